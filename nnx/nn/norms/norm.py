"""Layers that normalize every example by itself: `LayerNorm`, `RMSNorm`, `GroupNorm`, `InstanceNorm`.

They differ in the axes over which the moments are taken; `norm_base` holds what they share. With a mask, only valid
entries count toward the moments; where there are none, the moments are 0 and 1, so the input is kept.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.nn.norms.norm_base import Axes, IndexGroups, NormBase
from nnx.nn.support.checks import as_tuple, check_sizes, shape_of
from nnx.nn.support.parameters import NO_METADATA, InitializerLike, default_bias_init, default_scale_init
from nnx.nn.support.settings import PromoteDtype, default_promote_dtype

GROUPS_GIVEN = (
    "GroupNorm needs exactly one of `num_groups` and `group_size`, got num_groups={groups}, group_size={size}. "
    "To set `group_size`, write `num_groups=None` as well."
)
GROUPS_DO_NOT_DIVIDE = "GroupNorm: {features} features cannot be split into {what}."
GROUPS_NEED_FEATURES = "GroupNorm: `reduction_axes` must contain the last axis, which holds the features, got {got}."
NO_SPACE = (
    "InstanceNorm expected an input with axes between the batch and the features, such as (batch, time, {features}), "
    "got shape {shape}. Write `x[None]` for an unbatched input."
)


class LayerNorm(NormBase):
    """Layer normalization: mean 0 and variance 1 over the features of each entry; shape `(..., num_features)`, kept.

    Args:
        num_features: the number of features; one number per feature axis if scale and bias have several axes.
        epsilon: a small number added to the variance.
        dtype: the dtype of the result; by default, the dtype that input and parameters promote to.
        param_dtype: the dtype in which the parameters are stored.
        use_bias: whether to add a learned bias.
        use_scale: whether to multiply by a learned scale.
        bias_init: the initializer of the bias.
        scale_init: the initializer of the scale.
        reduction_axes: the axes over which the moments are taken.
        feature_axes: the axes along which scale and bias are learned.
        axis_name: the name of a mapped axis over which the moments are averaged as well.
        axis_index_groups: groups of indices along that axis to average within, see `jax.lax.pmean`.
        use_fast_variance: accepted as in Flax, without effect: the variance never cancels, and takes one pass.
        promote_dtype: a replacement for the function that decides the dtype of the result.
        ctx: the Context; needed only for initializers that draw random numbers.
        bias_metadata: metadata of the bias's Variable.
        scale_metadata: metadata of the scale's Variable.
        scale_offset: a number added to the scale before it multiplies, as in `RMSNorm`.

    >>> layer = nnx.LayerNorm(4, ctx=nnx.context(0))
    >>> layer(jnp.arange(8.0).reshape(2, 4)).mean(-1).tolist()
    [0.0, 0.0]
    """

    reduction_axes: tuple[int, ...]
    feature_axes: tuple[int, ...]
    scale_offset: float

    def __init__(
        self,
        num_features: int | tuple[int, ...],
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
        axis_index_groups: IndexGroups = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = default_promote_dtype,
        ctx: Context | None = None,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
        scale_metadata: Mapping[str, Any] = NO_METADATA,
        scale_offset: float = 0.0,
    ) -> None:
        check_sizes(self, num_features=num_features)
        super().__init__(
            num_features,
            epsilon=epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            scale_init=scale_init if use_scale else None,
            bias_init=bias_init if use_bias else None,
            axis_name=axis_name,
            axis_index_groups=axis_index_groups,
            use_fast_variance=use_fast_variance,
            promote_dtype=promote_dtype,
            ctx=ctx,
            scale_metadata=scale_metadata,
            bias_metadata=bias_metadata,
        )
        self.reduction_axes = as_tuple(reduction_axes)
        self.feature_axes = as_tuple(feature_axes)
        self.scale_offset = scale_offset

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes `x`; only entries where `mask` is true count toward the moments."""
        return self._normalize(x, mask, self.reduction_axes, self.feature_axes, scale_offset=self.scale_offset)


