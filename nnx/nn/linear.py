"""Linear layers: a learned kernel contracted with axes of the input."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.module import Module
from nnx.core.variables.variables import ContainerMetadata, Param
from nnx.nn.quantized.quantized import as_operand, weight_dtype
from nnx.nn.quantized.quantized_product import quantized_product
from nnx.nn.support.checks import as_tuple, check_last_axis, check_sizes, shape_of, too_few_axes, wrong_features
from nnx.nn.support.parameters import (
    NO_METADATA,
    AxisNames,
    InitializerLike,
    default_bias_init,
    default_kernel_init,
    initial_value,
    make_param,
    one_per_entry,
)
from nnx.nn.support.settings import (
    Hook,
    PromoteDtype,
    as_dtype,
    as_optional_dtype,
    cast,
    compiled_body,
    default_promote_dtype,
    statistics_dtype,
)
from nnx.sharding.explicit import result_sharding, split_like

DotGeneral = Callable[..., jax.Array]
"""A replacement for `jax.lax.dot_general`."""
NO_BATCH_AXES: Mapping[int, int] = MappingProxyType({})

BATCH_AXES_NOT_LEADING = (
    "{layer}: `batch_axis` must name the leading axes 0, 1, … of the input, got {got}. "
    "Move those axes to the front with `jnp.moveaxis`."
)
AXES_AND_FEATURES = (
    "{layer}: `axis` and `in_features` must have the same number of entries, got axis={axis} and "
    "in_features={features}."
)


@compiled_body
def _contract(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    scale: jax.Array | None,
    *,
    axes: tuple[int, ...],
    batch_axes: tuple[int, ...],
    dtype: Any,
    param_dtype: Any,
    precision: PrecisionLike,
    preferred_element_type: Any,
    out_sharding: Any,
    dot_general: Hook[DotGeneral] = lax.dot_general,
    promote: Hook[PromoteDtype] = default_promote_dtype,
) -> jax.Array:
    """Sums over `axes` of `x` and the axes of `kernel` that follow its batch axes, then adds the bias."""
    batches = len(batch_axes)
    summed = tuple(range(batches, batches + len(axes)))
    if scale is None:
        x, kernel, bias = promote((x, kernel, bias), dtype=dtype)
    else:
        # Integers would promote to a wider dtype than the weight had, so its scale takes part in the promotion instead.
        x, _, bias = promote((x, cast(scale, weight_dtype(scale, param_dtype)), bias), dtype=dtype)
        is_replaced = dot_general is not lax.dot_general
        is_plain = precision is None and out_sharding is None and not is_replaced
        if is_plain and not batches and axes == tuple(range(x.ndim - len(axes), x.ndim)):
            y = quantized_product(x, kernel, scale, len(axes), dtype=preferred_element_type)
            if y is not None:
                return y if bias is None else y + _spread(bias, y, batches)
        kernel, scale = as_operand(kernel, scale, summed, x.dtype, whole=is_replaced)
    if out_sharding is None:
        kept = (axis for axis in range(x.ndim) if axis not in axes and axis not in batch_axes)
        out_sharding = result_sharding((x, (*batch_axes, *kept)), (kernel, range(batches + len(axes), kernel.ndim)))
    # Options are passed only when set: a user's `dot_general` need not know them.
    options = {}
    if preferred_element_type is not None or scale is not None:
        # Sums of products with integers can be large, so they are not rounded before they are scaled.
        options["preferred_element_type"] = preferred_element_type or statistics_dtype(x.dtype)
    if out_sharding is not None:
        options["out_sharding"] = out_sharding
    dimensions = ((axes, summed), (batch_axes, tuple(range(batches))))
    y = dot_general(x, kernel, dimensions, precision=precision, **options)
    if scale is not None:
        y = cast(y * _spread(scale, y, batches), preferred_element_type or x.dtype)
    return y if bias is None else y + _spread(bias, y, batches)


def _spread(values: jax.Array, y: jax.Array, batches: int) -> jax.Array:
    """Returns values `(*batch, *out)` in a shape that broadcasts to the output, `(*batch, *kept, *out)`."""
    values = split_like(values, y, [axis if axis < batches else axis - values.ndim for axis in range(values.ndim)])
    between = (1,) * (y.ndim - values.ndim)
    return jnp.reshape(values, values.shape[:batches] + between + values.shape[batches:])


def _apply_kernel(
    layer: Any, inputs: jax.Array, axes: tuple[int, ...], batch_axes: tuple[int, ...], out_sharding: Any
) -> jax.Array:
    return _contract(
        inputs,
        layer.kernel,
        layer.bias,
        layer.kernel_scale,
        axes=axes,
        batch_axes=batch_axes,
        dtype=layer.dtype,
        param_dtype=layer.param_dtype,
        precision=layer.precision,
        preferred_element_type=layer.preferred_element_type,
        out_sharding=out_sharding,
        dot_general=layer.dot_general,
        promote=layer.promote_dtype,
    )


class Linear(Module):
    """Computes `y = x @ kernel + bias` on the last axis; shape `(..., in_features) -> (..., out_features)`.

    Args:
        in_features: the size of the input's last axis.
        out_features: the size of the output's last axis.
        use_bias: whether to add a bias.
        dtype: the computation dtype; by default, the dtype that input and parameters promote to.
        param_dtype: the dtype in which the parameters are stored.
        precision: the precision of the product, see `jax.lax.Precision`.
        kernel_init: the initializer of the kernel, of shape `(in_features, out_features)`.
        bias_init: the initializer of the bias, of shape `(out_features,)`.
        dot_general: a replacement for `jax.lax.dot_general`.
        promote_dtype: a replacement for the function that converts input, kernel and bias to one dtype.
        preferred_element_type: the dtype in which the product is accumulated and returned, see `jax.lax.dot_general`.
        ctx: the Context; its stream "params" initializes the parameters.
        kernel_metadata: metadata of the kernel's Variable.
        bias_metadata: metadata of the bias's Variable.

    >>> layer = nnx.Linear(3, 4, ctx=nnx.context(0))
    >>> layer(jnp.ones((2, 3))).shape
    (2, 4)
    """

    logical_axes: ClassVar[AxisNames] = {"kernel": ("in", "out"), "bias": ("out",)}

    in_features: int
    out_features: int
    use_bias: bool
    dtype: np.dtype | None
    param_dtype: np.dtype
    precision: PrecisionLike
    dot_general: DotGeneral
    promote_dtype: PromoteDtype
    preferred_element_type: np.dtype | None
    kernel: jax.Array
    kernel_scale: jax.Array | None = None
    bias: jax.Array | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: InitializerLike = default_kernel_init,
        bias_init: InitializerLike = default_bias_init,
        dot_general: DotGeneral = lax.dot_general,
        promote_dtype: PromoteDtype = default_promote_dtype,
        preferred_element_type: DTypeLike | None = None,
        ctx: Context,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
    ) -> None:
        check_sizes(self, in_features=in_features, out_features=out_features)
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.precision = precision
        self.dot_general = dot_general
        self.promote_dtype = promote_dtype
        self.preferred_element_type = as_optional_dtype(preferred_element_type)
        self.kernel = make_param(self, kernel_init, ctx, (in_features, out_features), kernel_metadata)
        self.bias = make_param(self, bias_init, ctx, (out_features,), bias_metadata) if use_bias else None

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Applies the layer.

        Args:
            inputs: an array of shape `(..., in_features)`.
            out_sharding: the sharding of the result on explicit mesh axes, see `jax.lax.dot_general`.

        Returns:
            An array of shape `(..., out_features)`.
        """
        check_last_axis(self, inputs, self.in_features, "in_features")
        return _apply_kernel(self, inputs, (inputs.ndim - 1,), (), out_sharding)


