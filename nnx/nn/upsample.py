"""`Upsample`, which enlarges (or shrinks) spatial axes by interpolation."""

import math
from collections.abc import Sequence

import jax

from nnx.core.module.module import Module
from nnx.nn.pool import cast_back
from nnx.nn.support.checks import check_spatial_axes, spatial_tuple
from nnx.nn.support.settings import cast, compiled_body, statistics_dtype

NO_SIZE = (
    "{layer} needs exactly one of `scale_factor` and `size`, got scale_factor={scale!r}, size={size!r}. "
    "Write e.g. `nnx.Upsample((2, 2))` or `nnx.Upsample(size=(64, 64))`."
)


@compiled_body
def _resize(x: jax.Array, *, size: tuple[int, ...], method: str) -> jax.Array:
    batch_axes = x.ndim - 1 - len(size)
    shape = (*x.shape[:batch_axes], *size, x.shape[-1])
    wide = x if method == "nearest" else cast(x, statistics_dtype(x.dtype))
    return cast_back(jax.image.resize(wide, shape, method), x)


class Upsample(Module):
    """Resizes spatial axes by interpolation; shape `(*batch, *spatial, features) -> (*batch, *spatial', features)`.

    Args:
        scale_factor: a tuple of factors, one per spatial dimension.
        size: a tuple with the spatial sizes of the result, instead of `scale_factor`.
        method: "nearest", "linear" ("bilinear", "trilinear"), "cubic" ("bicubic"), "lanczos3" or "lanczos5", as in
            `jax.image.resize`.

    >>> nnx.Upsample((2, 2), method="linear")(jnp.ones((5, 8, 8, 3))).shape
    (5, 16, 16, 3)
    """

    scale_factor: tuple[float, ...] | None
    size: tuple[int, ...] | None
    method: str

    def __init__(
        self,
        scale_factor: Sequence[float] | None = None,
        *,
        size: Sequence[int] | None = None,
        method: str = "nearest",
    ) -> None:
        name = type(self).__name__
        if (scale_factor is None) == (size is None):
            raise ValueError(NO_SIZE.format(layer=name, scale=scale_factor, size=size))
        self.scale_factor = None if scale_factor is None else spatial_tuple(name, "scale_factor", scale_factor)
        self.size = None if size is None else spatial_tuple(name, "size", size)
        self.method = method

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Resizes `inputs`, of shape `(*batch, *spatial, features)`."""
        factors = self.scale_factor or self.size or ()
        check_spatial_axes(type(self).__name__, inputs, len(factors))
        size = self.size
        if size is None:
            spatial = inputs.shape[inputs.ndim - 1 - len(factors) : -1]
            size = tuple(math.floor(n * factor) for n, factor in zip(spatial, factors, strict=True))
        return _resize(inputs, size=size, method=self.method)
