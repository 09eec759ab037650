"""Attention masks: which query sees which key.

A mask has the shape `[batch..., heads or 1, query_length, key_length]` and is true (nonzero) where a query may attend
to a key. Each builder here answers one question (the past, the padding, the segment, the window); `combine_masks` joins
the answers. Masks are float32 by default, as in Flax; pass `dtype=bool` for booleans. Positions count tokens from 0; a
window of `w` shows each query `w` tokens, including itself.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

MASK_AXES = (
    "combine_masks: all masks must have the same number of axes, [batch..., heads or 1, query_length, key_length]; "
    "got the shapes {shapes}. Add axes of size 1 with `mask[None]`."
)
EMPTY_WINDOW = "An attention window includes the token itself: expected window >= 1, got {got}."


def make_attention_mask(
    query_input: jax.Array,
    key_input: jax.Array,
    pairwise_fn: Callable[..., Any] = jnp.multiply,
    extra_batch_dims: int = 0,
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """Makes a mask from one value per query and one per key.

    Args:
        query_input: an array of shape `[batch..., query_length]`.
        key_input: an array of shape `[batch..., key_length]`.
        pairwise_fn: a broadcasting function of the two, whose result is the mask.
        extra_batch_dims: the number of axes of size 1 to put in front.
        dtype: the dtype of the mask.

    Returns:
        A mask of shape `[batch..., 1, query_length, key_length]`.

    >>> real = jnp.array([[1, 1, 0]])
    >>> nnx.make_attention_mask(real, real)[0, 0].tolist()
    [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    """
    mask = pairwise_fn(query_input[..., :, None], key_input[..., None, :])
    mask = jnp.expand_dims(mask, -3)
    if extra_batch_dims:
        mask = jnp.expand_dims(mask, tuple(range(extra_batch_dims)))
    return mask.astype(dtype)


def make_causal_mask(x: jax.Array, extra_batch_dims: int = 0, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Makes a mask under which each token sees itself and the past.

    Args:
        x: an array of shape `[batch..., length]`; only its shape is used.
        extra_batch_dims: the number of axes of size 1 to put in front.
        dtype: the dtype of the mask.

    Returns:
        A mask of shape `[batch..., 1, length, length]`.

    >>> nnx.make_causal_mask(jnp.zeros(3))[0].tolist()
    [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    """
    positions = jnp.broadcast_to(jnp.arange(x.shape[-1]), x.shape)
    return make_attention_mask(positions, positions, jnp.greater_equal, extra_batch_dims, dtype)


def make_sliding_window_mask(
    x: jax.Array, window: int, *, causal: bool = True, extra_batch_dims: int = 0, dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Makes a mask under which each token sees only the tokens near it.

    Args:
        x: an array of shape `[batch..., length]`; only its shape is used.
        window: the number of tokens a query sees, including itself: its `window - 1` predecessors and, unless `causal`,
            as many successors.
        causal: whether to hide the future as well.
        extra_batch_dims: the number of axes of size 1 to put in front.
        dtype: the dtype of the mask.

    Returns:
        A mask of shape `[batch..., 1, length, length]`.

    >>> nnx.make_sliding_window_mask(jnp.zeros(4), window=2, dtype=int)[0].tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """
    positions = jnp.broadcast_to(jnp.arange(x.shape[-1]), x.shape)
    near = lambda query, key: positions_visible(query, key, causal=causal, window=window)  # noqa: E731
    return make_attention_mask(positions, positions, near, extra_batch_dims, dtype)


def make_padding_mask(lengths: jax.Array, max_length: int, *, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Makes a mask that hides the keys past the end of each row.

    Args:
        lengths: an array of shape `[batch...]` with the number of real tokens, which come first.
        max_length: the padded length.
        dtype: the dtype of the mask.

    Returns:
        A mask of shape `[batch..., 1, 1, max_length]`, the same for every query.

    >>> nnx.make_padding_mask(jnp.array([1, 3]), 3, dtype=int)[:, 0, 0].tolist()
    [[1, 0, 0], [1, 1, 1]]
    """
    lengths = jnp.asarray(lengths)
    return (jnp.arange(max_length) < lengths[..., None, None, None]).astype(dtype)


def make_segment_mask(
    query_segments: jax.Array, key_segments: jax.Array | None = None, *, dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Makes a mask for several documents packed into one row: each token sees its own document.

    Args:
        query_segments: an array of shape `[batch..., query_length]`, one number per document; 0 marks padding, which no
            query sees.
        key_segments: an array of shape `[batch..., key_length]`; by default, that of the queries.
        dtype: the dtype of the mask.

    Returns:
        A mask of shape `[batch..., 1, query_length, key_length]`.

    >>> nnx.make_segment_mask(jnp.array([1, 1, 2, 0]), dtype=int)[0].tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    """
    if key_segments is None:
        key_segments = query_segments
    same_document = lambda query, key: (query == key) & (key != 0)  # noqa: E731
    return make_attention_mask(query_segments, key_segments, same_document, dtype=dtype)


def combine_masks(*masks: jax.Array | None, dtype: DTypeLike = jnp.float32) -> jax.Array | None:
    """Makes the mask that is true where all masks are.

    Args:
        *masks: masks that broadcast against each other, all with the same number of axes; `None` is skipped.
        dtype: the dtype of the result.

    Returns:
        The combined mask, or `None` if there are no masks.

    Raises:
        ValueError: if the masks have different numbers of axes.

    >>> causal = nnx.make_causal_mask(jnp.zeros((1, 3)))
    >>> nnx.combine_masks(causal, nnx.make_padding_mask(jnp.array([2]), 3), None)[0, 0].tolist()
    [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]
    """
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    if any(mask.ndim != given[0].ndim for mask in given):
        raise ValueError(MASK_AXES.format(shapes=[mask.shape for mask in given]))
    combined = given[0].astype(bool)
    for mask in given[1:]:
        combined = combined & mask.astype(bool)
    return combined.astype(dtype)


def positions_visible(
    query_positions: jax.Array,
    key_positions: jax.Array,
    *,
    causal: bool,
    window: int | None,
    section: int | None = None,
) -> jax.Array:
    """Returns whether the query at one position sees the key at another; the arguments broadcast.

    Of a text in sections of `section` tokens, it sees only keys of its own.
    """
    if section is not None:
        near = query_positions // section == key_positions // section
        return near & positions_visible(query_positions, key_positions, causal=causal, window=window)
    distance = query_positions - key_positions
    if window is None:
        return distance >= 0 if causal else jnp.ones_like(distance, bool)
    if window < 1:
        raise ValueError(EMPTY_WINDOW.format(got=window))
    past = distance < window
    return past & (distance >= 0) if causal else past & (distance > -window)
