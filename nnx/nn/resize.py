"""Layers that bring space to a wanted size: adaptive and global pooling, and `Upsample`.

Inputs have shape `(*batch, *spatial, features)`, as in `pool`.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nnx.core.module import Module
from nnx.nn.checks import spatial_tuple
from nnx.nn.dtypes import cast, statistics_dtype
from nnx.nn.pool import check_spatial_axes, highest, lowest

Reduction = Literal["max", "min", "avg"]
Size = tuple[int | None, ...]

NO_SIZE = (
    "{layer} needs exactly one of `scale_factor` and `size`, got scale_factor={scale!r}, size={size!r}. "
    "Write e.g. `nnx.Upsample((2, 2))` or `nnx.Upsample(size=(64, 64))`."
)


def _reduce(x: Array, axes: tuple[int, ...], how: Reduction, keepdims: bool = False) -> Array:
    if how == "max":
        return jnp.max(x, axes, keepdims=keepdims)
    if how == "min":
        return jnp.min(x, axes, keepdims=keepdims)
    average = jnp.mean(cast(x, statistics_dtype(x.dtype)), axes, keepdims=keepdims)
    return cast(average, x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else average


def _bins(size: int, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Which entries of an axis of `size` fall into each of `bins` bins: indices and validity, `(bins, widest)`.

    Bin `i` reaches from `floor(i * size / bins)` to `ceil((i + 1) * size / bins)`; neighbours overlap where the sizes
    do not divide.
    """
    starts = np.arange(bins) * size // bins
    ends = -(-(np.arange(bins) + 1) * size // bins)
    indices = starts[:, None] + np.arange((ends - starts).max())
    return np.minimum(indices, size - 1), indices < ends[:, None]


def _adapt_axis(x: Array, axis: int, bins: int, how: Reduction) -> Array:
    size = x.shape[axis]
    if size % bins == 0:
        split = jnp.reshape(x, (*x.shape[:axis], bins, size // bins, *x.shape[axis + 1 :]))
        return _reduce(split, (axis + 1,), how)
    indices, valid = _bins(size, bins)
    split = jnp.take(x, indices, axis=axis)
    valid = valid.reshape((1,) * axis + valid.shape + (1,) * (x.ndim - axis - 1))
    if how == "avg":
        wide = cast(split, statistics_dtype(x.dtype))
        average = jnp.mean(wide, axis + 1, where=jnp.broadcast_to(valid, split.shape))
        return cast(average, x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else average
    empty = lowest(x.dtype) if how == "max" else highest(x.dtype)
    return _reduce(jnp.where(valid, split, empty), (axis + 1,), how)


@partial(jax.jit, static_argnames=("output_size", "how"))
def _adapt(x: Array, *, output_size: Size, how: Reduction) -> Array:
    first = x.ndim - 1 - len(output_size)
    for i, bins in enumerate(output_size):
        if bins is not None and bins != x.shape[first + i]:
            x = _adapt_axis(x, first + i, bins, how)
    return x


def _adaptive(name: str, inputs: Array, output_size: Sequence[int | None], how: Reduction) -> Array:
    size: Size = spatial_tuple(name, "output_size", output_size)
    check_spatial_axes(name, inputs, len(size))
    return _adapt(inputs, output_size=size, how=how)


def adaptive_avg_pool(inputs: Array, output_size: Sequence[int | None]) -> Array:
    """Averages over as many windows as the output is to have entries.

    Args:
        inputs: of shape `(*batch, *spatial, features)`.
        output_size: one entry per spatial dimension, as a tuple; `None` keeps that dimension.

    >>> import nnx, jax.numpy as jnp
    >>> nnx.adaptive_avg_pool(jnp.arange(5.0)[:, None], (2,)).ravel().tolist()
    [1.0, 3.0]
    """
    return _adaptive("adaptive_avg_pool", inputs, output_size, "avg")


def adaptive_max_pool(inputs: Array, output_size: Sequence[int | None]) -> Array:
    """The maximum over as many windows as the output is to have entries; arguments as for `adaptive_avg_pool`.

    >>> import nnx, jax.numpy as jnp
    >>> nnx.adaptive_max_pool(jnp.arange(5.0)[:, None], (2,)).ravel().tolist()
    [2.0, 4.0]
    """
    return _adaptive("adaptive_max_pool", inputs, output_size, "max")


class AdaptiveAvgPool(Module):
    """`adaptive_avg_pool` as a module; shape `(*batch, *spatial, features) -> (*batch, *output_size, features)`.

    Args:
        output_size: one entry per spatial dimension, as a tuple; `None` keeps that dimension.

    >>> import nnx, jax.numpy as jnp
    >>> nnx.AdaptiveAvgPool((3, 1))(jnp.ones((5, 8, 8, 2))).shape
    (5, 3, 1, 2)
    """

    def __init__(self, output_size: Sequence[int | None]):
        self.output_size = spatial_tuple(type(self).__name__, "output_size", output_size)

    def __call__(self, inputs: Array) -> Array:
        return _adaptive(type(self).__name__, inputs, self.output_size, "avg")


class AdaptiveMaxPool(Module):
    """`adaptive_max_pool` as a module; arguments and shapes as for `AdaptiveAvgPool`.

    >>> import nnx, jax.numpy as jnp
    >>> nnx.AdaptiveMaxPool((3, 1))(jnp.ones((5, 8, 8, 2))).shape
    (5, 3, 1, 2)
    """

    def __init__(self, output_size: Sequence[int | None]):
        self.output_size = spatial_tuple(type(self).__name__, "output_size", output_size)

    def __call__(self, inputs: Array) -> Array:
        return _adaptive(type(self).__name__, inputs, self.output_size, "max")


@partial(jax.jit, static_argnames=("spatial_dims", "keepdims", "how"))
def _global(x: Array, *, spatial_dims: int, keepdims: bool, how: Reduction) -> Array:
    return _reduce(x, tuple(range(x.ndim - 1 - spatial_dims, x.ndim - 1)), how, keepdims)


def _global_pool(name: str, inputs: Array, spatial_dims: int | None, keepdims: bool, how: Reduction) -> Array:
    if spatial_dims is None:
        check_spatial_axes(name, inputs, 2)
        spatial_dims = inputs.ndim - 2
    check_spatial_axes(name, inputs, spatial_dims)
    return _global(inputs, spatial_dims=spatial_dims, keepdims=keepdims, how=how)


def global_avg_pool(inputs: Array, spatial_dims: int | None = None, *, keepdims: bool = False) -> Array:
    """Averages over all of space.

    Args:
        inputs: of shape `(*batch, *spatial, features)`.
        spatial_dims: how many axes before the last are space; by default all but the first, which is the batch.
        keepdims: whether the spatial axes stay, with size 1.

    >>> import nnx, jax.numpy as jnp
    >>> nnx.global_avg_pool(jnp.ones((5, 8, 8, 3))).shape
    (5, 3)
    """
    return _global_pool("global_avg_pool", inputs, spatial_dims, keepdims, "avg")


def global_max_pool(inputs: Array, spatial_dims: int | None = None, *, keepdims: bool = False) -> Array:
    """The maximum over all of space; arguments as for `global_avg_pool`.

    >>> import nnx, jax.numpy as jnp
    >>> nnx.global_max_pool(jnp.ones((8, 8, 3)), spatial_dims=2).shape
    (3,)
    """
    return _global_pool("global_max_pool", inputs, spatial_dims, keepdims, "max")


class GlobalAvgPool(Module):
    """`global_avg_pool` as a module; shape `(*batch, *spatial, features) -> (*batch, features)`.

    Args:
        spatial_dims: how many axes before the last are space; by default all but the first, which is the batch.
        keepdims: whether the spatial axes stay, with size 1.

    >>> import nnx, jax.numpy as jnp
    >>> nnx.GlobalAvgPool()(jnp.ones((5, 8, 8, 3))).shape
    (5, 3)
    """

    def __init__(self, spatial_dims: int | None = None, *, keepdims: bool = False):
        self.spatial_dims = spatial_dims
        self.keepdims = keepdims

    def __call__(self, inputs: Array) -> Array:
        return _global_pool(type(self).__name__, inputs, self.spatial_dims, self.keepdims, "avg")


class GlobalMaxPool(Module):
    """`global_max_pool` as a module; arguments and shapes as for `GlobalAvgPool`.

    >>> import nnx, jax.numpy as jnp
    >>> nnx.GlobalMaxPool()(jnp.ones((5, 8, 8, 3))).shape
    (5, 3)
    """

    def __init__(self, spatial_dims: int | None = None, *, keepdims: bool = False):
        self.spatial_dims = spatial_dims
        self.keepdims = keepdims

    def __call__(self, inputs: Array) -> Array:
        return _global_pool(type(self).__name__, inputs, self.spatial_dims, self.keepdims, "max")


@partial(jax.jit, static_argnames=("size", "method"))
def _resize(x: Array, *, size: tuple[int, ...], method: str) -> Array:
    batch_axes = x.ndim - 1 - len(size)
    shape = (*x.shape[:batch_axes], *size, x.shape[-1])
    wide = x if method == "nearest" else cast(x, statistics_dtype(x.dtype))
    resized = jax.image.resize(wide, shape, method)
    return cast(resized, x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else resized


class Upsample(Module):
    """Resizes space by interpolation; shape `(*batch, *spatial, features) -> (*batch, *spatial', features)`.

    Args:
        scale_factor: by which to multiply each spatial size, as a tuple.
        size: the spatial sizes wanted, as a tuple, instead of `scale_factor`.
        method: "nearest", "linear" ("bilinear", "trilinear"), "cubic" ("bicubic"), "lanczos3" or "lanczos5", as in
            `jax.image.resize`.

    >>> import nnx, jax.numpy as jnp
    >>> nnx.Upsample((2, 2), method="linear")(jnp.ones((5, 8, 8, 3))).shape
    (5, 16, 16, 3)
    """

    def __init__(
        self,
        scale_factor: Sequence[float] | None = None,
        *,
        size: Sequence[int] | None = None,
        method: str = "nearest",
    ):
        name = type(self).__name__
        if (scale_factor is None) == (size is None):
            raise ValueError(NO_SIZE.format(layer=name, scale=scale_factor, size=size))
        self.scale_factor = None if scale_factor is None else spatial_tuple(name, "scale_factor", scale_factor)
        self.size = None if size is None else spatial_tuple(name, "size", size)
        self.method = method

    def __call__(self, inputs: Array) -> Array:
        factors = self.scale_factor or self.size or ()
        check_spatial_axes(type(self).__name__, inputs, len(factors))
        size = self.size
        if size is None:
            spatial = inputs.shape[inputs.ndim - 1 - len(factors) : -1]
            size = tuple(math.floor(n * factor) for n, factor in zip(spatial, factors, strict=True))
        return _resize(inputs, size=size, method=self.method)
