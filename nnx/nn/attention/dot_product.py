"""Dot-product attention as a function.

Shapes: queries `[batch..., query_length, heads, head_dim]`, keys and values `[batch..., key_length, kv_heads,
head_dim]` with `heads` a multiple of `kv_heads` (grouped-query attention). There are three ways to compute it:

- **cudnn**, the fused kernel of NVIDIA GPUs, which never writes the attention weights to memory; where it has no
  gradient, for odd lengths, differentiating the call uses xla instead;
- **xla**, the same through `jax.nn.dot_product_attention` without a fused kernel;
- the *explicit* weights below, also "xla", for what the other two cannot do: dropout, returning the weights, a soft
  cap, sinks, a `precision`, values with a different head size, float64, float16 off the GPU, and no keys at all.

A *sink* is one more logit per head in the softmax. It takes its part of the attention and has no value, so the weights
of the keys add up to less than one.

`attention_kernel` decides which kernel a call uses. A query that sees no key returns zeros with each of them: left
alone, the kernels disagree on such a query (the average of all values, zeros or NaN, depending on what hides the keys).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from nnx.core.module.module import Module
from nnx.core.variables.variables import Intermediate
from nnx.nn.attention.attention_kernel import Implementation, Window, attention_implementation, fusion_obstacle
from nnx.nn.attention.masks import positions_visible
from nnx.nn.support.settings import PromoteDtype, compiled_body, default_promote_dtype
from nnx.sharding.explicit import heads_like, split_like

WRONG_LENGTHS = "dot_product_attention: expected {name} of shape {expected}, one per row, got {got}."
NO_DROPOUT_KEY = (
    "dot_product_attention: dropout_rate={rate} needs a key: pass dropout_rng=ctx.make_rng('dropout'), or "
    "deterministic=True."
)
RATE_OUT_OF_RANGE = "{caller}: dropout_rate is a probability, a number from 0 to 1, got {got!r}."
CANNOT_FUSE = "dot_product_attention: implementation='cudnn' is not possible here: {obstacle}."
UNKNOWN_IMPLEMENTATION = "dot_product_attention: expected implementation 'cudnn', 'xla' or None, got {got!r}."
NOT_HEADS = "dot_product_attention: expected three arrays of shape [batch..., length, heads, head_dim], got {shapes}."
DIFFERENT_BATCHES = "dot_product_attention: expected the same leading axes, got {shapes}."
DIFFERENT_HEAD_DIMS = "dot_product_attention: expected keys with the queries' head_dim={expected}, got {got}: {shapes}."
UNPAIRED_VALUES = "dot_product_attention: expected one value per key and head, got {shapes}."
UNGROUPED_HEADS = (
    "dot_product_attention: expected the number of query heads to be a multiple of that of key heads, got {shapes}."
)
DOES_NOT_BROADCAST = (
    "dot_product_attention: expected a {name} that broadcasts to [batch..., heads, query_length, key_length] = "
    "{shape}, got {got}."
)

WRONG_SINKS = "dot_product_attention: expected sinks of shape ({heads},), one logit per query head, got {got}."

# The logit of a hidden key. It is finite because a query that sees no key would otherwise compute `inf - inf` in the
# softmax, and its gradient would be NaN. `jax.nn.dot_product_attention` uses the same number.
_MASKED = -0.7 * float(np.finfo(np.float32).max)


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: PrecisionLike = None,
    module: Module | None = None,
    promote_dtype: PromoteDtype = default_promote_dtype,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: Window | None = None,
    implementation: Implementation | None = None,
    logits_soft_cap: float | None = None,
    assume_seen: bool = False,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attends from queries to keys, and averages the values accordingly.

    Pass causality, lengths and windows as arguments where you can: a fused kernel skips what they hide, while it has to
    read a `mask`. A query that may see no key at all returns zeros, and no gradient flows through it.

    Args:
        query: `[batch..., query_length, heads, head_dim]` with any number of batch axes, including none.
        key: `[batch..., key_length, kv_heads, head_dim]`; each key head serves `heads // kv_heads` query heads.
        value: `[batch..., key_length, kv_heads, value_dim]`.
        bias: an array to add to the logits; broadcasts to `[batch..., heads, query_length, key_length]`. Minus infinity
            hides a key. No bias, however low, makes a query see keys that the other arguments hide.
        mask: an array that is true (nonzero) where a query may attend to a key; broadcasts to the same shape.
        broadcast_dropout: whether to drop the same weights in all batch rows and heads.
        dropout_rng: the key for dropout.
        dropout_rate: the fraction of the weights to drop.
        deterministic: whether to skip dropout.
        dtype: the computation dtype; by default, the dtype that the inputs promote to. Logits and softmax use at least
            float32.
        precision: the precision of the matrix products, see `jax.lax.Precision`.
        module: a Module that records the weights with `sow`, as the `Intermediate` "attention_weights".
        promote_dtype: a replacement for the function that converts queries, keys and values to one dtype.
        is_causal: whether query `i` sees only the keys `0..i`.
        scale: the scale of the logits; `1 / sqrt(head_dim)` by default.
        query_seq_lengths: `[batch...]`, the number of real queries in each row; the output of the others is zero.
        key_value_seq_lengths: `[batch...]`, the number of real keys in each row; the others are hidden.
        local_window_size: a pair `(left, right)`: query `i` sees the keys `i - left..i + right`; an int means both.
        implementation: "cudnn" or "xla"; by default, the one that `attention_implementation` returns.
        logits_soft_cap: a bound that the scaled logits approach smoothly, `cap * tanh(logits / cap)`; none by default.
        assume_seen: a promise that every query sees at least one key. It saves the pass over the output that sets the
            rows of queries without keys to zero.
        sinks: `[heads]`, one more logit per head that takes part in the softmax and is then dropped: what it takes is
            missing from the weights of the keys. Neither scale, soft cap, bias nor mask applies to it.

    Returns:
        An array of shape `[batch..., query_length, heads, value_dim]`.

    Raises:
        ValueError: if shapes do not fit together, or "cudnn" is requested and cannot compute this call; the message
            says why.

    >>> query = jnp.ones((2, 5, 4, 8))
    >>> key = value = jnp.ones((2, 5, 2, 8))  # two query heads share a key head
    >>> nnx.dot_product_attention(query, key, value, is_causal=True).shape
    (2, 5, 4, 8)
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    batch = checked_batch(query, key, value)
    logits_shape = (*batch, query.shape[-2], query.shape[-3], key.shape[-3])
    check_broadcasts("bias", bias, logits_shape)
    check_broadcasts("mask", mask, logits_shape)
    _check_lengths("query_seq_lengths", query_seq_lengths, batch)
    _check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
    if sinks is not None and sinks.shape != query.shape[-2:-1]:
        raise ValueError(WRONG_SINKS.format(heads=query.shape[-2], got=sinks.shape))
    check_dropout_rate("dot_product_attention", dropout_rate)
    dropout = dropout_rate > 0.0 and not deterministic
    if dropout and dropout_rng is None:
        raise ValueError(NO_DROPOUT_KEY.format(rate=dropout_rate))

    key, value = heads_like(query, key, value)
    features: dict[str, Any] = {
        "is_causal": is_causal,
        "local_window_size": local_window_size,
        "dropout": dropout,
        "weights": module is not None,
        "precision": precision,
        "logits_soft_cap": logits_soft_cap,
        "sinks": sinks is not None,
    }
    implementation = _chosen(implementation, (query, key, value, bias, mask), features)
    arrays = (query, key, value, bias, mask, query_seq_lengths, key_value_seq_lengths)
    window = (local_window_size, local_window_size) if isinstance(local_window_size, int) else local_window_size
    visibility: dict[str, Any] = {
        "is_causal": is_causal,
        "scale": scale,
        "window": window,
        "assume_seen": assume_seen,
    }
    if not _needs_weights(query, key, value, features, implementation):
        return _delegated(*arrays, **visibility, implementation=implementation)
    out, weights = _explicit(
        *arrays,
        dropout_rng if dropout else None,
        sinks,
        **visibility,
        dropout_rate=dropout_rate,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        soft_cap=logits_soft_cap,
    )
    if module is not None:
        Module.sow(module, Intermediate, "attention_weights", weights)
    return out


def _chosen(implementation: Any, arrays: tuple[Any, ...], features: dict[str, Any]) -> Implementation:
    """Returns the kernel to use: the one that was asked for, if it can compute the call, or the best one."""
    if implementation is None:
        return attention_implementation(*arrays, **features)
    if implementation not in ("cudnn", "xla"):
        raise ValueError(UNKNOWN_IMPLEMENTATION.format(got=implementation))
    obstacle = fusion_obstacle(*arrays, **features) if implementation == "cudnn" else None
    if obstacle is not None:
        raise ValueError(CANNOT_FUSE.format(obstacle=obstacle))
    return implementation


def _needs_weights(
    query: jax.Array, key: jax.Array, value: jax.Array, features: dict[str, Any], implementation: Implementation
) -> bool:
    """Whether a call has to compute the attention weights, because `jax.nn.dot_product_attention` cannot do it."""
    options = ("dropout", "weights", "precision", "logits_soft_cap", "sinks")
    return (
        any(features[name] is not None and features[name] is not False for name in options)
        or value.shape[-1] != key.shape[-1]
        or key.shape[-3] == 0
        or (implementation == "xla" and query.dtype in (jnp.float16, jnp.float64))
    )


def _check_lengths(name: str, lengths: jax.Array | None, batch: tuple[int, ...]) -> None:
    if lengths is not None and lengths.shape != batch:
        raise ValueError(WRONG_LENGTHS.format(name=name, expected=batch, got=lengths.shape))


def check_dropout_rate(caller: str, rate: float) -> None:
    """Raises `ValueError` unless the rate is a probability."""
    if not 0 <= rate <= 1:
        raise ValueError(RATE_OUT_OF_RANGE.format(caller=caller, got=rate))


def checked_batch(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[int, ...]:
    """Returns the common leading axes, after checking that the three arrays fit together."""
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if query.ndim < 3 or not query.ndim == key.ndim == value.ndim:
        raise ValueError(NOT_HEADS.format(shapes=shapes))
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(DIFFERENT_BATCHES.format(shapes=shapes))
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(DIFFERENT_HEAD_DIMS.format(expected=query.shape[-1], got=key.shape[-1], shapes=shapes))
    if key.shape[-3:-1] != value.shape[-3:-1]:
        raise ValueError(UNPAIRED_VALUES.format(shapes=shapes))
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(UNGROUPED_HEADS.format(shapes=shapes))
    return query.shape[:-3]


def check_broadcasts(name: str, array: jax.Array | None, shape: tuple[int, ...]) -> None:
    """Raises `ValueError` unless a bias or mask, if there is one, broadcasts to the shape of the logits."""
    if array is None:
        return
    fits = array.ndim <= len(shape) and all(
        have in (1, want) for have, want in zip(reversed(array.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(DOES_NOT_BROADCAST.format(name=name, shape=shape, got=array.shape))


@compiled_body
def _delegated(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    query_lengths: jax.Array | None,
    key_lengths: jax.Array | None,
    *,
    is_causal: bool,
    scale: float | None,
    window: tuple[int, int] | None,
    assume_seen: bool,
    implementation: Implementation,
) -> jax.Array:
    """Attends with `jax.nn.dot_product_attention`, which takes exactly one batch axis."""
    batch = query.shape[:-3]
    lengths = (query.shape[-3], key.shape[-3])
    seen = None if assume_seen else _seen(mask, bias, *lengths, key_lengths, is_causal, window)
    # cuDNN's window is a causal one with a left bound; `fusion_obstacle` lets no other window through.
    if implementation == "cudnn" and window is not None:
        is_causal, window = True, (window[0], 0)
    if mask is not None:
        mask = _one_batch_axis(mask.astype(bool), batch)
    if bias is not None:
        bias = _one_batch_axis(_bounded(bias), batch)
    # cuDNN does not broadcast the last two axes of a mask, and takes a bias only in the dtype of the queries.
    if implementation == "cudnn":
        mask = None if mask is None else jnp.broadcast_to(mask, (*mask.shape[:2], *lengths))
        bias = None if bias is None else bias.astype(query.dtype)
        # Not every version of cuDNN takes a row of length 0 (some return NaN, some fail), so such a row gets one key
        # here; `seen` zeros its output below.
        key_lengths = None if key_lengths is None else jnp.maximum(key_lengths, 1)
    # On the H200, with JAX 0.11, the gradient of cuDNN's kernel fails for odd lengths, with or without a mask.
    attend = _fused_unless_differentiated if implementation == "cudnn" and any(n % 2 for n in lengths) else _attend
    out = attend(
        _Settings(scale, is_causal, window, implementation),
        _collapsed(query),
        _collapsed(key),
        _collapsed(value),
        bias,
        mask,
        None if query_lengths is None else query_lengths.reshape(-1).astype(jnp.int32),
        None if key_lengths is None else key_lengths.reshape(-1).astype(jnp.int32),
    )
    out = out.reshape(query.shape)
    return out if seen is None else jnp.where(jnp.swapaxes(seen, -3, -2), out, 0)


class _Settings(NamedTuple):
    """The static arguments of `jax.nn.dot_product_attention`."""

    scale: float | None
    is_causal: bool
    window: tuple[int, int] | None
    implementation: Implementation


def _attend(
    settings: _Settings,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    query_lengths: jax.Array | None,
    key_lengths: jax.Array | None,
) -> jax.Array:
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias,
        mask,
        scale=settings.scale,
        is_causal=settings.is_causal,
        query_seq_lengths=query_lengths,
        key_value_seq_lengths=key_lengths,
        local_window_size=settings.window,
        implementation=settings.implementation,
    )


_fused_unless_differentiated = jax.custom_jvp(_attend, nondiff_argnums=(0,))


@_fused_unless_differentiated.defjvp
def _differentiate_without_fusion(settings: _Settings, primals: Any, tangents: Any) -> Any:
    """Computes the output as well as its derivative with XLA."""
    return jax.jvp(functools.partial(_attend, settings._replace(implementation="xla")), primals, tangents)


@compiled_body
def _explicit(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    query_lengths: jax.Array | None,
    key_lengths: jax.Array | None,
    dropout_rng: jax.Array | None,
    sinks: jax.Array | None,
    *,
    is_causal: bool,
    scale: float | None,
    window: tuple[int, int] | None,
    assume_seen: bool,
    dropout_rate: float,
    broadcast_dropout: bool,
    precision: PrecisionLike,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the output and the attention weights, `[batch..., heads, query_length, key_length]`."""
    *batch, query_length, heads, head_dim = query.shape
    key_length, kv_heads = key.shape[-3:-1]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    logits = _logits(query, key, precision) * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    if bias is not None:
        logits = logits + _bounded(bias).astype(logits.dtype)

    visible = _visible(mask, query_length, key_length, key_lengths, is_causal, window)
    if visible is not None:
        logits = jnp.where(visible, logits, _MASKED)
    weights = jax.nn.softmax(logits, axis=-1) if sinks is None else _softmax_with_sinks(logits, sinks)
    weights = weights.astype(query.dtype)
    seen = None if assume_seen else _seen(mask, bias, query_length, key_length, key_lengths, is_causal, window)
    if seen is not None:
        weights = jnp.where(seen, weights, 0)

    if dropout_rng is not None:
        weights = _dropped(weights, dropout_rng, dropout_rate, broadcast_dropout)

    grouped = weights.reshape(*batch, kv_heads, heads // kv_heads, query_length, key_length)
    out = jnp.einsum("...kgts,...skh->...tkgh", grouped, value, precision=precision)
    out = out.reshape(*batch, query_length, heads, value.shape[-1])
    if query_lengths is not None:
        real = jnp.arange(query_length) < query_lengths[..., None]
        out = jnp.where(real[..., None, None], out, 0.0)
    return out, weights


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
    top = jax.lax.stop_gradient(jnp.maximum(logits.max(-1, keepdims=True, initial=_MASKED), sinks))
    exponentials = jnp.exp(logits - top)
    return exponentials / (exponentials.sum(-1, keepdims=True) + jnp.exp(sinks - top))


def _visible(
    mask: jax.Array | None,
    query_length: int,
    key_length: int,
    key_lengths: jax.Array | None,
    is_causal: bool,
    window: tuple[int, int] | None,
) -> jax.Array | None:
    """Returns what mask, lengths, causality and window leave visible, or `None` for everything."""
    visible = None if mask is None else mask.astype(bool)
    parts = []
    queries, keys = jnp.arange(query_length)[:, None], jnp.arange(key_length)
    if is_causal:
        parts.append(positions_visible(queries, keys, causal=True, window=None))
    if window is not None:
        left, right = window
        parts.append((queries - keys <= left) & (keys - queries <= right))
    if key_lengths is not None:
        parts.append(keys < key_lengths[..., None, None, None])
    for part in parts:
        visible = part if visible is None else visible & part
    return visible


def _bounded(bias: jax.Array) -> jax.Array:
    """Returns a bias whose entries are above the logit of a hidden key, so that this is never the largest of a row."""
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        return bias
    lowest = -0.3 * min(float(jnp.finfo(bias.dtype).max), float(jnp.finfo(jnp.float32).max))
    return jnp.maximum(bias, jnp.asarray(lowest, bias.dtype))


def _seen(
    mask: jax.Array | None,
    bias: jax.Array | None,
    query_length: int,
    key_length: int,
    key_lengths: jax.Array | None,
    is_causal: bool,
    window: tuple[int, int] | None,
) -> jax.Array | None:
    """Returns which queries see at least one key, or `None` if shapes and settings alone show that all of them do.

    The result has at least three axes and broadcasts to `[batch..., heads, query_length, 1]`.
    """
    if mask is not None or bias is not None:
        visible: Any = _visible(mask, query_length, key_length, key_lengths, is_causal, window)
        if bias is not None:
            visible = bias > -jnp.inf if visible is None else visible & (bias > -jnp.inf)
        seen = visible.any(-1, keepdims=True)
        return seen.reshape((1,) * (3 - seen.ndim) + seen.shape)

    # Without a mask, query `i` sees the keys from `max(i - left, 0)` to `min(i + right, key_length - 1)`. Whether there
    # are any takes one comparison per query, instead of one per query and key.
    left, right = (query_length, key_length) if window is None else window
    right = min(right, 0) if is_causal else right
    if key_lengths is None:
        # Query 0 is the first to look only before the first key, and the last query the first to look only past the
        # last key. If they and the window itself are fine, so is every query.
        if right >= 0 and left + right >= 0 and query_length - left <= key_length and key_length > 0:
            return None
        end = key_length
    else:
        end = jnp.minimum(key_lengths, key_length)[..., None, None, None]
    queries = jnp.arange(query_length)[None, :, None]
    return jnp.maximum(queries - left, 0) < jnp.minimum(queries + right + 1, end)


def _collapsed(array: jax.Array) -> jax.Array:
    return array.reshape(-1, *array.shape[-3:])


def _one_batch_axis(array: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Returns a bias or mask that broadcasts over `batch` with these axes flattened into one."""
    array = array.reshape((1,) * (len(batch) + 3 - array.ndim) + array.shape)
    if len(batch) > 1 and any(size != 1 for size in array.shape[:-3]):
        array = jnp.broadcast_to(array, (*batch, *array.shape[-3:]))
    return array.reshape(-1, *array.shape[-3:])
