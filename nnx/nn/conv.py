"""Convolutions over one to three (or more) spatial dimensions, channels last.

An input has shape `(*batch, *spatial, features)` with any number of batch axes, none included; the number of spatial
axes is the length of `kernel_size`. The arithmetic is compiled on its own, as in `linear`.
"""

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
from nnx.nn.checks import TOO_FEW_AXES, per_dimension, spatial_tuple, wrong_features
from nnx.nn.dtypes import PromoteDtype, as_dtype, as_optional_dtype, promote_dtype
from nnx.nn.initial_values import InitializerLike, default_bias_init, default_kernel_init, initial_value
from nnx.nn.linear import NO_METADATA
from nnx.nn.padding import Padding, PaddingLike, normalize_padding
from nnx.sharding.explicit import result_sharding, split_like

Dilation = int | Sequence[int] | None

CONV_PADDINGS = ("SAME", "VALID", "CIRCULAR", "REFLECT", "CAUSAL")

GROUPS_DO_NOT_DIVIDE = (
    "Conv: `feature_group_count` must divide `in_features` and `out_features`, "
    "got feature_group_count={groups}, in_features={inputs}, out_features={outputs}."
)
CAUSAL_IS_1D = '{layer}: padding "CAUSAL" is defined for one spatial dimension, got kernel_size={kernel_size}.'
MASK_SHAPE = "{layer}: `{argument}` must keep the kernel's shape {expected}, got {got}."
MASK_TWICE = "{layer}: pass `mask_fn` or `mask`, not both."


def spatial_numbers(dimensions: int) -> lax.ConvDimensionNumbers:
    """Channels last: batch, spatial…, feature; kernels are spatial…, in, out."""
    channels_last = (0, dimensions + 1, *range(1, dimensions + 1))
    return lax.ConvDimensionNumbers(channels_last, (dimensions + 1, dimensions, *range(dimensions)), channels_last)


def _pad(x: Array, pairs: Sequence[tuple[int, int]], mode: str) -> Array:
    return jnp.pad(x, ((0, 0), *pairs, (0, 0)), mode=mode)