class RMSNorm(NormBase):
    """Root-mean-square normalization: mean square 1 over the features; shape `(..., num_features)`, kept.

    Args:
        num_features: the number of features; one number per feature axis if the scale has several axes.
        epsilon: a small number added to the mean square.
        dtype: the dtype of the result; by default, the dtype that input and parameters promote to.
        param_dtype: the dtype in which the scale is stored.
        use_scale: whether to multiply by a learned scale.
        scale_init: the initializer of the scale.
        reduction_axes: the axes over which the mean square is taken.
        feature_axes: the axes along which the scale is learned.
        axis_name: the name of a mapped axis over which the mean square is averaged as well.
        axis_index_groups: groups of indices along that axis to average within.
        use_fast_variance: accepted as in Flax, without effect: a mean square takes one pass and does not cancel.
        promote_dtype: a replacement for the function that decides the dtype of the result.
        ctx: the Context; needed only for initializers that draw random numbers.
        scale_metadata: metadata of the scale's Variable.
        scale_offset: a number added to the scale before it multiplies. Gemma's norms have 1.0 and
            `scale_init=nnx.initializers.zeros()`: the parameter is the difference from 1.

    >>> layer = nnx.RMSNorm(2, ctx=nnx.context(0))
    >>> [round(v, 3) for v in layer(jnp.array([3.0, 3.0])).tolist()]
    [1.0, 1.0]
    """

    reduction_axes: tuple[int, ...]
    feature_axes: tuple[int, ...]
    scale_offset: float

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        *,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        use_scale: bool = True,
        scale_init: InitializerLike = default_scale_init,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: IndexGroups = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = default_promote_dtype,
        ctx: Context | None = None,
        scale_metadata: Mapping[str, Any] = NO_METADATA,
        scale_offset: float = 0.0,
    ) -> None:
        check_sizes(self, num_features=num_features)
        super().__init__(
            num_features,
            epsilon=epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            scale_init=scale_init if use_scale else None,
            bias_init=None,
            axis_name=axis_name,
            axis_index_groups=axis_index_groups,
            use_fast_variance=use_fast_variance,
            promote_dtype=promote_dtype,
            ctx=ctx,
            scale_metadata=scale_metadata,
        )
        self.reduction_axes = as_tuple(reduction_axes)
        self.feature_axes = as_tuple(feature_axes)
        self.scale_offset = scale_offset

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes `x`; only entries where `mask` is true count toward the mean square."""
        return self._normalize(
            x, mask, self.reduction_axes, self.feature_axes, center=False, scale_offset=self.scale_offset
        )


class GroupNorm(NormBase):
    """Group normalization: moments over groups of features; shape `(batch, ..., num_features)`, kept.

    Args:
        num_features: the number of features.
        num_groups: the number of groups; `None` when `group_size` is set.
        group_size: the number of features per group.
        epsilon: a small number added to the variance.
        dtype: the dtype of the result; by default, the dtype that input and parameters promote to.
        param_dtype: the dtype in which the parameters are stored.
        use_bias: whether to add a learned bias.
        use_scale: whether to multiply by a learned scale.
        bias_init: the initializer of the bias.
        scale_init: the initializer of the scale.
        reduction_axes: the axes over which the moments are taken, including the last; by default, all but the first,
            which is the batch. For an unbatched image, or several batch axes, write `reduction_axes=(-3, -2, -1)`.
        axis_name: the name of a mapped axis over which the moments are averaged as well.
        axis_index_groups: groups of indices along that axis to average within.
        use_fast_variance: accepted as in Flax, without effect: the variance never cancels, and takes one pass.
        promote_dtype: a replacement for the function that decides the dtype of the result.
        ctx: the Context; needed only for initializers that draw random numbers.
        bias_metadata: metadata of the bias's Variable.
        scale_metadata: metadata of the scale's Variable.

    >>> layer = nnx.GroupNorm(6, num_groups=3, ctx=nnx.context(0))
    >>> layer(jnp.ones((2, 5, 5, 6))).shape
    (2, 5, 5, 6)
    """

    num_groups: int
    group_size: int
    reduction_axes: tuple[int, ...] | None

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
        axis_index_groups: IndexGroups = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = default_promote_dtype,
        ctx: Context | None = None,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
        scale_metadata: Mapping[str, Any] = NO_METADATA,
    ) -> None:
        check_sizes(self, num_features=num_features)
        self.num_groups = _number_of_groups(num_features, num_groups, group_size)
        self.group_size = num_features // self.num_groups
        super().__init__(
            num_features,
            epsilon=epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            scale_init=scale_init if use_scale else None,
            bias_init=bias_init if use_bias else None,
            axis_name=axis_name,
            axis_index_groups=axis_index_groups,
            use_fast_variance=use_fast_variance,
            promote_dtype=promote_dtype,
            ctx=ctx,
            scale_metadata=scale_metadata,
            bias_metadata=bias_metadata,
        )
        self.reduction_axes = None if reduction_axes is None else as_tuple(reduction_axes)

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes `x`; only entries where `mask` is true count toward the moments."""
        axes = self.reduction_axes
        shape_of(self, x)
        if axes is None:
            axes = (*range(1, x.ndim - 1), -1)
        elif not {-1, x.ndim - 1} & set(axes):
            raise ValueError(GROUPS_NEED_FEATURES.format(got=axes))
        return self._normalize(x, mask, axes, groups=self.num_groups)


