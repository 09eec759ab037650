"""Pooling to a given size: adaptive pooling (as many windows as the output has entries) and global pooling (one).

Inputs have shape `(*batch, *spatial, features)`, as in `pool`.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from nnx.core.module.module import Module
from nnx.nn.pool import cast_back, highest, lowest
from nnx.nn.support.checks import check_spatial_axes, spatial_tuple
from nnx.nn.support.settings import cast, compiled_body, statistics_dtype

Reduction = Literal["max", "min", "avg"]
Size = tuple[int | None, ...]

EMPTY_OUTPUT = "{layer}: expected output_size with positive entries, or None to keep a dimension, got {got}."


def _reduce(x: jax.Array, axes: tuple[int, ...], how: Reduction, keepdims: bool = False) -> jax.Array:
    if how == "max":
        return jnp.max(x, axes, keepdims=keepdims)
    if how == "min":
        return jnp.min(x, axes, keepdims=keepdims)
    return cast_back(jnp.mean(cast(x, statistics_dtype(x.dtype)), axes, keepdims=keepdims), x)


# Adaptive pooling


def _bins(size: int, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns which entries of an axis of `size` fall into each of `bins` bins: indices and validity, `(bins, widest)`.

    Bin `i` reaches from `floor(i * size / bins)` to `ceil((i + 1) * size / bins)`; neighbors overlap where the sizes
    do not divide.
    """
    starts = np.arange(bins) * size // bins
    ends = -(-(np.arange(bins) + 1) * size // bins)  # -(-a // b) is the ceiling of a / b
    indices = starts[:, None] + np.arange((ends - starts).max())
    return np.minimum(indices, size - 1), indices < ends[:, None]


def _adapt_axis(x: jax.Array, axis: int, bins: int, how: Reduction) -> jax.Array:
    size = x.shape[axis]
    if size % bins == 0:
        split = jnp.reshape(x, (*x.shape[:axis], bins, size // bins, *x.shape[axis + 1 :]))
        return _reduce(split, (axis + 1,), how)
    indices, valid = _bins(size, bins)
    split = jnp.take(x, indices, axis=axis)
    valid = valid.reshape((1,) * axis + valid.shape + (1,) * (x.ndim - axis - 1))
    if how == "avg":
        wide = cast(split, statistics_dtype(x.dtype))
        return cast_back(jnp.mean(wide, axis + 1, where=jnp.broadcast_to(valid, split.shape)), x)
    empty = lowest(x.dtype) if how == "max" else highest(x.dtype)
    return _reduce(jnp.where(valid, split, empty), (axis + 1,), how)


@compiled_body
def _adapt(x: jax.Array, *, output_size: Size, how: Reduction) -> jax.Array:
    first = x.ndim - 1 - len(output_size)
    for i, bins in enumerate(output_size):
        if bins is not None and bins != x.shape[first + i]:
            x = _adapt_axis(x, first + i, bins, how)
    return x


def _checked_size(name: str, output_size: Sequence[int | None]) -> Size:
    size: Size = spatial_tuple(name, "output_size", output_size)
    if any(entry is not None and entry < 1 for entry in size):
        raise ValueError(EMPTY_OUTPUT.format(layer=name, got=size))
    return size


def _adaptive_pool(name: str, inputs: jax.Array, output_size: Sequence[int | None], how: Reduction) -> jax.Array:
    size = _checked_size(name, output_size)
    check_spatial_axes(name, inputs, len(size))
    return _adapt(inputs, output_size=size, how=how)


def adaptive_avg_pool(inputs: jax.Array, output_size: Sequence[int | None]) -> jax.Array:
    """Averages over as many windows as the output has entries.

    Args:
        inputs: an array of shape `(*batch, *spatial, features)`.
        output_size: a tuple with one entry per spatial dimension; `None` keeps that dimension.

    >>> nnx.adaptive_avg_pool(jnp.arange(5.0)[:, None], (2,)).ravel().tolist()
    [1.0, 3.0]
    """
    return _adaptive_pool("adaptive_avg_pool", inputs, output_size, "avg")


def adaptive_max_pool(inputs: jax.Array, output_size: Sequence[int | None]) -> jax.Array:
    """Returns the maximum over as many windows as the output has entries; arguments as in `adaptive_avg_pool`.

    >>> nnx.adaptive_max_pool(jnp.arange(5.0)[:, None], (2,)).ravel().tolist()
    [2.0, 4.0]
    """
    return _adaptive_pool("adaptive_max_pool", inputs, output_size, "max")


class _AdaptivePool(Module):
    """Adaptive pooling; a subclass defines how a window is reduced."""

    _how: ClassVar[Reduction]

    output_size: Size

    def __init__(self, output_size: Sequence[int | None]) -> None:
        self.output_size = _checked_size(type(self).__name__, output_size)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Reduces `(*batch, *spatial, features)` to `(*batch, *output_size, features)`."""
        return _adaptive_pool(type(self).__name__, inputs, self.output_size, self._how)


class AdaptiveAvgPool(_AdaptivePool):
    """`adaptive_avg_pool` as a Module; shape `(*batch, *spatial, features) -> (*batch, *output_size, features)`.

    Args:
        output_size: a tuple with one entry per spatial dimension; `None` keeps that dimension.

    >>> nnx.AdaptiveAvgPool((3, 1))(jnp.ones((5, 8, 8, 2))).shape
    (5, 3, 1, 2)
    """

    _how = "avg"


class AdaptiveMaxPool(_AdaptivePool):
    """`adaptive_max_pool` as a Module; arguments and shapes are those of `AdaptiveAvgPool`.

    >>> nnx.AdaptiveMaxPool((3, 1))(jnp.ones((5, 8, 8, 2))).shape
    (5, 3, 1, 2)
    """

    _how = "max"


# Global pooling


@compiled_body
def _global(x: jax.Array, *, spatial_dims: int, keepdims: bool, how: Reduction) -> jax.Array:
    return _reduce(x, tuple(range(x.ndim - 1 - spatial_dims, x.ndim - 1)), how, keepdims)


def _global_pool(name: str, inputs: jax.Array, spatial_dims: int | None, keepdims: bool, how: Reduction) -> jax.Array:
    if spatial_dims is None:
        check_spatial_axes(name, inputs, 2)
        spatial_dims = inputs.ndim - 2
    check_spatial_axes(name, inputs, spatial_dims)
    return _global(inputs, spatial_dims=spatial_dims, keepdims=keepdims, how=how)


def global_avg_pool(inputs: jax.Array, spatial_dims: int | None = None, *, keepdims: bool = False) -> jax.Array:
    """Averages over all spatial axes.

    Args:
        inputs: an array of shape `(*batch, *spatial, features)`.
        spatial_dims: the number of axes before the last that are spatial; by default, all but the first, which is the
            batch.
        keepdims: whether the spatial axes stay, with size 1.

    >>> nnx.global_avg_pool(jnp.ones((5, 8, 8, 3))).shape
    (5, 3)
    """
    return _global_pool("global_avg_pool", inputs, spatial_dims, keepdims, "avg")


def global_max_pool(inputs: jax.Array, spatial_dims: int | None = None, *, keepdims: bool = False) -> jax.Array:
    """Returns the maximum over all spatial axes; arguments as in `global_avg_pool`.

    >>> nnx.global_max_pool(jnp.ones((8, 8, 3)), spatial_dims=2).shape
    (3,)
    """
    return _global_pool("global_max_pool", inputs, spatial_dims, keepdims, "max")


class _GlobalPool(Module):
    """Global pooling; a subclass defines how the spatial axes are reduced."""

    _how: ClassVar[Reduction]

    spatial_dims: int | None
    keepdims: bool

    def __init__(self, spatial_dims: int | None = None, *, keepdims: bool = False) -> None:
        self.spatial_dims = spatial_dims
        self.keepdims = keepdims

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Reduces `(*batch, *spatial, features)` to `(*batch, features)`."""
        return _global_pool(type(self).__name__, inputs, self.spatial_dims, self.keepdims, self._how)


class GlobalAvgPool(_GlobalPool):
    """`global_avg_pool` as a Module; shape `(*batch, *spatial, features) -> (*batch, features)`.

    Args:
        spatial_dims: the number of axes before the last that are spatial; by default, all but the first, which is the
            batch.
        keepdims: whether the spatial axes stay, with size 1.

    >>> nnx.GlobalAvgPool()(jnp.ones((5, 8, 8, 3))).shape
    (5, 3)
    """

    _how = "avg"


class GlobalMaxPool(_GlobalPool):
    """`global_max_pool` as a Module; arguments and shapes are those of `GlobalAvgPool`.

    >>> nnx.GlobalMaxPool()(jnp.ones((5, 8, 8, 3))).shape
    (5, 3)
    """

    _how = "max"
