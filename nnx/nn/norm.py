"""Normalisation of each entry by itself: `LayerNorm` and `RMSNorm`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module import Module
from nnx.nn.dtypes import PromoteDtype, as_dtype, as_optional_dtype, cast, promote_dtype, statistics_dtype
from nnx.nn.initial_values import InitializerLike, default_bias_init, default_scale_init
from nnx.nn.linear import NO_METADATA
from nnx.nn.moments import (
    Axes,
    as_axes,
    as_groups,
    check_features,
    check_mask,
    make_scale_and_bias,
    moments,
    rescale,
    result_dtype,
)


def _normalize(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    mask: Array | None,
    *,
    reduction_axes: tuple[int, ...],
    feature_axes: tuple[int, ...],
    epsilon: float,
    center: bool,
    groups: int | None,
    fast: bool,
    axis_name: Any,
    axis_index_groups: Any,
    dtype: Any,
    promote: PromoteDtype = promote_dtype,
) -> Array:
    out_dtype = result_dtype(x, scale, bias, dtype, promote)
    x = cast(x, statistics_dtype(x.dtype))
    shape = x.shape
    axes = tuple(axis % x.ndim for axis in reduction_axes)
    options: dict[str, Any] = {
        "center": center,
        "fast": fast,
        "axis_name": axis_name,
        "axis_index_groups": axis_index_groups,
    }
    if groups is None:
        mean, var = moments(x, mask, axes, **options)
    else:
        # (..., features) -> (..., groups, group size), and the moments of a group back to all of its features.
        grouped = jnp.reshape(x, (*shape[:-1], groups, shape[-1] // groups))
        if mask is not None:
            mask = jnp.reshape(jnp.broadcast_to(mask, shape), grouped.shape)
        axes = tuple(axis if axis < x.ndim - 1 else x.ndim for axis in axes)
        mean, var = moments(grouped, mask, axes, **options)
        var = jnp.repeat(jnp.squeeze(var, -1), shape[-1] // groups, axis=-1)
        mean = None if mean is None else jnp.repeat(jnp.squeeze(mean, -1), shape[-1] // groups, axis=-1)
    return cast(rescale(x, mean, var, scale, bias, feature_axes, epsilon), out_dtype)


_normalize_compiled = partial(
    jax.jit,
    static_argnames=(
        "reduction_axes",
        "feature_axes",
        "epsilon",
        "center",
        "groups",
        "fast",
        "axis_name",
        "axis_index_groups",
        "dtype",
    ),
)(_normalize)


def normalize(
    layer: Any,
    x: Array,
    mask: Array | None,
    reduction_axes: tuple[int, ...],
    feature_axes: tuple[int, ...] = (-1,),
    *,
    center: bool = True,
    groups: int | None = None,
) -> Array:
    """`x` normalised as `layer` says, over these axes."""
    check_features(layer, x, layer.num_features, feature_axes)
    check_mask(layer, x, mask)
    settings = {
        "reduction_axes": reduction_axes,
        "feature_axes": feature_axes,
        "epsilon": layer.epsilon,
        "center": center,
        "groups": groups,
        "fast": layer.use_fast_variance,
        "axis_name": layer.axis_name,
        "axis_index_groups": layer.axis_index_groups,
        "dtype": layer.dtype,
    }
    if layer.promote_dtype is promote_dtype:
        return _normalize_compiled(x, layer.scale, layer.bias, mask, **settings)
    return _normalize(x, layer.scale, layer.bias, mask, **settings, promote=layer.promote_dtype)


class LayerNorm(Module):
    """Layer normalisation: mean 0 and variance 1 over the features of each entry; shape `(..., num_features)`, kept.

    Args:
        num_features: number of features.
        epsilon: added to the variance.
        dtype: of the result; by default that of input and parameters.
        param_dtype: in which the parameters are stored.
        use_bias: whether to add a learned bias.
        use_scale: whether to multiply by a learned scale.
        bias_init: initialiser of the bias.
        scale_init: initialiser of the scale.
        reduction_axes: axes over which the moments are taken.
        feature_axes: axes that have their own scale and bias.
        axis_name: name of a mapped axis over which the moments are averaged as well.
        axis_index_groups: groups of indices along that axis to average within, see `jax.lax.pmean`.
        use_fast_variance: whether to compute the variance as `E[x²] - E[x]²`, in one pass over the input.
        promote_dtype: replaces the function that decides the dtype of the result.
        ctx: only needed for initialisers that draw random numbers.
        bias_metadata: metadata of the bias's Variable.
        scale_metadata: metadata of the scale's Variable.

    >>> import nnx, jax.numpy as jnp
    >>> layer = nnx.LayerNorm(4, ctx=nnx.context(0))
    >>> layer(jnp.arange(8.0).reshape(2, 4)).mean(-1).tolist()
    [0.0, 0.0]
    """

    logical_axes = {"scale": ("norm",), "bias": ("norm",)}

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: InitializerLike = default_bias_init,
        scale_init: InitializerLike = default_scale_init,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = promote_dtype,
        ctx: Context | None = None,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
        scale_metadata: Mapping[str, Any] = NO_METADATA,
    ):
        self.num_features = num_features
        self.epsilon = epsilon
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.reduction_axes = as_axes(reduction_axes)
        self.feature_axes = as_axes(feature_axes)
        self.axis_name = axis_name
        self.axis_index_groups = as_groups(axis_index_groups)
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype
        self.scale: Array | None
        self.bias: Array | None
        make_scale_and_bias(
            self,
            num_features,
            ctx,
            scale_init if use_scale else None,
            scale_metadata,
            bias_init if use_bias else None,
            bias_metadata,
        )

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        return normalize(self, x, mask, self.reduction_axes, self.feature_axes)


class RMSNorm(Module):
    """Root-mean-square normalisation: mean square 1 over the features; shape `(..., num_features)`, kept.

    Args:
        num_features: number of features.
        epsilon: added to the mean square.
        dtype: of the result; by default that of input and parameters.
        param_dtype: in which the scale is stored.
        use_scale: whether to multiply by a learned scale.
        scale_init: initialiser of the scale.
        reduction_axes: axes over which the mean square is taken.
        feature_axes: axes that have their own scale.
        axis_name: name of a mapped axis over which the mean square is averaged as well.
        axis_index_groups: groups of indices along that axis to average within.
        use_fast_variance: has no effect on a mean square; there for the sake of `LayerNorm`'s signature.
        promote_dtype: replaces the function that decides the dtype of the result.
        ctx: only needed for initialisers that draw random numbers.
        scale_metadata: metadata of the scale's Variable.

    >>> import nnx, jax.numpy as jnp
    >>> layer = nnx.RMSNorm(2, ctx=nnx.context(0))
    >>> [round(v, 3) for v in layer(jnp.array([3.0, 3.0])).tolist()]
    [1.0, 1.0]
    """

    logical_axes = {"scale": ("norm",), "bias": ("norm",)}

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        use_scale: bool = True,
        scale_init: InitializerLike = default_scale_init,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = promote_dtype,
        ctx: Context | None = None,
        scale_metadata: Mapping[str, Any] = NO_METADATA,
    ):
        self.num_features = num_features
        self.epsilon = epsilon
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.use_scale = use_scale
        self.reduction_axes = as_axes(reduction_axes)
        self.feature_axes = as_axes(feature_axes)
        self.axis_name = axis_name
        self.axis_index_groups = as_groups(axis_index_groups)
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype
        self.scale: Array | None
        make_scale_and_bias(self, num_features, ctx, scale_init if use_scale else None, scale_metadata)

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        return normalize(self, x, mask, self.reduction_axes, self.feature_axes, center=False)
