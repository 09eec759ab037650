"""Quantized weights: a matrix stored as small integers and *scales*, `weight ≈ integers * scale`.

The axes of a weight that a product sums over are its *summed* axes; the others belong to the output. There is one scale
per output (*per channel*), or one per output and *group* of consecutive inputs. Per channel, the scale has the weight's
axes without the summed ones. With groups, it also has one axis of groups, in the place of the first summed axis:

    Linear            kernel [in, out]             scale [out] or [groups, out]
    attention/out     kernel [heads, dim, out]     scale [out] or [groups, out]
    Embed             embedding [vocab, features]  scale [vocab] or [vocab, groups]

Layers keep the integers in the place of the weight, and the scale next to it (`kernel_scale`, `embedding_scale`). Both
are `QuantizedParam`s. `quantize` turns the weights of a model into them. The scale has the dtype of the weight, except
that a float16 weight has float32 scales: a fraction of its small values is below the range of float16.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nnx.core.variables.variables import Variable
from nnx.nn.support.settings import cast
from nnx.sharding.explicit import with_automatic_axes
from nnx.sharding.target import lowered_on, target

INTEGERS = {8: np.dtype(jnp.int8), 4: np.dtype(jnp.int4)}
"""The dtype of the integers, by number of bits."""

NOT_INTEGERS = (
    "This layer is quantized: it has a scale of shape {scale}, so its weight must be integers, got {dtype}{weight}. "
    "Something wrote an ordinary weight into it (a wrapper such as `nnx.WeightNorm`, or an assignment). Call "
    "`nnx.dequantize(model)` first."
)
STACKED = (
    "A quantized weight of shape {weight} does not fit its scale of shape {scale}: both are probably stacked, and the "
    "scan or vmap that runs this layer does not slice them. Slice all variables, `variable_axes={{...: 0}}`, or these "
    "as well, `variable_axes={{nnx.Param: 0, nnx.QuantizedParam: 0}}`."
)


class QuantizedParam(Variable[Any]):
    """The integers or the scale of a quantized weight; it is not an `nnx.Param`, so it is not trained.

    >>> model = nnx.Linear(4, 2, ctx=nnx.context(0))
    >>> nnx.quantize(model, bits=8)
    ['']
    >>> list(model.filter(nnx.QuantizedParam)), list(model.filter(nnx.Param))
    (['kernel', 'kernel_scale'], ['bias'])
    """

    collection = "quantized_params"


# Dtypes


def scale_dtype(dtype: Any) -> Any:
    """Returns the dtype of the scales of a weight: its own, or float32 if it has a narrower range of exponents."""
    return dtype if jnp.finfo(dtype).minexp <= jnp.finfo(jnp.float32).minexp else jnp.dtype(jnp.float32)


def weight_dtype(scale: Any, param_dtype: Any) -> Any:
    """Returns the dtype of the weight that a scale belongs to, which takes part in deciding how its layer computes.

    That is the layer's `param_dtype` if its scales have this dtype. Otherwise the scale was cast on its own, or comes
    from an earlier version, in which it always had the dtype of the weight.
    """
    return param_dtype if scale.dtype == scale_dtype(param_dtype) else scale.dtype


# Making and undoing


def to_integers(weight: jax.Array, summed: Sequence[int], bits: int, group_size: int | None) -> tuple[Any, Any]:
    """Returns the integers and the scale of a weight.

    The value of a group with the largest magnitude becomes `-2**(bits - 1)` exactly. That uses all integers: with
    symmetric ones, `-7..7`, the steps of 4 bits would be a seventh wider. The scale can therefore be negative.

    Args:
        weight: the weight.
        summed: its summed axes, in ascending order.
        bits: 8 or 4.
        group_size: the number of inputs that share a scale; None for all of them.
    """
    size = int(np.prod([weight.shape[axis] for axis in summed]))
    grouped = _in_groups(weight, summed, group_size or size).astype(jnp.float32)  # [..., groups, group_size, ...]
    largest = 2 ** (bits - 1)
    axis = summed[0] + 1
    low, high = jnp.min(grouped, axis, keepdims=True), jnp.max(grouped, axis, keepdims=True)
    extreme = jnp.where(-low >= high, low, high)
    # Rounded to the dtype in which it is stored, so that the integers make up for what rounding changes.
    stored = scale_dtype(weight.dtype)
    scale = (extreme / -largest).astype(stored).astype(jnp.float32)
    steps = jnp.round(grouped / jnp.where(scale == 0, 1, scale))
    integers = jnp.clip(steps, -largest, largest - 1).astype(INTEGERS[bits])
    scale = jnp.squeeze(scale.astype(stored), axis)
    if group_size is None:
        scale = jnp.squeeze(scale, summed[0])
    return _from_groups(integers, weight.shape, summed), scale


def to_weight(integers: jax.Array, scale: jax.Array, summed: Sequence[int], dtype: Any) -> jax.Array:
    """Returns the weight that integers and a scale represent; `summed` are the summed axes of the integers."""
    check_scale(integers, scale, summed)
    first = summed[0]
    if is_per_channel(integers, scale, summed):
        scale = jnp.expand_dims(scale, tuple(summed))
        return kept_apart(cast(cast(integers, scale.dtype) * scale, dtype), integers)
    size = int(np.prod([integers.shape[axis] for axis in summed])) // scale.shape[first]

    def scaled(integers: jax.Array, scale: jax.Array) -> jax.Array:
        grouped = cast(_in_groups(integers, summed, size), scale.dtype) * jnp.expand_dims(scale, first + 1)
        return _from_groups(cast(grouped, dtype), integers.shape, summed)

    return kept_apart(with_automatic_axes(scaled, integers)(integers, scale), integers)


# Multiplying


def as_operand(
    integers: jax.Array, scale: jax.Array, summed: Sequence[int], dtype: Any, whole: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """Returns what to multiply with in place of a quantized weight, and a scale for the result (None if it has it).

    Per channel, the scale can wait until after the product. The integers are then converted as they are read, which
    compilers fuse into the product, so that only the integers go through memory.

    Args:
        integers: the integers.
        scale: the scale.
        summed: the summed axes of the integers.
        dtype: the dtype of the product's operands.
        whole: whether to return the weight itself in any case.
    """
    check_scale(integers, scale, summed)
    if is_per_channel(integers, scale, summed) and not whole:
        # A byte each, where they cannot be converted as they are read, is the least that goes through memory.
        return cast(kept_apart(cast(integers, INTEGERS[8]), integers), dtype), scale
    return to_weight(integers, scale, summed, dtype), None


def kept_apart(x: jax.Array, integers: jax.Array) -> jax.Array:
    """Returns `x`, made from integers of 4 bits, so that XLA for GPUs computes it before what uses it.

    It would otherwise convert int4 inside of the kernel of a product, which gives wrong results: often where it does
    not time several kernels and compare them (`--xla_gpu_autotune_level=0`), once where it does. It also crashed.
    """
    at = target(integers)
    if integers.dtype != INTEGERS[4] or at.platform not in ("gpu", "any"):
        return x
    return lowered_on(at, lax.optimization_barrier, lambda x: x, x, platform="gpu")


def is_per_channel(integers: Any, scale: Any, summed: Sequence[int]) -> bool:
    """Whether there is one scale per output, and not one per group."""
    return scale.ndim == integers.ndim - len(summed)


def check_scale(integers: Any, scale: Any, summed: Sequence[int]) -> None:
    """Raises `ValueError` unless a weight holds integers that fit its scale."""
    if not jnp.issubdtype(integers.dtype, jnp.integer):
        raise ValueError(NOT_INTEGERS.format(scale=scale.shape, dtype=integers.dtype, weight=list(integers.shape)))
    kept = [size for axis, size in enumerate(integers.shape) if axis not in summed]
    groups = [] if is_per_channel(integers, scale, summed) else [summed[0]]
    if [size for axis, size in enumerate(scale.shape) if axis not in groups] != kept:
        raise ValueError(STACKED.format(weight=integers.shape, scale=scale.shape))


def _in_groups(weight: jax.Array, summed: Sequence[int], size: int) -> jax.Array:
    """Returns a weight with its summed axes replaced by two, `[groups, size]`, in the place of the first one."""
    first = summed[0]
    together = range(first, first + len(summed))
    moved = jnp.moveaxis(weight, summed, together)
    return jnp.reshape(moved, (*moved.shape[:first], -1, size, *moved.shape[first + len(summed) :]))


def _from_groups(grouped: jax.Array, shape: Sequence[int], summed: Sequence[int]) -> jax.Array:
    """Undoes `_in_groups` for a weight of this shape."""
    first = summed[0]
    sizes = [shape[axis] for axis in summed]
    flat = jnp.reshape(grouped, (*grouped.shape[:first], *sizes, *grouped.shape[first + 2 :]))
    return jnp.moveaxis(flat, range(first, first + len(summed)), summed)