def _reshaped(value: Any, shape: tuple[int, ...]) -> Any:
    """Returns an initial value in another shape, with the metadata an initializer may have attached to it."""
    if isinstance(value, ContainerMetadata):
        return ContainerMetadata(_reshaped(value.value, shape), value.metadata)
    return jnp.reshape(value, shape)


class LinearGeneral(Module):
    """A linear map from any axes of the input to any number of output axes, which come last.

    Args:
        in_features: the size or sizes of the input axes to sum over.
        out_features: the size or sizes of the new axes.
        axis: the input axes to sum over, one per entry of `in_features`.
        batch_axis: leading input axes, as `{axis: size}`, along which every entry has its own kernel and bias.
        use_bias: whether to add a bias.
        dtype: the computation dtype; by default, the dtype that input and parameters promote to.
        param_dtype: the dtype in which the parameters are stored.
        kernel_init: the initializer of the kernel. It is called with the matrix shape `(all inputs, all outputs)`, so
            that it sees the true fan-in, once for every entry along the batch axes, and its results are reshaped to
            `(*batch, *in_features, *out_features)`.
        bias_init: the initializer of the bias, called and reshaped in the same way.
        precision: the precision of the product, see `jax.lax.Precision`.
        promote_dtype: a replacement for the function that converts input, kernel and bias to one dtype.
        dot_general: a replacement for `jax.lax.dot_general`.
        dot_general_cls: a class whose instance is used as `dot_general`.
        preferred_element_type: the dtype in which the product is accumulated and returned.
        ctx: the Context; its stream "params" initializes the parameters.
        kernel_metadata: metadata of the kernel's Variable.
        bias_metadata: metadata of the bias's Variable.

    >>> layer = nnx.LinearGeneral((2, 3), (4, 5), axis=(1, -1), ctx=nnx.context(0))
    >>> layer.kernel.shape, layer(jnp.ones((16, 2, 3))).shape
    ((2, 3, 4, 5), (16, 4, 5))
    """

    in_features: tuple[int, ...]
    out_features: tuple[int, ...]
    axis: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    use_bias: bool
    dtype: np.dtype | None
    param_dtype: np.dtype
    precision: PrecisionLike
    promote_dtype: PromoteDtype
    dot_general: DotGeneral
    preferred_element_type: np.dtype | None
    kernel: jax.Array
    kernel_scale: jax.Array | None = None
    bias: jax.Array | None

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        axis: int | Sequence[int] = -1,
        batch_axis: Mapping[int, int] = NO_BATCH_AXES,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: InitializerLike = default_kernel_init,
        bias_init: InitializerLike = default_bias_init,
        precision: PrecisionLike = None,
        promote_dtype: PromoteDtype = default_promote_dtype,
        dot_general: DotGeneral | None = None,
        dot_general_cls: Callable[[], DotGeneral] | None = None,
        preferred_element_type: DTypeLike | None = None,
        ctx: Context,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
    ) -> None:
        check_sizes(self, in_features=in_features, out_features=out_features)
        self.in_features = as_tuple(in_features)
        self.out_features = as_tuple(out_features)
        self.axis = as_tuple(axis)
        if len(self.axis) != len(self.in_features):
            raise ValueError(AXES_AND_FEATURES.format(layer="LinearGeneral", axis=axis, features=in_features))
        if sorted(batch_axis) != list(range(len(batch_axis))):
            raise ValueError(BATCH_AXES_NOT_LEADING.format(layer="LinearGeneral", got=dict(batch_axis)))
        self.batch_sizes = tuple(batch_axis[i] for i in range(len(batch_axis)))
        self.use_bias = use_bias
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.dot_general = dot_general_cls() if dot_general_cls is not None else dot_general or lax.dot_general
        self.preferred_element_type = as_optional_dtype(preferred_element_type)

        def param(initializer: InitializerLike, drawn: tuple[int, ...], stored: tuple[int, ...], metadata: Any) -> Any:
            value = initial_value(self, initializer, ctx, drawn, self.param_dtype)
            return Param(_reshaped(value, stored), **metadata)

        if self.batch_sizes:
            kernel_init = one_per_entry(kernel_init, math.prod(self.batch_sizes))
        matrix = (math.prod(self.in_features), math.prod(self.out_features))
        kernel_shape = self.batch_sizes + self.in_features + self.out_features
        self.kernel = param(kernel_init, matrix, kernel_shape, kernel_metadata)
        bias_shape = self.batch_sizes + self.out_features
        self.bias = param(bias_init, (math.prod(bias_shape),), bias_shape, bias_metadata) if use_bias else None

    @property
    def logical_axes(self) -> AxisNames:
        """The default names of the parameters' axes: "in" and "out" are the first of several."""
        batch = (None,) * len(self.batch_sizes)
        out = ("out", *(None,) * (len(self.out_features) - 1))
        return {"kernel": (*batch, "in", *(None,) * (len(self.in_features) - 1), *out), "bias": (*batch, *out)}

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Applies the layer.

        Args:
            inputs: an array whose axes `axis` have the sizes `in_features`.
            out_sharding: the sharding of the result on explicit mesh axes, see `jax.lax.dot_general`.

        Returns:
            An array with the batch axes, the other axes of the input, and `out_features`.
        """
        shape = shape_of(self, inputs)
        for axis, size in zip(self.axis, self.in_features, strict=True):
            if not -len(shape) <= axis < len(shape):
                raise too_few_axes(type(self).__name__, f"with an axis {axis} of size {size}", shape)
            if shape[axis] != size:
                raise wrong_features(self, size, shape[axis], shape, "in_features", f"on axis {axis}")
        for axis, size in enumerate(self.batch_sizes):
            if shape[axis] != size:
                raise wrong_features(self, size, shape[axis], shape, "batch_axis", f"on batch axis {axis}")
        axes = tuple(axis % len(shape) for axis in self.axis)
        return _apply_kernel(self, inputs, axes, tuple(range(len(self.batch_sizes))), out_sharding)
