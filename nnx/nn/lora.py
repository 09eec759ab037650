"""Low-rank adaptation: a trained product of two thin matrices, added to a linear layer whose weights stay fixed.

`lora_a` and `lora_b` are `LoRAParam`s, so `wrt=nnx.LoRAParam` trains them and nothing else. `add_lora` adds them to the
linear layers of an existing model; `merge_lora` multiplies them into the kernels.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.hints.hints import explain_keywords
from nnx.core.module.module import Module
from nnx.core.state.filters import Filter, PathMatches, to_predicate
from nnx.core.state.paths import path_order
from nnx.core.variables.variables import Variable
from nnx.nn.linear import Linear, LinearGeneral
from nnx.nn.support.checks import check_last_axis, check_sizes
from nnx.nn.support.draws import fan_in_initializer
from nnx.nn.support.parameters import (
    NO_METADATA,
    AxisNames,
    InitializerLike,
    default_bias_init,
    initial_value,
)
from nnx.nn.support.settings import (
    Hook,
    PromoteDtype,
    as_dtype,
    as_optional_dtype,
    cast,
    compiled_body,
    default_promote_dtype,
)
from nnx.sharding.axes import PARTITION_NAME, DefaultAxes, axis_names
from nnx.sharding.explicit import result_sharding
from nnx.transforms.control.vmap import vmap

NOTHING_MATCHES = (
    "add_lora: `where` matches no linear layer, so nothing would be trained. It takes paths of this model, such as "
    '`where="**/{name}"`. The linear layers of this {model} are: {paths}.'
)
ALL_ADAPTED = (
    "add_lora: `where` matches linear layers that have an adaptation already, such as {path!r}, and no others. Call "
    "nnx.merge_lora(model) first to add another one."
)
QUANTIZED_KERNEL = (
    "merge_lora: the kernel at {path!r} is quantized, and rounding it again would lose most of the adaptation. Call "
    "`nnx.dequantize(model)` first, and `nnx.quantize(model)` afterwards if you like."
)
STACKED = (
    "LoRA: `lora_a` has shape {got}, expected ({features}, {rank}): it is stacked like the kernel it was added to, but "
    "the scan or vmap that runs this layer does not slice it. Slice all variables, `variable_axes={{...: 0}}`, or the "
    "adaptations as well, `variable_axes={{nnx.Param: 0, nnx.LoRAParam: 0}}`."
)
NOT_CALLABLE = "LoRA: `base_module` must be callable, got {got}."
CANNOT_MERGE = "merge_lora cannot merge the LoRA at {path!r}: {why} Nothing was changed."
BASE_WITHOUT_KERNEL = "its base_module is a {base}, not a Linear with a kernel to add to."
IS_THE_MODEL = "it is the model itself, which cannot be replaced in place. Merge a Module that holds it."
BATCHED_KERNEL = (
    "add_lora: the LinearGeneral at {path!r} has batch axes, for which low-rank adaptation is not defined here. "
    "Leave it out with `where=`."
)

default_a_init: InitializerLike = fan_in_initializer(2.0, "uniform")
default_b_init: InitializerLike = default_bias_init


class LoRAParam(Variable[Any]):
    """A parameter of a low-rank adaptation; it is not an `nnx.Param`, so the two are trained separately.

    >>> model = nnx.LoRA(4, 2, 4, ctx=nnx.context(0))
    >>> list(model.filter(nnx.LoRAParam))
    ['lora_a', 'lora_b']
    """

    collection = "lora_params"


@compiled_body
def _low_rank(
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    *,
    scale: float,
    dtype: Any,
    promote: Hook[PromoteDtype] = default_promote_dtype,
) -> jax.Array:
    x, a, b = promote((x, a, b), dtype=dtype)
    for matrix in (a, b):  # (x @ a) @ b never forms the full matrix
        x = jnp.matmul(x, matrix, out_sharding=result_sharding((x, range(x.ndim - 1)), (matrix, (1,))))
    return x if scale == 1.0 else x * scale


class LoRA(Module):
    """Computes `y = scale * x @ lora_a @ lora_b`, plus the output of `base_module` if there is one.

    Shape: `(..., in_features) -> (..., out_features)`. With a `base_module`, the result has the dtype of its output.

    Args:
        in_features: the size of the input's last axis.
        lora_rank: the rank.
        out_features: the size of the output's last axis.
        base_module: a Module whose output is added.
        alpha: the numerator of the scale, `alpha / lora_rank`; by default, the scale is 1.
        dtype: the computation dtype; by default, the dtype that input and parameters promote to.
        param_dtype: the dtype in which the parameters are stored.
        a_initializer: the initializer of `lora_a`, of shape `(in_features, lora_rank)`.
        b_initializer: the initializer of `lora_b`, of shape `(lora_rank, out_features)`; by default zeros, so that the
            adaptation changes nothing at first.
        lora_param_type: the Variable type of the two.
        promote_dtype: a replacement for the function that converts input and parameters to one dtype.
        ctx: the Context; its stream "params" initializes the parameters.
        a_metadata: metadata of `lora_a`.
        b_metadata: metadata of `lora_b`.

    >>> ctx = nnx.context(0)
    >>> layer = nnx.LoRA(3, 2, 4, base_module=nnx.Linear(3, 4, ctx=ctx), ctx=ctx)
    >>> layer(jnp.ones((16, 3))).shape
    (16, 4)
    """

    logical_axes: ClassVar[AxisNames] = {"lora_a": ("in", None), "lora_b": (None, "out")}

    in_features: int
    out_features: int
    lora_rank: int
    scale: float
    base_module: Module | None
    dtype: np.dtype | None
    param_dtype: np.dtype
    promote_dtype: PromoteDtype
    lora_a: jax.Array
    lora_b: jax.Array

    def __init__(
        self,
        in_features: int,
        lora_rank: int,
        out_features: int,
        *,
        base_module: Module | None = None,
        alpha: float | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        a_initializer: InitializerLike = default_a_init,
        b_initializer: InitializerLike = default_b_init,
        lora_param_type: type[Variable[Any]] = LoRAParam,
        promote_dtype: PromoteDtype = default_promote_dtype,
        ctx: Context,
        a_metadata: Mapping[str, Any] = NO_METADATA,
        b_metadata: Mapping[str, Any] = NO_METADATA,
    ) -> None:
        check_sizes(self, in_features=in_features, lora_rank=lora_rank, out_features=out_features)
        if base_module is not None and not callable(base_module):
            raise TypeError(NOT_CALLABLE.format(got=type(base_module).__name__))
        self.in_features = in_features
        self.out_features = out_features
        self.lora_rank = lora_rank
        self.scale = 1.0 if alpha is None else alpha / lora_rank
        self.base_module = base_module
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.promote_dtype = promote_dtype
        a = initial_value(self, a_initializer, ctx, (in_features, lora_rank), self.param_dtype)
        b = initial_value(self, b_initializer, ctx, (lora_rank, out_features), self.param_dtype)
        make: Any = lora_param_type
        self.lora_a = make(a, **a_metadata)
        self.lora_b = make(b, **b_metadata)

    def __call__(self, x: jax.Array, **kwargs: Any) -> jax.Array:
        """Applies the adaptation to `x`, of shape `(..., in_features)`; `kwargs` are passed to `base_module`."""
        check_last_axis(self, x, self.in_features, "in_features")
        if self.lora_a.ndim != 2:
            raise ValueError(STACKED.format(got=self.lora_a.shape, features=self.in_features, rank=self.lora_rank))
        delta = _low_rank(x, self.lora_a, self.lora_b, scale=self.scale, dtype=self.dtype, promote=self.promote_dtype)
        base: Any = self.base_module
        return delta if base is None else _adapted(base(x, **kwargs), delta)


def _adapted(y: jax.Array, delta: jax.Array) -> jax.Array:
    """Returns the sum in the dtype of `y`: an adaptation must not change the dtypes of the model around it."""
    return y + cast(delta, y.dtype)


class LoRALinear(Linear):
    """A `Linear` plus a `LoRA`; the paths are those of a `Linear`, so the weights of one load unchanged.

    Args:
        in_features: the size of the input's last axis.
        out_features: the size of the output's last axis.
        lora_rank: the rank.
        lora_alpha: the numerator of the scale, `lora_alpha / lora_rank`; by default, the scale is 1.
        lora_dtype: the dtype of the low-rank computation.
        lora_param_dtype: the dtype in which the low-rank parameters are stored.
        a_initializer: the initializer of `lora.lora_a`.
        b_initializer: the initializer of `lora.lora_b`.
        lora_param_type: the Variable type of the two.
        lora_promote_dtype: the `promote_dtype` of the low-rank part.
        ctx: the Context; its stream "params" initializes the parameters.
        a_metadata: metadata of `lora.lora_a`.
        b_metadata: metadata of `lora.lora_b`.
        **kwargs: the other arguments of `Linear`.

    >>> layer = nnx.LoRALinear(3, 4, lora_rank=2, ctx=nnx.context(0))
    >>> list(layer.get_state())
    ['bias', 'kernel', 'lora/lora_a', 'lora/lora_b']
    """

    lora: LoRA

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        lora_rank: int,
        lora_alpha: float | None = None,
        lora_dtype: DTypeLike | None = None,
        lora_param_dtype: DTypeLike = jnp.float32,
        a_initializer: InitializerLike = default_a_init,
        b_initializer: InitializerLike = default_b_init,
        lora_param_type: type[Variable[Any]] = LoRAParam,
        lora_promote_dtype: PromoteDtype = default_promote_dtype,
        ctx: Context,
        a_metadata: Mapping[str, Any] = NO_METADATA,
        b_metadata: Mapping[str, Any] = NO_METADATA,
        **kwargs: Any,
    ) -> None:
        check_sizes(self, in_features=in_features, out_features=out_features, lora_rank=lora_rank)
        super().__init__(in_features, out_features, ctx=ctx, **kwargs)
        self.lora = LoRA(
            in_features,
            lora_rank,
            out_features,
            alpha=lora_alpha,
            dtype=lora_dtype,
            param_dtype=lora_param_dtype,
            a_initializer=a_initializer,
            b_initializer=b_initializer,
            lora_param_type=lora_param_type,
            promote_dtype=lora_promote_dtype,
            ctx=ctx,
            a_metadata=a_metadata,
            b_metadata=b_metadata,
        )

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Applies the layer and its adaptation; the arguments are those of `Linear`."""
        return _adapted(super().__call__(inputs, out_sharding), self.lora(inputs))


