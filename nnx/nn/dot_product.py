"""Dot-product attention as a function, and the choice of the kernel that computes it.

Shapes: queries `[batch..., query_length, heads, head_dim]`, keys and values `[batch..., key_length, kv_heads,
head_dim]` with `heads` a multiple of `kv_heads` (grouped-query attention). There are three ways to compute it:

- **cudnn**, the fused kernel of NVIDIA GPUs, which never writes the attention weights to memory;
- **xla**, the same through `jax.nn.dot_product_attention` without a fused kernel;
- the *explicit* weights below, also "xla", where the caller needs what the former cannot do: dropout, the weights
  themselves, a `precision`, values with another head size, float16 off the GPU.

`attention_implementation` says which kernel a call gets.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from nnx.core.module import Module
from nnx.core.variables import Intermediate
from nnx.nn.dtypes import PromoteDtype, promote_dtype
from nnx.nn.masks import positions_visible

Implementation = Literal["cudnn", "xla"]
Window = int | tuple[int, int]

_MASKED = -0.7 * float(np.finfo(np.float32).max)  # finite, so that a query that sees nothing gives no NaN


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
    dtype: Any = None,
    precision: Any = None,
    module: Module | None = None,
    promote_dtype: PromoteDtype = promote_dtype,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: Window | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Attends with queries to keys, and averages the values by it.

    Say `is_causal`, lengths and windows by their arguments where you can: a fused kernel skips what they hide, while a
    `mask` must be read.

    Args:
        query: `[batch..., query_length, heads, head_dim]`; `batch` may be any number of axes, or none.
        key: `[batch..., key_length, kv_heads, head_dim]`; each key head serves `heads // kv_heads` query heads.
        value: `[batch..., key_length, kv_heads, value_dim]`.
        bias: added to the logits; broadcasts to `[batch..., heads, query_length, key_length]`.
        mask: true (nonzero) where a query may attend to a key; broadcasts to the same shape.
        broadcast_dropout: drop the same weights in all batch rows and heads.
        dropout_rng: key for dropout.
        dropout_rate: share of the weights that is dropped.
        deterministic: no dropout.
        dtype: of the computation; that of the inputs, promoted, by default. Logits and softmax are at least float32.
        precision: of the matrix products.
        module: a Module into which the weights are sown, as the `Intermediate` "attention_weights".
        promote_dtype: replaces the function that brings queries, keys and values to one dtype.
        is_causal: query `i` sees the keys `0..i`.
        scale: of the logits; `1 / sqrt(head_dim)` by default.
        query_seq_lengths: `[batch...]`, real queries in each row; the output of the others is zero.
        key_value_seq_lengths: `[batch...]`, real keys in each row; the others are hidden.
        local_window_size: `(left, right)`: query `i` sees the keys `i - left..i + right`; an int stands for both.
        implementation: "cudnn" or "xla"; by default the one `attention_implementation` names.

    Returns:
        `[batch..., query_length, heads, value_dim]`.

    Raises:
        ValueError: where shapes do not fit together, or "cudnn" is asked for and cannot do it; the message says why.

    >>> import nnx, jax.numpy as jnp
    >>> query = jnp.ones((2, 5, 4, 8))
    >>> key = value = jnp.ones((2, 5, 2, 8))  # two query heads share a key head
    >>> nnx.dot_product_attention(query, key, value, is_causal=True).shape
    (2, 5, 4, 8)
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    batch = _checked_batch(query, key, value)
    logits_shape = (*batch, query.shape[-2], query.shape[-3], key.shape[-3])
    _check_broadcasts("bias", bias, logits_shape)
    _check_broadcasts("mask", mask, logits_shape)
    for name, lengths in (("query_seq_lengths", query_seq_lengths), ("key_value_seq_lengths", key_value_seq_lengths)):
        if lengths is not None and lengths.shape != batch:
            raise ValueError(
                f"dot_product_attention: expected {name} of shape {batch}, one per row, got {lengths.shape}."
            )

    dropout = dropout_rate > 0.0 and not deterministic
    if dropout and dropout_rng is None:
        raise ValueError(
            f"dot_product_attention: dropout_rate={dropout_rate} needs a key: pass "
            "dropout_rng=ctx.make_rng('dropout'), or deterministic=True."
        )
    features: dict[str, Any] = {
        "is_causal": is_causal,
        "local_window_size": local_window_size,
        "dropout": dropout,
        "weights": module is not None,
        "precision": precision,
    }
    if implementation is None:
        implementation = attention_implementation(query, key, value, bias, mask, **features)
    elif implementation == "cudnn":
        obstacle = _fusion_obstacle(query, key, value, bias, mask, **features)
        if obstacle is not None:
            raise ValueError(f"dot_product_attention: implementation='cudnn' is not possible here: {obstacle}.")
    elif implementation != "xla":
        raise ValueError(
            f"dot_product_attention: expected implementation 'cudnn', 'xla' or None, got {implementation!r}."
        )

    arrays = (query, key, value, bias, mask, query_seq_lengths, key_value_seq_lengths)
    window = (local_window_size, local_window_size) if isinstance(local_window_size, int) else local_window_size
    explicit = (
        dropout
        or precision is not None
        or module is not None
        or value.shape[-1] != key.shape[-1]
        or (implementation == "xla" and query.dtype == jnp.float16)
    )
    if not explicit:
        return _delegated(*arrays, is_causal, scale, window, implementation)
    out, weights = _explicit(
        *arrays, dropout_rng if dropout else None, is_causal, scale, window, dropout_rate, broadcast_dropout, precision
    )
    if module is not None:
        module.sow(Intermediate, "attention_weights", weights)
    return out


def attention_implementation(
    query: jax.Array | jax.ShapeDtypeStruct,
    key: jax.Array | jax.ShapeDtypeStruct,
    value: jax.Array | jax.ShapeDtypeStruct,
    bias: jax.Array | jax.ShapeDtypeStruct | None = None,
    mask: jax.Array | jax.ShapeDtypeStruct | None = None,
    *,
    is_causal: bool = False,
    local_window_size: Window | None = None,
    dropout: bool = False,
    weights: bool = False,
    precision: Any = None,
    platform: str | None = None,
    compute_capability: str | None = None,
) -> Implementation:
    """The kernel that `dot_product_attention` chooses for such a call: "cudnn" where it can, else "xla".

    Args:
        query, key, value, bias, mask: arrays, or `jax.ShapeDtypeStruct`s in their place.
        is_causal, local_window_size, precision: as in `dot_product_attention`.
        dropout: whether dropout is active.
        weights: whether the weights are asked for.
        platform: "gpu", "cpu", "tpu"; that of JAX's default backend by default.
        compute_capability: of the GPU, as in "9.0"; that of the first device by default.

    >>> import jax, nnx, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((8, 1024, 12, 64), jnp.bfloat16)
    >>> nnx.attention_implementation(x, x, x, is_causal=True, platform="gpu", compute_capability="9.0")
    'cudnn'
    >>> nnx.attention_implementation(x, x, x, is_causal=True, platform="cpu")
    'xla'
    """
    obstacle = _fusion_obstacle(
        query,
        key,
        value,
        bias,
        mask,
        is_causal=is_causal,
        local_window_size=local_window_size,
        dropout=dropout,
        weights=weights,
        precision=precision,
        platform=platform,
        compute_capability=compute_capability,
    )
    return "cudnn" if obstacle is None else "xla"


def _fusion_obstacle(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    *,
    is_causal: bool,
    local_window_size: Window | None,
    dropout: bool,
    weights: bool,
    precision: Any,
    platform: str | None = None,
    compute_capability: str | None = None,
) -> str | None:
    """Why cuDNN's kernel cannot serve this call, or `None` when it can."""
    platform = jax.default_backend() if platform is None else platform
    if platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU, and the platform is {platform!r}"
    if compute_capability is None:
        compute_capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    major = compute_capability.partition(".")[0]
    if not major.isdigit() or int(major) < 8:
        return f"it needs compute capability 8.0, and the GPU has {compute_capability!r}"
    if not query.dtype == key.dtype == value.dtype or query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 or float16, and the inputs are {query.dtype}, {key.dtype}, {value.dtype}"

    *_, query_length, heads, head_dim = query.shape
    key_length = key.shape[-3]
    largest = 256 if int(major) >= 9 else 128
    if head_dim % 8 or head_dim > largest:
        return f"it takes head sizes up to {largest} that are multiples of 8, and this one is {head_dim}"
    if value.shape[-1] != head_dim:
        return f"keys and values must have one head size, and have {head_dim} and {value.shape[-1]}"
    if dropout:
        return "it is used without dropout only"
    if weights:
        return "it does not produce the attention weights"
    if precision is not None:
        return f"it takes no precision, and precision={precision!r} was given"
    if local_window_size is not None and not is_causal:
        right = local_window_size if isinstance(local_window_size, int) else local_window_size[1]
        if right != 0:
            return "it knows windows into the past only: pass is_causal=True"
    if bias is not None or mask is not None:
        if query_length % 2 or key_length % 2:
            return f"with a bias or mask it takes even lengths, and they are {query_length} and {key_length}"
    if bias is not None and (
        mask is not None or bias.shape[-3:] != (heads, query_length, key_length) or _rows(bias) > 1
    ):
        return (
            "it differentiates a bias of shape [heads, query_length, key_length] without a mask only, and this one is "
            f"{bias.shape}{'' if mask is None else ' with a mask'}"
        )
    return None


