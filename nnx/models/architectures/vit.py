"""ViT: an encoder of images, plain (`ViT`) or as a classifier (`ViTClassifier`)."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.dict_sequence import Sequence
from nnx.core.module.module import Module
from nnx.models.architectures.encoder import EncoderOutput, encoder_blocks
from nnx.models.architectures.patches import DOES_NOT_DIVIDE, PatchEmbed
from nnx.models.files.config_entries import TWO_LABELS, check_config
from nnx.nn.linear import Linear
from nnx.nn.norms.norm import LayerNorm
from nnx.nn.support.parameters import AxisNames
from nnx.nn.support.settings import as_dtype

SIZES = ("image_size", "patch_size", "channels", "features", "hidden_features", "num_layers", "num_heads")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """The architecture of a ViT; the defaults are those of the base model.

    Args:
        image_size: the height and width of the images.
        patch_size: the height and width of a patch.
        channels: the number of channels of the images.
        features: the number of features of a patch between layers.
        hidden_features: the number of hidden features of the MLPs.
        num_layers: the number of layers.
        num_heads: the number of heads.
        activation: the name of the activation; one of `nnx.models.ACTIVATIONS`.
        norm_epsilon: the epsilon of every norm.
        use_qkv_bias: whether the projections of queries, keys and values have biases.
        task: "image_classification", or None for the plain model.
        labels: the names of the classes.
        extra: the other entries of the `config.json` this was read from, as JSON by name. They are written back.

    >>> nnx.models.ViTConfig(image_size=384).replace(task="image_classification").task
    'image_classification'
    """

    model_type: ClassVar[str] = "vit"

    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    features: int = 768
    hidden_features: int = 3072
    num_layers: int = 12
    num_heads: int = 12
    activation: str = "gelu"
    norm_epsilon: float = 1e-12
    use_qkv_bias: bool = True
    task: Literal["image_classification"] | None = None
    labels: tuple[str, ...] = TWO_LABELS
    extra: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check_config(self, SIZES, ("image_classification",))
        if self.image_size % self.patch_size:
            raise ValueError(DOES_NOT_DIVIDE.format(config="ViTConfig", image=self.image_size, patch=self.patch_size))

    def replace(self, **changes: Any) -> "ViTConfig":
        """Returns a copy with other values in some fields."""
        return dataclasses.replace(self, **changes)


class ViT(Module):
    """An encoder of images: `[batch, height, width, channels]` in, an `EncoderOutput` out.

    The first of the hidden states belongs to the class token, the others to the patches, row by row.

    Args:
        config: the architecture.
        dtype: the computation dtype; by default, that of the parameters.
        param_dtype: the dtype in which the parameters are stored.
        ctx: the Context; its stream "params" initializes the parameters.

    Attributes:
        config: the architecture.
        embed: the `PatchEmbed`.
        layers: a `Sequence` of `EncoderBlock`s.
        norm: the `LayerNorm` of the hidden states.
        pooler: the `Linear` layer behind `pooler_output`; None in a classifier.

    >>> config = nnx.models.ViTConfig(
    ...     image_size=8, patch_size=4, features=16, hidden_features=32, num_layers=2, num_heads=4)
    >>> out = nnx.models.ViT(config, ctx=nnx.context(0))(jnp.ones((2, 8, 8, 3)))
    >>> out.last_hidden_state.shape, out.pooler_output.shape
    ((2, 5, 16), (2, 16))
    """

    logical_axes: ClassVar[AxisNames] = {"pooler/kernel": ("embed", None), "pooler/bias": (None,)}

    config: ViTConfig
    param_dtype: np.dtype
    embed: PatchEmbed
    layers: Sequence
    norm: LayerNorm
    pooler: Linear | None

    def __init__(
        self,
        config: ViTConfig,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        ctx: Context,
    ) -> None:
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ctx": ctx}
        features = config.features
        self.config = config
        self.param_dtype = as_dtype(param_dtype)
        self.embed = PatchEmbed(config.image_size, config.patch_size, config.channels, features, **options)
        self.layers = encoder_blocks(config, use_qkv_bias=config.use_qkv_bias, **options)
        self.norm = LayerNorm(features, epsilon=config.norm_epsilon, **options)
        self.pooler = Linear(features, features, **options) if config.task is None else None

    def __call__(self, images: jax.Array) -> EncoderOutput:
        """Encodes images, floats of shape `[batch, height, width, channels]`."""
        x = self.embed(images, model="ViT")
        for block in self.layers:
            x = block(x)
        x = self.norm(x)
        return EncoderOutput(x, None if self.pooler is None else jnp.tanh(self.pooler(x[:, 0])))


class ViTClassifier(Module):
    """A `ViT` with a classifier: images `[batch, height, width, channels]` in, logits `[batch, labels]` out.

    Args:
        config: the architecture; its task becomes "image_classification".
        dtype, param_dtype, ctx: as in `ViT`.

    Attributes:
        config: the architecture.
        encoder: the `ViT`.
        head: the `Linear` layer that makes logits of the class token.

    >>> config = nnx.models.ViTConfig(
    ...     image_size=8, patch_size=4, features=16, hidden_features=32, num_layers=1, num_heads=4,
    ...     labels=("cat", "dog"))
    >>> nnx.models.ViTClassifier(config, ctx=nnx.context(0))(jnp.ones((5, 8, 8, 3))).shape
    (5, 2)
    """

    logical_axes: ClassVar[AxisNames] = {"head/kernel": ("embed", None), "head/bias": (None,)}

    config: ViTConfig
    param_dtype: np.dtype
    encoder: ViT
    head: Linear

    def __init__(
        self,
        config: ViTConfig,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        ctx: Context,
    ) -> None:
        self.config = config = config.replace(task="image_classification")
        self.param_dtype = as_dtype(param_dtype)
        self.encoder = ViT(config, dtype=dtype, param_dtype=param_dtype, ctx=ctx)
        self.head = Linear(config.features, len(config.labels), dtype=dtype, param_dtype=param_dtype, ctx=ctx)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the logits of images."""
        return self.head(self.encoder(images).last_hidden_state[:, 0])