def _convolve(
    x: Array,
    kernel: Array,
    bias: Array | None,
    *,
    strides: tuple[int, ...],
    padding: Padding,
    input_dilation: tuple[int, ...],
    kernel_dilation: tuple[int, ...],
    groups: int,
    dtype: Any,
    precision: PrecisionLike,
    preferred_element_type: Any,
    out_sharding: Any,
    conv_general_dilated: Callable[..., Array] = lax.conv_general_dilated,
    promote: PromoteDtype = promote_dtype,
) -> Array:
    x, kernel, bias = promote((x, kernel, bias), dtype=dtype)
    n = len(strides)
    batch = x.shape[: x.ndim - n - 1]
    x = jnp.reshape(x, (math.prod(batch), *x.shape[x.ndim - n - 1 :]))

    # What the kernel, spread by its dilation, reaches beyond its first entry.
    reach = [(size - 1) * d for size, d in zip(kernel.shape[:n], kernel_dilation, strict=True)]
    if padding == "CIRCULAR" or padding == "REFLECT":
        mode = "wrap" if padding == "CIRCULAR" else "reflect"
        x = _pad(x, [(r // 2, r - r // 2) for r in reach], mode)
        padding = "VALID"
    elif padding == "CAUSAL":
        padding = ((reach[0], 0),)
    elif isinstance(padding, str) and any(d != 1 for d in input_dilation):
        # XLA takes no name for the padding of a spread input.
        spread = [(size - 1) * d + 1 for size, d in zip(x.shape[1:-1], input_dilation, strict=True)]
        padding = tuple(lax.padtype_to_pads(spread, [r + 1 for r in reach], strides, padding))

    if out_sharding is None:
        out_sharding = result_sharding((x, range(n + 1)), (kernel, (n + 1,)))
    options: dict[str, Any] = {} if out_sharding is None else {"out_sharding": out_sharding}
    if preferred_element_type is not None:
        options["preferred_element_type"] = preferred_element_type
    y = conv_general_dilated(
        x,
        kernel,
        strides,
        padding,
        lhs_dilation=input_dilation,
        rhs_dilation=kernel_dilation,
        dimension_numbers=spatial_numbers(n),
        feature_group_count=groups,
        precision=precision,
        **options,
    )
    return with_bias(y, bias, batch)


def with_bias(y: Array, bias: Array | None, batch: tuple[int, ...]) -> Array:
    """Adds the bias to the features, and gives the one batch axis of the convolution its axes back."""
    if bias is not None:
        bias = split_like(bias, y, (-1,))
        y = y + jnp.reshape(bias, (1,) * (y.ndim - 1) + bias.shape)
    return jnp.reshape(y, batch + y.shape[1:])


_convolve_compiled = partial(
    jax.jit,
    static_argnames=(
        "strides",
        "padding",
        "input_dilation",
        "kernel_dilation",
        "groups",
        "dtype",
        "precision",
        "preferred_element_type",
        "out_sharding",
    ),
)(_convolve)


def check_input(layer: Any, inputs: Array) -> None:
    """Raises unless `inputs` has the layer's spatial axes and features."""
    shape = inputs.shape
    dimensions = len(layer.kernel_size)
    if len(shape) < dimensions + 1:
        spatial = ", ".join(f"d{i}" for i in range(dimensions))
        expected = f"(..., {spatial}, {layer.in_features})"
        raise ValueError(TOO_FEW_AXES.format(layer=type(layer).__name__, expected=expected, shape=shape))
    if shape[-1] != layer.in_features:
        raise wrong_features(layer, layer.in_features, shape[-1], shape, "in_features")


def masked_kernel(layer: Any) -> Array:
    """The layer's kernel under its `mask` or `mask_fn`."""
    kernel = layer.kernel
    if layer.mask is not None:
        return kernel * layer.mask
    if layer.mask_fn is None:
        return kernel
    masked = layer.mask_fn(kernel)
    if masked.shape != kernel.shape:
        name = type(layer).__name__
        raise ValueError(MASK_SHAPE.format(layer=name, argument="mask_fn", expected=kernel.shape, got=masked.shape))
    return masked


def check_mask(layer: str, mask: Array | None, mask_fn: Any, kernel_shape: tuple[int, ...]) -> None:
    """Raises if there are two masks, or the mask has another shape than the kernel."""
    if mask is None:
        return
    if mask_fn is not None:
        raise ValueError(MASK_TWICE.format(layer=layer))
    if mask.shape != kernel_shape:
        raise ValueError(MASK_SHAPE.format(layer=layer, argument="mask", expected=kernel_shape, got=mask.shape))


class Conv(Module):
    """Convolution; shape `(*batch, *spatial, in_features) -> (*batch, *spatial', out_features)`.

    Args:
        in_features: size of the input's last axis.
        out_features: size of the output's last axis.
        kernel_size: one entry per spatial dimension, as a tuple.
        strides: an int, or one per spatial dimension.
        padding: "SAME", "VALID", "CIRCULAR" (periodic), "REFLECT", "CAUSAL" (one dimension; no look-ahead), an int, or
            one int or `(low, high)` pair per spatial dimension.
        input_dilation: an int, or one per spatial dimension.
        kernel_dilation: an int, or one per spatial dimension.
        feature_group_count: number of groups of features that are convolved apart; `in_features` of them for a
            depthwise convolution.
        use_bias: whether to add a bias.
        mask_fn: a function applied to the kernel before each use, e.g. to set parts of it to zero.
        mask: an array of the kernel's shape that it is multiplied with; the short form of a `mask_fn`.
        dtype: of the computation; by default that of input and parameters.
        param_dtype: in which the parameters are stored.
        precision: of the convolution, see `jax.lax.Precision`.
        kernel_init: initialiser of the kernel, of shape `(*kernel_size, in_features // groups, out_features)`.
        bias_init: initialiser of the bias.
        conv_general_dilated: replaces `jax.lax.conv_general_dilated`.
        promote_dtype: replaces the function that brings input, kernel and bias to one dtype.
        preferred_element_type: in which the convolution is accumulated and returned.
        ctx: draws the parameters from its stream "params".
        kernel_metadata: metadata of the kernel's Variable.
        bias_metadata: metadata of the bias's Variable.

    >>> import nnx, jax.numpy as jnp
    >>> layer = nnx.Conv(3, 8, kernel_size=(3, 3), strides=2, ctx=nnx.context(0))
    >>> layer(jnp.ones((5, 32, 32, 3))).shape
    (5, 16, 16, 8)
    """

    logical_axes = {"kernel": ("in", "out"), "bias": ("out",)}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: Sequence[int],
        strides: int | Sequence[int] | None = 1,
        *,
        padding: PaddingLike = "SAME",
        input_dilation: Dilation = 1,
        kernel_dilation: Dilation = 1,
        feature_group_count: int = 1,
        use_bias: bool = True,
        mask_fn: Callable[[Array], Array] | None = None,
        mask: Array | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: InitializerLike = default_kernel_init,
        bias_init: InitializerLike = default_bias_init,
        conv_general_dilated: Callable[..., Array] = lax.conv_general_dilated,
        promote_dtype: PromoteDtype = promote_dtype,
        preferred_element_type: DTypeLike | None = None,
        ctx: Context,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
    ):
        name = type(self).__name__
        kernel_size = spatial_tuple(name, "kernel_size", kernel_size)
        dimensions = len(kernel_size)
        if in_features % feature_group_count or out_features % feature_group_count:
            raise ValueError(
                GROUPS_DO_NOT_DIVIDE.format(groups=feature_group_count, inputs=in_features, outputs=out_features)
            )
        kernel_shape = (*kernel_size, in_features // feature_group_count, out_features)
        check_mask(name, mask, mask_fn, kernel_shape)

        self.in_features = in_features
        self.out_features = out_features
        self.kernel_size = kernel_size
        self.strides = per_dimension(name, "strides", strides, dimensions)
        self.padding = normalize_padding(name, padding, dimensions, CONV_PADDINGS)
        if self.padding == "CAUSAL" and dimensions != 1:
            raise ValueError(CAUSAL_IS_1D.format(layer=name, kernel_size=kernel_size))
        self.input_dilation = per_dimension(name, "input_dilation", input_dilation, dimensions)
        self.kernel_dilation = per_dimension(name, "kernel_dilation", kernel_dilation, dimensions)
        self.feature_group_count = feature_group_count
        self.use_bias = use_bias
        self.mask_fn = mask_fn
        self.mask = mask
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = param_dtype = as_dtype(param_dtype)
        self.precision = precision
        self.conv_general_dilated = conv_general_dilated
        self.promote_dtype = promote_dtype
        self.preferred_element_type = as_optional_dtype(preferred_element_type)
        self.kernel = Param(initial_value(self, kernel_init, ctx, kernel_shape, param_dtype), **kernel_metadata)
        self.bias = None
        if use_bias:
            self.bias = Param(initial_value(self, bias_init, ctx, (out_features,), param_dtype), **bias_metadata)

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        check_input(self, inputs)
        settings = {
            "strides": self.strides,
            "padding": self.padding,
            "input_dilation": self.input_dilation,
            "kernel_dilation": self.kernel_dilation,
            "groups": self.feature_group_count,
            "dtype": self.dtype,
            "precision": self.precision,
            "preferred_element_type": self.preferred_element_type,
            "out_sharding": out_sharding,
        }
        kernel = masked_kernel(self)
        if self.conv_general_dilated is lax.conv_general_dilated and self.promote_dtype is promote_dtype:
            return _convolve_compiled(inputs, kernel, self.bias, **settings)
        return _convolve(
            inputs,
            kernel,
            self.bias,
            **settings,
            conv_general_dilated=self.conv_general_dilated,
            promote=self.promote_dtype,
        )
