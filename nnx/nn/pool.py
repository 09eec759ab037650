"""Pooling over windows: `max_pool`, `avg_pool`, `min_pool`, and the same as modules.

An input has shape `(*batch, *spatial, features)` with any number of batch axes, none included; the number of spatial
axes is the length of `window_shape`. Strides are 1 unless given, as in Flax (and unlike PyTorch, where they are the
window's shape).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from nnx.core.module import Module
from nnx.nn.checks import TOO_FEW_AXES, per_dimension, spatial_tuple
from nnx.nn.dtypes import cast, statistics_dtype
from nnx.nn.padding import Padding, PaddingLike, normalize_padding

POOL_PADDINGS = ("SAME", "VALID")

_Window = tuple[tuple[int, ...], tuple[int, ...], Padding]


def _window(
    layer: str, window_shape: Sequence[int], strides: int | Sequence[int] | None, padding: PaddingLike
) -> _Window:
    """Window, strides and padding as given by a user, checked and brought to one form."""
    window = spatial_tuple(layer, "window_shape", window_shape)
    dimensions = len(window)
    return (
        window,
        per_dimension(layer, "strides", strides, dimensions),
        normalize_padding(layer, padding, dimensions, POOL_PADDINGS),
    )


def check_spatial_axes(layer: str, x: Array, dimensions: int) -> None:
    """Raises unless `x` has `dimensions` spatial axes and one of features."""
    if x.ndim < dimensions + 1:
        spatial = ", ".join(f"d{i}" for i in range(dimensions))
        raise ValueError(TOO_FEW_AXES.format(layer=layer, expected=f"(..., {spatial}, features)", shape=x.shape))


def _reduce_windows(x: Array, init: Any, reduce_fn: Callable[..., Any], window: _Window) -> Array:
    shape, strides, padding = window
    batch_axes = x.ndim - len(shape) - 1
    around = (1,) * batch_axes
    if not isinstance(padding, str):
        padding = ((0, 0),) * batch_axes + padding + ((0, 0),)
    return lax.reduce_window(x, init, reduce_fn, (*around, *shape, 1), (*around, *strides, 1), padding)


def pool(
    inputs: Array,
    init: Any,
    reduce_fn: Callable[..., Any],
    window_shape: Sequence[int],
    strides: int | Sequence[int] | None,
    padding: PaddingLike,
) -> Array:
    """Reduces windows with any function.

    Args:
        inputs: of shape `(*batch, *spatial, features)`.
        init: the value the reduction starts from.
        reduce_fn: an associative function of two arrays.
        window_shape: one entry per spatial dimension, as a tuple.
        strides: an int, or one per spatial dimension; `None` for ones.
        padding: "SAME", "VALID", an int, or one int or `(low, high)` pair per spatial dimension.

    >>> import nnx, jax, jax.numpy as jnp
    >>> nnx.pool(jnp.arange(4.0)[:, None], 0.0, jax.lax.add, (2,), 2, "VALID").ravel().tolist()
    [1.0, 5.0]
    """
    window = _window("pool", window_shape, strides, padding)
    check_spatial_axes("pool", inputs, len(window[0]))
    return _reduce_windows(inputs, init, reduce_fn, window)


def lowest(dtype: Any) -> Any:
    """The identity of `max` for `dtype`."""
    return np.array(-np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min, dtype)


def highest(dtype: Any) -> Any:
    """The identity of `min` for `dtype`."""
    return np.array(np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max, dtype)


@partial(jax.jit, static_argnames=("window",))
def _max(x: Array, *, window: _Window) -> Array:
    return _reduce_windows(x, lowest(x.dtype), lax.max, window)


@partial(jax.jit, static_argnames=("window",))
def _min(x: Array, *, window: _Window) -> Array:
    return _reduce_windows(x, highest(x.dtype), lax.min, window)


@partial(jax.jit, static_argnames=("window", "count_include_pad"))
def _avg(x: Array, *, window: _Window, count_include_pad: bool) -> Array:
    wide = cast(x, statistics_dtype(x.dtype))
    zero = np.array(0, wide.dtype)
    sums = _reduce_windows(wide, zero, lax.add, window)
    if count_include_pad:
        averages = sums / np.prod(window[0])
    else:
        spatial = (1,) * (x.ndim - len(window[0]) - 1) + x.shape[x.ndim - len(window[0]) - 1 : -1] + (1,)
        averages = sums / _reduce_windows(jnp.ones(spatial, wide.dtype), zero, lax.add, window)
    return cast(averages, x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else averages


def max_pool(
    inputs: Array,
    window_shape: Sequence[int],
    strides: int | Sequence[int] | None = None,
    padding: PaddingLike = "VALID",
) -> Array:
    """The maximum of each window.

    Args:
        inputs: of shape `(*batch, *spatial, features)`.
        window_shape: one entry per spatial dimension, as a tuple.
        strides: an int, or one per spatial dimension; `None` for ones.
        padding: "SAME", "VALID", an int, or one int or `(low, high)` pair per spatial dimension.

    >>> import nnx, jax.numpy as jnp
    >>> nnx.max_pool(jnp.arange(4.0)[:, None], (2,), strides=(2,)).ravel().tolist()
    [1.0, 3.0]
    """
    window = _window("max_pool", window_shape, strides, padding)
    check_spatial_axes("max_pool", inputs, len(window[0]))
    return _max(inputs, window=window)


def min_pool(
    inputs: Array,
    window_shape: Sequence[int],
    strides: int | Sequence[int] | None = None,
    padding: PaddingLike = "VALID",
) -> Array:
    """The minimum of each window; arguments as for `max_pool`.

    >>> import nnx, jax.numpy as jnp
    >>> nnx.min_pool(jnp.arange(4.0)[:, None], (2,), strides=(2,)).ravel().tolist()
    [0.0, 2.0]
    """
    window = _window("min_pool", window_shape, strides, padding)
    check_spatial_axes("min_pool", inputs, len(window[0]))
    return _min(inputs, window=window)


def avg_pool(
    inputs: Array,
    window_shape: Sequence[int],
    strides: int | Sequence[int] | None = None,
    padding: PaddingLike = "VALID",
    count_include_pad: bool = True,
) -> Array:
    """The average of each window; arguments as for `max_pool`.

    Args:
        count_include_pad: whether padding counts as zeros, or does not count.

    >>> import nnx, jax.numpy as jnp
    >>> nnx.avg_pool(jnp.arange(4.0)[:, None], (2,), strides=(2,)).ravel().tolist()
    [0.5, 2.5]
    """
    window = _window("avg_pool", window_shape, strides, padding)
    check_spatial_axes("avg_pool", inputs, len(window[0]))
    return _avg(inputs, window=window, count_include_pad=count_include_pad)


class _WindowPool(Module):
    def __init__(
        self,
        window_shape: Sequence[int],
        strides: int | Sequence[int] | None = None,
        padding: PaddingLike = "VALID",
    ):
        window = _window(type(self).__name__, window_shape, strides, padding)
        self.window_shape, self.strides, self.padding = window

    def _checked_window(self, inputs: Array) -> _Window:
        check_spatial_axes(type(self).__name__, inputs, len(self.window_shape))
        return self.window_shape, self.strides, self.padding


class MaxPool(_WindowPool):
    """`max_pool` as a module; shape `(*batch, *spatial, features) -> (*batch, *spatial', features)`.

    Args:
        window_shape: one entry per spatial dimension, as a tuple.
        strides: an int, or one per spatial dimension; `None` for ones.
        padding: "SAME", "VALID", an int, or one int or `(low, high)` pair per spatial dimension.

    >>> import nnx, jax.numpy as jnp
    >>> nnx.MaxPool((2, 2), strides=2)(jnp.ones((5, 8, 8, 3))).shape
    (5, 4, 4, 3)
    """

    def __call__(self, inputs: Array) -> Array:
        return _max(inputs, window=self._checked_window(inputs))


class MinPool(_WindowPool):
    """`min_pool` as a module; arguments and shapes as for `MaxPool`.

    >>> import nnx, jax.numpy as jnp
    >>> nnx.MinPool((2, 2), strides=2)(jnp.ones((5, 8, 8, 3))).shape
    (5, 4, 4, 3)
    """

    def __call__(self, inputs: Array) -> Array:
        return _min(inputs, window=self._checked_window(inputs))


class AvgPool(_WindowPool):
    """`avg_pool` as a module; arguments and shapes as for `MaxPool`.

    Args:
        count_include_pad: whether padding counts as zeros, or does not count.

    >>> import nnx, jax.numpy as jnp
    >>> nnx.AvgPool((2, 2), strides=2)(jnp.ones((5, 8, 8, 3))).shape
    (5, 4, 4, 3)
    """

    def __init__(
        self,
        window_shape: Sequence[int],
        strides: int | Sequence[int] | None = None,
        padding: PaddingLike = "VALID",
        count_include_pad: bool = True,
    ):
        super().__init__(window_shape, strides, padding)
        self.count_include_pad = count_include_pad

    def __call__(self, inputs: Array) -> Array:
        return _avg(inputs, window=self._checked_window(inputs), count_include_pad=self.count_include_pad)
