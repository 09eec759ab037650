"""Attention with its weights written out: every option, for all queries or for a block of them.

`attend` computes logits, hides what must not be seen, and averages the values. The positions of queries and keys are
arguments, so that `blocks` can call it for one block of queries after the other.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike

from nnx.sharding.explicit import split_like

# The logit of a hidden key. It is finite because a query that sees no key would otherwise compute `inf - inf` in the
# softmax, and its gradient would be NaN. `jax.nn.dot_product_attention` uses the same number.
MASKED = -0.7 * float(np.finfo(np.float32).max)


class AttentionSettings(NamedTuple):
    """What is known about a call when it is traced; see `dot_product_attention`."""

    is_causal: bool
    scale: float | None
    window: tuple[int, int] | None
    assume_seen: bool
    dropout_rate: float
    broadcast_dropout: bool
    precision: PrecisionLike
    soft_cap: float | None


class AttentionArrays(NamedTuple):
    """The arrays of a call besides queries, keys and values, each None if it was not given; see
    `dot_product_attention`."""

    bias: jax.Array | None = None
    mask: jax.Array | None = None
    query_lengths: jax.Array | None = None
    key_lengths: jax.Array | None = None
    dropout_rng: jax.Array | None = None
    sinks: jax.Array | None = None


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    options: AttentionArrays,
    settings: AttentionSettings,
    query_positions: jax.Array,
    key_positions: jax.Array,
    some_unseeing: bool,
) -> tuple[jax.Array, jax.Array]:
    """Returns the output and the attention weights, `[batch..., heads, queries, keys]`.

    Args:
        query: the queries, `[batch..., queries, heads, head_dim]`.
        key, value: the keys and values, `[batch..., keys, kv_heads, features]`.
        options: the other arrays; bias and mask cover these queries and keys.
        settings: the settings of the call.
        query_positions, key_positions: the positions of these queries and keys in their texts.
        some_unseeing: whether a query may see no key, so that its output has to be set to zero; see `may_see_nothing`.
    """
    *batch, queries, heads, head_dim = query.shape
    kv_heads = key.shape[-2]
    scale = 1.0 / math.sqrt(head_dim) if settings.scale is None else settings.scale
    logits = _logits(query, key, settings.precision) * scale
    if settings.soft_cap is not None:
        logits = settings.soft_cap * jnp.tanh(logits / settings.soft_cap)
    if options.bias is not None:
        logits = logits + bounded(options.bias).astype(logits.dtype)

    visible = _visible(options, settings, query_positions, key_positions)
    if visible is not None:
        logits = jnp.where(visible, logits, MASKED)
    weights = jax.nn.softmax(logits, axis=-1) if options.sinks is None else _softmax_with_sinks(logits, options.sinks)
    weights = weights.astype(query.dtype)
    if some_unseeing:
        weights = jnp.where(_which_see(options, settings, query_positions, key_positions), weights, 0)
    if options.dropout_rng is not None:
        weights = _dropped(weights, options.dropout_rng, settings.dropout_rate, settings.broadcast_dropout)

    grouped = weights.reshape(*batch, kv_heads, heads // kv_heads, queries, key.shape[-3])
    out = jnp.einsum("...kgts,...skh->...tkgh", grouped, value, precision=settings.precision)
    out = out.reshape(*batch, queries, heads, value.shape[-1])
    return zero_padding(out, options, query_positions), weights


def _logits(query: jax.Array, key: jax.Array, precision: PrecisionLike) -> jax.Array:
    """Returns the products of queries and keys, `[batch..., heads, query_length, key_length]`, in float32 or wider."""
    *batch, query_length, heads, head_dim = query.shape
    key_length, kv_heads = key.shape[-3:-1]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    # Letters: t queries, s keys, k key heads, g query heads per key head, h features. Grouping the query heads avoids
    # repeating the keys; the products are accumulated in float32 even for half-precision inputs.
    grouped = query.reshape(*batch, query_length, kv_heads, heads // kv_heads, head_dim)
    logits = jnp.einsum("...tkgh,...skh->...kgts", grouped, key, precision=precision, preferred_element_type=wide)
    return logits.reshape(*batch, heads, query_length, key_length)


def _dropped(weights: jax.Array, key: jax.Array, rate: float, broadcast: bool) -> jax.Array:
    keep = jax.random.bernoulli(key, 1.0 - rate, weights.shape[-2:] if broadcast else weights.shape)
    # At a rate of 1 nothing is kept, and the gradient of a division by zero would be NaN.
    return jnp.where(keep, weights / (1.0 - rate or 1.0), 0.0).astype(weights.dtype)


def _softmax_with_sinks(logits: jax.Array, sinks: jax.Array) -> jax.Array:
    """Returns the weights of the keys, `[batch..., heads, query_length, key_length]`, next to a sink per head.

    The sink is added to the sum instead of appended to the logits, which would copy them.
    """
    sinks = split_like(sinks.astype(logits.dtype), logits, (-3,))[:, None, None]
    top = jax.lax.stop_gradient(jnp.maximum(logits.max(-1, keepdims=True, initial=MASKED), sinks))
    exponentials = jnp.exp(logits - top)
    return exponentials / (exponentials.sum(-1, keepdims=True) + jnp.exp(sinks - top))


def _visible(
    options: AttentionArrays, settings: AttentionSettings, queries: jax.Array, keys: jax.Array
) -> jax.Array | None:
    """Returns what mask, lengths, causality and window leave visible at these positions, or `None` for everything."""
    parts = []
    distance = queries[:, None] - keys
    if options.mask is not None:
        parts.append(options.mask.astype(bool))
    if settings.is_causal:
        parts.append(distance >= 0)
    if settings.window is not None:
        left, right = settings.window
        parts.append((distance <= left) & (-distance <= right))
    if options.key_lengths is not None:
        parts.append(keys < options.key_lengths[..., None, None, None])
    return functools.reduce(jnp.logical_and, parts) if parts else None


def bounded(bias: jax.Array) -> jax.Array:
    """Returns a bias whose entries are above the logit of a hidden key, so that this is never the largest of a row."""
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        return bias
    lowest = -0.3 * min(float(jnp.finfo(bias.dtype).max), float(jnp.finfo(jnp.float32).max))
    return jnp.maximum(bias, jnp.asarray(lowest, bias.dtype))


def may_see_nothing(options: AttentionArrays, settings: AttentionSettings, query_length: int, key_length: int) -> bool:
    """Whether a query may see no key, as far as shapes and settings tell."""
    if settings.assume_seen:
        return False
    if options.mask is not None or options.bias is not None or options.key_lengths is not None:
        return True
    left, right = (query_length, key_length) if settings.window is None else settings.window
    right = min(right, 0) if settings.is_causal else right
    # Query 0 is the first to look only before the first key, and the last query the first to look only past the last
    # key. If they and the window itself are fine, so is every query.
    return right < 0 or left + right < 0 or query_length - left > key_length or key_length == 0


def zero_unseeing(out: jax.Array, options: AttentionArrays, settings: AttentionSettings, key_length: int) -> jax.Array:
    """Returns the output `[batch..., queries, heads, features]` with zeros for queries that see no key."""
    query_length = out.shape[-3]
    if not may_see_nothing(options, settings, query_length, key_length):
        return out
    seen = _which_see(options, settings, jnp.arange(query_length), jnp.arange(key_length))
    return jnp.where(jnp.swapaxes(seen, -3, -2), out, 0)


def zero_padding(out: jax.Array, options: AttentionArrays, positions: jax.Array) -> jax.Array:
    """Returns the output of queries at these positions with zeros for those past the end of their texts."""
    if options.query_lengths is None:
        return out
    real = positions < options.query_lengths[..., None]
    return jnp.where(real[..., None, None], out, 0)


def _which_see(options: AttentionArrays, settings: AttentionSettings, queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns which of the queries at these positions see at least one key.

    The result has at least three axes and broadcasts to `[batch..., heads, query_length, 1]`.
    """
    if options.mask is not None or options.bias is not None:
        visible: Any = _visible(options, settings, queries, keys)
        if options.bias is not None:
            visible = options.bias > -jnp.inf if visible is None else visible & (options.bias > -jnp.inf)
        seen = visible.any(-1, keepdims=True)
        return seen.reshape((1,) * (3 - seen.ndim) + seen.shape)

    # Without a mask, query `i` sees the keys from `max(i - left, 0)` to `min(i + right, key_length - 1)`. Whether there
    # are any takes one comparison per query, instead of one per query and key.
    end: Any = keys[-1] + 1 if keys.size else 0
    if options.key_lengths is not None:
        end = jnp.minimum(options.key_lengths, end)[..., None, None, None]
    queries = queries[None, :, None]
    # Without a window, every key is to the right of its left end and to the left of its right one.
    left, right = (queries, end) if settings.window is None else settings.window
    right = jnp.minimum(right, 0) if settings.is_causal else right
    return jnp.maximum(queries - left, 0) < jnp.minimum(queries + right + 1, end)
