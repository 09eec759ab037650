"""T5: an encoder and a decoder of text with relative positions, and the encoder alone.

A *stack* is the encoder or the decoder: layers, and one table of relative positions that all of them use. Attention
logits are not scaled, norms do not subtract the mean, and there are no biases.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.dict_sequence import Sequence
from nnx.core.module.module import Module
from nnx.models.activations_by_name import activation_of
from nnx.models.architectures.conditioned import Conditioned, ConditionedCache, check_rows, check_source_mask
from nnx.models.architectures.encoder import EncoderOutput
from nnx.models.architectures.relative_positions import RelativePositionBias
from nnx.models.files.config_entries import check_config
from nnx.models.inputs.tokens import check_tokens, without_negatives
from nnx.nn.attention.attention import MultiHeadAttention
from nnx.nn.attention.kv_cache import DecoderCache, LayerCache
from nnx.nn.embed import Embed
from nnx.nn.linear import Linear
from nnx.nn.mlp import MLP, GatedMLP
from nnx.nn.norms.norm import RMSNorm
from nnx.nn.support.parameters import AxisNames
from nnx.nn.support.settings import as_dtype, as_optional_dtype

SIZES = (
    *("vocab_size", "features", "hidden_features", "head_dim", "num_layers", "num_decoder_layers", "num_heads"),
    *("num_buckets", "max_distance"),
)
ENCODER_ONLY = "T5: the config has task='encoding', which means the encoder alone: use T5Encoder, or set task=None."
WHOLE_MODEL = "T5Encoder: expected task='encoding' in the config, got {got!r}, which means the whole model: use T5."


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config:
    """The architecture of a T5; the defaults are those of the small model as first published.

    Args:
        vocab_size: the number of tokens.
        features: the number of features of a token between layers.
        hidden_features: the number of hidden features of the MLPs.
        head_dim: the number of features of a head.
        num_layers: the number of layers of the encoder.
        num_decoder_layers: the number of layers of the decoder.
        num_heads: the number of heads.
        num_buckets, max_distance: the buckets of distances, see `RelativePositionBias`.
        feed_forward: the activation of the MLPs, one of `nnx.models.ACTIVATIONS`, with "gated-" before it for a
            `GatedMLP`. "gated-gelu", that of version 1.1, means the approximation by tanh.
        norm_epsilon: the epsilon of every norm.
        tie_embeddings: whether the embedding is also the output layer.
        scale_logits: whether the features are divided by the root of their number before the output layer. The first
            models do both of these, version 1.1 and later neither.
        start_token: the token that every decoded text starts with.
        task: "encoding" for the encoder alone; None for the whole model.
        extra: the other entries of the `config.json` this was read from, as JSON by name. They are written back.

    >>> nnx.models.T5Config(feed_forward="gated-gelu", tie_embeddings=False, scale_logits=False).num_heads
    8
    """

    model_type: ClassVar[str] = "t5"

    vocab_size: int = 32128
    features: int = 512
    hidden_features: int = 2048
    head_dim: int = 64
    num_layers: int = 6
    num_decoder_layers: int = 6
    num_heads: int = 8
    num_buckets: int = 32
    max_distance: int = 128
    feed_forward: str = "relu"
    norm_epsilon: float = 1e-6
    tie_embeddings: bool = True
    scale_logits: bool = True
    start_token: int = 0
    task: Literal["encoding"] | None = None
    extra: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check_config(self, SIZES, ("encoding",))

    def replace(self, **changes: Any) -> "T5Config":
        """Returns a copy with other values in some fields."""
        return dataclasses.replace(self, **changes)


class T5Block(Module):
    """One layer of a T5; each of its parts is normalized before and added to its input.

    Args:
        config: the architecture.
        decoder: whether it is a layer of the decoder, which attends to the source as well.
        dtype, param_dtype, ctx: as in `T5`.

    Attributes:
        attention: the `MultiHeadAttention` of the text to itself.
        cross_attention: that to the source, or None in the encoder.
        mlp: a `GatedMLP` or an `MLP`.
        attention_norm, cross_attention_norm, mlp_norm: the `RMSNorm`s of their inputs.
    """

    attention: MultiHeadAttention
    attention_norm: RMSNorm
    cross_attention: MultiHeadAttention | None
    cross_attention_norm: RMSNorm | None
    mlp: GatedMLP | MLP
    mlp_norm: RMSNorm

    def __init__(self, config: T5Config, decoder: bool, **options: Any) -> None:
        def attention() -> MultiHeadAttention:
            width = config.num_heads * config.head_dim
            return MultiHeadAttention(config.num_heads, config.features, width, scale=1.0, use_bias=False, **options)

        self.attention = attention()
        self.attention_norm = _norm(config, options)
        self.cross_attention = attention() if decoder else None
        self.cross_attention_norm = _norm(config, options) if decoder else None
        self.mlp = _mlp(config, options)
        self.mlp_norm = _norm(config, options)

    def __call__(
        self,
        x: jax.Array,
        bias: jax.Array,
        *,
        mask: jax.Array | None = None,
        source: LayerCache | None = None,
    ) -> jax.Array:
        """Applies the layer to whole texts.

        Args:
            x: an array of shape `[batch, length, features]`.
            bias: the relative positions, `[heads, length, length]`.
            mask: an array that is true where a token may see another token, or part of the source if there is one.
            source: the projected source; with it, the layer is that of a decoder, and causal.
        """
        own_mask = mask if source is None else None
        x = x + self.attention(self.attention_norm(x), bias=bias, mask=own_mask, is_causal=source is not None)
        return self._rest(x, source, mask)

    def decode_step(
        self,
        x: jax.Array,
        bias: jax.Array,
        cache: LayerCache,
        text_lengths: jax.Array,
        lengths: jax.Array | None,
        *,
        source: LayerCache,
        mask: jax.Array | None,
    ) -> tuple[jax.Array, LayerCache]:
        """Applies the layer to the next tokens, see `MultiHeadAttention.decode_step`."""
        attended, cache = self.attention.decode_step(self.attention_norm(x), cache, text_lengths, lengths, bias=bias)
        return self._rest(x + attended, source, mask), cache

    def _rest(self, x: jax.Array, source: LayerCache | None, mask: jax.Array | None) -> jax.Array:
        if self.cross_attention is not None and self.cross_attention_norm is not None and source is not None:
            x = x + self.cross_attention.attend_projected(self.cross_attention_norm(x), source, mask=mask)
        return x + self.mlp(self.mlp_norm(x))


class T5Stack(Module):
    """The encoder or the decoder of a T5, without the embedding.

    Args:
        config: the architecture.
        decoder: whether it is the decoder.
        dtype, param_dtype, ctx: as in `T5`.

    Attributes:
        positions: the `RelativePositionBias` that all layers use.
        layers: a `Sequence` of `T5Block`s.
        norm: the `RMSNorm` of the result.
    """

    positions: RelativePositionBias
    layers: Sequence
    norm: RMSNorm

    def __init__(self, config: T5Config, decoder: bool, **options: Any) -> None:
        self.positions = RelativePositionBias(
            config.num_buckets, config.max_distance, config.num_heads, bidirectional=not decoder, **options
        )
        number = config.num_decoder_layers if decoder else config.num_layers
        self.layers = Sequence(T5Block(config, decoder, **options) for _ in range(number))
        self.norm = _norm(config, options)

    def __call__(
        self, x: jax.Array, *, mask: jax.Array | None = None, source: tuple[LayerCache, ...] | None = None
    ) -> jax.Array:
        """Applies the layers to whole texts; the arguments are those of `T5Block`, with a source for each layer."""
        positions = jnp.arange(x.shape[1])
        bias = self.positions(positions, positions)
        for i, block in enumerate(self.layers):
            x = block(x, bias, mask=mask, source=None if source is None else source[i])
        return self.norm(x)

    def projected(self, encoded: jax.Array) -> tuple[LayerCache, ...]:
        """Returns the keys and values of a source for each layer of a decoder."""
        return tuple(block.cross_attention.project_keys(encoded) for block in self.layers)


class _WithEncoder(Module):
    """What `T5` and `T5Encoder` share: the embedding and the encoder."""

    config: T5Config
    dtype: np.dtype | None
    param_dtype: np.dtype
    embed: Embed
    encoder: T5Stack

    def __init__(
        self,
        config: T5Config,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        ctx: Context,
    ) -> None:
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ctx": ctx}
        self.config = config
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.embed = Embed(config.vocab_size, config.features, **options)
        self.encoder = T5Stack(config, decoder=False, **options)

    def encode(self, tokens: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Encodes texts.

        Args:
            tokens: integers `[batch, length]` within `0..vocab_size - 1`. Others are an error; inside a transform,
                where values are unknown, they turn their row into NaN.
            mask: `[batch, length]`, true for tokens and false for padding.

        Returns:
            An array of shape `[batch, length, features]`.
        """
        x = self._embedded(tokens)
        check_source_mask(type(self).__name__, mask, x)
        return self.encoder(x, mask=_key_mask(mask))

    def _embedded(self, tokens: jax.Array) -> jax.Array:
        check_tokens(type(self).__name__, tokens, self.config.vocab_size)
        return self.embed(without_negatives(tokens, self.config.vocab_size))


