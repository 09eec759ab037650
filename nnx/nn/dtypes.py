"""`set_dtypes`: changing the dtypes of the layers of a model that has been built."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from nnx.core.module.info import ModuleBase, info_of
from nnx.core.module.kinds import STATIC, is_variable
from nnx.core.module.module import Module
from nnx.core.state.selectors import ModuleSelector, select_modules
from nnx.core.state.updates import check_levels
from nnx.core.variables.refs import Ref
from nnx.core.variables.variables import BatchStat, Cache, Intermediate, Loss, spec_of
from nnx.nn.quantized.quantized import QuantizedParam, scale_dtype
from nnx.nn.support.settings import as_dtype, statistics_dtype

NOT_A_MODEL = "nnx.set_dtypes takes a Module, got {model}."
NO_DTYPE = """nnx.set_dtypes: give at least one of `dtype` (how layers compute) and `param_dtype` (how parameters are \
stored), e.g. nnx.set_dtypes(model, dtype=jnp.bfloat16)."""
NOT_FLOATING = "nnx.set_dtypes: {name} must be a floating-point dtype, got {dtype}."


def set_dtypes(
    model: Module,
    *,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    where: ModuleSelector = ...,
) -> None:
    """Sets the dtypes of layers in place: how they compute, and how their parameters are stored.

    The model is then equal to one that was constructed with these dtypes. Layers keep what they compute in float32
    internally (statistics of norms, the softmax of attention), and running statistics never become narrower than
    float32. Caches keep their dtype.

    Args:
        model: the model.
        dtype: the computation dtype; layers without this setting are left as they are. None changes nothing.
        param_dtype: the dtype in which floating-point parameters are stored. None changes nothing.
        where: a Module selector: a Module type, a glob over paths, a function `f(path, module)`, a list of these, or
            `...` for all layers. A selected Module includes the `nnx.Dict`s and `nnx.Sequence`s of parameters in it.

    Raises:
        TypeError: `model` is not a Module, or `where` is not a selector.
        ValueError: neither dtype is given, one is not floating-point, or `where` selects nothing.

    >>> model = nnx.Sequence([nnx.Linear(2, 3, ctx=nnx.context(0)), nnx.LayerNorm(3)])
    >>> nnx.set_dtypes(model, dtype=jnp.bfloat16)
    >>> nnx.set_dtypes(model, param_dtype=jnp.bfloat16, where=nnx.Linear)
    >>> model(jnp.ones(2)).dtype, model[0].kernel.dtype, model[1].scale.dtype
    (dtype(bfloat16), dtype(bfloat16), dtype('float32'))
    """
    if not isinstance(model, ModuleBase):
        raise TypeError(NOT_A_MODEL.format(model=type(model).__name__))
    if dtype is None and param_dtype is None:
        raise ValueError(NO_DTYPE)
    settings = {
        name: as_dtype(given) for name, given in (("dtype", dtype), ("param_dtype", param_dtype)) if given is not None
    }
    for name, given in settings.items():
        if not jnp.issubdtype(given, jnp.floating):
            raise ValueError(NOT_FLOATING.format(name=name, dtype=given))
    selected = list(select_modules(model, where, "nnx.set_dtypes").values())
    holders = [holder for module in selected for holder in _holders(module)]
    check_levels([*selected, *(holder for holder, _ in holders)], "set_dtypes")
    for module in selected:
        for name, given in settings.items():
            if info_of(module).kinds.get(name) is STATIC:
                setattr(module, name, given)
    if param_dtype is not None:
        for holder, has_statistics in holders:
            _cast_variables(holder, settings["param_dtype"], has_statistics)


def _holders(module: Any) -> list[tuple[Any, bool]]:
    """Returns the Modules that hold a layer's own Variables, and for each whether its BatchStats are the layer's.

    These are the layer itself and, if it has parameters of its own, the containers that it keeps them in, such as the
    scales of a `WeightNorm`. Other submodules are layers themselves.
    """
    has_setting = info_of(module).kinds.get("param_dtype") is STATIC
    holders, stack = [], [module]
    while stack:
        holder = stack.pop()
        holders.append((holder, has_setting))
        if has_setting:
            stack += [child for child in vars(holder).values() if _is_container(child)]
    return holders


def _is_container(value: Any) -> bool:
    """Whether a value is an nnx.Dict or nnx.Sequence that holds Variables and no layers."""
    if not isinstance(value, ModuleBase) or type(value).__module__ != "nnx.core.module.dict_sequence":
        return False
    return not any(isinstance(item, ModuleBase) for item in vars(value).values())


def _cast_variables(holder: Any, dtype: Any, has_statistics: bool) -> None:
    for name, kind in list(info_of(holder).kinds.items()):
        spec = spec_of(kind) if type(kind) is Ref else kind
        if not is_variable(spec) or issubclass(spec.type, (Cache, Intermediate, Loss)):
            continue
        target = dtype
        if issubclass(spec.type, BatchStat):
            if not has_statistics:
                continue
            target = statistics_dtype(dtype)
        elif issubclass(spec.type, QuantizedParam):
            target = scale_dtype(dtype)
        value = vars(holder)[name]
        if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating) and value.dtype != target:
            is_abstract = isinstance(value, jax.ShapeDtypeStruct)
            new = jax.ShapeDtypeStruct(value.shape, target, sharding=value.sharding) if is_abstract else None
            Module.set_path(holder, name.removeprefix("/"), value.astype(target) if new is None else new)
