"""Linear layers: kernels applied to axes of an input.

The arithmetic of each layer is one module-level function of arrays, compiled on its own: called eagerly it is a single
dispatch, and a model that repeats a layer traces, differentiates and lowers it once. A user's own `dot_general`
or `promote_dtype` is called as it is, outside of that cache.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module import Module
from nnx.core.variables import ContainerMetadata, Param
from nnx.nn.checks import TOO_FEW_AXES, check_last_axis, wrong_features
from nnx.nn.dtypes import PromoteDtype, as_dtype, as_optional_dtype, promote_dtype
from nnx.nn.initial_values import InitializerLike, default_bias_init, default_kernel_init, initial_value
from nnx.sharding.explicit import result_sharding, split_like

DotGeneral = Callable[..., Array]
NO_METADATA: Mapping[str, Any] = MappingProxyType({})
NO_BATCH_AXES: Mapping[int, int] = MappingProxyType({})

BATCH_AXES_NOT_LEADING = (
    "{layer}: `batch_axis` must name the leading axes 0, 1, … of the input, got {got}. "
    "Move those axes to the front with `jnp.moveaxis`."
)


def _contract(
    x: Array,
    kernel: Array,
    bias: Array | None,
    *,
    axes: tuple[int, ...],
    batch_axes: tuple[int, ...],
    dtype: Any,
    precision: PrecisionLike,
    preferred_element_type: Any,
    out_sharding: Any,
    dot_general: DotGeneral = lax.dot_general,
    promote: PromoteDtype = promote_dtype,
) -> Array:
    """Sums over `axes` of `x` and the axes of `kernel` after the batch axes; then adds the bias."""
    x, kernel, bias = promote((x, kernel, bias), dtype=dtype)
    batches = len(batch_axes)
    dimensions = ((axes, tuple(range(batches, batches + len(axes)))), (batch_axes, tuple(range(batches))))
    if out_sharding is None:
        kept = (axis for axis in range(x.ndim) if axis not in axes and axis not in batch_axes)
        out_sharding = result_sharding((x, (*batch_axes, *kept)), (kernel, range(batches + len(axes), kernel.ndim)))
    options = {}
    if preferred_element_type is not None:
        options["preferred_element_type"] = preferred_element_type
    if out_sharding is not None:
        options["out_sharding"] = out_sharding
    y = dot_general(x, kernel, dimensions, precision=precision, **options)
    if bias is None:
        return y
    bias = split_like(bias, y, [axis if axis < batches else axis - bias.ndim for axis in range(bias.ndim)])
    between = (1,) * (y.ndim - bias.ndim)
    return y + jnp.reshape(bias, bias.shape[:batches] + between + bias.shape[batches:])


_contract_compiled = partial(
    jax.jit,
    static_argnames=("axes", "batch_axes", "dtype", "precision", "preferred_element_type", "out_sharding"),
)(_contract)


class Linear(Module):
    """`y = x @ kernel + bias` on the last axis; shape `(..., in_features) -> (..., out_features)`.

    Args:
        in_features: size of the input's last axis.
        out_features: size of the output's last axis.
        use_bias: whether to add a bias.
        dtype: of the computation; by default that of input and parameters.
        param_dtype: in which the parameters are stored.
        precision: of the product, see `jax.lax.Precision`.
        kernel_init: initialiser of the kernel, of shape `(in_features, out_features)`.
        bias_init: initialiser of the bias, of shape `(out_features,)`.
        dot_general: replaces `jax.lax.dot_general`.
        promote_dtype: replaces the function that brings input, kernel and bias to one dtype.
        preferred_element_type: in which the product is accumulated and returned, see `jax.lax.dot_general`.
        ctx: draws the parameters from its stream "params".
        kernel_metadata: metadata of the kernel's Variable.
        bias_metadata: metadata of the bias's Variable.

    >>> import nnx, jax.numpy as jnp
    >>> layer = nnx.Linear(3, 4, ctx=nnx.context(0))
    >>> layer(jnp.ones((2, 3))).shape
    (2, 4)
    """

    logical_axes = {"kernel": ("in", "out"), "bias": ("out",)}

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
        promote_dtype: PromoteDtype = promote_dtype,
        preferred_element_type: DTypeLike | None = None,
        ctx: Context,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
    ):
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = param_dtype = as_dtype(param_dtype)
        self.precision = precision
        self.dot_general = dot_general
        self.promote_dtype = promote_dtype
        self.preferred_element_type = as_optional_dtype(preferred_element_type)
        kernel = initial_value(self, kernel_init, ctx, (in_features, out_features), param_dtype)
        self.kernel = Param(kernel, **kernel_metadata)
        self.bias = None
        if use_bias:
            self.bias = Param(initial_value(self, bias_init, ctx, (out_features,), param_dtype), **bias_metadata)

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        check_last_axis(self, inputs, self.in_features, "in_features")
        return _apply_kernel(self, inputs, (inputs.ndim - 1,), (), out_sharding)


def _apply_kernel(
    layer: Any, inputs: Array, axes: tuple[int, ...], batch_axes: tuple[int, ...], out_sharding: Any
) -> Array:
    settings = {
        "axes": axes,
        "batch_axes": batch_axes,
        "dtype": layer.dtype,
        "precision": layer.precision,
        "preferred_element_type": layer.preferred_element_type,
        "out_sharding": out_sharding,
    }
    if layer.dot_general is lax.dot_general and layer.promote_dtype is promote_dtype:
        return _contract_compiled(inputs, layer.kernel, layer.bias, **settings)
    return _contract(
        inputs, layer.kernel, layer.bias, **settings, dot_general=layer.dot_general, promote=layer.promote_dtype
    )


def _ints(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _reshaped(value: Any, shape: tuple[int, ...]) -> Any:
    """An initial value in another shape, its metadata (if an initialiser attached any) kept."""
    if isinstance(value, ContainerMetadata):
        return ContainerMetadata(_reshaped(value.value, shape), value.metadata)
    return jnp.reshape(value, shape)


class LinearGeneral(Module):
    """A linear map from any axes of the input to any number of output axes, which come last.

    Args:
        in_features: size or sizes of the input axes that are summed over.
        out_features: size or sizes of the new axes.
        axis: the input axes that are summed over, one per entry of `in_features`.
        batch_axis: leading input axes, `{axis: size}`, along which every entry has its own kernel and bias.
        use_bias: whether to add a bias.
        dtype: of the computation; by default that of input and parameters.
        param_dtype: in which the parameters are stored.
        kernel_init: initialiser; called with the matrix shape `(all inputs, all outputs)`, so that it sees the true
            numbers of features, and reshaped to `(*batch, *in_features, *out_features)`.
        bias_init: initialiser of the bias, likewise.
        precision: of the product, see `jax.lax.Precision`.
        promote_dtype: replaces the function that brings input, kernel and bias to one dtype.
        dot_general: replaces `jax.lax.dot_general`.
        dot_general_cls: a class whose instance is used as `dot_general`.
        preferred_element_type: in which the product is accumulated and returned.
        ctx: draws the parameters from its stream "params".
        kernel_metadata: metadata of the kernel's Variable.
        bias_metadata: metadata of the bias's Variable.

    >>> import nnx, jax.numpy as jnp
    >>> layer = nnx.LinearGeneral((2, 3), (4, 5), axis=(1, -1), ctx=nnx.context(0))
    >>> layer.kernel.shape, layer(jnp.ones((16, 2, 3))).shape
    ((2, 3, 4, 5), (16, 4, 5))
    """

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
        promote_dtype: PromoteDtype = promote_dtype,
        dot_general: DotGeneral | None = None,
        dot_general_cls: Callable[[], DotGeneral] | None = None,
        preferred_element_type: DTypeLike | None = None,
        ctx: Context,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
    ):
        self.in_features = _ints(in_features)
        self.out_features = _ints(out_features)
        self.axis = _ints(axis)
        if len(self.axis) != len(self.in_features):
            raise ValueError(
                f"LinearGeneral: `axis` and `in_features` must have the same number of entries, "
                f"got axis={axis} and in_features={in_features}."
            )
        if sorted(batch_axis) != list(range(len(batch_axis))):
            raise ValueError(BATCH_AXES_NOT_LEADING.format(layer="LinearGeneral", got=dict(batch_axis)))
        self.batch_sizes = tuple(batch_axis[i] for i in range(len(batch_axis)))
        self.use_bias = use_bias
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = param_dtype = as_dtype(param_dtype)
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.dot_general = dot_general_cls() if dot_general_cls is not None else dot_general or lax.dot_general
        self.preferred_element_type = as_optional_dtype(preferred_element_type)

        matrix = (math.prod(self.batch_sizes) * math.prod(self.in_features), math.prod(self.out_features))
        kernel = initial_value(self, kernel_init, ctx, matrix, param_dtype)
        self.kernel = Param(
            _reshaped(kernel, self.batch_sizes + self.in_features + self.out_features), **kernel_metadata
        )
        self.bias = None
        if use_bias:
            shape = self.batch_sizes + self.out_features
            bias = initial_value(self, bias_init, ctx, (math.prod(shape),), param_dtype)
            self.bias = Param(_reshaped(bias, shape), **bias_metadata)

    @property
    def logical_axes(self) -> dict[str, tuple[str | None, ...]]:
        batch = (None,) * len(self.batch_sizes)
        out = ("out", *(None,) * (len(self.out_features) - 1))
        return {"kernel": (*batch, "in", *(None,) * (len(self.in_features) - 1), *out), "bias": (*batch, *out)}

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        shape = inputs.shape
        for axis, size in zip(self.axis, self.in_features, strict=True):
            if not -len(shape) <= axis < len(shape):
                wanted = f"with an axis {axis} of size {size}"
                raise ValueError(TOO_FEW_AXES.format(layer=type(self).__name__, expected=wanted, shape=shape))
            if shape[axis] != size:
                raise wrong_features(self, size, shape[axis], shape, "in_features", f"on axis {axis}")
        for axis, size in enumerate(self.batch_sizes):
            if shape[axis] != size:
                raise wrong_features(self, size, shape[axis], shape, "batch_axis", f"on batch axis {axis}")
        axes = tuple(axis % len(shape) for axis in self.axis)
        return _apply_kernel(self, inputs, axes, tuple(range(len(self.batch_sizes))), out_sharding)
