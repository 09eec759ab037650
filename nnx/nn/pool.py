"""Pooling over windows: `max_pool`, `avg_pool`, `min_pool`, and the same as Modules.

An input has shape `(*batch, *spatial, features)` with any number of batch axes, including none; the number of spatial
axes is the length of `window_shape`. Strides are 1 by default, as in Flax (in PyTorch they default to the shape of the
window).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nnx.core.module.module import Module
from nnx.nn.support.checks import (
    Padding,
    PaddingLike,
    Strides,
    check_spatial_axes,
    normalize_padding,
    per_dimension,
    spatial_tuple,
)
from nnx.nn.support.settings import cast, compiled_body, statistics_dtype

POOL_PADDINGS = ("SAME", "VALID")

ONLY_PADDING = (
    "{layer}: with window_shape={window}, strides={strides} and padding={padding}, some windows of an input of shape "
    "{shape} lie entirely in the padding, so there is nothing to reduce. Pad by less than the size of a window."
)


class _Window(NamedTuple):
    """A window as the reductions take it; it is hashable, so it can be a static setting."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: Padding


def _as_window(layer: str, window_shape: Sequence[int], strides: Strides, padding: PaddingLike) -> _Window:
    """Checks what a user passed and brings it to one form."""
    shape = spatial_tuple(layer, "window_shape", window_shape)
    dimensions = len(shape)
    return _Window(
        shape,
        per_dimension(layer, "strides", strides, dimensions),
        normalize_padding(layer, padding, dimensions, POOL_PADDINGS),
    )


def _window_for(
    layer: str, inputs: jax.Array, window_shape: Sequence[int], strides: Strides, padding: PaddingLike
) -> _Window:
    """Like `_as_window`, and checks that `inputs` has enough axes for the window."""
    window = _as_window(layer, window_shape, strides, padding)
    check_spatial_axes(layer, inputs, len(window.shape))
    return window


def _check_windows(layer: str, x: jax.Array, window: _Window) -> None:
    """Raises `ValueError` if a window would hold nothing but padding; that has no maximum, minimum or average."""
    shape, strides, padding = window
    if isinstance(padding, str):
        return
    for size, wide, stride, (low, high) in zip(x.shape[-len(shape) - 1 : -1], shape, strides, padding, strict=True):
        steps = (size + low + high - wide) // stride
        if size > 0 and steps >= 0 and (low >= wide or steps * stride - low >= size):
            text = {"window": shape, "strides": strides, "padding": padding, "shape": x.shape}
            raise ValueError(ONLY_PADDING.format(layer=layer, **text))


def _reduce_windows(x: jax.Array, init: Any, reduce_fn: Callable[..., Any], window: _Window) -> jax.Array:
    shape, strides, padding = window
    batch_axes = x.ndim - len(shape) - 1
    if batch_axes == 0:  # on TPUs the gradient of a maximum needs two axes without a window
        return _reduce_windows(x[None], init, reduce_fn, window)[0]
    around = (1,) * batch_axes
    if not isinstance(padding, str):
        padding = ((0, 0),) * batch_axes + padding + ((0, 0),)
    return lax.reduce_window(x, init, reduce_fn, (*around, *shape, 1), (*around, *strides, 1), padding)


def lowest(dtype: Any) -> np.ndarray:
    """Returns the identity of `max` for `dtype`."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return np.array(False)
    return np.array(-np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min, dtype)


def highest(dtype: Any) -> np.ndarray:
    """Returns the identity of `min` for `dtype`."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return np.array(True)
    return np.array(np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max, dtype)


