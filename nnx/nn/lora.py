"""Low-rank adaptation: a trained product of two thin matrices added to a linear layer that is left alone.

`lora_a` and `lora_b` are `LoRAParam`s, so that `wrt=nnx.LoRAParam` trains them and nothing else. `add_lora` puts them
into the linear layers of an existing model; `merge_lora` multiplies them out again.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.filters import Filter, PathMatches, to_predicate
from nnx.core.module import Module
from nnx.core.variables import Variable
from nnx.nn.checks import check_last_axis
from nnx.nn.dtypes import PromoteDtype, as_dtype, as_optional_dtype, promote_dtype
from nnx.nn.initial_values import InitializerLike, compiled, default_bias_init, initial_value
from nnx.nn.initializers import he_uniform
from nnx.nn.linear import NO_METADATA, Linear, LinearGeneral
from nnx.sharding.explicit import result_sharding

NOTHING_MATCHES = (
    "add_lora: `where` matches no linear layer, so that nothing would be trained. "
    "The linear layers of this {model} are: {paths}."
)
NOT_CALLABLE = "LoRA: `base_module` must be callable, got {got}."
BATCHED_KERNEL = "add_lora: the LinearGeneral at {path!r} has batch axes, for which there is no low-rank form here."

default_a_init = compiled(he_uniform())
default_b_init = default_bias_init


class LoRAParam(Variable):
    """A parameter of a low-rank adaptation; no `nnx.Param`, so that the two train apart.

    >>> model = nnx.LoRA(4, 2, 4, ctx=nnx.context(0))
    >>> list(model.filter(nnx.LoRAParam))
    ['lora_a', 'lora_b']
    """

    collection = "lora_params"


def _low_rank(
    x: Array, a: Array, b: Array, *, scale: float, dtype: Any, promote: PromoteDtype = promote_dtype
) -> Array:
    x, a, b = promote((x, a, b), dtype=dtype)
    for matrix in (a, b):
        x = jnp.matmul(x, matrix, out_sharding=result_sharding((x, range(x.ndim - 1)), (matrix, (1,))))
    return x if scale == 1.0 else x * scale


_low_rank_compiled = partial(jax.jit, static_argnames=("scale", "dtype"))(_low_rank)


class LoRA(Module):
    """`y = scale * x @ lora_a @ lora_b`, plus the output of `base_module` if there is one.

    Shape: `(..., in_features) -> (..., out_features)`.

    Args:
        in_features: size of the input's last axis.
        lora_rank: the rank.
        out_features: size of the output's last axis.
        base_module: a module whose output is added.
        alpha: the product is scaled by `alpha / lora_rank`; by default not at all.
        dtype: of the computation; by default that of input and parameters.
        param_dtype: in which the parameters are stored.
        a_initializer: initialiser of `lora_a`, of shape `(in_features, lora_rank)`.
        b_initializer: initialiser of `lora_b`, of shape `(lora_rank, out_features)`; zeros, to change nothing at first.
        lora_param_type: Variable type of the two.
        promote_dtype: replaces the function that brings input and parameters to one dtype.
        ctx: draws the parameters from its stream "params".
        a_metadata: metadata of `lora_a`.
        b_metadata: metadata of `lora_b`.

    >>> import nnx, jax.numpy as jnp
    >>> ctx = nnx.context(0)
    >>> layer = nnx.LoRA(3, 2, 4, base_module=nnx.Linear(3, 4, ctx=ctx), ctx=ctx)
    >>> layer(jnp.ones((16, 3))).shape
    (16, 4)
    """

    logical_axes = {"lora_a": ("in", None), "lora_b": (None, "out")}

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
        lora_param_type: type[Variable] = LoRAParam,
        promote_dtype: PromoteDtype = promote_dtype,
        ctx: Context,
        a_metadata: Mapping[str, Any] = NO_METADATA,
        b_metadata: Mapping[str, Any] = NO_METADATA,
    ):
        if base_module is not None and not callable(base_module):
            raise TypeError(NOT_CALLABLE.format(got=type(base_module).__name__))
        self.in_features = in_features
        self.out_features = out_features
        self.lora_rank = lora_rank
        self.scale = 1.0 if alpha is None else alpha / lora_rank
        self.base_module = base_module
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = param_dtype = as_dtype(param_dtype)
        self.promote_dtype = promote_dtype
        a = initial_value(self, a_initializer, ctx, (in_features, lora_rank), param_dtype)
        b = initial_value(self, b_initializer, ctx, (lora_rank, out_features), param_dtype)
        make: Any = lora_param_type
        self.lora_a: Array = make(a, **a_metadata)
        self.lora_b: Array = make(b, **b_metadata)

    def __call__(self, x: Array, **kwargs: Any) -> Array:
        check_last_axis(self, x, self.in_features, "in_features")
        if self.promote_dtype is promote_dtype:
            y = _low_rank_compiled(x, self.lora_a, self.lora_b, scale=self.scale, dtype=self.dtype)
        else:
            y = _low_rank(x, self.lora_a, self.lora_b, scale=self.scale, dtype=self.dtype, promote=self.promote_dtype)
        return y if self.base_module is None else y + self.base_module(x, **kwargs)


class LoRALinear(Linear):
    """A `Linear` plus a `LoRA`, with the paths of a `Linear`: its weights load as they are.

    Args:
        in_features: size of the input's last axis.
        out_features: size of the output's last axis.
        lora_rank: the rank.
        lora_alpha: the low-rank part is scaled by `lora_alpha / lora_rank`; by default not at all.
        lora_dtype: of the low-rank computation.
        lora_param_dtype: in which the low-rank parameters are stored.
        a_initializer: initialiser of `lora.lora_a`.
        b_initializer: initialiser of `lora.lora_b`.
        lora_param_type: Variable type of the two.
        lora_promote_dtype: as `promote_dtype`, for the low-rank part.
        ctx: draws the parameters from its stream "params".
        a_metadata: metadata of `lora.lora_a`.
        b_metadata: metadata of `lora.lora_b`.
        **kwargs: the other arguments of `Linear`.

    >>> import nnx, jax.numpy as jnp
    >>> layer = nnx.LoRALinear(3, 4, lora_rank=2, ctx=nnx.context(0))
    >>> list(layer.get_state())
    ['bias', 'kernel', 'lora/lora_a', 'lora/lora_b']
    """

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
        lora_param_type: type[Variable] = LoRAParam,
        lora_promote_dtype: PromoteDtype = promote_dtype,
        ctx: Context,
        a_metadata: Mapping[str, Any] = NO_METADATA,
        b_metadata: Mapping[str, Any] = NO_METADATA,
        **kwargs: Any,
    ):
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

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        return super().__call__(inputs, out_sharding) + self.lora(inputs)


class LoRALinearGeneral(LinearGeneral):
    """A `LinearGeneral` plus a `LoRA` between its flattened features; made by `add_lora`."""

    lora: LoRA

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        y = super().__call__(inputs, out_sharding)
        last = tuple(range(inputs.ndim - len(self.axis), inputs.ndim))
        x = jnp.moveaxis(inputs, self.axis, last)  # (*others, *in_features)
        others = x.shape[: inputs.ndim - len(self.axis)]
        delta = self.lora(jnp.reshape(x, (*others, math.prod(self.in_features))))
        return y + jnp.reshape(delta, y.shape)


_ADAPTED: dict[type[Module], type[Module]] = {Linear: LoRALinear, LinearGeneral: LoRALinearGeneral}
_PLAIN = {adapted: plain for plain, adapted in _ADAPTED.items()}


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
    lora_param_type: type[Variable] = LoRAParam,
    ctx: Context,
) -> list[str]:
    """Adds a low-rank adaptation to linear layers of a model, in place.

    The layers stay the objects they are, in every place they are used, with their weights, metadata and paths; they
    gain a submodule `lora`, and become `LoRALinear` (or `LoRALinearGeneral`).

    Args:
        model: the model.
        rank: of the adaptation.
        where: which layers, by a filter over the paths and Modules of the model; a string is a glob over paths, such as
            `"**/attention/query"`. By default all `Linear` and `LinearGeneral`.
        alpha: the low-rank part is scaled by `alpha / rank`; by default not at all.
        dtype: of the low-rank computation.
        param_dtype: in which its parameters are stored.
        a_initializer: initialiser of `lora_a`.
        b_initializer: initialiser of `lora_b`.
        lora_param_type: Variable type of the two.
        ctx: draws the parameters from its stream "params".

    Returns:
        The paths of the layers that were changed.

    Raises:
        ValueError: if `where` matches no linear layer.

    >>> import nnx, jax.numpy as jnp
    >>> ctx = nnx.context(0)
    >>> model = nnx.MLP(3, 8, 2, ctx=ctx)
    >>> nnx.add_lora(model, 2, where="layers/0", ctx=ctx)
    ['layers/0']
    >>> list(model.filter(nnx.LoRAParam))
    ['layers/0/lora/lora_a', 'layers/0/lora/lora_b']
    """
    matches = to_predicate(PathMatches(where) if isinstance(where, str) else where)
    linear = {path: module for path, module in model.named_modules() if type(module) in _ADAPTED}
    chosen = {path: module for path, module in linear.items() if matches(path, module)}
    if not chosen:
        paths = ", ".join(map(repr, linear)) or "(none)"
        raise ValueError(NOTHING_MATCHES.format(model=type(model).__name__, paths=paths))
    for path, module in chosen.items():
        if isinstance(module, LinearGeneral) and module.batch_sizes:
            raise ValueError(BATCHED_KERNEL.format(path=path))
    for module in chosen.values():
        assert isinstance(module, Linear | LinearGeneral)
        features = (
            (module.in_features, module.out_features)
            if isinstance(module, Linear)
            else (math.prod(module.in_features), math.prod(module.out_features))
        )
        adaptation = LoRA(
            features[0],
            rank,
            features[1],
            alpha=alpha,
            dtype=module.dtype if dtype is None else dtype,
            param_dtype=param_dtype,
            a_initializer=a_initializer,
            b_initializer=b_initializer,
            lora_param_type=lora_param_type,
            ctx=ctx,
        )
        # The attribute first: it is what the checks of the trace level guard, and what counts as a change of structure.
        module.lora = adaptation
        object.__setattr__(module, "__class__", _ADAPTED[type(module)])
    return list(chosen)


def merge_lora(model: Module) -> list[str]:
    """Adds every low-rank adaptation of a model to the kernel it belongs to, and takes it out, in place.

    Returns:
        The paths of the layers that were changed, now plain `Linear` or `LinearGeneral` again.

    >>> import nnx
    >>> ctx = nnx.context(0)
    >>> model = nnx.MLP(3, 8, 2, ctx=ctx)
    >>> paths = nnx.add_lora(model, 2, ctx=ctx)
    >>> nnx.merge_lora(model) == paths, type(model.layers[0]).__name__
    (True, 'Linear')
    """
    merged = []
    for path, module in list(model.named_modules()):
        if type(module) not in _PLAIN:
            continue
        assert isinstance(module, LoRALinear | LoRALinearGeneral)
        delta = module.lora.scale * (module.lora.lora_a @ module.lora.lora_b)
        module.kernel = (module.kernel + jnp.reshape(delta, module.kernel.shape)).astype(module.kernel.dtype)
        del module.lora
        object.__setattr__(module, "__class__", _PLAIN[type(module)])
        merged.append(path)
    return merged
