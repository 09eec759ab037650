"""What normalizing layers share: the arithmetic, and `NormBase` with their settings and parameters.

*Moments* (mean and variance) are computed in at least float32 over the *reduction axes*. *Scale* and *bias* are learned
along the *feature axes*. A *mask* is nonzero where an entry counts. It has as many axes as the input, each of its size
or 1.

The square of 1e20 is beyond float32, so what is squared is first divided by a large *unit* (`_unit_for`), which costs
one product per entry and no pass over the data. A variance that overflows all the same makes the result NaN, never
zeros (`_inverse_root`).
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.module import Module
from nnx.nn.support.checks import check_last_axis, shape_of, too_few_axes, wrong_features
from nnx.nn.support.parameters import NO_METADATA, AxisNames, InitializerLike, make_param
from nnx.nn.support.settings import (
    Hook,
    PromoteDtype,
    as_dtype,
    as_optional_dtype,
    cast,
    compiled_body,
    default_promote_dtype,
    result_dtype,
    statistics_dtype,
)

Axes = int | Sequence[int]
IndexGroups = Sequence[Sequence[int]] | None

WRONG_MASK = (
    "{layer} expected a mask with the input's number of axes, each of the input's size or 1, "
    "got a mask of shape {mask} for an input of shape {shape}."
)


class Moments(NamedTuple):
    """Mean and variance; without any valid entry they are 0 and 1, so that normalizing changes nothing.

    Attributes:
        mean: the mean, or `None` if the values are not centered.
        var: the variance; the mean square if the values are not centered. It is measured in squares of the unit.
        known: whether there are valid entries; an array if there is a mask.
    """

    mean: jax.Array | None
    var: jax.Array
    known: bool | jax.Array


def _unit_for(epsilon: float) -> float:
    """Returns what to divide by before squaring: the power of two whose square is about `2**60 * epsilon`.

    For an epsilon of 1e-6, entries of up to about 1e25 can then be squared. Squares that become too small for float32
    are far below epsilon. A larger unit would make the derivative of the inverse deviation overflow instead, since
    that reaches `(epsilon / unit**2) ** -1.5`. A power of two changes no digit.
    """
    return 2.0 ** max(0, (60 + math.log2(epsilon)) // 2) if epsilon > 0 else 1.0


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _square(x: jax.Array, unit: float) -> jax.Array:
    return lax.square(x * (1 / unit))


@_square.defjvp
def _square_jvp(unit: float, primals: Any, tangents: Any) -> Any:
    (x,), (tangent,) = primals, tangents
    # JAX's own rule would keep the quotient for the backward pass, in addition to `x`.
    return _square(x, unit), x * (tangent * (2 / unit**2))


@jax.custom_jvp
def _inverse_root(x: jax.Array) -> jax.Array:
    """Returns `1 / sqrt(x)`, and NaN, not 0, for an infinite `x`."""
    # Subtracting the smallest number changes nothing but 0, and the root of a negative number is NaN. A comparison
    # would use a value twice, and XLA recognizes the form of `_fused` only if every value of a row is used once.
    root = lax.rsqrt(x) - jnp.finfo(x.dtype).tiny
    return lax.square(lax.sqrt(root))


@_inverse_root.defjvp
def _inverse_root_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (tangent,) = primals, tangents
    inverse = _inverse_root(x)
    # In this order: `x**-1.5`, the product of the factors, can be too small for float32 where the result is not.
    return inverse, -0.5 * inverse * (tangent / x)


def _inverse_deviation(var: jax.Array, epsilon: float, unit: float) -> jax.Array:
    """Returns `1 / sqrt(var + epsilon)` for a variance in squares of the unit."""
    return _inverse_root(var + epsilon / unit**2) * (1 / unit)


def _squared(x: jax.Array, unit: float) -> jax.Array:
    """Returns `|x|²` in squares of the unit; it is real for complex `x`."""
    return _square(x.real, unit) + _square(x.imag, unit) if jnp.iscomplexobj(x) else _square(x, unit)


def _squared_means(x: jax.Array, unit: float) -> jax.Array:
    """Returns what `_squared` does, for one value per row.

    For a single row, where the unit is a constant of the same shape, XLA would turn `(x * c) * (x * c)` into
    `(x * x) * c²`, which overflows. It does not look through a maximum; this one changes only minus infinity.
    """
    if jnp.iscomplexobj(x):
        return _squared_means(x.real, unit) + _squared_means(x.imag, unit)
    return lax.square(jnp.maximum(x * (1 / unit), jnp.finfo(x.dtype).min))


def _shifted_moments(x: jax.Array, axes: tuple[int, ...], unit: float) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance over `axes` in one pass: on a GPU, a second one would be a kernel more for each norm.

    E[x²] - E[x]² cancels when the mean is large. Of the distances from one of the values it does not: for a value k
    deviations away from the mean, the relative error is about k² roundings, and among n values k² is at most n.
    """
    origin = lax.stop_gradient(x[tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(x.ndim))])
    distance = x - origin
    offset = jnp.mean(distance, axes, keepdims=True)
    var = jnp.mean(_squared(distance, unit), axes, keepdims=True) - _squared_means(offset, unit)
    return origin + offset, jnp.where(var < 0, 0, var)