class T5Encoder(_WithEncoder):
    """The encoder of a T5: tokens `[batch, length]` in, an `EncoderOutput` without a pooled one out.

    Args:
        config: the architecture, with `task="encoding"`.
        dtype, param_dtype, ctx: as in `T5`.

    Attributes:
        config: the architecture.
        embed: the `Embed` of tokens.
        encoder: the `T5Stack`.

    >>> config = nnx.models.T5Config(
    ...     vocab_size=64, features=16, hidden_features=32, head_dim=4, num_layers=2, num_heads=4, task="encoding")
    >>> model = nnx.models.T5Encoder(config, ctx=nnx.context(0))
    >>> model(jnp.array([[3, 1, 4, 1, 5]])).last_hidden_state.shape
    (1, 5, 16)
    """

    def __init__(
        self,
        config: T5Config,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        ctx: Context,
    ) -> None:
        if config.task != "encoding":
            raise ValueError(WHOLE_MODEL.format(got=config.task))
        super().__init__(config, dtype=dtype, param_dtype=param_dtype, ctx=ctx)

    def __call__(self, tokens: jax.Array, mask: jax.Array | None = None) -> EncoderOutput:
        """Encodes texts; the arguments are those of `encode`."""
        return EncoderOutput(self.encode(tokens, mask), None)


