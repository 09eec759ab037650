"""ResNet: a convolutional encoder of images, plain (`ResNet`) or as a classifier (`ResNetClassifier`).

A network is a *stem* followed by *stages* of *blocks*. A block adds its input to the output of its convolutions; if the
shapes differ, the input passes through a *shortcut*.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.dict_sequence import Sequence
from nnx.core.module.module import Module
from nnx.models.activations_by_name import activation_of
from nnx.models.architectures.encoder import EncoderOutput
from nnx.models.architectures.patches import checked_images
from nnx.models.files.config_entries import TWO_LABELS, check_config
from nnx.nn.activations import relu
from nnx.nn.conv import Conv
from nnx.nn.linear import Linear
from nnx.nn.norms.batch_norm import BatchNorm
from nnx.nn.pool import max_pool
from nnx.nn.support.parameters import AxisNames
from nnx.nn.support.settings import as_dtype, as_optional_dtype

WRONG_STAGES = "ResNetConfig: expected one depth per stage, got stage_features={features} and depths={depths}."
UNKNOWN_BLOCK = "ResNetConfig: expected block to be 'basic' or 'bottleneck', got {got!r}."
NOT_FOUR = "ResNetConfig: a bottleneck has a quarter of its stage's features: expected multiples of 4, got {got}."


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """The architecture of a ResNet; the defaults are those of ResNet-50.

    Args:
        channels: the number of channels of the images.
        stem_features: the number of features after the stem.
        stage_features: the number of features of each stage.
        depths: the number of blocks of each stage.
        block: "basic" (two convolutions) or "bottleneck" (three, the middle one with a quarter of the features).
        activation: the name of the activation after the stem and after each block, one of `nnx.models.ACTIVATIONS`.
            Within a block it is always ReLU, as in `transformers`.
        downsample_first_stage: whether the first stage halves the image as well.
        downsample_in_bottleneck: whether the first convolution of a bottleneck halves the image, instead of the
            second.
        task: "image_classification", or None for the plain model.
        labels: the names of the classes.
        extra: the other entries of the `config.json` this was read from, as JSON by name. They are written back.

    >>> nnx.models.ResNetConfig(depths=(2, 2, 2, 2), stage_features=(64, 128, 256, 512), block="basic").block
    'basic'
    """

    model_type: ClassVar[str] = "resnet"

    channels: int = 3
    stem_features: int = 64
    stage_features: tuple[int, ...] = (256, 512, 1024, 2048)
    depths: tuple[int, ...] = (3, 4, 6, 3)
    block: str = "bottleneck"
    activation: str = "relu"
    downsample_first_stage: bool = False
    downsample_in_bottleneck: bool = False
    task: Literal["image_classification"] | None = None
    labels: tuple[str, ...] = TWO_LABELS
    extra: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check_config(self, ("channels", "stem_features", "stage_features", "depths"), ("image_classification",))
        if len(self.depths) != len(self.stage_features) or not self.depths:
            raise ValueError(WRONG_STAGES.format(features=self.stage_features, depths=self.depths))
        if self.block not in ("basic", "bottleneck"):
            raise ValueError(UNKNOWN_BLOCK.format(got=self.block))
        if self.block == "bottleneck" and any(features % 4 for features in self.stage_features):
            raise ValueError(NOT_FOUR.format(got=self.stage_features))

    def replace(self, **changes: Any) -> "ResNetConfig":
        """Returns a copy with other values in some fields."""
        return dataclasses.replace(self, **changes)


class NormedConv(Module):
    """A convolution without bias, a `BatchNorm`, and an activation, if any.

    Args:
        in_features, out_features: the numbers of features.
        size: the height and width of the kernel.
        strides: the step of the convolution.
        activation: the activation, or None.
        dtype, param_dtype, ctx: as in `ResNet`.

    Attributes:
        conv: the `Conv`.
        norm: the `BatchNorm`.
    """

    activation: Callable[[jax.Array], jax.Array] | None
    conv: Conv
    norm: BatchNorm

    def __init__(
        self,
        in_features: int,
        out_features: int,
        size: int,
        strides: int = 1,
        *,
        activation: Callable[[jax.Array], jax.Array] | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        ctx: Context,
    ) -> None:
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ctx": ctx}
        self.activation = activation
        # Explicit, because "SAME" with strides pads one side more than the other.
        self.conv = Conv(in_features, out_features, (size, size), strides, padding=size // 2, use_bias=False, **options)
        self.norm = BatchNorm(out_features, momentum=0.9, epsilon=1e-5, **options)

    def __call__(self, x: jax.Array, *, use_running_average: bool = True) -> jax.Array:
        """Applies the layers to images `[batch, height, width, in_features]`."""
        x = self.norm(self.conv(x), use_running_average)
        return x if self.activation is None else self.activation(x)


class ResNetBlock(Module):
    """One block of a ResNet.

    Args:
        config: the architecture.
        in_features, out_features: the numbers of features.
        strides: the factor by which the block shrinks the image.
        dtype, param_dtype, ctx: as in `ResNet`.

    Attributes:
        layers: the `NormedConv`s, of which the last has no activation.
        shortcut: the `NormedConv` of the input, or None.
    """

    activation: Callable[[jax.Array], jax.Array]
    layers: Sequence
    shortcut: NormedConv | None

    def __init__(
        self,
        config: ResNetConfig,
        in_features: int,
        out_features: int,
        strides: int,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        ctx: Context,
    ) -> None:
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ctx": ctx}
        self.activation = activation_of(config.activation)
        if config.block == "basic":
            self.layers = Sequence(
                (
                    NormedConv(in_features, out_features, 3, strides, activation=relu, **options),
                    NormedConv(out_features, out_features, 3, **options),
                )
            )
        else:
            narrow = out_features // 4
            first, second = (strides, 1) if config.downsample_in_bottleneck else (1, strides)
            self.layers = Sequence(
                (
                    NormedConv(in_features, narrow, 1, first, activation=relu, **options),
                    NormedConv(narrow, narrow, 3, second, activation=relu, **options),
                    NormedConv(narrow, out_features, 1, **options),
                )
            )
        same = in_features == out_features and strides == 1
        self.shortcut = None if same else NormedConv(in_features, out_features, 1, strides, **options)

    def __call__(self, x: jax.Array, *, use_running_average: bool = True) -> jax.Array:
        """Applies the block to images `[batch, height, width, in_features]`."""
        mode: dict[str, Any] = {"use_running_average": use_running_average}
        added = x if self.shortcut is None else self.shortcut(x, **mode)
        for layer in self.layers:
            x = layer(x, **mode)
        return self.activation(x + added)


class ResNet(Module):
    """A convolutional encoder of images: `[batch, height, width, channels]` in, an `EncoderOutput` out.

    Args:
        config: the architecture.
        dtype: the computation dtype; by default, that of the parameters.
        param_dtype: the dtype in which the parameters are stored; the statistics of batches use at least float32.
        ctx: the Context; its stream "params" initializes the parameters.

    Attributes:
        config: the architecture.
        stem: the first `NormedConv`.
        stages: a `Sequence` of `Sequence`s of `ResNetBlock`s.

    >>> config = nnx.models.ResNetConfig(stem_features=8, stage_features=(8, 16), depths=(1, 2), block="basic")
    >>> out = nnx.models.ResNet(config, ctx=nnx.context(0))(jnp.ones((2, 32, 32, 3)))
    >>> out.last_hidden_state.shape, out.pooler_output.shape
    ((2, 4, 4, 16), (2, 16))
    """

    config: ResNetConfig
    dtype: np.dtype | None
    param_dtype: np.dtype
    stem: NormedConv
    stages: Sequence

    def __init__(
        self,
        config: ResNetConfig,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        ctx: Context,
    ) -> None:
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ctx": ctx}
        self.config = config
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        activation = activation_of(config.activation)
        self.stem = NormedConv(config.channels, config.stem_features, 7, 2, activation=activation, **options)
        features, stages = config.stem_features, []
        for number, (wide, depth) in enumerate(zip(config.stage_features, config.depths, strict=True)):
            strides = 2 if number > 0 or config.downsample_first_stage else 1
            first = ResNetBlock(config, features, wide, strides, **options)
            stages.append(Sequence((first, *(ResNetBlock(config, wide, wide, 1, **options) for _ in range(depth - 1)))))
            features = wide
        self.stages = Sequence(stages)

    def __call__(self, images: jax.Array, *, use_running_average: bool = True) -> EncoderOutput:
        """Encodes images.

        Args:
            images: floats of shape `[batch, height, width, channels]`, of any height and width.
            use_running_average: whether to normalize by the running averages. In training, pass False: batches are then
                normalized by their own statistics, which update the running averages.
        """
        dtype = self.stem.conv.kernel.dtype if self.dtype is None else self.dtype
        mode: dict[str, Any] = {"use_running_average": use_running_average}
        x = self.stem(checked_images("ResNet", images, self.config.channels, dtype), **mode)
        x = max_pool(x, (3, 3), (2, 2), padding=1)
        for stage in self.stages:
            for block in stage:
                x = block(x, **mode)
        return EncoderOutput(x, x.mean(axis=(1, 2)))


class ResNetClassifier(Module):
    """A `ResNet` with a classifier: images `[batch, height, width, channels]` in, logits `[batch, labels]` out.

    Args:
        config: the architecture; its task becomes "image_classification".
        dtype, param_dtype, ctx: as in `ResNet`.

    Attributes:
        config: the architecture.
        encoder: the `ResNet`.
        head: the `Linear` layer that makes logits.

    >>> config = nnx.models.ResNetConfig(
    ...     stem_features=8, stage_features=(8,), depths=(1,), block="basic", labels=("cat", "dog"))
    >>> nnx.models.ResNetClassifier(config, ctx=nnx.context(0))(jnp.ones((5, 16, 16, 3))).shape
    (5, 2)
    """

    logical_axes: ClassVar[AxisNames] = {"head/kernel": ("in", None), "head/bias": (None,)}

    config: ResNetConfig
    param_dtype: np.dtype
    encoder: ResNet
    head: Linear

    def __init__(
        self,
        config: ResNetConfig,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        ctx: Context,
    ) -> None:
        self.config = config = config.replace(task="image_classification")
        self.param_dtype = as_dtype(param_dtype)
        self.encoder = ResNet(config, dtype=dtype, param_dtype=param_dtype, ctx=ctx)
        features = config.stage_features[-1]
        self.head = Linear(features, len(config.labels), dtype=dtype, param_dtype=param_dtype, ctx=ctx)

    def __call__(self, images: jax.Array, *, use_running_average: bool = True) -> jax.Array:
        """Returns the logits of images; the arguments are those of `ResNet`."""
        pooled: Any = self.encoder(images, use_running_average=use_running_average).pooler_output
        return self.head(pooled)
