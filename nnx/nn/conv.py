"""Convolutions and transposed convolutions over any number of spatial dimensions, channels last.

An input has shape `(*batch, *spatial, features)` with any number of batch axes, including none; the number of spatial
axes is the length of `kernel_size`. The arithmetic is in `convolve`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.module import Module
from nnx.nn.convolve import convolve, convolve_transposed
from nnx.nn.support.checks import (
    Padding,
    PaddingLike,
    Strides,
    check_last_axis,
    check_sizes,
    check_spatial_axes,
    normalize_padding,
    per_dimension,
    spatial_tuple,
)
from nnx.nn.support.parameters import (
    NO_METADATA,
    AxisNames,
    InitializerLike,
    default_bias_init,
    default_kernel_init,
    kernel_init_for,
    make_param,
)
from nnx.nn.support.settings import PromoteDtype, as_dtype, as_optional_dtype, cast, default_promote_dtype

KernelMask = Callable[[jax.Array], jax.Array]

CONV_PADDINGS = ("SAME", "VALID", "CIRCULAR", "REFLECT", "CAUSAL")
TRANSPOSE_PADDINGS = ("SAME", "VALID", "CIRCULAR", "CAUSAL")

GROUPS_DO_NOT_DIVIDE = (
    "Conv: `feature_group_count` must divide `in_features` and `out_features`, "
    "got feature_group_count={groups}, in_features={inputs}, out_features={outputs}."
)
CAUSAL_IS_1D = '{layer}: padding "CAUSAL" is defined for one spatial dimension, got kernel_size={kernel_size}.'
PADDING_AND_DILATION = (
    'Conv: padding "{padding}" repeats the input beyond its ends, and input_dilation={dilation} puts zeros between its '
    "entries; which comes first is not defined. Dilate or pad the input yourself."
)
MASK_SHAPE = "{layer}: `{argument}` must keep the kernel's shape {expected}, got {got}."
MASK_TWICE = "{layer}: pass `mask_fn` or `mask`, not both."


class _Convolution(Module):
    """The settings and parameters that both convolutions have."""

    in_features: int
    out_features: int
    kernel_size: tuple[int, ...]
    strides: tuple[int, ...]
    padding: Padding
    kernel_dilation: tuple[int, ...]
    use_bias: bool
    mask_fn: KernelMask | None
    mask: jax.Array | None
    dtype: np.dtype | None
    param_dtype: np.dtype
    precision: PrecisionLike
    promote_dtype: PromoteDtype
    preferred_element_type: np.dtype | None
    kernel: jax.Array
    bias: jax.Array | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: Sequence[int],
        strides: Strides,
        *,
        kernel_features: tuple[int, int],
        in_axis: int,
        gaps: Strides,
        padding: PaddingLike,
        padding_names: Sequence[str],
        kernel_dilation: Strides,
        use_bias: bool,
        mask_fn: KernelMask | None,
        mask: jax.Array | None,
        dtype: DTypeLike | None,
        param_dtype: DTypeLike,
        precision: PrecisionLike,
        kernel_init: InitializerLike,
        bias_init: InitializerLike,
        promote_dtype: PromoteDtype,
        preferred_element_type: DTypeLike | None,
        ctx: Context,
        kernel_metadata: Mapping[str, Any],
        bias_metadata: Mapping[str, Any],
    ) -> None:
        name = type(self).__name__
        kernel_size = spatial_tuple(name, "kernel_size", kernel_size)
        dimensions = len(kernel_size)
        kernel_shape = (*kernel_size, *kernel_features)
        if mask is not None:
            if mask_fn is not None:
                raise ValueError(MASK_TWICE.format(layer=name))
            if mask.shape != kernel_shape:
                raise ValueError(MASK_SHAPE.format(layer=name, argument="mask", expected=kernel_shape, got=mask.shape))

        self.in_features = in_features
        self.out_features = out_features
        self.kernel_size = kernel_size
        self.strides = per_dimension(name, "strides", strides, dimensions)
        self.padding = normalize_padding(name, padding, dimensions, padding_names)
        if self.padding == "CAUSAL" and dimensions != 1:
            raise ValueError(CAUSAL_IS_1D.format(layer=name, kernel_size=kernel_size))
        self.kernel_dilation = per_dimension(name, "kernel_dilation", kernel_dilation, dimensions)
        self.use_bias = use_bias
        self.mask_fn = mask_fn
        self.mask = mask
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.preferred_element_type = as_optional_dtype(preferred_element_type)
        # Strides of a transposed convolution and input dilation put zeros between the inputs, so an output sums over
        # fewer of them than the kernel has entries.
        gain = float(math.prod(per_dimension(name, "input_dilation", gaps, dimensions)))
        kernel_init = kernel_init_for(kernel_init, (in_axis,), (-3 - in_axis,), gain=gain)
        self.kernel = make_param(self, kernel_init, ctx, kernel_shape, kernel_metadata)
        self.bias = make_param(self, bias_init, ctx, (out_features,), bias_metadata) if use_bias else None

    def _check_input(self, inputs: jax.Array) -> None:
        check_spatial_axes(type(self).__name__, inputs, len(self.kernel_size), self.in_features)
        check_last_axis(self, inputs, self.in_features, "in_features")

    def _masked_kernel(self) -> jax.Array:
        kernel = self.kernel
        if self.mask is not None:
            return kernel * self.mask.astype(kernel.dtype)
        if self.mask_fn is None:
            return kernel
        masked = self.mask_fn(kernel)
        if masked.shape != kernel.shape:
            name = type(self).__name__
            raise ValueError(MASK_SHAPE.format(layer=name, argument="mask_fn", expected=kernel.shape, got=masked.shape))
        return cast(masked, kernel.dtype)


class Conv(_Convolution):
    """A convolution; shape `(*batch, *spatial, in_features) -> (*batch, *spatial', out_features)`.

    Args:
        in_features: the size of the input's last axis.
        out_features: the size of the output's last axis.
        kernel_size: a tuple with one entry per spatial dimension.
        strides: an int, or one per spatial dimension.
        padding: "SAME", "VALID", "CIRCULAR" (periodic), "REFLECT", "CAUSAL" (one dimension; no look-ahead), an int, or
            one int or `(low, high)` pair per spatial dimension.
        input_dilation: an int, or one per spatial dimension.
        kernel_dilation: an int, or one per spatial dimension.
        feature_group_count: the number of groups of features that are convolved separately; `in_features` groups make
            a depthwise convolution.
        use_bias: whether to add a bias.
        mask_fn: a function applied to the kernel before each use, e.g. to set parts of it to zero.
        mask: an array of the kernel's shape to multiply it by; the short form of a `mask_fn`.
        dtype: the computation dtype; by default, the dtype that input and parameters promote to.
        param_dtype: the dtype in which the parameters are stored.
        precision: the precision of the convolution, see `jax.lax.Precision`.
        kernel_init: the initializer of the kernel, of shape `(*kernel_size, in_features // groups, out_features)`.
        bias_init: the initializer of the bias.
        conv_general_dilated: a replacement for `jax.lax.conv_general_dilated`.
        promote_dtype: a replacement for the function that converts input, kernel and bias to one dtype.
        preferred_element_type: the dtype in which the convolution is accumulated and returned.
        ctx: the Context; its stream "params" initializes the parameters.
        kernel_metadata: metadata of the kernel's Variable.
        bias_metadata: metadata of the bias's Variable.

    >>> layer = nnx.Conv(3, 8, kernel_size=(3, 3), strides=2, ctx=nnx.context(0))
    >>> layer(jnp.ones((5, 32, 32, 3))).shape
    (5, 16, 16, 8)
    """

    logical_axes: ClassVar[AxisNames] = {"kernel": ("in", "out"), "bias": ("out",)}

    input_dilation: tuple[int, ...]
    feature_group_count: int
    conv_general_dilated: Callable[..., jax.Array]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: Sequence[int],
        strides: Strides = 1,
        *,
        padding: PaddingLike = "SAME",
        input_dilation: Strides = 1,
        kernel_dilation: Strides = 1,
        feature_group_count: int = 1,
        use_bias: bool = True,
        mask_fn: KernelMask | None = None,
        mask: jax.Array | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: InitializerLike = default_kernel_init,
        bias_init: InitializerLike = default_bias_init,
        conv_general_dilated: Callable[..., jax.Array] = lax.conv_general_dilated,
        promote_dtype: PromoteDtype = default_promote_dtype,
        preferred_element_type: DTypeLike | None = None,
        ctx: Context,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
    ) -> None:
        check_sizes(self, in_features=in_features, out_features=out_features)
        if in_features % feature_group_count or out_features % feature_group_count:
            raise ValueError(
                GROUPS_DO_NOT_DIVIDE.format(groups=feature_group_count, inputs=in_features, outputs=out_features)
            )
        super().__init__(
            in_features,
            out_features,
            kernel_size,
            strides,
            kernel_features=(in_features // feature_group_count, out_features),
            in_axis=-2,
            gaps=input_dilation,
            padding=padding,
            padding_names=CONV_PADDINGS,
            kernel_dilation=kernel_dilation,
            use_bias=use_bias,
            mask_fn=mask_fn,
            mask=mask,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            bias_init=bias_init,
            promote_dtype=promote_dtype,
            preferred_element_type=preferred_element_type,
            ctx=ctx,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )
        dimensions = len(self.kernel_size)
        self.input_dilation = per_dimension(type(self).__name__, "input_dilation", input_dilation, dimensions)
        if self.padding in ("CIRCULAR", "REFLECT") and any(d != 1 for d in self.input_dilation):
            raise ValueError(PADDING_AND_DILATION.format(padding=self.padding, dilation=input_dilation))
        self.feature_group_count = feature_group_count
        self.conv_general_dilated = conv_general_dilated

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Convolves `inputs`.

        Args:
            inputs: an array of shape `(*batch, *spatial, in_features)`.
            out_sharding: the sharding of the result on explicit mesh axes, see `jax.lax.conv_general_dilated`.

        Returns:
            An array of shape `(*batch, *spatial', out_features)`.
        """
        self._check_input(inputs)
        return convolve(
            inputs,
            self._masked_kernel(),
            self.bias,
            strides=self.strides,
            padding=self.padding,
            input_dilation=self.input_dilation,
            kernel_dilation=self.kernel_dilation,
            groups=self.feature_group_count,
            dtype=self.dtype,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            out_sharding=out_sharding,
            conv_general_dilated=self.conv_general_dilated,
            promote=self.promote_dtype,
        )


