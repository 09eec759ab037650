"""Multi-head attention.

`MultiHeadAttention` projects queries, keys and values into heads, optionally normalizes and rotates them, attends, and
projects back. With `num_kv_heads` below `num_heads`, several query heads share a key head (grouped-query attention). In
*decode* mode it appends to a `KVCache` and attends to all tokens so far; `decode_step` does so with the caller's cache.
In cross-attention, `project_keys` and `attend_projected` project a source once for many calls.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.module import Module
from nnx.nn.attention.attention_kernel import Implementation
from nnx.nn.attention.dot_product import check_dropout_rate, dot_product_attention
from nnx.nn.attention.kv_cache import (
    KVCache,
    LayerCache,
    causal_options,
    ends_poisoned,
    next_positions,
    visible_part,
)
from nnx.nn.attention.rotary import RotaryEmbedding, rotate_pair
from nnx.nn.linear import DotGeneral, LinearGeneral
from nnx.nn.norms.norm import LayerNorm, RMSNorm
from nnx.nn.stochastic import draw_key
from nnx.nn.support.activation_names import named
from nnx.nn.support.checks import check_sizes, shape_of
from nnx.nn.support.parameters import (
    NO_METADATA,
    AxisNames,
    InitializerLike,
    default_bias_init,
    default_kernel_init,
    make_param,
)
from nnx.nn.support.settings import PromoteDtype, as_dtype, as_optional_dtype, cast, default_promote_dtype, resolve_mode

HEADS_DO_NOT_DIVIDE = "MultiHeadAttention: expected qkv_features to be a multiple of num_heads={heads}, got {got}."
KV_HEADS_DO_NOT_DIVIDE = "MultiHeadAttention: expected num_kv_heads to divide num_heads={heads}, got {got}."
EMPTY_SECTION = "MultiHeadAttention: expected section_size, the tokens of a section, to be at least 1, got {got}."
EMPTY_WINDOW = "MultiHeadAttention: sliding_window counts the token itself: expected at least 1, got {got}."
WRONG_ROTARY = (
    "MultiHeadAttention: expected a rotary embedding with head_dim={expected} (qkv_features // num_heads), got {got}."
)
WRONG_NORM = "MultiHeadAttention: expected normalize_qk to be True, False, 'layer' or 'rms', got {got!r}."
VALUES_WITHOUT_KEYS = "MultiHeadAttention: inputs_v was given without inputs_k; pass both."
WRONG_INPUT = "MultiHeadAttention: expected {name} of shape [batch..., length, {features}], got {got}."
NO_CONTEXT = (
    "MultiHeadAttention: dropout needs a key, and no Context was given: call the layer with ctx=ctx, or with "
    "deterministic=True."
)
NO_CACHE = (
    "MultiHeadAttention: decode mode needs a cache: call `layer.init_cache((batch, max_length, features))` first."
)
CACHE_SHAPE = "MultiHeadAttention.init_cache: expected the shape [batch..., max_length, features], got {got}."
DECODE_IS_SELF_ATTENTION = (
    "MultiHeadAttention: decode mode is for self-attention: expected as many keys as queries, got {keys} and "
    "{queries}. Cross-attention needs no cache: call it with decode=False."
)
DECODE_MASK = (
    "MultiHeadAttention: in decode mode a mask covers the slots of the cache: expected a last axis of "
    "max_length={max_length}, got a mask of shape {got}. (Decoding is causal without one.)"
)


class MultiHeadAttention(Module):
    """Multi-head dot-product attention, of a sequence to itself or to another.

    Args:
        num_heads: the number of query heads.
        in_features: the number of features of the queries' input.
        qkv_features: the features of all query heads together, a multiple of `num_heads`; `in_features` by default.
        out_features: the number of features of the output; `in_features` by default.
        num_kv_heads: the number of heads of keys and values, a divisor of `num_heads`; `num_heads` by default.
        in_kv_features: the number of features of the keys' and values' input; `in_features` by default.
        dtype: the computation dtype; by default, the dtype that inputs and parameters promote to.
        param_dtype: the dtype in which the parameters are stored.
        broadcast_dropout: whether to drop the same attention weights in all batch rows and heads.
        dropout_rate: the fraction of attention weights to drop.
        deterministic: whether to skip dropout; can also be set by the call or the Context flag of that name.
        precision: the precision of the matrix products, see `jax.lax.Precision`.
        kernel_init, bias_init: the initializers of the projections of queries, keys and values.
        out_kernel_init, out_bias_init: the initializers of the output projection; by default, the same.
        use_bias: whether the projections have biases.
        use_out_bias: whether the output projection has a bias; by default, the same.
        attention_fn: a function with the signature of `dot_product_attention`.
        decode: whether to use the cache (see `init_cache`); can also be set by the call.
        normalize_qk: how to normalize queries and keys per head: `True` or "layer" with `LayerNorm` without bias, "rms"
            with `RMSNorm`, `False` not at all.
        normalize_after_rotary: whether they are normalized after the rotary embedding instead of before it.
        qkv_promote_dtype, out_promote_dtype, ln_promote_dtype: replacements for the function that converts arrays to
            one dtype, in the projections and in the norms.
        qkv_dot_general, out_dot_general: replacements for `jax.lax.dot_general` in the projections.
        qkv_dot_general_cls, out_dot_general_cls: classes whose instances are used as such.
        rotary: an embedding that rotates queries and keys by their positions; one instance can serve many layers.
        sliding_window: the number of tokens a query sees, including itself; causal calls only look back.
        section_size: the number of tokens in a section, if a query sees only its own section of the text.
        query_scale: a function from the positions of queries to factors of them; it must be hashable.
        scale: the scale of the attention logits; `1 / sqrt(head_dim)` by default.
        logits_soft_cap: a bound that the scaled logits approach smoothly, see `dot_product_attention`.
        use_sinks: whether each head has a learned logit that takes part in the softmax and is then dropped, so that a
            query can attend to nothing. No fused kernel computes it.
        use_gate: whether the output of each head is multiplied by the sigmoid of a projection of the queries' input.
        implementation: "cudnn" or "xla" for `dot_product_attention`; chosen automatically by default.
        rng_collection: the name of the Context's stream for dropout.
        ctx: the Context; its stream "params" initializes the parameters.
        kernel_metadata, bias_metadata: metadata of the Variables of the projections of queries, keys and values.
        out_kernel_metadata, out_bias_metadata: metadata of those of the output projection; by default, the same.
        query_ln_scale_metadata, key_ln_scale_metadata: metadata of the norms' scales.

    Attributes:
        query: a `LinearGeneral` with a kernel `[in_features, heads, head_dim]`.
        key, value: `LinearGeneral`s with kernels `[in_kv_features, kv_heads, head_dim]`.
        out: a `LinearGeneral` with a kernel `[heads, head_dim, out_features]`.
        query_ln, key_ln: the norms of queries and keys, or None.
        gate: a `LinearGeneral` like `query`, or None without `use_gate`.
        sinks: the logits of the sinks, `[heads]`, zeros in a new layer; None without `use_sinks`.
        cache: the `KVCache`, or None before `init_cache`.

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

    logical_axes: ClassVar[AxisNames] = {
        **dict.fromkeys(
            (f"{name}/kernel" for name in ("query", "key", "value", "gate")), ("embed", "heads", "head_dim")
        ),
        **dict.fromkeys((f"{name}/bias" for name in ("query", "key", "value", "gate")), ("heads", "head_dim")),
        "out/kernel": ("heads", "head_dim", "embed"),
        "out/bias": ("embed",),
        "sinks": ("heads",),
    }

    num_heads: int
    num_kv_heads: int
    in_features: int
    in_kv_features: int
    qkv_features: int
    out_features: int
    head_dim: int
    dtype: np.dtype | None
    param_dtype: np.dtype
    broadcast_dropout: bool
    dropout_rate: float
    deterministic: bool | None
    precision: PrecisionLike
    use_bias: bool
    attention_fn: Callable[..., jax.Array]
    decode: bool | None
    sliding_window: int | None
    section_size: int | None
    query_scale: Callable[[jax.Array], jax.Array] | None
    scale: float | None
    logits_soft_cap: float | None
    implementation: Implementation | None
    rng_collection: str
    query: LinearGeneral
    key: LinearGeneral
    value: LinearGeneral
    out: LinearGeneral
    normalize_after_rotary: bool
    query_ln: LayerNorm | RMSNorm | None
    key_ln: LayerNorm | RMSNorm | None
    gate: LinearGeneral | None
    sinks: jax.Array | None
    rotary: RotaryEmbedding | None
    cache: KVCache | None

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        broadcast_dropout: bool = True,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: PrecisionLike = None,
        kernel_init: InitializerLike = default_kernel_init,
        out_kernel_init: InitializerLike | None = None,
        bias_init: InitializerLike = default_bias_init,
        out_bias_init: InitializerLike | None = None,
        use_bias: bool = True,
        use_out_bias: bool | None = None,
        attention_fn: Callable[..., jax.Array] = dot_product_attention,
        decode: bool | None = None,
        normalize_qk: bool | Literal["layer", "rms"] = False,
        normalize_after_rotary: bool = False,
        qkv_promote_dtype: PromoteDtype = default_promote_dtype,
        out_promote_dtype: PromoteDtype = default_promote_dtype,
        ln_promote_dtype: PromoteDtype = default_promote_dtype,
        qkv_dot_general: DotGeneral | None = None,
        out_dot_general: DotGeneral | None = None,
        qkv_dot_general_cls: Callable[[], DotGeneral] | None = None,
        out_dot_general_cls: Callable[[], DotGeneral] | None = None,
        rotary: RotaryEmbedding | None = None,
        sliding_window: int | None = None,
        section_size: int | None = None,
        query_scale: Callable[[jax.Array], jax.Array] | None = None,
        scale: float | None = None,
        logits_soft_cap: float | None = None,
        use_sinks: bool = False,
        use_gate: bool = False,
        implementation: Implementation | None = None,
        rng_collection: str = "dropout",
        ctx: Context,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        out_kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
        out_bias_metadata: Mapping[str, Any] = NO_METADATA,
        query_ln_scale_metadata: Mapping[str, Any] = NO_METADATA,
        key_ln_scale_metadata: Mapping[str, Any] = NO_METADATA,
    ) -> None:
        check_sizes(self, num_heads=num_heads, in_features=in_features)
        qkv_features = in_features if qkv_features is None else qkv_features
        out_features = in_features if out_features is None else out_features
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        in_kv_features = in_features if in_kv_features is None else in_kv_features
        head_dim = _checked_head_dim(num_heads, num_kv_heads, qkv_features, rotary)
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(EMPTY_WINDOW.format(got=sliding_window))
        if section_size is not None and section_size < 1:
            raise ValueError(EMPTY_SECTION.format(got=section_size))
        check_dropout_rate("MultiHeadAttention", dropout_rate)

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
        self.section_size = section_size
        self.query_scale = query_scale
        self.scale = scale
        self.logits_soft_cap = logits_soft_cap
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
        self.gate = projection(in_features, num_heads) if use_gate else None
        self.out = LinearGeneral(
            (num_heads, head_dim),
            out_features,
            axis=(-2, -1),
            use_bias=use_bias if use_out_bias is None else use_out_bias,
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
        self.normalize_after_rotary = normalize_after_rotary
        self.sinks = make_param(self, default_bias_init, ctx, (num_heads,)) if use_sinks else None
        self.rotary = rotary
        self.cache = None

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
            inputs_q: `[batch..., query_length, in_features]` with any number of batch axes, including none.
            inputs_k: `[batch..., key_length, in_kv_features]`; `inputs_q` by default.
            inputs_v: an array like `inputs_k`, which is its default.
            mask: an array that is true where a query may attend to a key; broadcasts to `[batch..., heads,
                query_length, key_length]`. In decode mode, `key_length` is the cache's `max_length`. A query that may
                see no key attends to nothing: the output projection gets zeros.
            deterministic: whether to skip dropout; overrides the instance's and the Context's.
            ctx: the Context, with the stream "dropout"; needed only for dropout.
            sow_weights: whether to record the attention weights as the `Intermediate` "attention_weights".
            decode: whether to append to the cache and attend to all of it, always causally; overrides the instance's.
            is_causal: whether query `i` sees only the keys `0..i`.
            out_sharding, qkv_sharding: the shardings of the results of the projections, see `jax.lax.dot_general`.
            bias: an array to add to the attention logits; broadcasts like `mask`.
            seq_lengths: `[batch...]`, the number of real tokens in each row of the keys; they come first, and the
                others are hidden. In decode mode, how many of these tokens to append: ragged prompts are padded on the
                right.
            positions: the positions of the queries for the rotary embedding, `[batch..., query_length]` or
                `[query_length]`; by default counted from 0, in decode mode from the row's index.
            key_positions: the positions of the keys; by default those of the queries, in cross-attention counted
                from 0.

        Returns:
            An array of shape `[batch..., query_length, out_features]`.
        """
        if inputs_k is None:
            if inputs_v is not None:
                raise ValueError(VALUES_WITHOUT_KEYS)
            inputs_k = inputs_q
        if inputs_v is None:
            inputs_v = inputs_k
        if key_positions is None and inputs_k is inputs_q:
            key_positions = positions
        query, key, value = self._projected(inputs_q, inputs_k, inputs_v, qkv_sharding)
        decode = self.decode if decode is None else decode
        # Options are passed only when set: a user's `attention_fn` need not know all of them.
        options: dict[str, Any] = {"mask": mask, "is_causal": is_causal}
        if bias is not None:
            options["bias"] = bias
        if decode:
            query, key, value = self._through_cache(query, key, value, seq_lengths, positions, key_positions, options)
        else:
            query, key = self._rotated(query, key, positions, key_positions)
            options["mask"] = self._within_sections(mask, query, key, positions, key_positions)
            if seq_lengths is not None:
                options["key_value_seq_lengths"] = seq_lengths
            if self.sliding_window is not None:
                reach = self.sliding_window - 1
                options["local_window_size"] = (reach, 0 if is_causal else reach)

        deterministic = self.dropout_rate == 0.0 or resolve_mode(self, "deterministic", deterministic, ctx)
        if not deterministic:
            if ctx is None:
                raise ValueError(NO_CONTEXT)
            options["dropout_rng"] = draw_key(self, self.rng_collection, ctx)
        options["module"] = self if sow_weights else None
        attended = self._attended(query, key, value, options, deterministic)
        return named(self.out(self._gated(attended, inputs_q), out_sharding), "attention_out")

    def decode_step(
        self,
        inputs: jax.Array,
        cache: LayerCache,
        lengths: jax.Array,
        seq_lengths: jax.Array | None = None,
        *,
        bias: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """Appends tokens to a cache that the caller owns, and attends causally to all tokens so far.

        The layer does not change, and nothing is dropped.

        Args:
            inputs: `[batch..., length, in_features]`, the next tokens.
            cache: the cache, see `make_cache`.
            lengths: `[batch...]`, the number of tokens each row holds before this call.
            seq_lengths: `[batch...]`, the number of real tokens in each row, which come first; others are not written.
            bias: an array to add to the attention logits; broadcasts to `[batch..., heads, length, max_length]`.

        Returns:
            An array of shape `[batch..., length, out_features]`, and the cache with the tokens appended.

        >>> layer, x = nnx.MultiHeadAttention(4, 16, ctx=nnx.context(0)), jnp.ones((2, 3, 16))
        >>> out, cache = layer.decode_step(x, layer.make_cache(2, max_length=8), lengths=jnp.array([0, 0]))
        >>> bool(jnp.allclose(out, layer(x, is_causal=True), atol=1e-5))
        True
        """
        query, key, value = self._projected(inputs, inputs, inputs)
        positions = next_positions(lengths, inputs.shape[-2])
        # Keys stay in the cache as they are rotated here, and meet queries of later tokens.
        query, key = self._rotated(query, key, positions, positions, text_length=cache.max_length)
        is_first = cache.is_empty and inputs.shape[-2] > 1
        cache = cache.append(key, value, lengths, seq_lengths)
        if bias is None and is_first:  # a kernel that knows that attention is causal skips half of the work
            seen = LayerCache(cast(key, cache.key.dtype), cast(value, cache.value.dtype))
            options: dict[str, Any] = {"is_causal": True}
            options["mask"] = self._within_sections(None, query, key, None, None)
            if self.sliding_window is not None:
                options["local_window_size"] = (self.sliding_window - 1, 0)
        elif bias is None:
            seen, options = visible_part(cache, positions, self.sliding_window, self.section_size)
        else:  # it covers all slots, so none may be cut off
            seen, options = cache, causal_options(positions, cache.max_length, self.sliding_window, self.section_size)
            options["bias"] = bias
        if self.attention_fn is dot_product_attention:
            options["assume_seen"] = True  # a token sees at least its own slot
        key, value = (cast(held, query.dtype) for held in (seen.key, seen.value))
        attended = self._attended(query, key, value, options, deterministic=True)
        return self.out(self._gated(attended, inputs)), cache

    def project_keys(self, inputs_k: jax.Array, inputs_v: jax.Array | None = None) -> LayerCache:
        """Returns keys and values for `attend_projected`: in cross-attention, those of a source that stays the same.

        Args:
            inputs_k: `[batch..., key_length, in_kv_features]`.
            inputs_v: an array like `inputs_k`, which is its default.

        >>> layer = nnx.MultiHeadAttention(4, 16, in_kv_features=8, ctx=nnx.context(0))
        >>> x, source = jnp.ones((2, 3, 16)), jnp.ones((2, 5, 8))
        >>> out = layer.attend_projected(x, layer.project_keys(source))
        >>> bool(jnp.allclose(out, layer(x, source), atol=1e-5))
        True
        """
        key, value = self._keys_and_values(inputs_k, inputs_k if inputs_v is None else inputs_v)
        key = key if self.rotary is None else self.rotary(key, None)
        return LayerCache(_normed(self.key_ln, key) if self.normalize_after_rotary else key, value)

    def attend_projected(
        self,
        inputs_q: jax.Array,
        projected: LayerCache,
        *,
        mask: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Attends to keys that were projected before; the result of a call with their inputs, without dropout.

        Args:
            inputs_q: `[batch..., query_length, in_features]`.
            projected: the keys and values, see `project_keys`.
            mask: an array that is true where a query may attend to a key, as in a call.
            positions: the positions of the queries for the rotary embedding, as in a call.
        """
        query = self._queries(inputs_q)
        query = query if self.rotary is None else self.rotary(query, positions)
        query = _normed(self.query_ln, query) if self.normalize_after_rotary else query
        key, value = (cast(held, query.dtype) for held in (projected.key, projected.value))
        attended = self._attended(query, key, value, {"mask": mask, "is_causal": False}, deterministic=True)
        return self.out(self._gated(attended, inputs_q))

    def make_cache(
        self, batch_shape: int | tuple[int, ...], max_length: int, dtype: DTypeLike = jnp.float32
    ) -> LayerCache:
        """Returns an empty cache for `decode_step`, with room for `max_length` tokens per row."""
        return LayerCache.empty(batch_shape, max_length, self.num_kv_heads, self.head_dim, dtype=dtype)

    def init_cache(self, input_shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> None:
        """Makes an empty cache, replacing any earlier one.

        Args:
            input_shape: the shape `[batch..., max_length, features]` of an input as long as the longest text to come.
            dtype: the dtype in which keys and values are stored.
        """
        if len(input_shape) < 2:
            raise ValueError(CACHE_SHAPE.format(got=tuple(input_shape)))
        *batch, max_length, _ = input_shape
        self.cache = KVCache(tuple(batch), max_length, self.num_kv_heads, self.head_dim, dtype=dtype)

    def _gated(self, attended: jax.Array, inputs_q: jax.Array) -> jax.Array:
        return attended if self.gate is None else attended * jax.nn.sigmoid(self.gate(inputs_q))

    def _projected(
        self, inputs_q: jax.Array, inputs_k: jax.Array, inputs_v: jax.Array, sharding: Any = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self._queries(inputs_q, sharding), *self._keys_and_values(inputs_k, inputs_v, sharding)

    def _queries(self, inputs_q: jax.Array, sharding: Any = None) -> jax.Array:
        self._check_input("inputs_q", inputs_q, self.in_features)
        query = self.query(inputs_q, sharding)  # [batch..., query_length, heads, head_dim]
        return query if self.normalize_after_rotary else _normed(self.query_ln, query)

    def _keys_and_values(
        self, inputs_k: jax.Array, inputs_v: jax.Array, sharding: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        self._check_input("inputs_k", inputs_k, self.in_kv_features)
        self._check_input("inputs_v", inputs_v, self.in_kv_features)
        key = self.key(inputs_k, sharding)  # [batch..., key_length, kv_heads, head_dim]
        key = key if self.normalize_after_rotary else _normed(self.key_ln, key)
        return key, self.value(inputs_v, sharding)

    def _rotated(
        self,
        query: jax.Array,
        key: jax.Array,
        positions: jax.Array | None,
        key_positions: jax.Array | None,
        text_length: int | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Applies the rotary embedding, and the norms that follow it, if any."""
        query, key = rotate_pair(self.rotary, query, key, positions, key_positions, text_length=text_length)
        if self.query_scale is not None:
            factors = self.query_scale(jnp.arange(query.shape[-3]) if positions is None else positions)
            query = query * cast(factors, query.dtype)[..., None, None]
        if not self.normalize_after_rotary:
            return query, key
        return _normed(self.query_ln, query), _normed(self.key_ln, key)

    def _within_sections(
        self, mask: Any, query: jax.Array, key: jax.Array, positions: Any, key_positions: Any
    ) -> jax.Array | None:
        """Returns a mask that also hides other sections of the text, if it has several."""
        section = self.section_size
        if section is None or (positions is None and key_positions is None and key.shape[-3] <= section):
            return mask
        places = jnp.arange(query.shape[-3]) if positions is None else positions
        others = jnp.arange(key.shape[-3]) if key_positions is None else key_positions
        same = (places // section)[..., :, None] == (others // section)[..., None, :]
        same = same[..., None, :, :]
        return same if mask is None else same & mask.astype(bool)

    def _check_input(self, name: str, inputs: jax.Array, features: int) -> None:
        shape = shape_of(self, inputs)
        if len(shape) < 2 or shape[-1] != features:
            raise ValueError(WRONG_INPUT.format(name=name, features=features, got=inputs.shape))

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
        """Returns the new queries with the keys and values of all tokens so far.

        Changes `options` so that every query sees only the tokens up to its own.
        """
        cache = self.cache
        if cache is None:
            raise ValueError(NO_CACHE)
        length = query.shape[-3]
        if key.shape[-3] != length:
            raise ValueError(DECODE_IS_SELF_ATTENTION.format(keys=key.shape[-3], queries=length))
        mask = options["mask"]
        if mask is not None and mask.shape[-1] not in (1, cache.max_length):
            raise ValueError(DECODE_MASK.format(max_length=cache.max_length, got=mask.shape))
        slots = cache.positions(length)
        positions = slots if positions is None else positions
        key_positions = positions if key_positions is None else key_positions
        query, key = self._rotated(query, key, positions, key_positions, text_length=cache.max_length)
        key, value = cache.append(key, value, seq_lengths)
        key, value = cast(key, query.dtype), cast(value, query.dtype)

        # `is_causal` would compare queries with slots as if the first query were in slot 0.
        options["is_causal"] = False
        if mask is None:
            options |= causal_options(slots, cache.max_length, self.sliding_window, self.section_size)
        else:
            # A query that sees nothing returns zeros, but no mask may hide that its row has overflowed.
            visible = cache.mask(slots, self.sliding_window, self.section_size) & mask.astype(bool)
            options["mask"] = visible | ends_poisoned(cache)[..., None, None, None]
        return query, key, value

    def _attended(
        self, query: jax.Array, key: jax.Array, value: jax.Array, options: dict[str, Any], deterministic: bool
    ) -> jax.Array:
        """Calls `attention_fn` with these options and those of the layer that are set."""
        for name in ("scale", "logits_soft_cap", "implementation", "sinks"):
            if getattr(self, name) is not None:
                options[name] = getattr(self, name)
        attended = self.attention_fn(
            named(query, "query"),
            named(key, "key"),
            named(value, "value"),
            dropout_rate=self.dropout_rate,
            broadcast_dropout=self.broadcast_dropout,
            deterministic=deterministic,
            dtype=self.dtype,
            precision=self.precision,
            **options,
        )
        return named(attended, "attention")


def _checked_head_dim(num_heads: int, num_kv_heads: int, qkv_features: int, rotary: RotaryEmbedding | None) -> int:
    """Returns the number of features of a head, after checking that it is the same everywhere."""
    if qkv_features % num_heads:
        raise ValueError(HEADS_DO_NOT_DIVIDE.format(heads=num_heads, got=qkv_features))
    if num_heads % num_kv_heads:
        raise ValueError(KV_HEADS_DO_NOT_DIVIDE.format(heads=num_heads, got=num_kv_heads))
    head_dim = qkv_features // num_heads
    if rotary is not None and rotary.head_dim != head_dim:
        raise ValueError(WRONG_ROTARY.format(expected=head_dim, got=rotary.head_dim))
    return head_dim


def _head_norm(kind: bool | Literal["layer", "rms"], head_dim: int, **options: Any) -> LayerNorm | RMSNorm | None:
    if kind is False:
        return None
    if kind == "rms":
        return RMSNorm(head_dim, **options)
    if kind is True or kind == "layer":
        return LayerNorm(head_dim, use_bias=False, **options)
    raise ValueError(WRONG_NORM.format(got=kind))


def _normed(norm: LayerNorm | RMSNorm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)
