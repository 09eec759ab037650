"""Images as sequences: `PatchEmbed` cuts an image into patches, and adds the class token and the positions."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.module import Module
from nnx.nn.conv import Conv
from nnx.nn.embed import LearnedPositionEmbed
from nnx.nn.initializers import normal
from nnx.nn.support.parameters import AxisNames, make_param
from nnx.nn.support.settings import as_dtype, as_optional_dtype, promote_dtype

WRONG_IMAGES = "{model}: expected images of shape [batch, {height}, {width}, {channels}], got {got}.{more}"
CHANNELS_FIRST = " Channels come last: transpose them with `images.transpose(0, 2, 3, 1)`."
NOT_FLOATS = "{model}: expected images of floating-point numbers, got dtype {dtype}. See `nnx.models.ImageProcessor`."
DOES_NOT_DIVIDE = "{config}: expected image_size={image} to be a multiple of patch_size={patch}."


def checked_images(
    model: str, images: jax.Array, channels: int, dtype: DTypeLike, size: int | None = None
) -> jax.Array:
    """Returns images in the dtype of the computation.

    Args:
        model: the name of the model, for errors.
        images: the images.
        channels: their number of channels.
        dtype: the dtype of the computation. Images come as float32, which would otherwise decide it.
        size: their height and width; `None` if these may vary.

    Raises:
        ValueError: the images are not floats of shape `[batch, height, width, channels]`, or have another size.
    """
    shape = np.shape(images)
    wanted = (channels,) if size is None else (size, size, channels)
    if len(shape) != 4 or shape[4 - len(wanted) :] != wanted:
        more = CHANNELS_FIRST if len(shape) == 4 and shape[1] == channels and shape[3] != channels else ""
        height, width = ("height", "width") if size is None else (size, size)
        raise ValueError(
            WRONG_IMAGES.format(model=model, height=height, width=width, channels=channels, got=shape, more=more)
        )
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise ValueError(NOT_FLOATS.format(model=model, dtype=images.dtype))
    return jnp.asarray(images, dtype)


class PatchEmbed(Module):
    """Turns square images into sequences: the class token, then one vector per patch, row by row; with positions.

    Args:
        image_size: the height and width of the images.
        patch_size: the height and width of a patch, a divisor of `image_size`.
        channels: the number of channels of the images.
        features: the number of features of a vector.
        use_bias: whether the patches have a bias.
        dtype: the computation dtype; by default, that of the parameters.
        param_dtype: the dtype in which the parameters are stored.
        ctx: the Context; its stream "params" initializes the parameters.

    Attributes:
        patches: the `Conv` from patches to vectors.
        class_token: the first vector, `[features]`.
        positions: the `LearnedPositionEmbed`.

    >>> layer = nnx.models.PatchEmbed(8, 4, 3, 16, ctx=nnx.context(0))
    >>> layer(jnp.ones((2, 8, 8, 3))).shape
    (2, 5, 16)
    """

    logical_axes: ClassVar[AxisNames] = {
        "patches/kernel": (None, None, None, "embed"),
        "patches/bias": ("embed",),
        "class_token": ("embed",),
    }

    image_size: int
    channels: int
    dtype: np.dtype | None
    param_dtype: np.dtype
    patches: Conv
    class_token: jax.Array
    positions: LearnedPositionEmbed

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        channels: int,
        features: int,
        *,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        ctx: Context,
    ) -> None:
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ctx": ctx}
        if image_size % patch_size:
            raise ValueError(DOES_NOT_DIVIDE.format(config="PatchEmbed", image=image_size, patch=patch_size))
        size = (patch_size, patch_size)
        self.image_size = image_size
        self.channels = channels
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.patches = Conv(channels, features, size, size, padding="VALID", use_bias=use_bias, **options)
        self.class_token = make_param(self, normal(0.02), ctx, (features,))
        self.positions = LearnedPositionEmbed((image_size // patch_size) ** 2 + 1, features, **options)

    def __call__(self, images: jax.Array, *, model: str = "PatchEmbed") -> jax.Array:
        """Returns the sequences of images.

        Args:
            images: floats of shape `[batch, height, width, channels]`.
            model: the name that errors use.

        Returns:
            An array of shape `[batch, 1 + patches, features]`.
        """
        dtype = self.patches.kernel.dtype if self.dtype is None else self.dtype
        images = checked_images(model, images, self.channels, dtype, self.image_size)
        x = self.patches(images)  # [batch, rows, columns, features]
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        first, x = promote_dtype((self.class_token, x), dtype=x.dtype)
        first = jnp.broadcast_to(first, (x.shape[0], 1, x.shape[-1]))
        return self.positions(jnp.concatenate([first, x], axis=1))
