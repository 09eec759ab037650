"""CLIP: an encoder of text and one of images, whose embeddings can be compared."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.dict_sequence import Sequence
from nnx.core.module.module import Module
from nnx.models.architectures.encoder import EncoderOutput, encoder_blocks, key_mask
from nnx.models.architectures.patches import DOES_NOT_DIVIDE, PatchEmbed
from nnx.models.files.config_entries import check_config
from nnx.models.inputs.tokens import check_tokens, too_long, without_negatives
from nnx.nn.embed import Embed, LearnedPositionEmbed
from nnx.nn.initializers import constant
from nnx.nn.linear import Linear
from nnx.nn.norms.norm import LayerNorm
from nnx.nn.support.parameters import AxisNames, make_param
from nnx.nn.support.settings import as_dtype

TOWER = ("features", "hidden_features", "num_layers", "num_heads")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CLIPTextConfig:
    """The encoder of text in a CLIP; the defaults are those of the base model.

    Args:
        vocab_size: the number of tokens.
        features: the number of features of a token between layers.
        hidden_features: the number of hidden features of the MLPs.
        num_layers: the number of layers.
        num_heads: the number of heads.
        max_length: the number of positions.
        activation: the name of the activation; one of `nnx.models.ACTIVATIONS`.
        norm_epsilon: the epsilon of every norm.
        end_token: the token that ends a text, whose features are those of the whole text. The first checkpoints say 2
            here, which means the token with the highest number.
        extra: the other entries of the `config.json` this was read from, as JSON by name. They are written back.
    """

    vocab_size: int = 49408
    features: int = 512
    hidden_features: int = 2048
    num_layers: int = 12
    num_heads: int = 8
    max_length: int = 77
    activation: str = "quick_gelu"
    norm_epsilon: float = 1e-5
    end_token: int = 49407
    extra: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check_config(self, (*TOWER, "vocab_size", "max_length"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CLIPVisionConfig:
    """The encoder of images in a CLIP; the defaults are those of the base model with patches of 32.

    Args:
        image_size: the height and width of the images.
        patch_size: the height and width of a patch.
        channels: the number of channels of the images.
        features, hidden_features, num_layers, num_heads, activation, norm_epsilon, extra: as in `CLIPTextConfig`.
    """

    image_size: int = 224
    patch_size: int = 32
    channels: int = 3
    features: int = 768
    hidden_features: int = 3072
    num_layers: int = 12
    num_heads: int = 12
    activation: str = "quick_gelu"
    norm_epsilon: float = 1e-5
    extra: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check_config(self, (*TOWER, "image_size", "patch_size", "channels"))
        if self.image_size % self.patch_size:
            raise ValueError(
                DOES_NOT_DIVIDE.format(config="CLIPVisionConfig", image=self.image_size, patch=self.patch_size)
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CLIPConfig:
    """The architecture of a CLIP.

    Args:
        text: the encoder of text.
        vision: the encoder of images.
        embedding_features: the number of features of an embedding.
        extra: the other entries of the `config.json` this was read from, as JSON by name. They are written back.

    >>> nnx.models.CLIPConfig().vision.patch_size
    32
    """

    model_type: ClassVar[str] = "clip"

    text: CLIPTextConfig = CLIPTextConfig()
    vision: CLIPVisionConfig = CLIPVisionConfig()
    embedding_features: int = 512
    extra: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check_config(self, ("embedding_features",))

    def replace(self, **changes: Any) -> "CLIPConfig":
        """Returns a copy with other values in some fields."""
        return dataclasses.replace(self, **changes)


class CLIPOutput(NamedTuple):
    """What a `CLIP` returns for texts and images.

    Attributes:
        logits_per_image: how well each text fits each image, `[images, texts]`.
        logits_per_text: the same, transposed.
        text_embeds: the embeddings of the texts, vectors of length 1.
        image_embeds: the embeddings of the images, vectors of length 1.
    """

    logits_per_image: jax.Array
    logits_per_text: jax.Array
    text_embeds: jax.Array
    image_embeds: jax.Array


class CLIPText(Module):
    """The encoder of text in a CLIP; every token sees those before it.

    Args:
        config: the architecture.
        dtype, param_dtype, ctx: as in `CLIP`.

    Attributes:
        embed: the `Embed` of tokens.
        positions: the `LearnedPositionEmbed`.
        layers: a `Sequence` of `EncoderBlock`s.
        norm: the `LayerNorm` of the hidden states.
    """

    config: CLIPTextConfig
    embed: Embed
    positions: LearnedPositionEmbed
    layers: Sequence
    norm: LayerNorm

    def __init__(
        self,
        config: CLIPTextConfig,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        ctx: Context,
    ) -> None:
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ctx": ctx}
        self.config = config
        self.embed = Embed(config.vocab_size, config.features, **options)
        self.positions = LearnedPositionEmbed(config.max_length, config.features, **options)
        self.layers = encoder_blocks(config, **options)
        self.norm = LayerNorm(config.features, epsilon=config.norm_epsilon, **options)

    def __call__(self, tokens: jax.Array, *, mask: jax.Array | None = None) -> EncoderOutput:
        """Encodes texts.

        Args:
            tokens: integers `[batch, length]`, with an end token in each row.
            mask: `[batch, length]`, true for tokens and false for padding. (Padding after the end token needs none.)

        Returns:
            The hidden states, and as `pooler_output` those of the end tokens.
        """
        config = self.config
        check_tokens("CLIPText", tokens, config.vocab_size)
        if tokens.shape[1] > config.max_length:
            raise too_long("CLIPText", config.max_length, tokens.shape[1])
        mask = None if mask is None else key_mask("CLIPText", mask, tokens)
        x = self.positions(self.embed(without_negatives(tokens, config.vocab_size)))
        for block in self.layers:
            x = block(x, mask=mask, is_causal=True)
        x = self.norm(x)
        # The position of the first end token; or, for the first checkpoints, that of the token with the highest number.
        ends = tokens if config.end_token == 2 else tokens == config.end_token
        return EncoderOutput(x, x[jnp.arange(x.shape[0]), jnp.argmax(ends, axis=-1)])


class CLIPVision(Module):
    """The encoder of images in a CLIP.

    Args:
        config: the architecture.
        dtype, param_dtype, ctx: as in `CLIP`.

    Attributes:
        embed: the `PatchEmbed`.
        pre_norm: the `LayerNorm` of its output.
        layers: a `Sequence` of `EncoderBlock`s.
        norm: the `LayerNorm` of the class token's hidden state.
    """

    config: CLIPVisionConfig
    embed: PatchEmbed
    pre_norm: LayerNorm
    layers: Sequence
    norm: LayerNorm

    def __init__(
        self,
        config: CLIPVisionConfig,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        ctx: Context,
    ) -> None:
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ctx": ctx}
        features, sizes = config.features, (config.image_size, config.patch_size, config.channels)
        self.config = config
        self.embed = PatchEmbed(*sizes, features, use_bias=False, **options)
        self.pre_norm = LayerNorm(features, epsilon=config.norm_epsilon, **options)
        self.layers = encoder_blocks(config, **options)
        self.norm = LayerNorm(features, epsilon=config.norm_epsilon, **options)

    def __call__(self, images: jax.Array) -> EncoderOutput:
        """Encodes images, floats of shape `[batch, height, width, channels]`."""
        x = self.pre_norm(self.embed(images, model="CLIPVision"))
        for block in self.layers:
            x = block(x)
        return EncoderOutput(x, self.norm(x[:, 0]))


class CLIP(Module):
    """Compares texts and images: tokens and images in, a `CLIPOutput` out.

    Args:
        config: the architecture.
        dtype: the computation dtype; by default, that of the parameters.
        param_dtype: the dtype in which the parameters are stored.
        ctx: the Context; its stream "params" initializes the parameters.

    Attributes:
        config: the architecture.
        text: the `CLIPText`.
        vision: the `CLIPVision`.
        text_projection, image_projection: the `Linear` layers from features to embeddings.
        logit_scale: the logarithm of the factor between products of embeddings and logits.

    >>> config = nnx.models.CLIPConfig(
    ...     text=nnx.models.CLIPTextConfig(
    ...         vocab_size=64, features=16, hidden_features=32, num_layers=1, num_heads=2, max_length=9, end_token=63),
    ...     vision=nnx.models.CLIPVisionConfig(
    ...         image_size=8, patch_size=4, features=16, hidden_features=32, num_layers=1, num_heads=2),
    ...     embedding_features=8)
    >>> model = nnx.models.CLIP(config, ctx=nnx.context(0))
    >>> out = model(jnp.array([[5, 9, 63], [7, 63, 0]]), jnp.ones((3, 8, 8, 3)))
    >>> out.logits_per_image.shape, out.text_embeds.shape
    ((3, 2), (2, 8))
    """

    logical_axes: ClassVar[AxisNames] = {
        "text_projection/kernel": ("embed", None),
        "image_projection/kernel": ("embed", None),
        "logit_scale": (),
    }

    config: CLIPConfig
    param_dtype: np.dtype
    text: CLIPText
    vision: CLIPVision
    text_projection: Linear
    image_projection: Linear
    logit_scale: jax.Array

    def __init__(
        self,
        config: CLIPConfig,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        ctx: Context,
    ) -> None:
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ctx": ctx}
        size = config.embedding_features
        self.config = config
        self.param_dtype = as_dtype(param_dtype)
        self.text = CLIPText(config.text, **options)
        self.vision = CLIPVision(config.vision, **options)
        self.text_projection = Linear(config.text.features, size, use_bias=False, **options)
        self.image_projection = Linear(config.vision.features, size, use_bias=False, **options)
        self.logit_scale = make_param(self, constant(2.6592), ctx, ())

    def __call__(self, tokens: jax.Array, images: jax.Array, *, mask: jax.Array | None = None) -> CLIPOutput:
        """Compares every text with every image; the arguments are those of `embed_text` and `embed_images`."""
        text_embeds, image_embeds = self.embed_text(tokens, mask=mask), self.embed_images(images)
        scale = jnp.exp(self.logit_scale).astype(text_embeds.dtype)
        logits = scale * jnp.einsum("te,ie->ti", text_embeds, image_embeds)
        return CLIPOutput(logits.T, logits, text_embeds, image_embeds)

    def embed_text(self, tokens: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Returns the embeddings of texts, vectors of length 1; the arguments are those of `CLIPText`."""
        pooled: Any = self.text(tokens, mask=mask).pooler_output
        return _unit(self.text_projection(pooled))

    def embed_images(self, images: jax.Array) -> jax.Array:
        """Returns the embeddings of images `[batch, height, width, channels]`, vectors of length 1."""
        pooled: Any = self.vision(images).pooler_output
        return _unit(self.image_projection(pooled))


def _unit(x: jax.Array) -> jax.Array:
    # In float32: the sum of squares of half-precision numbers would lose most of its digits.
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide / jnp.linalg.norm(wide, axis=-1, keepdims=True)).astype(x.dtype)
