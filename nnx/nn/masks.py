"""Attention masks: who may look at whom.

A mask has the shape `[batch..., heads or 1, query_length, key_length]` and is true where a query may attend to a key.
The builders here answer one question each (the past, the padding, the segment, the window); `combine_masks` joins the
answers. Positions count tokens from 0; a window of `w` shows each query `w` tokens, itself included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def make_attention_mask(
    query_input: jax.Array,
    key_input: jax.Array,
    pairwise_fn: Callable[..., Any] = jnp.multiply,
    extra_batch_dims: int = 0,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """A mask from one value per query and one per key.

    Args:
        query_input: `[batch..., query_length]`.
        key_input: `[batch..., key_length]`.
        pairwise_fn: broadcasting function of the two; its result is the mask.
        extra_batch_dims: how many axes of size one to put in front.
        dtype: of the mask.

    Returns:
        `[batch..., 1, query_length, key_length]`.

    >>> import nnx, jax.numpy as jnp
    >>> real = jnp.array([[1, 1, 0]])
    >>> nnx.make_attention_mask(real, real)[0, 0].tolist()
    [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    """
    mask = pairwise_fn(query_input[..., :, None], key_input[..., None, :])
    mask = jnp.expand_dims(mask, -3)
    if extra_batch_dims:
        mask = jnp.expand_dims(mask, tuple(range(extra_batch_dims)))
    return mask.astype(dtype)


def make_causal_mask(x: jax.Array, extra_batch_dims: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    """A mask under which each token sees itself and the past.

    Args:
        x: `[batch..., length]`; only its shape is used.
        extra_batch_dims: how many axes of size one to put in front.
        dtype: of the mask.

    Returns:
        `[batch..., 1, length, length]`.

    >>> import nnx, jax.numpy as jnp
    >>> nnx.make_causal_mask(jnp.zeros(3))[0].tolist()
    [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    """
    positions = jnp.broadcast_to(jnp.arange(x.shape[-1]), x.shape)
    return make_attention_mask(positions, positions, jnp.greater_equal, extra_batch_dims, dtype)


def make_sliding_window_mask(
    x: jax.Array, window: int, *, causal: bool = True, extra_batch_dims: int = 0, dtype: Any = jnp.bool_
) -> jax.Array:
    """A mask under which each token sees only the tokens near it.

    Args:
        x: `[batch..., length]`; only its shape is used.
        window: how many tokens a query sees, itself included: its `window - 1` predecessors, and, unless `causal`, as
            many successors.
        causal: hide the future as well.
        extra_batch_dims: how many axes of size one to put in front.
        dtype: of the mask.

    Returns:
        `[batch..., 1, length, length]`.

    >>> import nnx, jax.numpy as jnp
    >>> nnx.make_sliding_window_mask(jnp.zeros(4), window=2)[0].astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """
    positions = jnp.broadcast_to(jnp.arange(x.shape[-1]), x.shape)
    near = lambda query, key: positions_visible(query, key, causal=causal, window=window)  # noqa: E731
    return make_attention_mask(positions, positions, near, extra_batch_dims, dtype)


def make_padding_mask(lengths: jax.Array, max_length: int, *, dtype: Any = jnp.bool_) -> jax.Array:
    """A mask that hides the keys past the end of each row.

    Args:
        lengths: `[batch...]`, the number of real tokens, which stand first.
        max_length: the padded length.
        dtype: of the mask.

    Returns:
        `[batch..., 1, 1, max_length]`, the same for every query.

    >>> import nnx, jax.numpy as jnp
    >>> nnx.make_padding_mask(jnp.array([1, 3]), 3)[:, 0, 0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 1]]
    """
    lengths = jnp.asarray(lengths)
    return (jnp.arange(max_length) < lengths[..., None, None, None]).astype(dtype)


def make_segment_mask(
    query_segments: jax.Array, key_segments: jax.Array | None = None, *, dtype: Any = jnp.bool_
) -> jax.Array:
    """A mask for several documents packed into one row: each token sees its own document.

    Args:
        query_segments: `[batch..., query_length]`, one number per document; 0 marks padding, which nobody sees.
        key_segments: `[batch..., key_length]`; the queries' own by default.
        dtype: of the mask.

    Returns:
        `[batch..., 1, query_length, key_length]`.

    >>> import nnx, jax.numpy as jnp
    >>> nnx.make_segment_mask(jnp.array([1, 1, 2, 0]))[0].astype(int).tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    """
    if key_segments is None:
        key_segments = query_segments
    same_document = lambda query, key: (query == key) & (key != 0)  # noqa: E731
    return make_attention_mask(query_segments, key_segments, same_document, dtype=dtype)


def combine_masks(*masks: jax.Array | None, dtype: Any = jnp.float32) -> jax.Array | None:
    """The mask that is true where all of them are.

    Args:
        *masks: masks that broadcast against each other, all with the same number of axes; `None` is skipped.
        dtype: of the result.

    Returns:
        The combined mask, or `None` when no mask was given.

    Raises:
        ValueError: where the masks have different numbers of axes.

    >>> import nnx, jax.numpy as jnp
    >>> causal = nnx.make_causal_mask(jnp.zeros((1, 3)))
    >>> nnx.combine_masks(causal, nnx.make_padding_mask(jnp.array([2]), 3), None)[0, 0].tolist()
    [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]
    """
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    if any(mask.ndim != given[0].ndim for mask in given):
        raise ValueError(
            "combine_masks: all masks must have the same number of axes, [batch..., heads or 1, query_length, "
            f"key_length]; got the shapes {[mask.shape for mask in given]}."
        )
    combined = given[0].astype(bool)
    for mask in given[1:]:
        combined = combined & mask.astype(bool)
    return combined.astype(dtype)


def positions_visible(
    query_positions: jax.Array, key_positions: jax.Array, *, causal: bool, window: int | None
) -> jax.Array:
    """Whether the query at one position sees the key at another; the arguments broadcast against each other."""
    distance = query_positions - key_positions
    if window is None:
        return distance >= 0 if causal else jnp.ones_like(distance, bool)
    if window < 1:
        raise ValueError(f"An attention window shows at least the token itself: expected window >= 1, got {window}.")
    past = distance < window
    return past & (distance >= 0) if causal else past & (distance > -window)