def cast_back(averages: jax.Array, x: jax.Array) -> jax.Array:
    """Returns averages of `x` in the dtype of `x`; averages of integers stay floats."""
    return cast(averages, x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else averages


@compiled_body
def _max(x: jax.Array, *, window: _Window) -> jax.Array:
    return _reduce_windows(x, lowest(x.dtype), lax.max, window)


@compiled_body
def _min(x: jax.Array, *, window: _Window) -> jax.Array:
    return _reduce_windows(x, highest(x.dtype), lax.min, window)


@compiled_body
def _avg(x: jax.Array, *, window: _Window, count_include_pad: bool) -> jax.Array:
    wide = cast(x, statistics_dtype(x.dtype))
    zero = np.array(0, wide.dtype)
    sums = _reduce_windows(wide, zero, lax.add, window)
    if count_include_pad:
        return cast_back(sums / np.prod(window.shape), x)
    # Pooling an image of ones counts the real entries in each window. The count depends on neither batch nor feature.
    first = x.ndim - len(window.shape) - 1
    image = (1,) * first + x.shape[first:-1] + (1,)
    return cast_back(sums / _reduce_windows(jnp.ones(image, wide.dtype), zero, lax.add, window), x)


def pool(
    inputs: jax.Array,
    init: Any,
    reduce_fn: Callable[..., Any],
    window_shape: Sequence[int],
    strides: Strides,
    padding: PaddingLike,
) -> jax.Array:
    """Reduces windows with any function.

    Args:
        inputs: an array of shape `(*batch, *spatial, features)`.
        init: the value the reduction starts from.
        reduce_fn: an associative function of two arrays.
        window_shape: a tuple with one entry per spatial dimension.
        strides: an int, or one per spatial dimension; `None` for ones.
        padding: "SAME", "VALID", an int, or one int or `(low, high)` pair per spatial dimension.

    >>> nnx.pool(jnp.arange(4.0)[:, None], 0.0, jax.lax.add, (2,), 2, "VALID").ravel().tolist()
    [1.0, 5.0]
    """
    return _reduce_windows(inputs, init, reduce_fn, _window_for("pool", inputs, window_shape, strides, padding))


def max_pool(
    inputs: jax.Array, window_shape: Sequence[int], strides: Strides = None, padding: PaddingLike = "VALID"
) -> jax.Array:
    """Returns the maximum of each window.

    Args:
        inputs: an array of shape `(*batch, *spatial, features)`.
        window_shape: a tuple with one entry per spatial dimension.
        strides: an int, or one per spatial dimension; `None` for ones.
        padding: "SAME", "VALID", an int, or one int or `(low, high)` pair per spatial dimension.

    >>> nnx.max_pool(jnp.arange(4.0)[:, None], (2,), strides=(2,)).ravel().tolist()
    [1.0, 3.0]
    """
    window = _window_for("max_pool", inputs, window_shape, strides, padding)
    _check_windows("max_pool", inputs, window)
    return _max(inputs, window=window)


def min_pool(
    inputs: jax.Array, window_shape: Sequence[int], strides: Strides = None, padding: PaddingLike = "VALID"
) -> jax.Array:
    """Returns the minimum of each window; the arguments are those of `max_pool`.

    >>> nnx.min_pool(jnp.arange(4.0)[:, None], (2,), strides=(2,)).ravel().tolist()
    [0.0, 2.0]
    """
    window = _window_for("min_pool", inputs, window_shape, strides, padding)
    _check_windows("min_pool", inputs, window)
    return _min(inputs, window=window)


def avg_pool(
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Strides = None,
    padding: PaddingLike = "VALID",
    count_include_pad: bool = True,
) -> jax.Array:
    """Returns the average of each window; the other arguments are those of `max_pool`.

    Args:
        count_include_pad: whether padding counts as zeros (the default) or is left out of the average.

    >>> nnx.avg_pool(jnp.arange(4.0)[:, None], (2,), strides=(2,)).ravel().tolist()
    [0.5, 2.5]
    """
    window = _window_for("avg_pool", inputs, window_shape, strides, padding)
    if not count_include_pad:
        _check_windows("avg_pool", inputs, window)
    return _avg(inputs, window=window, count_include_pad=count_include_pad)


class _WindowPool(Module):
    """The window that all pooling Modules have."""

    window_shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: Padding

    def __init__(self, window_shape: Sequence[int], strides: Strides = None, padding: PaddingLike = "VALID") -> None:
        window = _as_window(type(self).__name__, window_shape, strides, padding)
        self.window_shape, self.strides, self.padding = window

    def _checked_window(self, inputs: jax.Array, padding_counts: bool = False) -> _Window:
        name = type(self).__name__
        check_spatial_axes(name, inputs, len(self.window_shape))
        window = _Window(self.window_shape, self.strides, self.padding)
        if not padding_counts:
            _check_windows(name, inputs, window)
        return window


class MaxPool(_WindowPool):
    """`max_pool` as a Module; shape `(*batch, *spatial, features) -> (*batch, *spatial', features)`.

    Args:
        window_shape: a tuple with one entry per spatial dimension.
        strides: an int, or one per spatial dimension; `None` for ones.
        padding: "SAME", "VALID", an int, or one int or `(low, high)` pair per spatial dimension.

    >>> nnx.MaxPool((2, 2), strides=2)(jnp.ones((5, 8, 8, 3))).shape
    (5, 4, 4, 3)
    """

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the maximum of each window."""
        return _max(inputs, window=self._checked_window(inputs))


class MinPool(_WindowPool):
    """`min_pool` as a Module; arguments and shapes are those of `MaxPool`.

    >>> nnx.MinPool((2, 2), strides=2)(jnp.ones((5, 8, 8, 3))).shape
    (5, 4, 4, 3)
    """

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the minimum of each window."""
        return _min(inputs, window=self._checked_window(inputs))


class AvgPool(_WindowPool):
    """`avg_pool` as a Module; shapes and the other arguments are those of `MaxPool`.

    Args:
        count_include_pad: whether padding counts as zeros (the default) or is left out of the average.

    >>> nnx.AvgPool((2, 2), strides=2)(jnp.ones((5, 8, 8, 3))).shape
    (5, 4, 4, 3)
    """

    count_include_pad: bool

    def __init__(
        self,
        window_shape: Sequence[int],
        strides: Strides = None,
        padding: PaddingLike = "VALID",
        count_include_pad: bool = True,
    ) -> None:
        super().__init__(window_shape, strides, padding)
        self.count_include_pad = count_include_pad

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the average of each window."""
        window = self._checked_window(inputs, self.count_include_pad)
        return _avg(inputs, window=window, count_include_pad=self.count_include_pad)
