"""What normalising layers share: moments, the rescaling by them, and the checks of what comes in.

*Moments* (mean and variance) are computed in at least float32 over the *reduction axes*; *scale* and *bias* are
learned along the *feature axes*. A *mask* is true where an entry counts; it has as many axes as the input, each of the
input's size or 1.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from nnx.core.context import Context
from nnx.core.module import Module
from nnx.core.variables import Param
from nnx.nn.checks import TOO_FEW_AXES, check_last_axis, wrong_features
from nnx.nn.dtypes import PromoteDtype, infer_dtype, promote_dtype
from nnx.nn.initial_values import InitializerLike, initial_value
from nnx.nn.linear import NO_METADATA

Axes = int | Sequence[int]

WRONG_MASK = (
    "{layer} expected a mask with the input's number of axes, each of the input's size or 1, "
    "got a mask of shape {mask} for an input of shape {shape}."
)


def as_axes(axes: Axes) -> tuple[int, ...]:
    """One axis or several as a tuple."""
    return (axes,) if isinstance(axes, int) else tuple(axes)


def as_groups(groups: Any) -> Any:
    """`axis_index_groups` as nested tuples, so that it can be hashed."""
    return None if groups is None else tuple(tuple(group) for group in groups)


def check_mask(layer: Module, x: Array, mask: Array | None) -> None:
    """Raises unless `mask` fits `x` without a broadcast of its axes."""
    if mask is None:
        return
    fits = mask.ndim == x.ndim and all(m in (1, n) for m, n in zip(mask.shape, x.shape, strict=True))
    if not fits:
        raise ValueError(WRONG_MASK.format(layer=type(layer).__name__, mask=mask.shape, shape=x.shape))


def check_features(layer: Any, x: Array, num_features: int, feature_axes: tuple[int, ...]) -> None:
    """Raises unless the feature axes of `x` hold `num_features` entries."""
    if feature_axes == (-1,):
        return check_last_axis(layer, x, num_features, "num_features")
    shape = x.shape
    if any(not -len(shape) <= axis < len(shape) for axis in feature_axes):
        wanted = f"with axes {feature_axes} of {num_features} features"
        raise ValueError(TOO_FEW_AXES.format(layer=type(layer).__name__, expected=wanted, shape=shape))
    size = math.prod(shape[axis] for axis in feature_axes)
    if size != num_features:
        raise wrong_features(layer, num_features, size, shape, "num_features", f"on axes {feature_axes}")


def make_scale_and_bias(
    layer: Any,
    num_features: int,
    ctx: Context | None,
    scale_init: InitializerLike | None,
    scale_metadata: Mapping[str, Any],
    bias_init: InitializerLike | None = None,
    bias_metadata: Mapping[str, Any] = NO_METADATA,
) -> None:
    """Gives `layer` its parameters; an initialiser of `None` means that it has no such parameter."""
    shape = (num_features,)
    layer.scale = layer.bias = None
    if scale_init is not None:
        layer.scale = Param(initial_value(layer, scale_init, ctx, shape, layer.param_dtype), **scale_metadata)
    if bias_init is not None:
        layer.bias = Param(initial_value(layer, bias_init, ctx, shape, layer.param_dtype), **bias_metadata)


def squared(x: Array) -> Array:
    """`|x|²`, real for complex `x`."""
    return lax.square(x.real) + lax.square(x.imag) if jnp.iscomplexobj(x) else lax.square(x)


def moments(
    x: Array,
    mask: Array | None,
    axes: tuple[int, ...],
    *,
    center: bool,
    fast: bool,
    axis_name: Any,
    axis_index_groups: Any,
) -> tuple[Array | None, Array]:
    """Mean (`None` unless `center`) and variance (mean square unless `center`) over `axes`, which stay with size 1."""

    def averages(*values: Array) -> tuple[Array, ...]:
        if mask is None:
            means = tuple(jnp.mean(v, axes, keepdims=True) for v in values)
            return means if axis_name is None else lax.pmean(means, axis_name, axis_index_groups=axis_index_groups)
        valid = jnp.broadcast_to(mask, x.shape)
        sums = tuple(jnp.sum(v, axes, keepdims=True, where=valid) for v in values)
        count = jnp.sum(valid, axes, keepdims=True, dtype=values[0].real.dtype)
        if axis_name is not None:
            sums, count = lax.psum((sums, count), axis_name, axis_index_groups=axis_index_groups)
        return tuple(s / count for s in sums)

    if not center:
        return None, averages(squared(x))[0]
    if fast:
        mean, mean_square = averages(x, squared(x))
        return mean, jnp.maximum(mean_square - squared(mean), 0.0)
    (mean,) = averages(x)
    return mean, averages(squared(x - mean))[0]


def rescale(
    x: Array,
    mean: Array | None,
    var: Array,
    scale: Array | None,
    bias: Array | None,
    feature_axes: tuple[int, ...],
    epsilon: float,
) -> Array:
    """`(x - mean) / sqrt(var + epsilon) * scale + bias`, in the dtype of the statistics."""
    features = {axis % x.ndim for axis in feature_axes}
    layout = tuple(size if axis in features else 1 for axis, size in enumerate(x.shape))
    factor = lax.rsqrt(var + epsilon)
    if scale is not None:
        factor = factor * jnp.reshape(scale, layout)
    y = (x if mean is None else x - mean) * factor
    return y if bias is None else y + jnp.reshape(bias, layout)


def result_dtype(x: Array, scale: Array | None, bias: Array | None, dtype: Any, promote: PromoteDtype) -> Any:
    """The dtype of a normalised `x`."""
    if promote is promote_dtype:
        return infer_dtype((x, scale, bias), dtype)
    return promote((x, scale, bias), dtype=dtype)[0].dtype
