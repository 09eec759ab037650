"""Transposed convolutions: the same shapes and padding names as in `conv`, the other way round."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module import Module
from nnx.core.variables import Param
from nnx.nn.checks import per_dimension, spatial_tuple
from nnx.nn.conv import (
    CAUSAL_IS_1D,
    Dilation,
    check_input,
    check_mask,
    masked_kernel,
    spatial_numbers,
    with_bias,
)
from nnx.nn.dtypes import PromoteDtype, as_dtype, as_optional_dtype, promote_dtype
from nnx.nn.initial_values import InitializerLike, default_bias_init, default_kernel_init, initial_value
from nnx.nn.linear import NO_METADATA
from nnx.nn.padding import Padding, PaddingLike, normalize_padding

TRANSPOSE_PADDINGS = ("SAME", "VALID", "CIRCULAR", "CAUSAL")


def _fold(y: Array, periods: Sequence[int], offsets: Sequence[int]) -> Array:
    """Adds up what lies a whole number of periods apart, so that the spatial axes close to circles."""
    for axis, (period, offset) in enumerate(zip(periods, offsets, strict=True), start=1):
        missing = -y.shape[axis] % period
        y = jnp.pad(y, [(0, missing if i == axis else 0) for i in range(y.ndim)])
        y = jnp.reshape(y, (*y.shape[:axis], -1, period, *y.shape[axis + 1 :])).sum(axis)
        y = jnp.roll(y, -offset, axis)
    return y


def _convolve_transposed(
    x: Array,
    kernel: Array,
    bias: Array | None,
    *,
    strides: tuple[int, ...],
    padding: Padding,
    kernel_dilation: tuple[int, ...],
    transpose_kernel: bool,
    dtype: Any,
    precision: PrecisionLike,
    preferred_element_type: Any,
    promote: PromoteDtype = promote_dtype,
) -> Array:
    x, kernel, bias = promote((x, kernel, bias), dtype=dtype)
    n = len(strides)
    batch = x.shape[: x.ndim - n - 1]
    x = jnp.reshape(x, (math.prod(batch), *x.shape[x.ndim - n - 1 :]))
    y = lax.conv_transpose(
        x,
        kernel,
        strides,
        "VALID" if padding in ("CIRCULAR", "CAUSAL") else padding,
        rhs_dilation=kernel_dilation,
        dimension_numbers=spatial_numbers(n),
        transpose_kernel=transpose_kernel,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    periods = [size * stride for size, stride in zip(x.shape[1:-1], strides, strict=True)]
    if padding == "CIRCULAR":
        beyond = [size - period for size, period in zip(y.shape[1:-1], periods, strict=True)]
        y = _fold(y, periods, [(b + 1) // 2 if transpose_kernel else b // 2 for b in beyond])
    elif padding == "CAUSAL":
        y = y[:, : periods[0]]
    return with_bias(y, bias, batch)


_convolve_transposed_compiled = partial(
    jax.jit,
    static_argnames=(
        "strides",
        "padding",
        "kernel_dilation",
        "transpose_kernel",
        "dtype",
        "precision",
        "preferred_element_type",
    ),
)(_convolve_transposed)


class ConvTranspose(Module):
    """Transposed convolution; shape `(*batch, *spatial, in_features) -> (*batch, *spatial', out_features)`.

    Args:
        in_features: size of the input's last axis.
        out_features: size of the output's last axis.
        kernel_size: one entry per spatial dimension, as a tuple.
        strides: an int, or one per spatial dimension; `None` for ones.
        padding: "SAME" (spatial sizes times strides), "VALID" (all that the kernel reaches), "CIRCULAR" (periodic,
            sizes as for "SAME"), "CAUSAL" (one dimension; no look-ahead), an int, or one int or `(low, high)` pair per
            spatial dimension: padding of the input after the strides spread it, as in `jax.lax.conv_transpose`.
        kernel_dilation: an int, or one per spatial dimension; `None` for ones.
        use_bias: whether to add a bias.
        mask_fn: a function applied to the kernel before each use.
        mask: an array of the kernel's shape that it is multiplied with; the short form of a `mask_fn`.
        dtype: of the computation; by default that of input and parameters.
        param_dtype: in which the parameters are stored.
        precision: of the convolution, see `jax.lax.Precision`.
        kernel_init: initialiser of the kernel, of shape `(*kernel_size, in_features, out_features)`.
        bias_init: initialiser of the bias.
        transpose_kernel: whether to flip the kernel and swap its feature axes, so that the layer is the transpose of
            the `Conv` with the same kernel, which then has shape `(*kernel_size, out_features, in_features)`.
        promote_dtype: replaces the function that brings input, kernel and bias to one dtype.
        preferred_element_type: in which the convolution is accumulated and returned.
        ctx: draws the parameters from its stream "params".
        kernel_metadata: metadata of the kernel's Variable.
        bias_metadata: metadata of the bias's Variable.

    >>> import nnx, jax.numpy as jnp
    >>> layer = nnx.ConvTranspose(3, 8, kernel_size=(4, 4), strides=2, ctx=nnx.context(0))
    >>> layer(jnp.ones((5, 16, 16, 3))).shape
    (5, 32, 32, 8)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: Sequence[int],
        strides: int | Sequence[int] | None = None,
        *,
        padding: PaddingLike = "SAME",
        kernel_dilation: Dilation = None,
        use_bias: bool = True,
        mask_fn: Callable[[Array], Array] | None = None,
        mask: Array | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: InitializerLike = default_kernel_init,
        bias_init: InitializerLike = default_bias_init,
        transpose_kernel: bool = False,
        promote_dtype: PromoteDtype = promote_dtype,
        preferred_element_type: DTypeLike | None = None,
        ctx: Context,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
    ):
        name = type(self).__name__
        kernel_size = spatial_tuple(name, "kernel_size", kernel_size)
        dimensions = len(kernel_size)
        features = (out_features, in_features) if transpose_kernel else (in_features, out_features)
        kernel_shape = (*kernel_size, *features)
        check_mask(name, mask, mask_fn, kernel_shape)

        self.in_features = in_features
        self.out_features = out_features
        self.kernel_size = kernel_size
        self.strides = per_dimension(name, "strides", strides, dimensions)
        self.padding = normalize_padding(name, padding, dimensions, TRANSPOSE_PADDINGS)
        if self.padding == "CAUSAL" and dimensions != 1:
            raise ValueError(CAUSAL_IS_1D.format(layer=name, kernel_size=kernel_size))
        self.kernel_dilation = per_dimension(name, "kernel_dilation", kernel_dilation, dimensions)
        self.use_bias = use_bias
        self.mask_fn = mask_fn
        self.mask = mask
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = param_dtype = as_dtype(param_dtype)
        self.precision = precision
        self.transpose_kernel = transpose_kernel
        self.promote_dtype = promote_dtype
        self.preferred_element_type = as_optional_dtype(preferred_element_type)
        self.kernel = Param(initial_value(self, kernel_init, ctx, kernel_shape, param_dtype), **kernel_metadata)
        self.bias = None
        if use_bias:
            self.bias = Param(initial_value(self, bias_init, ctx, (out_features,), param_dtype), **bias_metadata)

    @property
    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        return {"kernel": ("out", "in") if self.transpose_kernel else ("in", "out"), "bias": ("out",)}

    def __call__(self, inputs: Array) -> Array:
        check_input(self, inputs)
        settings = {
            "strides": self.strides,
            "padding": self.padding,
            "kernel_dilation": self.kernel_dilation,
            "transpose_kernel": self.transpose_kernel,
            "dtype": self.dtype,
            "precision": self.precision,
            "preferred_element_type": self.preferred_element_type,
        }
        kernel = masked_kernel(self)
        if self.promote_dtype is promote_dtype:
            return _convolve_transposed_compiled(inputs, kernel, self.bias, **settings)
        return _convolve_transposed(inputs, kernel, self.bias, **settings, promote=self.promote_dtype)