class ConvTranspose(_Convolution):
    """A transposed convolution; shape `(*batch, *spatial, in_features) -> (*batch, *spatial', out_features)`.

    Args:
        in_features: the size of the input's last axis.
        out_features: the size of the output's last axis.
        kernel_size: a tuple with one entry per spatial dimension.
        strides: an int, or one per spatial dimension; `None` for ones.
        padding: "SAME" (spatial sizes times strides), "VALID" (everything the kernel reaches), "CIRCULAR" (periodic,
            sizes as for "SAME"), "CAUSAL" (one dimension; no look-ahead), an int, or one int or `(low, high)` pair per
            spatial dimension: padding of the input after the strides spread it, as in `jax.lax.conv_transpose`.
        kernel_dilation: an int, or one per spatial dimension; `None` for ones.
        use_bias: whether to add a bias.
        mask_fn: a function applied to the kernel before each use.
        mask: an array of the kernel's shape to multiply it by; the short form of a `mask_fn`.
        dtype: the computation dtype; by default, the dtype that input and parameters promote to.
        param_dtype: the dtype in which the parameters are stored.
        precision: the precision of the convolution, see `jax.lax.Precision`.
        kernel_init: the initializer of the kernel, of shape `(*kernel_size, in_features, out_features)`.
        bias_init: the initializer of the bias.
        transpose_kernel: whether to flip the kernel and swap its feature axes, so that the layer is the transpose of
            the `Conv` with the same kernel, which then has shape `(*kernel_size, out_features, in_features)`.
        promote_dtype: a replacement for the function that converts input, kernel and bias to one dtype.
        preferred_element_type: the dtype in which the convolution is accumulated and returned.
        ctx: the Context; its stream "params" initializes the parameters.
        kernel_metadata: metadata of the kernel's Variable.
        bias_metadata: metadata of the bias's Variable.

    >>> layer = nnx.ConvTranspose(3, 8, kernel_size=(4, 4), strides=2, ctx=nnx.context(0))
    >>> layer(jnp.ones((5, 16, 16, 3))).shape
    (5, 32, 32, 8)
    """

    transpose_kernel: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: Sequence[int],
        strides: Strides = None,
        *,
        padding: PaddingLike = "SAME",
        kernel_dilation: Strides = None,
        use_bias: bool = True,
        mask_fn: KernelMask | None = None,
        mask: jax.Array | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: InitializerLike = default_kernel_init,
        bias_init: InitializerLike = default_bias_init,
        transpose_kernel: bool = False,
        promote_dtype: PromoteDtype = default_promote_dtype,
        preferred_element_type: DTypeLike | None = None,
        ctx: Context,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
    ) -> None:
        check_sizes(self, in_features=in_features, out_features=out_features)
        super().__init__(
            in_features,
            out_features,
            kernel_size,
            strides,
            kernel_features=(out_features, in_features) if transpose_kernel else (in_features, out_features),
            in_axis=-1 if transpose_kernel else -2,
            gaps=strides,
            padding=padding,
            padding_names=TRANSPOSE_PADDINGS,
            kernel_dilation=kernel_dilation,
            use_bias=use_bias,
            mask_fn=mask_fn,
            mask=mask,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            bias_init=bias_init,
            promote_dtype=promote_dtype,
            preferred_element_type=preferred_element_type,
            ctx=ctx,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )
        self.transpose_kernel = transpose_kernel

    @property
    def logical_axes(self) -> AxisNames:
        """The default names of the parameters' axes."""
        return {"kernel": ("out", "in") if self.transpose_kernel else ("in", "out"), "bias": ("out",)}

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Convolves `inputs`, of shape `(*batch, *spatial, in_features)`."""
        self._check_input(inputs)
        return convolve_transposed(
            inputs,
            self._masked_kernel(),
            self.bias,
            strides=self.strides,
            padding=self.padding,
            kernel_dilation=self.kernel_dilation,
            transpose_kernel=self.transpose_kernel,
            dtype=self.dtype,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            promote=self.promote_dtype,
        )
