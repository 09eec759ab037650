"""Multi-head attention.

`MultiHeadAttention` projects queries, keys and values into heads, optionally normalises and rotates them, attends, and
projects back. With `num_kv_heads` below `num_heads` several query heads share a key head (grouped-query attention). In
*decode* mode it appends the keys and values of its inputs to a `KVCache` and attends to all tokens so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from nnx.core.context import Context
from nnx.core.module import Module
from nnx.nn.dot_product import Implementation, dot_product_attention
from nnx.nn.dtypes import PromoteDtype, as_dtype, as_optional_dtype, cast, promote_dtype
from nnx.nn.initial_values import InitializerLike, default_bias_init, default_kernel_init
from nnx.nn.kv_cache import KVCache
from nnx.nn.linear import NO_METADATA, DotGeneral, LinearGeneral
from nnx.nn.modes import resolve_mode
from nnx.nn.norm import LayerNorm, RMSNorm
from nnx.nn.rotary import RotaryEmbedding


class MultiHeadAttention(Module):
    """Multi-head dot-product attention, of a sequence to itself or to another.

    Args:
        num_heads: of the queries.
        in_features: of the queries' input.
        qkv_features: of all query heads together, a multiple of `num_heads`; `in_features` by default.
        out_features: of the output; `in_features` by default.
        num_kv_heads: heads of keys and values, a divisor of `num_heads`; as many by default.
        in_kv_features: of the keys' and values' input; `in_features` by default.
        dtype: of the computation; by default that of inputs and parameters, promoted.
        param_dtype: of the parameters.
        broadcast_dropout: drop the same attention weights in all batch rows and heads.
        dropout_rate: share of attention weights dropped.
        deterministic: no dropout. May also come with the call or as the Context flag of that name.
        precision: of the matrix products.
        kernel_init, bias_init: initialisers of the projections of queries, keys and values.
        out_kernel_init, out_bias_init: those of the output projection; the former by default.
        use_bias: whether the projections have biases.
        attention_fn: called as `dot_product_attention` is.
        decode: use the cache (see `init_cache`). May also come with the call.
        normalize_qk: normalise queries and keys per head: `True` or "layer" by `LayerNorm` without bias, "rms" by
            `RMSNorm`.
        qkv_promote_dtype, out_promote_dtype, ln_promote_dtype: replace the function that brings arrays to one dtype,
            in the projections and in the norms.
        qkv_dot_general, out_dot_general: replace `jax.lax.dot_general` in the projections.
        qkv_dot_general_cls, out_dot_general_cls: classes whose instances do.
        rotary: rotates queries and keys by their positions; one instance may serve many layers.
        sliding_window: how many tokens a query sees, itself included; causal calls look back only.
        implementation: "cudnn" or "xla" for `dot_product_attention`; chosen automatically by default.
        rng_collection: the Context's stream for dropout.
        ctx: Context with the stream "params".
        kernel_metadata, bias_metadata: metadata of the Variables of the projections of queries, keys and values.
        out_kernel_metadata, out_bias_metadata: those of the output projection; the former by default.
        query_ln_scale_metadata, key_ln_scale_metadata: those of the norms' scales.

    Attributes:
        query: a `LinearGeneral`, with a kernel `[in_features, heads, head_dim]`.
        key: likewise.
        value: likewise.
        out: a `LinearGeneral`, with a kernel `[heads, head_dim, out_features]`.
        query_ln: the norm of the queries, or None.
        key_ln: that of the keys, or None.
        cache: the `KVCache`, or None before `init_cache`.

    >>> import nnx, jax.numpy as jnp
    >>> layer = nnx.MultiHeadAttention(4, 16, num_kv_heads=2, rotary=nnx.RotaryEmbedding(4), ctx=nnx.context(0))
    >>> x = jnp.ones((2, 5, 16))  # batch, length, features
    >>> full = layer(x, is_causal=True)
    >>> full.shape
    (2, 5, 16)
    >>> layer.init_cache((2, 8, 16))  # room for 8 tokens
    >>> first = layer(x[:, :3], decode=True)  # a prompt
    >>> rest = [layer(x[:, i : i + 1], decode=True) for i in (3, 4)]
    >>> bool(jnp.allclose(jnp.concatenate([first, *rest], axis=1), full, atol=1e-5))
    True
    """

    logical_axes = {
        **dict.fromkeys(("query/kernel", "key/kernel", "value/kernel"), ("embed", "heads", "head_dim")),
        **dict.fromkeys(("query/bias", "key/bias", "value/bias"), ("heads", "head_dim")),
        "out/kernel": ("heads", "head_dim", "embed"),
        "out/bias": ("embed",),
    }

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        broadcast_dropout: bool = True,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: Any = None,
        kernel_init: InitializerLike = default_kernel_init,
        out_kernel_init: InitializerLike | None = None,
        bias_init: InitializerLike = default_bias_init,
        out_bias_init: InitializerLike | None = None,
        use_bias: bool = True,
        attention_fn: Callable[..., jax.Array] = dot_product_attention,
        decode: bool | None = None,
        normalize_qk: bool | Literal["layer", "rms"] = False,
        qkv_promote_dtype: PromoteDtype = promote_dtype,
        out_promote_dtype: PromoteDtype = promote_dtype,
        ln_promote_dtype: PromoteDtype = promote_dtype,
        qkv_dot_general: DotGeneral | None = None,
        out_dot_general: DotGeneral | None = None,
        qkv_dot_general_cls: Callable[[], DotGeneral] | None = None,
        out_dot_general_cls: Callable[[], DotGeneral] | None = None,
        rotary: RotaryEmbedding | None = None,
        sliding_window: int | None = None,
        implementation: Implementation | None = None,
        rng_collection: str = "dropout",
        ctx: Context,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        out_kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
        out_bias_metadata: Mapping[str, Any] = NO_METADATA,
        query_ln_scale_metadata: Mapping[str, Any] = NO_METADATA,
        key_ln_scale_metadata: Mapping[str, Any] = NO_METADATA,
    ):
        qkv_features = in_features if qkv_features is None else qkv_features
        out_features = in_features if out_features is None else out_features
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        in_kv_features = in_features if in_kv_features is None else in_kv_features
        if qkv_features % num_heads:
            raise ValueError(
                f"MultiHeadAttention: expected qkv_features to be a multiple of num_heads={num_heads}, got "
                f"{qkv_features}."
            )
        if num_heads % num_kv_heads:
            raise ValueError(
                f"MultiHeadAttention: expected num_kv_heads to divide num_heads={num_heads}, got {num_kv_heads}."
            )
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(
                "MultiHeadAttention: sliding_window counts the token itself: expected at least 1, got "
                f"{sliding_window}."
            )
        head_dim = qkv_features // num_heads
        if rotary is not None and rotary.head_dim != head_dim:
            raise ValueError(
                f"MultiHeadAttention: expected a rotary embedding with head_dim={head_dim} (qkv_features // "
                f"num_heads), got {rotary.head_dim}."
            )

        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.in_features = in_features
        self.in_kv_features = in_kv_features
        self.qkv_features = qkv_features
        self.out_features = out_features
        self.head_dim = head_dim
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.broadcast_dropout = broadcast_dropout
        self.dropout_rate = dropout_rate
        self.deterministic = deterministic
        self.precision = precision
        self.use_bias = use_bias
        self.attention_fn = attention_fn
        self.decode = decode
        self.sliding_window = sliding_window
        self.implementation = implementation
        self.rng_collection = rng_collection

        def projection(from_features: int, heads: int) -> LinearGeneral:
            return LinearGeneral(
                from_features,
                (heads, head_dim),
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                bias_init=bias_init,
                precision=precision,
                promote_dtype=qkv_promote_dtype,
                dot_general=qkv_dot_general,
                dot_general_cls=qkv_dot_general_cls,
                ctx=ctx,
                kernel_metadata=kernel_metadata,
                bias_metadata=bias_metadata,
            )

        self.query = projection(in_features, num_heads)
        self.key = projection(in_kv_features, num_kv_heads)
        self.value = projection(in_kv_features, num_kv_heads)
        self.out = LinearGeneral(
            (num_heads, head_dim),
            out_features,
            axis=(-2, -1),
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init if out_kernel_init is None else out_kernel_init,
            bias_init=bias_init if out_bias_init is None else out_bias_init,
            precision=precision,
            promote_dtype=out_promote_dtype,
            dot_general=out_dot_general,
            dot_general_cls=out_dot_general_cls,
            ctx=ctx,
            kernel_metadata=out_kernel_metadata or kernel_metadata,
            bias_metadata=out_bias_metadata or bias_metadata,
        )
        norm: dict[str, Any] = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "promote_dtype": ln_promote_dtype,
            "ctx": ctx,
        }
        self.query_ln = _head_norm(normalize_qk, head_dim, scale_metadata=query_ln_scale_metadata, **norm)
        self.key_ln = _head_norm(normalize_qk, head_dim, scale_metadata=key_ln_scale_metadata, **norm)
        self.rotary = rotary
        self.cache: KVCache | None = None

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        ctx: Context | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        bias: jax.Array | None = None,
        seq_lengths: jax.Array | None = None,
        positions: jax.Array | None = None,
        key_positions: jax.Array | None = None,
    ) -> jax.Array:
        """Attends from `inputs_q` to `inputs_k`.

        Args:
            inputs_q: `[batch..., query_length, in_features]`; `batch` may be any number of axes, or none.
            inputs_k: `[batch..., key_length, in_kv_features]`; `inputs_q` by default.
            inputs_v: like `inputs_k`, which is its default.
            mask: true where a query may attend to a key; broadcasts to `[batch..., heads, query_length, key_length]`,
                in decode mode with the cache's `max_length` for `key_length`.
            deterministic: no dropout; overrides the instance's and the Context's.
            ctx: Context with the stream "dropout", needed where there is dropout.
            sow_weights: keep the attention weights as the `Intermediate` "attention_weights".
            decode: append to the cache and attend to all of it; overrides the instance's. Always causal.
            is_causal: query `i` sees the keys `0..i`.
            out_sharding, qkv_sharding: of the results of the projections, see `jax.lax.dot_general`.
            bias: added to the attention logits; of the shape of `mask`.
            seq_lengths: `[batch...]`, real tokens in each row of the keys; they stand first, the others are hidden. In
                decode mode,
                how many of these tokens to append: ragged prompts are padded on the right.
            positions: of the queries for the rotary embedding, `[batch..., query_length]` or `[query_length]`; counted
                from 0, in decode mode from the row's index, by default.
            key_positions: of the keys; those of the queries by default, in cross-attention counted from 0.

        Returns:
            `[batch..., query_length, out_features]`.
        """
        if inputs_k is None:
            if inputs_v is not None:
                raise ValueError("MultiHeadAttention: inputs_v was given without inputs_k; pass both.")
            inputs_k = inputs_q
        if inputs_v is None:
            inputs_v = inputs_k
        if key_positions is None and inputs_k is inputs_q:
            key_positions = positions
        for name, inputs, expected in (
            ("inputs_q", inputs_q, self.in_features),
            ("inputs_k", inputs_k, self.in_kv_features),
            ("inputs_v", inputs_v, self.in_kv_features),
        ):
            if inputs.ndim < 2 or inputs.shape[-1] != expected:
                raise ValueError(
                    f"MultiHeadAttention: expected {name} of shape [batch..., length, {expected}], got {inputs.shape}."
                )

        query = self.query(inputs_q, qkv_sharding)  # [batch..., query_length, heads, head_dim]
        key = self.key(inputs_k, qkv_sharding)  # [batch..., key_length, kv_heads, head_dim]
        value = self.value(inputs_v, qkv_sharding)
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)

        decode = self.decode if decode is None else decode
        options: dict[str, Any] = {"mask": mask, "is_causal": is_causal}
        if bias is not None:
            options["bias"] = bias
        if decode:
            query, key, value = self._through_cache(query, key, value, seq_lengths, positions, key_positions, options)
        else:
            query, key = self._rotated(query, key, positions, key_positions)
            if seq_lengths is not None:
                options["key_value_seq_lengths"] = seq_lengths
            if self.sliding_window is not None:
                reach = self.sliding_window - 1
                options["local_window_size"] = (reach, 0 if is_causal else reach)
        if self.implementation is not None:
            options["implementation"] = self.implementation

        if self.dropout_rate > 0.0:
            deterministic = resolve_mode(self, "deterministic", deterministic, ctx)
            if not deterministic:
                if ctx is None:
                    raise ValueError(_NO_CONTEXT)
                options["dropout_rng"] = ctx.make_rng(self.rng_collection)
        else:
            deterministic = True
        attended = self.attention_fn(
            query,
            key,
            value,
            dropout_rate=self.dropout_rate,
            broadcast_dropout=self.broadcast_dropout,
            deterministic=deterministic,
            dtype=self.dtype,
            precision=self.precision,
            module=self if sow_weights else None,
            **options,
        )
        return self.out(attended, out_sharding)

    def init_cache(self, input_shape: tuple[int, ...], dtype: Any = jnp.float32) -> None:
        """Makes an empty cache, or replaces the present one.

        Args:
            input_shape: `[batch..., max_length, features]`: that of an input as long as the longest text to come.
            dtype: in which keys and values are stored.
        """
        if len(input_shape) < 2:
            raise ValueError(
                "MultiHeadAttention.init_cache: expected the shape [batch..., max_length, features], got "
                f"{tuple(input_shape)}."
            )
        *batch, max_length, _ = input_shape
        self.cache = KVCache(tuple(batch), max_length, self.num_kv_heads, self.head_dim, dtype=dtype)

    def _rotated(
        self, query: jax.Array, key: jax.Array, positions: jax.Array | None, key_positions: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        if self.rotary is None:
            return query, key
        return self.rotary(query, positions), self.rotary(key, key_positions)

    def _through_cache(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        seq_lengths: jax.Array | None,
        positions: jax.Array | None,
        key_positions: jax.Array | None,
        options: dict[str, Any],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The new queries with the keys and values of all tokens so far; says in `options` which of them each sees."""
        cache = self.cache
        if cache is None:
            raise ValueError(_NO_CACHE)
        length = query.shape[-3]
        if key.shape[-3] != length:
            raise ValueError(
                "MultiHeadAttention: decode mode is for self-attention: expected as many keys as queries, got "
                f"{key.shape[-3]} and {length}. Cross-attention needs no cache: call it with decode=False."
            )
        mask = options["mask"]
        if mask is not None and mask.shape[-1] not in (1, cache.max_length):
            raise ValueError(
                f"MultiHeadAttention: in decode mode a mask speaks of the cache's slots: expected a last axis of "
                f"max_length={cache.max_length}, got a mask of shape {mask.shape}. (Decoding is causal without one.)"
            )
        slots = cache.positions(length)
        positions = slots if positions is None else positions
        query, key = self._rotated(query, key, positions, positions if key_positions is None else key_positions)
        key, value = cache.append(key, value, seq_lengths)
        key, value = cast(key, query.dtype), cast(value, query.dtype)

        options["is_causal"] = False  # counted from the first slot, it would not be about these queries
        if length == 1 and mask is None and self.sliding_window is None:
            options["key_value_seq_lengths"] = jnp.minimum(slots[..., 0] + 1, cache.max_length)
        else:
            visible = cache.mask(slots, self.sliding_window)
            options["mask"] = visible if mask is None else visible & mask.astype(bool)
        return query, key, value


_NO_CONTEXT = (
    "MultiHeadAttention: dropout needs a key, and no Context was given: call the layer with ctx=ctx, or with "
    "deterministic=True."
)
_NO_CACHE = (
    "MultiHeadAttention: decode mode needs a cache: call `layer.init_cache((batch, max_length, features))` first."
)


def _head_norm(kind: bool | Literal["layer", "rms"], head_dim: int, **options: Any) -> LayerNorm | RMSNorm | None:
    if kind is False:
        return None
    if kind == "rms":
        return RMSNorm(head_dim, **options)
    if kind is True or kind == "layer":
        return LayerNorm(head_dim, use_bias=False, **options)
    raise ValueError(f"MultiHeadAttention: expected normalize_qk to be True, False, 'layer' or 'rms', got {kind!r}.")
