"""Normalisation of each example by itself, over space: `GroupNorm` and `InstanceNorm`."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module import Module
from nnx.nn.dtypes import PromoteDtype, as_dtype, as_optional_dtype, promote_dtype
from nnx.nn.initial_values import InitializerLike, default_bias_init, default_scale_init
from nnx.nn.linear import NO_METADATA
from nnx.nn.moments import Axes, as_axes, as_groups, make_scale_and_bias
from nnx.nn.norm import normalize

GROUPS_GIVEN = (
    "GroupNorm needs exactly one of `num_groups` and `group_size`, got num_groups={groups}, group_size={size}. "
    "To give `group_size`, write `num_groups=None` as well."
)
GROUPS_DO_NOT_DIVIDE = "GroupNorm: {features} features cannot be split into {what}."
GROUPS_NEED_FEATURES = "GroupNorm: `reduction_axes` must contain the last axis, which holds the features, got {got}."


class GroupNorm(Module):
    """Group normalisation: moments over groups of features; shape `(batch, ..., num_features)`, kept.

    Args:
        num_features: number of features.
        num_groups: number of groups; `None` when `group_size` is given.
        group_size: number of features per group.
        epsilon: added to the variance.
        dtype: of the result; by default that of input and parameters.
        param_dtype: in which the parameters are stored.
        use_bias: whether to add a learned bias.
        use_scale: whether to multiply by a learned scale.
        bias_init: initialiser of the bias.
        scale_init: initialiser of the scale.
        reduction_axes: axes over which the moments are taken, the last among them; by default all but the first, which
            is the batch. For an unbatched image, or several batch axes, write `reduction_axes=(-3, -2, -1)`.
        axis_name: name of a mapped axis over which the moments are averaged as well.
        axis_index_groups: groups of indices along that axis to average within.
        use_fast_variance: whether to compute the variance as `E[x²] - E[x]²`.
        promote_dtype: replaces the function that decides the dtype of the result.
        ctx: only needed for initialisers that draw random numbers.
        bias_metadata: metadata of the bias's Variable.
        scale_metadata: metadata of the scale's Variable.

    >>> import nnx, jax.numpy as jnp
    >>> layer = nnx.GroupNorm(6, num_groups=3, ctx=nnx.context(0))
    >>> layer(jnp.ones((2, 5, 5, 6))).shape
    (2, 5, 5, 6)
    """

    logical_axes = {"scale": ("norm",), "bias": ("norm",)}

    def __init__(
        self,
        num_features: int,
        num_groups: int | None = 32,
        group_size: int | None = None,
        *,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: InitializerLike = default_bias_init,
        scale_init: InitializerLike = default_scale_init,
        reduction_axes: Axes | None = None,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = promote_dtype,
        ctx: Context | None = None,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
        scale_metadata: Mapping[str, Any] = NO_METADATA,
    ):
        if (num_groups is None) == (group_size is None):
            raise ValueError(GROUPS_GIVEN.format(groups=num_groups, size=group_size))
        if group_size is not None:
            if num_features % group_size:
                what = f"groups of group_size={group_size}"
                raise ValueError(GROUPS_DO_NOT_DIVIDE.format(features=num_features, what=what))
            num_groups = num_features // group_size
        assert num_groups is not None
        if num_groups <= 0 or num_features % num_groups:
            what = f"num_groups={num_groups} equal groups"
            raise ValueError(GROUPS_DO_NOT_DIVIDE.format(features=num_features, what=what))
        self.num_features = num_features
        self.num_groups = num_groups
        self.group_size = num_features // num_groups
        self.epsilon = epsilon
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.reduction_axes = None if reduction_axes is None else as_axes(reduction_axes)
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
        axes = self.reduction_axes
        if axes is None:
            axes = (*range(1, x.ndim - 1), -1)
        elif not {-1, x.ndim - 1} & set(axes):
            raise ValueError(GROUPS_NEED_FEATURES.format(got=axes))
        return normalize(self, x, mask, axes, groups=self.num_groups)


class InstanceNorm(Module):
    """Instance normalisation: moments over space, for each example and feature; shape `(batch, ..., num_features)`.

    Args:
        num_features: number of features.
        epsilon: added to the variance.
        dtype: of the result; by default that of input and parameters.
        param_dtype: in which the parameters are stored.
        use_bias: whether to add a learned bias.
        use_scale: whether to multiply by a learned scale.
        bias_init: initialiser of the bias.
        scale_init: initialiser of the scale.
        feature_axes: the feature axes; the moments are taken over all others but the first, which is the batch.
        axis_name: name of a mapped axis over which the moments are averaged as well.
        axis_index_groups: groups of indices along that axis to average within.
        use_fast_variance: whether to compute the variance as `E[x²] - E[x]²`.
        promote_dtype: replaces the function that decides the dtype of the result.
        ctx: only needed for initialisers that draw random numbers.
        bias_metadata: metadata of the bias's Variable.
        scale_metadata: metadata of the scale's Variable.

    >>> import nnx, jax.numpy as jnp
    >>> layer = nnx.InstanceNorm(3, ctx=nnx.context(0))
    >>> layer(jnp.ones((2, 5, 5, 3))).shape
    (2, 5, 5, 3)
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
        features = {axis % x.ndim for axis in self.feature_axes} if x.ndim else set()
        reduction_axes = tuple(axis for axis in range(1, x.ndim) if axis not in features)
        if not reduction_axes and x.ndim:
            raise ValueError(
                f"InstanceNorm expected an input with axes between the batch and the features, such as "
                f"(batch, time, {self.num_features}), got shape {x.shape}. Write `x[None]` for an unbatched input."
            )
        return normalize(self, x, mask, reduction_axes, self.feature_axes)