def moments(
    x: jax.Array,
    mask: jax.Array | None,
    axes: tuple[int, ...],
    *,
    center: bool,
    axis_name: Any,
    axis_index_groups: Any,
    unit: float = 1.0,
) -> Moments:
    """Returns the moments of the valid entries over `axes`, which stay with size 1."""
    valid = None if mask is None else jnp.broadcast_to(jnp.asarray(mask, bool), x.shape)

    def total(value: Any) -> Any:
        return value if axis_name is None else lax.psum(value, axis_name, axis_index_groups=axis_index_groups)

    count: Any = math.prod(x.shape[axis] for axis in axes)
    if valid is not None:
        count = jnp.sum(valid, axes, keepdims=True, dtype=x.real.dtype)
    count = total(count)
    divisor = jnp.maximum(count, 1) if valid is not None else max(count, 1)

    def average(value: jax.Array) -> jax.Array:
        return total(jnp.sum(value, axes, keepdims=True)) / divisor

    kept = x if valid is None else jnp.where(valid, x, 0)
    if not center:
        mean, var = None, average(_squared(kept, unit))
    elif valid is None and axis_name is None and count:
        mean, var = _shifted_moments(x, axes, unit)
    else:
        # The corrected two-pass variance. The second term is zero, yet it carries the derivative with respect to the
        # mean, at all orders; with the mean held fixed, the first term needs no reduction for it.
        mean = average(kept)
        fixed_mean = lax.stop_gradient(mean)
        distance = x - fixed_mean
        distance = distance if valid is None else jnp.where(valid, distance, 0)
        var = average(_squared(distance, unit)) - _squared(mean - fixed_mean, unit)
    if valid is None:
        return Moments(mean, var if count else jnp.ones_like(var), count > 0)
    return Moments(mean, jnp.where(count > 0, var, unit**-2), count > 0)