class LoRALinearGeneral(LinearGeneral):
    """A `LinearGeneral` plus a `LoRA` between its flattened features; made by `add_lora`."""

    lora: LoRA

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Applies the layer and its adaptation; the arguments are those of `LinearGeneral`."""
        y = super().__call__(inputs, out_sharding)
        last = tuple(range(inputs.ndim - len(self.axis), inputs.ndim))
        x = jnp.moveaxis(inputs, self.axis, last)  # (*others, *in_features)
        others = x.shape[: inputs.ndim - len(self.axis)]
        delta = self.lora(jnp.reshape(x, (*others, math.prod(self.in_features))))
        return _adapted(y, jnp.reshape(delta, y.shape))


_ADAPTED: dict[type[Module], type[Module]] = {Linear: LoRALinear, LinearGeneral: LoRALinearGeneral}
_PLAIN = {adapted: plain for plain, adapted in _ADAPTED.items()}


@explain_keywords
def add_lora(
    model: Module,
    rank: int,
    *,
    where: Filter = ...,
    alpha: float | None = None,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike = jnp.float32,
    a_initializer: InitializerLike = default_a_init,
    b_initializer: InitializerLike = default_b_init,
    lora_param_type: type[Variable[Any]] = LoRAParam,
    ctx: Context,
) -> list[str]:
    """Adds a low-rank adaptation to linear layers of a model, in place.

    The layers remain the same objects wherever they are used, with their weights, metadata and paths. They gain a
    submodule `lora` and become `LoRALinear` (or `LoRALinearGeneral`). If a scan or vmap has stacked the kernels of many
    layers along their leading axes, the adaptations are stacked in the same way, each with its own initial values.

    Args:
        model: the model.
        rank: the rank of the adaptation.
        where: a filter over the paths and Modules of the model; a string is a glob over paths, such as
            `"**/attention/query"`. By default, it matches every `Linear` and `LinearGeneral`.
        alpha: the numerator of the scale, `alpha / rank`; by default, the scale is 1.
        dtype: the dtype of the low-rank computation; by default, that of the layer.
        param_dtype: the dtype in which the low-rank parameters are stored.
        a_initializer: the initializer of `lora_a`.
        b_initializer: the initializer of `lora_b`.
        lora_param_type: the Variable type of the two.
        ctx: the Context; its stream "params" initializes the parameters.

    Returns:
        The paths of the changed layers.

    Raises:
        ValueError: if `where` matches no linear layer.

    >>> ctx = nnx.context(0)
    >>> model = nnx.MLP(3, 8, 2, ctx=ctx)
    >>> nnx.add_lora(model, 2, where="layers/0", ctx=ctx)
    ['layers/0']
    >>> list(model.filter(nnx.LoRAParam))
    ['layers/0/lora/lora_a', 'layers/0/lora/lora_b']
    """
    chosen = _linear_layers(model, where)
    for module in chosen.values():
        adaptation = _stacked_like(
            module,
            ctx,
            rank=rank,
            alpha=alpha,
            dtype=module.dtype if dtype is None else dtype,
            param_dtype=param_dtype,
            a_initializer=a_initializer,
            b_initializer=b_initializer,
            lora_param_type=lora_param_type,
        )
        # The attribute comes first: its assignment checks the trace level, and makes the library notice the change of
        # structure. `object.__setattr__` on `__class__` does neither.
        module.lora = adaptation
        object.__setattr__(module, "__class__", _ADAPTED[type(module)])
    return list(chosen)


def _linear_layers(model: Module, where: Filter) -> dict[str, Any]:
    """Returns the linear layers of a model that `where` matches, by path."""
    matches = to_predicate(PathMatches(where) if isinstance(where, str) else where)
    # By path: which keys a layer draws must not depend on the order in which attributes were set.
    modules = sorted(Module.named_modules(model), key=lambda found: path_order(found[0]))
    linear = {path: module for path, module in modules if type(module) in _ADAPTED}
    chosen = {path: module for path, module in linear.items() if matches(path, module)}
    if not chosen:
        adapted = next((p for p, module in modules if type(module) in _PLAIN and matches(p, module)), None)
        if adapted is not None:
            raise ValueError(ALL_ADAPTED.format(path=adapted))
        paths, name = ", ".join(map(repr, linear)) or "(none)", next(iter(linear), "head").rpartition("/")[2]
        raise ValueError(NOTHING_MATCHES.format(model=type(model).__name__, paths=paths, name=name))
    for path, module in chosen.items():
        if isinstance(module, LinearGeneral) and module.batch_sizes:
            raise ValueError(BATCHED_KERNEL.format(path=path))
    return chosen


def _stacked_like(layer: Linear | LinearGeneral, ctx: Context, *, rank: int, **options: Any) -> LoRA:
    """Returns an adaptation of a layer; for a stacked kernel, a stack of them."""
    if isinstance(layer, Linear):
        inputs, outputs, kernel_axes = layer.in_features, layer.out_features, 2
    else:
        inputs, outputs = math.prod(layer.in_features), math.prod(layer.out_features)
        kernel_axes = len(layer.in_features) + len(layer.out_features)

    def build(ctx: Context) -> LoRA:
        return LoRA(inputs, rank, outputs, ctx=ctx, **options)

    stacked = layer.kernel.ndim - kernel_axes
    sharding = Module.variable(layer, "kernel").sharding
    names = () if isinstance(sharding, DefaultAxes) else axis_names(sharding)
    for axis in reversed(range(stacked)):  # the innermost first, since each `vmap` adds its axis in front
        metadata = {PARTITION_NAME: names[axis]} if axis < len(names) else None
        size = layer.kernel.shape[axis]
        build = vmap(build, variable_axes={...: 0}, split_rngs="params", axis_size=size, metadata_params=metadata)
    return build(ctx)


def merge_lora(model: Module) -> list[str]:
    """Adds every low-rank adaptation of a model to the kernel it belongs to, and removes it, in place.

    A `LoRA` around a `base_module` is replaced by that module wherever the model uses it.

    Returns:
        The paths of the changed layers, which are plain `Linear` or `LinearGeneral` again.

    Raises:
        ValueError: a kernel is quantized, the `base_module` of a `LoRA` is not a `Linear`, or the model itself is a
            `LoRA`; nothing has changed then.

    >>> ctx = nnx.context(0)
    >>> model = nnx.MLP(3, 8, 2, ctx=ctx)
    >>> paths = nnx.add_lora(model, 2, ctx=ctx)
    >>> nnx.merge_lora(model) == paths, type(model.layers[0]).__name__
    (True, 'Linear')
    """
    modules = list(Module.named_modules(model))
    adapted: dict[str, Any] = {path: module for path, module in modules if type(module) in _PLAIN}
    wrappers = {path: lora for path, lora in modules if isinstance(lora, LoRA) and lora.base_module is not None}
    bases = {path: _checked_base(path, wrapper, model) for path, wrapper in wrappers.items()}
    for path, layer in {**adapted, **bases}.items():
        if layer.kernel_scale is not None:
            raise ValueError(QUANTIZED_KERNEL.format(path=path))
    for module in adapted.values():
        _add_to_kernel(module, module.lora)
        del module.lora
        object.__setattr__(module, "__class__", _PLAIN[type(module)])
    for path, wrapper in wrappers.items():
        _add_to_kernel(bases[path], wrapper)
        for _, owner in list(Module.named_modules(model)):
            for name in [name for name, value in vars(owner).items() if value is wrapper]:
                Module.set_path(owner, name.removeprefix("/"), wrapper.base_module)
    return [*adapted, *wrappers]


def _checked_base(path: str, wrapper: LoRA, model: Module) -> Linear:
    """Returns the layer below one or more `LoRA`s, after checking that they can be merged into it."""
    base: Any = wrapper.base_module
    while isinstance(base, LoRA) and base.base_module is not None:
        base = base.base_module
    if wrapper is model:
        raise ValueError(CANNOT_MERGE.format(path=path, why=IS_THE_MODEL))
    if not isinstance(base, Linear):
        raise ValueError(CANNOT_MERGE.format(path=path, why=BASE_WITHOUT_KERNEL.format(base=type(base).__name__)))
    return base


def _add_to_kernel(layer: Any, adaptation: LoRA) -> None:
    delta = adaptation.scale * (adaptation.lora_a @ adaptation.lora_b)
    layer.kernel = (layer.kernel + jnp.reshape(delta, layer.kernel.shape)).astype(layer.kernel.dtype)
