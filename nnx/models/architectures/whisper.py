"""Whisper: an encoder of speech and a decoder of text."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.dict_sequence import Sequence
from nnx.core.module.module import Module
from nnx.models.activations_by_name import activation_of
from nnx.models.architectures.conditioned import Conditioned, ConditionedCache, check_rows, check_source_mask
from nnx.models.architectures.encoder import EncoderBlock
from nnx.models.files.config_entries import HEADS_DO_NOT_DIVIDE, check_config
from nnx.models.inputs.tokens import check_tokens, too_long, without_negatives
from nnx.nn.attention.attention import MultiHeadAttention
from nnx.nn.attention.kv_cache import DecoderCache, LayerCache
from nnx.nn.conv import Conv
from nnx.nn.embed import Embed, LearnedPositionEmbed
from nnx.nn.linear import LinearGeneral
from nnx.nn.norms.norm import LayerNorm
from nnx.nn.support.parameters import AxisNames
from nnx.nn.support.settings import as_dtype, as_optional_dtype

SIZES = (
    *("vocab_size", "features", "num_bands", "max_source_length", "max_length"),
    *("num_layers", "num_encoder_heads", "hidden_features"),
    *("num_decoder_layers", "num_decoder_heads", "decoder_hidden_features"),
)
EPSILON = 1e-5
WRONG_FEATURES = (
    "Whisper: expected sound as [batch, {frames}, {bands}] (frames and mel bands, see nnx.models.log_mel), got {got}."
)
NOT_FLOATS = "Whisper: expected sound as floating-point numbers, got dtype {got}. See nnx.models.log_mel."


@dataclasses.dataclass(frozen=True, kw_only=True)
class WhisperConfig:
    """The architecture of a Whisper; the defaults are those of the tiny model.

    Args:
        vocab_size: the number of tokens.
        features: the number of features of a frame or token between layers.
        num_bands: the number of mel bands of the sound.
        max_source_length: the number of positions of the encoder; sound has twice as many frames.
        max_length: the number of positions of the decoder.
        num_layers, num_encoder_heads, hidden_features: the layers of the encoder, their heads, and the hidden features
            of their MLPs.
        num_decoder_layers, num_decoder_heads, decoder_hidden_features: those of the decoder.
        activation: the name of the activation; one of `nnx.models.ACTIVATIONS`.
        start_token: the token that every text starts with.
        extra: the other entries of the `config.json` this was read from, as JSON by name. They are written back.

    >>> nnx.models.WhisperConfig(num_bands=128).max_source_length
    1500
    """

    model_type: ClassVar[str] = "whisper"

    vocab_size: int = 51865
    features: int = 384
    num_bands: int = 80
    max_source_length: int = 1500
    max_length: int = 448
    num_layers: int = 4
    num_encoder_heads: int = 6
    hidden_features: int = 1536
    num_decoder_layers: int = 4
    num_decoder_heads: int = 6
    decoder_hidden_features: int = 1536
    activation: str = "gelu"
    start_token: int = 50257
    extra: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check_config(self, SIZES)
        for heads in (self.num_encoder_heads, self.num_decoder_heads):
            if self.features % heads:
                raise ValueError(
                    HEADS_DO_NOT_DIVIDE.format(config="WhisperConfig", features=self.features, heads=heads)
                )

    def replace(self, **changes: Any) -> "WhisperConfig":
        """Returns a copy with other values in some fields."""
        return dataclasses.replace(self, **changes)


class WhisperEncoder(Module):
    """The encoder of a Whisper: sound `[batch, frames, bands]` in, `[batch, frames / 2, features]` out.

    Args:
        config: the architecture.
        dtype, param_dtype, ctx: as in `Whisper`.

    Attributes:
        conv, halving_conv: the `Conv`s at the start; the second one halves the number of frames.
        positions: the `LearnedPositionEmbed`, which starts out as sines and cosines.
        layers: a `Sequence` of `EncoderBlock`s, whose keys have no bias.
        norm: the `LayerNorm` of the result.
    """

    logical_axes: ClassVar[AxisNames] = {
        "conv/kernel": (None, None, "embed"),
        "conv/bias": ("embed",),
        "halving_conv/kernel": (None, None, "embed"),
        "halving_conv/bias": ("embed",),
    }

    config: WhisperConfig
    conv: Conv
    halving_conv: Conv
    positions: LearnedPositionEmbed
    layers: Sequence
    norm: LayerNorm

    def __init__(self, config: WhisperConfig, **options: Any) -> None:
        features = config.features
        around = ((1, 1),)  # "SAME" would pad only the end when it halves
        self.config = config
        self.conv = Conv(config.num_bands, features, (3,), padding=around, **options)
        self.halving_conv = Conv(features, features, (3,), 2, padding=around, **options)
        self.positions = LearnedPositionEmbed(config.max_source_length, features, embedding_init=_sinusoids, **options)
        self.layers = Sequence(
            EncoderBlock(
                features,
                config.hidden_features,
                config.num_encoder_heads,
                activation=activation_of(config.activation),
                epsilon=EPSILON,
                **options,
            )
            for _ in range(config.num_layers)
        )
        for block in self.layers:
            _without_key_bias(block.attention, options)
        self.norm = LayerNorm(features, epsilon=EPSILON, **options)

    def __call__(self, sound: jax.Array) -> jax.Array:
        """Encodes sound, `[batch, 2 * max_source_length, num_bands]`."""
        expected = (2 * self.config.max_source_length, self.config.num_bands)
        if sound.ndim != 3 or sound.shape[1:] != expected:
            raise ValueError(WRONG_FEATURES.format(frames=expected[0], bands=expected[1], got=sound.shape))
        if not jnp.issubdtype(sound.dtype, jnp.floating):
            raise ValueError(NOT_FLOATS.format(got=sound.dtype))
        # Sound comes as float32 and does not decide the dtype of the computation.
        sound = sound.astype(self.conv.kernel.dtype if self.conv.dtype is None else self.conv.dtype)
        activation = activation_of("gelu")  # that of the convolutions does not depend on the config
        x = self.positions(activation(self.halving_conv(activation(self.conv(sound)))))
        for block in self.layers:
            x = block(x)
        return self.norm(x)


class WhisperDecoderBlock(Module):
    """One layer of the decoder of a Whisper: an `EncoderBlock` with attention to the source between its two parts.

    Args:
        config: the architecture.
        dtype, param_dtype, ctx: as in `Whisper`.

    Attributes:
        text: an `EncoderBlock`: the attention of the text to itself, the MLP, and their norms.
        cross_attention: the `MultiHeadAttention` to the source, after that of the text to itself.
        cross_attention_norm: the `LayerNorm` of its input.
    """

    text: EncoderBlock
    cross_attention: MultiHeadAttention
    cross_attention_norm: LayerNorm

    def __init__(self, config: WhisperConfig, **options: Any) -> None:
        heads, features = config.num_decoder_heads, config.features
        self.text = EncoderBlock(
            features,
            config.decoder_hidden_features,
            heads,
            activation=activation_of(config.activation),
            epsilon=EPSILON,
            **options,
        )
        self.cross_attention = MultiHeadAttention(heads, features, **options)
        self.cross_attention_norm = LayerNorm(features, epsilon=EPSILON, **options)
        for attention in (self.text.attention, self.cross_attention):
            _without_key_bias(attention, options)

    def __call__(self, x: jax.Array, source: LayerCache, mask: jax.Array | None = None) -> jax.Array:
        """Applies the layer to whole texts, `[batch, length, features]`."""
        attended = self.text.attention(self.text.attention_norm(x), is_causal=True)
        return self._rest(x + attended, source, mask)

    def decode_step(
        self,
        x: jax.Array,
        cache: LayerCache,
        text_lengths: jax.Array,
        lengths: jax.Array | None,
        source: LayerCache,
        mask: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """Applies the layer to the next tokens, see `MultiHeadAttention.decode_step`."""
        normed = self.text.attention_norm(x)
        attended, cache = self.text.attention.decode_step(normed, cache, text_lengths, lengths)
        return self._rest(x + attended, source, mask), cache

    def _rest(self, x: jax.Array, source: LayerCache, mask: jax.Array | None) -> jax.Array:
        x = x + self.cross_attention.attend_projected(self.cross_attention_norm(x), source, mask=mask)
        return x + self.text.mlp(self.text.mlp_norm(x))


class Whisper(Module):
    """A speech recognizer: sound and the text so far in, logits of the next tokens out.

    Args:
        config: the architecture.
        dtype: the computation dtype; by default, that of the parameters.
        param_dtype: the dtype in which the parameters are stored.
        ctx: the Context; its stream "params" initializes the parameters.

    Attributes:
        config: the architecture.
        encoder: the `WhisperEncoder`.
        embed: the `Embed` of tokens, which is also the output layer.
        positions: the `LearnedPositionEmbed` of the text.
        layers: a `Sequence` of `WhisperDecoderBlock`s.
        norm: the `LayerNorm` before the output layer.

    >>> config = nnx.models.WhisperConfig(
    ...     vocab_size=64, features=16, num_bands=8, max_source_length=10, max_length=20, num_layers=1,
    ...     num_encoder_heads=4, hidden_features=32, num_decoder_layers=1, num_decoder_heads=4,
    ...     decoder_hidden_features=32, start_token=1)
    >>> model = nnx.models.Whisper(config, ctx=nnx.context(0))
    >>> sound = nnx.models.log_mel(np.zeros(3200), num_bands=8, num_frames=20)[None]
    >>> start = jnp.array([[config.start_token]])
    >>> model(sound, start).shape
    (1, 1, 64)
    >>> nnx.generate(model.conditioned(model.encode(sound)), start, max_new_tokens=5, temperature=0).shape
    (1, 5)
    """

    config: WhisperConfig
    dtype: np.dtype | None
    param_dtype: np.dtype
    encoder: WhisperEncoder
    embed: Embed
    positions: LearnedPositionEmbed
    layers: Sequence
    norm: LayerNorm

    def __init__(
        self,
        config: WhisperConfig,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        ctx: Context,
    ) -> None:
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ctx": ctx}
        self.config = config
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.encoder = WhisperEncoder(config, **options)
        self.embed = Embed(config.vocab_size, config.features, **options)
        self.positions = LearnedPositionEmbed(config.max_length, config.features, **options)
        self.layers = Sequence(WhisperDecoderBlock(config, **options) for _ in range(config.num_decoder_layers))
        self.norm = LayerNorm(config.features, epsilon=EPSILON, **options)

    def __call__(self, sound: jax.Array, decoder_tokens: jax.Array) -> jax.Array:
        """Returns the logits of the token after each one of a text.

        Args:
            sound: the logarithm of the power in each mel band, `[batch, 2 * max_source_length, num_bands]`, see
                `log_mel`.
            decoder_tokens: the text, integers `[batch, length]` within `0..vocab_size - 1`. Others are an error; inside
                a transform, where values are unknown, they turn their row into NaN.

        Returns:
            Logits of shape `[batch, length, vocab_size]`.
        """
        length = decoder_tokens.shape[-1]
        if length > self.config.max_length:
            raise too_long("Whisper", self.config.max_length, length)
        x, source = self._embedded(decoder_tokens, None), self._projected(self.encode(sound))
        for block, held in zip(self.layers, source, strict=True):
            x = block(x, held)
        return self.embed.attend(self.norm(x))

    @property
    def max_length(self) -> int:
        """The longest text the model can write."""
        return self.config.max_length

    def encode(self, sound: jax.Array) -> jax.Array:
        """Encodes sound: `[batch, 2 * max_source_length, num_bands]` to `[batch, max_source_length, features]`."""
        return self.encoder(jnp.asarray(sound))

    def conditioned(self, encoded: jax.Array, mask: jax.Array | None = None) -> Conditioned:
        """Returns the model together with encoded sound, as `nnx.generate` takes it.

        Args:
            encoded: what `encode` returned.
            mask: `[batch, max_source_length]`, true for what the decoder may see; all of it by default, which is how
                the models were trained.
        """
        return Conditioned(self, encoded, mask)

    def init_cache(
        self, encoded: jax.Array, length: int, *, mask: jax.Array | None = None, dtype: DTypeLike | None = None
    ) -> ConditionedCache:
        """Returns a cache for `decode`, with the encoded sound and no text.

        Args:
            encoded: what `encode` returned.
            length: the number of tokens that each row can hold.
            mask: `[batch, max_source_length]`, as for `conditioned`.
            dtype: the dtype in which the keys and values of the text are stored; that of `encoded` by default.
        """
        check_source_mask("Whisper.init_cache", mask, encoded)
        heads = self.config.num_decoder_heads
        layers = [(heads, self.config.features // heads)] * self.config.num_decoder_layers
        text = DecoderCache.empty(encoded.shape[0], length, layers, dtype=encoded.dtype if dtype is None else dtype)
        return ConditionedCache(text, self._projected(encoded), None if mask is None else jnp.asarray(mask, bool))

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
        check_rows("Whisper", tokens, cache)
        text = cache.text
        x = self._embedded(tokens, text.lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32))
        mask = None if cache.mask is None else cache.mask[:, None, None, :]
        layers = []
        for block, held, source in zip(self.layers, text.layers, cache.source, strict=True):
            x, held = block.decode_step(x, held, text.lengths, lengths, source, mask)
            layers.append(held)
        text = text.advanced(layers, tokens.shape[1] if lengths is None else lengths)
        return self.embed.attend(self.norm(x)), dataclasses.replace(cache, text=text)

    def _embedded(self, tokens: jax.Array, positions: jax.Array | None) -> jax.Array:
        check_tokens("Whisper", tokens, self.config.vocab_size)
        return self.positions(self.embed(without_negatives(tokens, self.config.vocab_size)), positions)

    def _projected(self, encoded: jax.Array) -> tuple[LayerCache, ...]:
        return tuple(block.cross_attention.project_keys(encoded) for block in self.layers)


def _without_key_bias(attention: MultiHeadAttention, options: dict[str, Any]) -> None:
    """Replaces the projection of keys by one without bias; `use_bias=False` would affect all three."""
    heads = (attention.num_heads, attention.head_dim)
    attention.key = LinearGeneral(attention.in_kv_features, heads, use_bias=False, **options)


def _sinusoids(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """An initializer: sines in the first half of the features, cosines in the second."""
    length, features = shape
    half = features // 2
    frequencies = np.exp(-math.log(10_000.0) * np.arange(half) / max(1, half - 1))
    angles = np.arange(length)[:, None] * frequencies
    waves = np.concatenate([np.sin(angles), np.cos(angles), np.zeros((length, features - 2 * half))], axis=1)
    return jnp.asarray(waves, dtype)