class T5(_WithEncoder):
    """An encoder-decoder: a source and the text so far in, logits of the next tokens out.

    Args:
        config: the architecture.
        dtype: the computation dtype; by default, that of the parameters.
        param_dtype: the dtype in which the parameters are stored.
        ctx: the Context; its stream "params" initializes the parameters.

    Attributes:
        config: the architecture.
        embed: the `Embed` of tokens, of the source and of the text.
        encoder, decoder: the `T5Stack`s.
        head: the output layer, or None if it is the transposed embedding.

    >>> config = nnx.models.T5Config(
    ...     vocab_size=64, features=16, hidden_features=32, head_dim=4, num_layers=2, num_decoder_layers=2, num_heads=4)
    >>> model = nnx.models.T5(config, ctx=nnx.context(0))
    >>> source, start = jnp.array([[3, 1, 4, 1, 5]]), jnp.array([[config.start_token]])
    >>> model(source, start).shape
    (1, 1, 64)
    >>> conditioned = model.conditioned(model.encode(source))
    >>> nnx.generate(conditioned, start, max_new_tokens=6, temperature=0).shape
    (1, 6)
    """

    logical_axes: ClassVar[AxisNames] = {"head/kernel": ("embed", "vocab")}

    decoder: T5Stack
    head: Linear | None

    def __init__(
        self,
        config: T5Config,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        ctx: Context,
    ) -> None:
        if config.task is not None:
            raise ValueError(ENCODER_ONLY)
        super().__init__(config, dtype=dtype, param_dtype=param_dtype, ctx=ctx)
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ctx": ctx}
        self.decoder = T5Stack(config, decoder=True, **options)
        self.head = (
            None if config.tie_embeddings else Linear(config.features, config.vocab_size, use_bias=False, **options)
        )

    def __call__(self, tokens: jax.Array, decoder_tokens: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Returns the logits of the token after each one of a text.

        Args:
            tokens: the source, see `encode`.
            decoder_tokens: the text, integers `[batch, length]`; it begins with `config.start_token`.
            mask: `[batch, source_length]`, true for tokens of the source and false for padding.

        Returns:
            Logits of shape `[batch, length, vocab_size]`.
        """
        encoded = self.encode(tokens, mask)
        x = self.decoder(self._embedded(decoder_tokens), mask=_key_mask(mask), source=self.decoder.projected(encoded))
        return self._logits(x)

    def conditioned(self, encoded: jax.Array, mask: jax.Array | None = None) -> Conditioned:
        """Returns the model together with a source, as `nnx.generate` takes it.

        Args:
            encoded: what `encode` returned.
            mask: `[batch, source_length]`, as for `encode`.
        """
        return Conditioned(self, encoded, mask)

    def init_cache(
        self, encoded: jax.Array, length: int, *, mask: jax.Array | None = None, dtype: DTypeLike | None = None
    ) -> ConditionedCache:
        """Returns a cache for `decode`, with the source and no text.

        Args:
            encoded: what `encode` returned.
            length: the number of tokens that each row can hold.
            mask: `[batch, source_length]`, as for `encode`.
            dtype: the dtype in which the keys and values of the text are stored; that of `encoded` by default.
        """
        check_source_mask("T5.init_cache", mask, encoded)
        heads = [(self.config.num_heads, self.config.head_dim)] * self.config.num_decoder_layers
        text = DecoderCache.empty(encoded.shape[0], length, heads, dtype=encoded.dtype if dtype is None else dtype)
        return ConditionedCache(
            text, self.decoder.projected(encoded), None if mask is None else jnp.asarray(mask, bool)
        )

    def decode(
        self, tokens: jax.Array, cache: ConditionedCache, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, ConditionedCache]:
        """Appends tokens to the text in a cache, and returns the logits of the token after each one.

        Args:
            tokens: integers `[batch, length]`, the next tokens of each row.
            cache: the cache, see `init_cache`.
            lengths: `[batch]`, the number of real tokens in each row, which come first; all of them by default.

        Returns:
            Logits `[batch, length, vocab_size]`, and the cache with the tokens added.
        """
        check_rows("T5", tokens, cache)
        x, text = self._embedded(tokens), cache.text
        positions = text.lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        bias = self.decoder.positions(positions, jnp.arange(text.max_length, dtype=jnp.int32))
        layers = []
        for block, held, source in zip(self.decoder.layers, text.layers, cache.source, strict=True):
            options: dict[str, Any] = {"source": source, "mask": _key_mask(cache.mask)}
            x, held = block.decode_step(x, bias, held, text.lengths, lengths, **options)
            layers.append(held)
        text = text.advanced(layers, tokens.shape[1] if lengths is None else lengths)
        return self._logits(self.decoder.norm(x)), dataclasses.replace(cache, text=text)

    def _logits(self, x: jax.Array) -> jax.Array:
        if self.config.scale_logits:
            x = x * jnp.asarray(self.config.features**-0.5, x.dtype)
        return self.embed.attend(x) if self.head is None else self.head(x)


def _norm(config: T5Config, options: dict[str, Any]) -> RMSNorm:
    return RMSNorm(config.features, epsilon=config.norm_epsilon, **options)


def _mlp(config: T5Config, options: dict[str, Any]) -> GatedMLP | MLP:
    name = config.feed_forward
    gated = name.startswith("gated-")
    activation = activation_of("gelu_new" if name == "gated-gelu" else name.removeprefix("gated-"))
    mlp: Any = GatedMLP if gated else MLP
    return mlp(
        config.features, config.hidden_features, config.features, activation=activation, use_bias=False, **options
    )


def _key_mask(mask: jax.Array | None) -> jax.Array | None:
    """Returns a mask of the source as one of keys, `[batch, heads, query, key]`."""
    return None if mask is None else mask[:, None, None, :]