def _feature_layout(shape: tuple[int, ...], feature_axes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape in which scale and bias broadcast to an input of this shape."""
    features = {axis % len(shape) for axis in feature_axes}
    return tuple(size if axis in features else 1 for axis, size in enumerate(shape))


def rescale(
    x: jax.Array,
    mean: jax.Array | None,
    var: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    feature_axes: tuple[int, ...],
    epsilon: float,
    unit: float = 1.0,
) -> jax.Array:
    """Computes `(x - mean) / sqrt(var + epsilon) * scale + bias` in the statistics dtype."""
    layout = _feature_layout(x.shape, feature_axes)
    # Scale and inverse deviation are multiplied first: both are small, so the input is multiplied only once.
    factor = _inverse_deviation(var, epsilon, unit)
    if scale is not None:
        factor = factor * jnp.reshape(scale, layout)
    y = (x if mean is None else x - mean) * factor
    return y if bias is None else y + jnp.reshape(bias, layout)


@partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5, 6))
def _fused(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    axes: tuple[int, ...],
    feature_axes: tuple[int, ...],
    epsilon: float,
    center: bool,
) -> jax.Array:
    """Normalizes `x` by its own moments, in the form that XLA turns into a single kernel on a GPU.

    That form is an array combined with the broadcast of its own reduction, twice: first the mean is subtracted, then
    the result is multiplied by its inverse deviation, before anything else happens to it. Decoding has little to do
    between two launches, so one kernel per norm instead of two shows: GPT-2 small with 8 rows writes 3 % more tokens
    on an H200.

    A derivative needs the moments themselves, so its rule computes them, in one pass.
    """
    unit = _unit_for(epsilon)
    if center:
        x = x - jnp.mean(x, axes, keepdims=True)
    y = x * _inverse_deviation(jnp.mean(_square(x, unit), axes, keepdims=True), epsilon, unit)
    layout = _feature_layout(x.shape, feature_axes)
    y = y if scale is None else y * jnp.reshape(scale, layout)
    return y if bias is None else y + jnp.reshape(bias, layout)


@_fused.defjvp
def _fused_jvp(
    axes: tuple[int, ...], feature_axes: tuple[int, ...], epsilon: float, center: bool, primals: Any, tangents: Any
) -> Any:
    unit = _unit_for(epsilon)

    def normalized(x: Any, scale: Any, bias: Any) -> jax.Array:
        mean, var = (
            _shifted_moments(x, axes, unit) if center else (None, jnp.mean(_square(x, unit), axes, keepdims=True))
        )
        return rescale(x, mean, var, scale, bias, feature_axes, epsilon, unit)

    return jax.jvp(normalized, primals, tangents)


def _group_moments(
    x: jax.Array, mask: jax.Array | None, axes: tuple[int, ...], groups: int, options: dict[str, Any]
) -> tuple[jax.Array | None, jax.Array]:
    """Returns mean and variance of groups of the last axis, repeated for the features of each."""
    size = x.shape[-1] // groups
    grouped = jnp.reshape(x, (*x.shape[:-1], groups, size))
    if mask is not None:
        mask = jnp.reshape(jnp.broadcast_to(mask, x.shape), grouped.shape)
    # The features of a group are a new last axis, over which the moments are taken in place of all features.
    axes = tuple(axis if axis < x.ndim - 1 else x.ndim for axis in axes)
    mean, var, _ = moments(grouped, mask, axes, **options)
    return None if mean is None else _repeated(mean, size), _repeated(var, size)


def _repeated(moment: jax.Array, size: int) -> jax.Array:
    return jnp.repeat(jnp.squeeze(moment, -1), size, axis=-1)


@compiled_body
def _normalize(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    mask: jax.Array | None,
    *,
    reduction_axes: tuple[int, ...],
    feature_axes: tuple[int, ...],
    epsilon: float,
    center: bool,
    groups: int | None,
    axis_name: Any,
    axis_index_groups: Any,
    dtype: Any,
    scale_offset: float,
    promote: Hook[PromoteDtype] = default_promote_dtype,
) -> jax.Array:
    """Normalizes `x` by its own moments, over whole axes or over `groups` of the last one."""
    out_dtype = result_dtype((x, scale, bias), dtype, promote)
    x = cast(x, statistics_dtype(x.dtype))
    if scale is not None and scale_offset != 0.0:
        # Added in the statistics dtype: bfloat16 would round a scale of 1.001 back to 1.
        scale = cast(scale, statistics_dtype(scale.dtype)) + scale_offset
    axes = tuple(axis % x.ndim for axis in reduction_axes)
    if mask is None and groups is None and axis_name is None and x.size and not jnp.iscomplexobj(x):
        return cast(_fused(x, scale, bias, axes, feature_axes, epsilon, center), out_dtype)
    unit = _unit_for(epsilon)
    options: dict[str, Any] = {"center": center, "axis_name": axis_name, "axis_index_groups": axis_index_groups}
    options["unit"] = unit
    if groups is None:
        mean, var, _ = moments(x, mask, axes, **options)
    else:
        mean, var = _group_moments(x, mask, axes, groups, options)
    return cast(rescale(x, mean, var, scale, bias, feature_axes, epsilon, unit), out_dtype)


class NormBase(Module):
    """The settings, scale and bias of a normalizing layer."""

    logical_axes: ClassVar[AxisNames] = {"scale": ("norm",), "bias": ("norm",)}

    num_features: int
    epsilon: float
    dtype: np.dtype | None
    param_dtype: np.dtype
    use_bias: bool
    use_scale: bool
    axis_name: str | None
    axis_index_groups: tuple[tuple[int, ...], ...] | None
    use_fast_variance: bool
    promote_dtype: PromoteDtype
    scale: jax.Array | None
    bias: jax.Array | None

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        *,
        epsilon: float,
        dtype: DTypeLike | None,
        param_dtype: DTypeLike,
        scale_init: InitializerLike | None,
        bias_init: InitializerLike | None,
        axis_name: str | None,
        axis_index_groups: IndexGroups,
        use_fast_variance: bool,
        promote_dtype: PromoteDtype,
        ctx: Context | None,
        scale_metadata: Mapping[str, Any],
        bias_metadata: Mapping[str, Any] = NO_METADATA,
    ) -> None:
        """Sets the layer up; an initializer of `None` means that the layer does not have that parameter."""
        shape = num_features if isinstance(num_features, tuple) else (num_features,)
        self.num_features = math.prod(shape)
        self.epsilon = epsilon
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.use_bias = bias_init is not None
        self.use_scale = scale_init is not None
        self.axis_name = axis_name
        # Nested tuples, because settings of a compiled body must be hashable.
        self.axis_index_groups = None if axis_index_groups is None else tuple(tuple(g) for g in axis_index_groups)
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype
        self.scale = None if scale_init is None else make_param(self, scale_init, ctx, shape, scale_metadata)
        self.bias = None if bias_init is None else make_param(self, bias_init, ctx, shape, bias_metadata)

    def _check(self, x: jax.Array, mask: jax.Array | None, feature_axes: tuple[int, ...]) -> None:
        """Raises `ValueError` unless the feature axes of `x` hold `num_features` entries and `mask` fits `x`."""
        shape = shape_of(self, x)
        if feature_axes == (-1,):
            check_last_axis(self, x, self.num_features, "num_features")
        elif any(not -len(shape) <= axis < len(shape) for axis in feature_axes):
            wanted = f"with axes {feature_axes} of {self.num_features} features"
            raise too_few_axes(type(self).__name__, wanted, shape)
        else:
            size = math.prod(shape[axis] for axis in feature_axes)
            if size != self.num_features:
                raise wrong_features(self, self.num_features, size, shape, "num_features", f"on axes {feature_axes}")
        if mask is None:
            return
        if len(shape_of(self, mask)) != x.ndim or any(m not in (1, n) for m, n in zip(mask.shape, shape, strict=True)):
            raise ValueError(WRONG_MASK.format(layer=type(self).__name__, mask=mask.shape, shape=shape))

    def _normalize(
        self,
        x: jax.Array,
        mask: jax.Array | None,
        reduction_axes: tuple[int, ...],
        feature_axes: tuple[int, ...] = (-1,),
        *,
        center: bool = True,
        groups: int | None = None,
        scale_offset: float = 0.0,
    ) -> jax.Array:
        """Normalizes `x` by its own moments over these axes, after checking it."""
        self._check(x, mask, feature_axes)
        return _normalize(
            x,
            self.scale,
            self.bias,
            mask,
            reduction_axes=reduction_axes,
            feature_axes=feature_axes,
            epsilon=self.epsilon,
            center=center,
            groups=groups,
            axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups,
            dtype=self.dtype,
            scale_offset=scale_offset,
            promote=self.promote_dtype,
        )
