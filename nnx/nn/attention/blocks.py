"""Attention to long texts in blocks of queries, whose memory grows linearly with the length.

The weights of a block are computed, used and forgotten before the next block; the gradient computes them again. Each
block runs the arithmetic of `weights.attend`, so every option works, and results are those of the plain form within
rounding (dropout draws other weights to drop). Where a window hides most keys, a block reads only those near it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from nnx.nn.attention.weights import AttentionArrays, AttentionSettings, attend, may_see_nothing
from nnx.nn.support.settings import cast, compiled_body, statistics_dtype
from nnx.sharding.target import target

LONG = 2048 * 2048
"""The number of weights per head from which on they are computed in blocks."""
ENTRIES = 2**20
"""The number of weights per head in a block, as far as `SMALLEST` allows."""
SMALLEST = 128  # queries of a block, the tile of matrix units on a TPU
LARGEST = 256
"""On an H200, 128 take 12 to 31 % longer. On a CPU, they take 7 to 12 % less time: they fit its caches."""


def is_long(queries: Any, keys: Any) -> bool:
    """Whether so many queries and keys are worth blocks; they may be symbolic, as in `nnx.export`."""
    return isinstance(queries, int) and isinstance(keys, int) and queries * keys >= LONG and queries >= 2 * SMALLEST


def block_size(keys: int, platform: str) -> int:
    """Returns the number of queries in a block, for so many keys on a platform."""
    largest = SMALLEST if platform == "cpu" else LARGEST
    return max(SMALLEST, min(largest, 1 << (max(ENTRIES // max(keys, 1), 1).bit_length() - 1)))


@compiled_body
def attend_in_blocks(
    query: jax.Array, key: jax.Array, value: jax.Array, options: AttentionArrays, *, settings: AttentionSettings
) -> jax.Array:
    """Returns what `weights.attend` does, without the weights; the arguments cover all queries and keys."""
    queries, keys = query.shape[-3], key.shape[-3]
    some_unseeing = may_see_nothing(options, settings, queries, keys)
    # The gradients of keys and values are sums over all blocks, so they are added up in float32.
    wide = [cast(array, statistics_dtype(array.dtype)) for array in (key, value)]
    half = queries // 2 // SMALLEST * SMALLEST
    if not settings.is_causal or settings.window is not None or half >= keys:
        return _attend_to(query, wide, value.dtype, options, settings, some_unseeing, 0)
    # No query of the first half sees a key past it, which saves a quarter of the work.
    first, second = query[..., :half, :, :], query[..., half:, :, :]
    near = [array[..., :half, :, :] for array in wide]
    outs = [
        _attend_to(first, near, value.dtype, _part(options, 0, half, half), settings, some_unseeing, 0),
        _attend_to(second, wide, value.dtype, _part(options, half, queries, keys), settings, some_unseeing, half),
    ]
    return jnp.concatenate(outs, -3)


def _part(options: AttentionArrays, start: int, stop: int, keys: int) -> AttentionArrays:
    """Returns the options for some queries and the first keys."""

    def cut(array: jax.Array | None) -> jax.Array | None:
        if array is not None and array.ndim > 1 and array.shape[-2] > 1:
            array = array[..., start:stop, :]
        return array if array is None or array.ndim == 0 or array.shape[-1] == 1 else array[..., :keys]

    return options._replace(bias=cut(options.bias), mask=cut(options.mask))


def _attend_to(
    query: jax.Array,
    wide: Sequence[jax.Array],
    dtype: Any,
    options: AttentionArrays,
    settings: AttentionSettings,
    some_unseeing: bool,
    offset: int,
) -> jax.Array:
    """Attends from queries, the first of which is at the position `offset`, to keys and values in float32."""
    keys = wide[0].shape[-3]
    size = block_size(keys, target(query, *wide).platform)
    span = _span(options, settings, size, keys)

    def block(_: None, start: Any, query: jax.Array, bias: jax.Array | None) -> tuple[None, jax.Array]:
        count = query.shape[-3]
        first: Any = 0 if span is None else jnp.clip(start - _window(settings)[0], 0, keys - span)
        near, of_near = (
            cast(array if span is None else lax.dynamic_slice_in_dim(array, first, span, -3), dtype) for array in wide
        )
        mask = options.mask
        if mask is not None and mask.ndim > 1 and mask.shape[-2] > 1:
            mask = lax.dynamic_slice_in_dim(mask, start, count, -2)
        if mask is not None and mask.shape[-1] > 1 and span is not None:
            mask = lax.dynamic_slice_in_dim(mask, first, span, -1)
        rng = options.dropout_rng
        rng = None if rng is None else jax.random.fold_in(rng, offset + start)
        local = options._replace(bias=bias, mask=mask, dropout_rng=rng)
        positions, key_positions = offset + start + jnp.arange(count), first + jnp.arange(near.shape[-3])
        return None, attend(query, near, of_near, local, settings, positions, key_positions, some_unseeing)[0]

    bias, of_keys = options.bias, None
    if bias is not None and (bias.ndim < 2 or bias.shape[-2] == 1):
        bias, of_keys = None, bias  # the same for every query, so there is nothing to divide

    def run(carry: None, start: Any, query: jax.Array, bias: jax.Array | None) -> tuple[None, jax.Array]:
        return block(carry, start, query, of_keys if bias is None else bias)

    return over_blocks(run, None, size, [(query, -3), (bias, -2)], -3)[1]


def _window(settings: AttentionSettings) -> tuple[int, int]:
    assert settings.window is not None
    left, right = settings.window
    return left, min(right, 0) if settings.is_causal else right


def _span(options: AttentionArrays, settings: AttentionSettings, size: int, keys: int) -> int | None:
    """Returns how many keys a block of queries has in its window; None if it has to read all of them."""
    if settings.window is None or options.bias is not None:
        return None
    left, right = _window(settings)
    span = size + max(left, 0) + max(right, 0)
    return span if span < keys and left >= 0 else None


def over_blocks(
    step: Callable[..., tuple[Any, Any]],
    carry: Any,
    size: int,
    arrays: Sequence[tuple[jax.Array | None, int]],
    out_axis: int,
) -> tuple[Any, Any]:
    """Runs `step(carry, start, *parts) -> carry, out` on one block after the other, keeping nothing in between.

    Args:
        step: the function of one block; the gradient runs it again.
        carry: what the first step gets, and each step passes to the next one.
        size: the size of a block; the last one can be smaller.
        arrays: what is divided, each with its axis; None stays None.
        out_axis: the axis along which the outputs, one array or a tuple of them, are put together.

    Returns:
        The last carry, and the outputs.
    """
    length = next(array.shape[axis] for array, axis in arrays if array is not None)
    count, rest = divmod(length, size)
    step = jax.checkpoint(step, prevent_cse=False)  # in a loop nothing can be merged with the first computation

    def run(carry: Any, block: Any) -> tuple[Any, Any]:
        return step(carry, *block)

    stacked = [None if array is None else _stacked(array, axis, count, size) for array, axis in arrays]
    carry, out = lax.scan(run, carry, (jnp.arange(count) * size, *stacked))
    out = jax.tree.map(lambda part: _joined(part, out_axis), out)
    if rest:
        last = [
            None if array is None else lax.slice_in_dim(array, count * size, length, axis=axis)
            for array, axis in arrays
        ]
        carry, end = step(carry, jnp.asarray(count * size), *last)
        out = jax.tree.map(lambda *parts: jnp.concatenate(parts, out_axis), out, end)
    return carry, out


def _stacked(array: jax.Array, axis: int, count: int, size: int) -> jax.Array:
    """Returns the whole blocks of an array along a new first axis."""
    axis %= array.ndim
    array = lax.slice_in_dim(array, 0, count * size, axis=axis)
    split = array.reshape(*array.shape[:axis], count, size, *array.shape[axis + 1 :])
    return jnp.moveaxis(split, axis, 0)


def _joined(blocks: jax.Array, axis: int) -> jax.Array:
    """Puts blocks together; the inverse of `_stacked`."""
    axis %= blocks.ndim - 1
    moved = jnp.moveaxis(blocks, 0, axis)
    return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])