def _number_of_groups(num_features: int, num_groups: int | None, group_size: int | None) -> int:
    if num_groups is not None and group_size is None:
        groups, what = num_groups, f"num_groups={num_groups} equal groups"
        divides = num_groups > 0 and num_features % num_groups == 0
    elif num_groups is None and group_size is not None:
        divides = group_size > 0 and num_features % group_size == 0
        groups, what = num_features // group_size if divides else 0, f"groups of group_size={group_size}"
    else:
        raise ValueError(GROUPS_GIVEN.format(groups=num_groups, size=group_size))
    if not divides or groups < 1:
        raise ValueError(GROUPS_DO_NOT_DIVIDE.format(features=num_features, what=what))
    return groups


class InstanceNorm(NormBase):
    """Instance normalization: moments over space, for each example and feature; shape `(batch, ..., num_features)`.

    Args:
        num_features: the number of features.
        epsilon: a small number added to the variance.
        dtype: the dtype of the result; by default, the dtype that input and parameters promote to.
        param_dtype: the dtype in which the parameters are stored.
        use_bias: whether to add a learned bias.
        use_scale: whether to multiply by a learned scale.
        bias_init: the initializer of the bias.
        scale_init: the initializer of the scale.
        feature_axes: the feature axes; the moments are taken over all others but the first, which is the batch.
        axis_name: the name of a mapped axis over which the moments are averaged as well.
        axis_index_groups: groups of indices along that axis to average within.
        use_fast_variance: accepted as in Flax, without effect: the variance never cancels, and takes one pass.
        promote_dtype: a replacement for the function that decides the dtype of the result.
        ctx: the Context; needed only for initializers that draw random numbers.
        bias_metadata: metadata of the bias's Variable.
        scale_metadata: metadata of the scale's Variable.

    >>> layer = nnx.InstanceNorm(3, ctx=nnx.context(0))
    >>> layer(jnp.ones((2, 5, 5, 3))).shape
    (2, 5, 5, 3)
    """

    feature_axes: tuple[int, ...]

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
        axis_index_groups: IndexGroups = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = default_promote_dtype,
        ctx: Context | None = None,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
        scale_metadata: Mapping[str, Any] = NO_METADATA,
    ) -> None:
        check_sizes(self, num_features=num_features)
        super().__init__(
            num_features,
            epsilon=epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            scale_init=scale_init if use_scale else None,
            bias_init=bias_init if use_bias else None,
            axis_name=axis_name,
            axis_index_groups=axis_index_groups,
            use_fast_variance=use_fast_variance,
            promote_dtype=promote_dtype,
            ctx=ctx,
            scale_metadata=scale_metadata,
            bias_metadata=bias_metadata,
        )
        self.feature_axes = as_tuple(feature_axes)

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes `x`; only entries where `mask` is true count toward the moments."""
        shape_of(self, x)
        features = {axis % x.ndim for axis in self.feature_axes} if x.ndim else set()
        reduction_axes = tuple(axis for axis in range(1, x.ndim) if axis not in features)
        if not reduction_axes and x.ndim:
            raise ValueError(NO_SPACE.format(features=self.num_features, shape=x.shape))
        return self._normalize(x, mask, reduction_axes, self.feature_axes)
