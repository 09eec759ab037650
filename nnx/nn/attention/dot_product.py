"""Dot-product attention as a function.

Shapes: queries `[batch..., query_length, heads, head_dim]`, keys and values `[batch..., key_length, kv_heads,
head_dim]` with `heads` a multiple of `kv_heads` (grouped-query attention). These are the ways to compute it:

- **cudnn**, the fused kernel of NVIDIA GPUs, which never writes the attention weights to memory; where it has no
  gradient, for odd lengths, differentiating the call uses xla instead;
- **splash**, the fused kernel of TPUs that comes with JAX (see `splash`);
- **xla**, ordinary operations. Long texts are computed in *blocks* of queries (see `blocks`), whose memory grows
  linearly with the length. For short ones it is `jax.nn.dot_product_attention`, or the weights written out (see
  `weights`) for what that cannot do: dropout, returning the weights, a soft cap, sinks, a `precision`, values with a
  different head size, float64, float16 off the GPU, and no keys at all.

A *sink* is one more logit per head in the softmax. It takes its part of the attention and has no value, so the weights
of the keys add up to less than one.

`attention_kernel` decides which kernel a call uses. A query that sees no key returns zeros with each of them: left
alone, the kernels disagree on such a query (the average of all values, zeros or NaN, depending on what hides the keys).
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from nnx.core.module.module import Module
from nnx.core.variables.variables import Intermediate
from nnx.nn.attention.attention_kernel import (
    Features,
    Implementation,
    Window,
    best_implementation,
    fusion_obstacle,
    splash_obstacle,
)
from nnx.nn.attention.blocks import attend_in_blocks, is_long
from nnx.nn.attention.weights import AttentionArrays, AttentionSettings, attend, bounded, may_see_nothing, zero_unseeing
from nnx.nn.support.settings import PromoteDtype, compiled_body, default_promote_dtype
from nnx.sharding.explicit import heads_like
from nnx.sharding.target import Target, lowered_on, target

WRONG_LENGTHS = "dot_product_attention: expected {name} of shape {expected}, one per row, got {got}."
NO_DROPOUT_KEY = (
    "dot_product_attention: dropout_rate={rate} needs a key: pass dropout_rng=ctx.make_rng('dropout'), or "
    "deterministic=True."
)
RATE_OUT_OF_RANGE = "{caller}: dropout_rate is a probability, a number from 0 to 1, got {got!r}."
CANNOT_FUSE = "dot_product_attention: implementation={name!r} is not possible here: {obstacle}."
UNKNOWN_IMPLEMENTATION = "dot_product_attention: expected implementation 'cudnn', 'splash', 'xla' or None, got {got!r}."
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
    read a `mask`. A query that may see no key at all returns zeros, and no gradient flows through it. The memory, also
    that of the gradient, grows linearly with the length, except for a `bias` or `mask` of full size and for recorded
    weights.

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
        implementation: "cudnn", "splash" or "xla"; by default, the one that `attention_implementation` returns.
        logits_soft_cap: a bound that the scaled logits approach smoothly, `cap * tanh(logits / cap)`; none by default.
        assume_seen: a promise that every query sees at least one key. It saves the pass over the output that sets the
            rows of queries without keys to zero.
        sinks: `[heads]`, one more logit per head that takes part in the softmax and is then dropped: what it takes is
            missing from the weights of the keys. Neither scale, soft cap, bias nor mask applies to it.

    Returns:
        An array of shape `[batch..., query_length, heads, value_dim]`.

    Raises:
        ValueError: if shapes do not fit together, or a fused kernel is requested that cannot compute this call; the
            message says why.

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
    features = Features(
        is_causal, local_window_size, dropout, module is not None, precision, logits_soft_cap, sinks is not None
    )
    arrays = (query, key, value, bias, mask, query_seq_lengths, key_value_seq_lengths)
    window = (local_window_size, local_window_size) if isinstance(local_window_size, int) else local_window_size
    settings = AttentionSettings(
        is_causal, scale, window, assume_seen, dropout_rate, broadcast_dropout, precision, logits_soft_cap
    )
    ordinary = functools.partial(_ordinary, settings, features, dropout_rng if dropout else None, sinks, module)
    wanted = implementation
    at = target(query, key, value)
    implementation = _chosen(wanted, arrays[:5], features, at)
    if implementation == "xla":
        return ordinary(*arrays)
    fused = functools.partial(_fused, settings, implementation)
    if wanted is not None:
        return fused(*arrays)
    return lowered_on(at, fused, ordinary, *arrays)


def _chosen(implementation: Any, arrays: tuple[Any, ...], features: Features, at: Target) -> Implementation:
    """Returns the kernel to use: the one that was asked for, if it can compute the call, or the best one."""
    if implementation is None:
        return best_implementation(features, at, *arrays)
    if implementation not in ("cudnn", "splash", "xla"):
        raise ValueError(UNKNOWN_IMPLEMENTATION.format(got=implementation))
    obstacles = {"cudnn": fusion_obstacle, "splash": splash_obstacle}
    obstacle = obstacles[implementation](features, at, *arrays) if implementation in obstacles else None
    if obstacle is not None:
        raise ValueError(CANNOT_FUSE.format(name=implementation, obstacle=obstacle))
    return implementation


def _fused(settings: AttentionSettings, implementation: Implementation, *arrays: Any) -> jax.Array:
    """Attends with a fused kernel."""
    if implementation == "cudnn":
        return _delegated(*arrays, settings=settings, implementation="cudnn")
    from nnx.nn.attention.splash import splash_attention  # Pallas takes long to import

    query, key, value, bias, mask, query_lengths, key_lengths = arrays
    del bias, mask
    return splash_attention(query, key, value, query_lengths, key_lengths, settings)


def _ordinary(
    settings: AttentionSettings,
    features: Features,
    dropout_rng: jax.Array | None,
    sinks: jax.Array | None,
    module: Module | None,
    *arrays: Any,
) -> jax.Array:
    """Attends without a fused kernel."""
    query, key, value, bias, mask, query_lengths, key_lengths = arrays
    options = AttentionArrays(bias, mask, query_lengths, key_lengths, dropout_rng, sinks)
    if module is None and is_long(query.shape[-3], key.shape[-3]) and jax.typeof(query).sharding.spec[-3] is None:
        return attend_in_blocks(query, key, value, options, settings=settings)
    if not _needs_weights(query, key, value, features):
        return _delegated(*arrays, settings=settings, implementation="xla")
    out, weights = _explicit(query, key, value, options, settings=settings)
    if module is not None:
        Module.sow(module, Intermediate, "attention_weights", weights)
    return out


def _needs_weights(query: jax.Array, key: jax.Array, value: jax.Array, features: Features) -> bool:
    """Whether a call has to compute the attention weights, because `jax.nn.dot_product_attention` cannot do it."""
    return (
        (features.dropout or features.weights or features.sinks)
        or (features.precision is not None or features.logits_soft_cap is not None)
        or value.shape[-1] != key.shape[-1]
        or key.shape[-3] == 0
        or query.dtype in (jnp.float16, jnp.float64)
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
    settings: AttentionSettings,
    implementation: Literal["cudnn", "xla"],
) -> jax.Array:
    """Attends with `jax.nn.dot_product_attention`, which takes exactly one batch axis."""
    batch = query.shape[:-3]
    lengths = (query.shape[-3], key.shape[-3])
    given, given_settings = AttentionArrays(bias, mask, None, key_lengths), settings
    # cuDNN's window is a causal one with a left bound; `fusion_obstacle` lets no other window through.
    if implementation == "cudnn" and settings.window is not None:
        settings = settings._replace(is_causal=True, window=(settings.window[0], 0))
    if mask is not None:
        mask = _one_batch_axis(mask.astype(bool), batch)
    if bias is not None:
        bias = _one_batch_axis(bounded(bias), batch)
    # cuDNN does not broadcast the last two axes of a mask, and takes a bias only in the dtype of the queries.
    if implementation == "cudnn":
        mask = None if mask is None else jnp.broadcast_to(mask, (*mask.shape[:2], *lengths))
        bias = None if bias is None else bias.astype(query.dtype)
        # Not every version of cuDNN takes a row of length 0 (some return NaN, some fail), so such a row gets one key
        # here; its output is set to zero below.
        key_lengths = None if key_lengths is None else jnp.maximum(key_lengths, 1)
    # On the H200, with JAX 0.11, the gradient of cuDNN's kernel fails for odd lengths, with or without a mask.
    attend = _fused_unless_differentiated if implementation == "cudnn" and any(n % 2 for n in lengths) else _attend
    out = attend(
        settings,
        implementation,
        _collapsed(query),
        _collapsed(key),
        _collapsed(value),
        bias,
        mask,
        None if query_lengths is None else query_lengths.reshape(-1).astype(jnp.int32),
        None if key_lengths is None else key_lengths.reshape(-1).astype(jnp.int32),
    )
    return zero_unseeing(out.reshape(query.shape), given, given_settings, lengths[1])


def _attend(
    settings: AttentionSettings,
    implementation: Literal["cudnn", "xla"],
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
        implementation=implementation,
    )


_fused_unless_differentiated = jax.custom_jvp(_attend, nondiff_argnums=(0, 1))


@_fused_unless_differentiated.defjvp
def _differentiate_without_fusion(settings: AttentionSettings, implementation: Any, primals: Any, tangents: Any) -> Any:
    """Computes the output as well as its derivative with XLA."""
    del implementation
    return jax.jvp(functools.partial(_attend_without_fusion, settings), primals, tangents)


def _attend_without_fusion(
    settings: AttentionSettings,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    query_lengths: Any,
    key_lengths: Any,
) -> jax.Array:
    if not is_long(query.shape[-3], key.shape[-3]):
        return _attend(settings, "xla", query, key, value, bias, mask, query_lengths, key_lengths)
    options = AttentionArrays(bias, mask, query_lengths, key_lengths)
    return attend_in_blocks(query, key, value, options, settings=settings._replace(assume_seen=True))


@compiled_body
def _explicit(
    query: jax.Array, key: jax.Array, value: jax.Array, options: AttentionArrays, *, settings: AttentionSettings
) -> tuple[jax.Array, jax.Array]:
    """Returns the output and the attention weights, `[batch..., heads, query_length, key_length]`."""
    queries, keys = query.shape[-3], key.shape[-3]
    some_unseeing = may_see_nothing(options, settings, queries, keys)
    return attend(query, key, value, options, settings, jnp.arange(queries), jnp.arange(keys), some_unseeing)


def _collapsed(array: jax.Array) -> jax.Array:
    return array.reshape(-1, *array.shape[-3:])


def _one_batch_axis(array: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Returns a bias or mask that broadcasts over `batch` with these axes flattened into one."""
    array = array.reshape((1,) * (len(batch) + 3 - array.ndim) + array.shape)
    if len(batch) > 1 and any(size != 1 for size in array.shape[:-3]):
        array = jnp.broadcast_to(array, (*batch, *array.shape[-3:]))
    return array.reshape(-1, *array.shape[-3:])