def _rows(array: Any) -> int:
    return math.prod(array.shape[:-3])


def _checked_batch(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[int, ...]:
    """The common leading axes, after checking that the three fit together."""
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if query.ndim < 3 or not query.ndim == key.ndim == value.ndim:
        raise ValueError(
            f"dot_product_attention: expected three arrays of shape [batch..., length, heads, head_dim], got {shapes}."
        )
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"dot_product_attention: expected the same leading axes, got {shapes}.")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"dot_product_attention: expected keys with the queries' head_dim={query.shape[-1]}, got {key.shape[-1]}: "
            f"{shapes}."
        )
    if key.shape[-3:-1] != value.shape[-3:-1]:
        raise ValueError(f"dot_product_attention: expected one value per key and head, got {shapes}.")
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(
            "dot_product_attention: expected the number of query heads to be a multiple of that of key heads, got "
            f"{shapes}."
        )
    return query.shape[:-3]


def _check_broadcasts(name: str, array: jax.Array | None, shape: tuple[int, ...]) -> None:
    if array is None:
        return
    fits = array.ndim <= len(shape) and all(
        have in (1, want) for have, want in zip(reversed(array.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(
            f"dot_product_attention: expected a {name} that broadcasts to [batch..., heads, query_length, key_length] "
            f"= {shape}, got {array.shape}."
        )


# The two bodies below are compiled as one function each, so that the layers of a model share one trace of them.


@functools.partial(jax.jit, static_argnums=(7, 8, 9, 10))
def _delegated(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    query_lengths: jax.Array | None,
    key_lengths: jax.Array | None,
    is_causal: bool,
    scale: float | None,
    window: tuple[int, int] | None,
    implementation: Implementation,
) -> jax.Array:
    """Attention by `jax.nn.dot_product_attention`, which knows exactly one batch axis."""
    batch = query.shape[:-3]
    if implementation == "cudnn" and window is not None:
        is_causal, window = True, (window[0], 0)
    if mask is not None:
        mask = _one_batch_axis(mask.astype(bool), batch)
    if bias is not None:
        bias = _one_batch_axis(bias, batch)
    if implementation == "cudnn":
        lengths = (query.shape[-3], key.shape[-3])
        mask = None if mask is None else jnp.broadcast_to(mask, (*mask.shape[:2], *lengths))
        bias = None if bias is None else bias.astype(query.dtype)
    out = jax.nn.dot_product_attention(
        _collapsed(query),
        _collapsed(key),
        _collapsed(value),
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=None if query_lengths is None else query_lengths.reshape(-1).astype(jnp.int32),
        key_value_seq_lengths=None if key_lengths is None else key_lengths.reshape(-1).astype(jnp.int32),
        local_window_size=window,
        implementation=implementation,
    )
    return out.reshape(query.shape)


@functools.partial(jax.jit, static_argnums=(8, 9, 10, 11, 12, 13))
def _explicit(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    query_lengths: jax.Array | None,
    key_lengths: jax.Array | None,
    dropout_rng: jax.Array | None,
    is_causal: bool,
    scale: float | None,
    window: tuple[int, int] | None,
    dropout_rate: float,
    broadcast_dropout: bool,
    precision: Any,
) -> tuple[jax.Array, jax.Array]:
    """Attention with its weights, `[batch..., heads, query_length, key_length]`, in the open."""
    *batch, query_length, heads, head_dim = query.shape
    key_length, kv_heads = key.shape[-3:-1]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    wide = jnp.promote_types(query.dtype, jnp.float32)

    grouped = query.reshape(*batch, query_length, kv_heads, heads // kv_heads, head_dim)
    logits = jnp.einsum("...tkgh,...skh->...kgts", grouped, key, precision=precision, preferred_element_type=wide)
    logits = logits.reshape(*batch, heads, query_length, key_length) * scale
    if bias is not None:
        logits = logits + bias.astype(wide)

    visible = _visible(mask, query_length, key_length, key_lengths, is_causal, window)
    if visible is not None:
        logits = jnp.where(visible, logits, _MASKED)
    weights = jax.nn.softmax(logits, axis=-1).astype(query.dtype)

    if dropout_rng is not None:
        shape = weights.shape[-2:] if broadcast_dropout else weights.shape
        keep = jax.random.bernoulli(dropout_rng, 1.0 - dropout_rate, shape)
        weights = jnp.where(keep, weights / (1.0 - dropout_rate), 0.0).astype(query.dtype)

    grouped = weights.reshape(*batch, kv_heads, heads // kv_heads, query_length, key_length)
    out = jnp.einsum("...kgts,...skh->...tkgh", grouped, value, precision=precision)
    out = out.reshape(*batch, query_length, heads, value.shape[-1])
    if query_lengths is not None:
        real = jnp.arange(query_length) < query_lengths[..., None]
        out = jnp.where(real[..., None, None], out, 0.0)
    return out, weights


def _visible(
    mask: jax.Array | None,
    query_length: int,
    key_length: int,
    key_lengths: jax.Array | None,
    is_causal: bool,
    window: tuple[int, int] | None,
) -> jax.Array | None:
    """What `mask`, lengths, causality and window leave visible, or `None` for everything."""
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


def _collapsed(array: jax.Array) -> jax.Array:
    return array.reshape(-1, *array.shape[-3:])


def _one_batch_axis(array: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """A bias or mask that broadcasts over `batch`, with these axes made one."""
    array = array.reshape((1,) * (len(batch) + 3 - array.ndim) + array.shape)
    if len(batch) > 1 and any(size != 1 for size in array.shape[:-3]):
        array = jnp.broadcast_to(array, (*batch, *array.shape[-3:]))
    return array.reshape(-1, *array.shape[-3:])
