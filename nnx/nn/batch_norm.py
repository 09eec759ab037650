"""Batch normalisation, the layer whose statistics cross examples and live on as running averages."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module import Module
from nnx.core.variables import BatchStat
from nnx.nn.dtypes import PromoteDtype, as_dtype, as_optional_dtype, cast, promote_dtype, statistics_dtype
from nnx.nn.initial_values import InitializerLike, default_bias_init, default_scale_init
from nnx.nn.initializers import ones, zeros
from nnx.nn.linear import NO_METADATA
from nnx.nn.modes import resolve_mode
from nnx.nn.moments import as_groups, check_features, check_mask, make_scale_and_bias, moments, rescale, result_dtype

NO_BATCH_AXIS = (
    "BatchNorm expected a batch to average over, got an input of shape {shape}, whose only axis holds the features. "
    "Pass a batch, `x[None]`; or `use_running_average=True`; or, under `vmap`, give the layer the `axis_name`."
)


def _normalize(
    x: Array,
    mean: Array,
    var: Array,
    scale: Array | None,
    bias: Array | None,
    *,
    axis: int,
    epsilon: float,
    dtype: Any,
    promote: PromoteDtype = promote_dtype,
) -> Array:
    out_dtype = result_dtype(x, scale, bias, dtype, promote)
    layout = [1] * x.ndim
    layout[axis] = x.shape[axis]
    x = cast(x, statistics_dtype(x.dtype))
    y = rescale(x, jnp.reshape(mean, layout), jnp.reshape(var, layout), scale, bias, (axis,), epsilon)
    return cast(y, out_dtype)


@partial(jax.jit, static_argnames=("axis", "fast", "axis_name", "axis_index_groups"))
def _batch_moments(
    x: Array, mask: Array | None, *, axis: int, fast: bool, axis_name: Any, axis_index_groups: Any
) -> tuple[Array, Array]:
    x = cast(x, statistics_dtype(x.dtype))
    axes = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    mean, var = moments(x, mask, axes, center=True, fast=fast, axis_name=axis_name, axis_index_groups=axis_index_groups)
    assert mean is not None
    return jnp.reshape(mean, (-1,)), jnp.reshape(var, (-1,))


@partial(jax.jit, static_argnames=("momentum",))
def _running(old: Array, new: Array, *, momentum: float) -> Array:
    return cast(momentum * old + (1.0 - momentum) * lax.stop_gradient(new), old.dtype)


_normalize_compiled = partial(jax.jit, static_argnames=("axis", "epsilon", "dtype"))(_normalize)


class BatchNorm(Module):
    """Batch normalisation: mean 0 and variance 1 over all axes but the features; shape `(batch, ..., num_features)`.

    In training the moments of the batch are used, and enter the running averages `mean` and `var` (`BatchStat`); with
    `use_running_average` those are used instead. The mode is taken from the call, else the instance, else the Context's
    flag `use_running_average`.

    Args:
        num_features: number of features.
        use_running_average: the instance's mode; `None` to decide in the call or by the Context.
        axis: the feature axis.
        momentum: weight of the old value in the running averages.
        epsilon: added to the variance.
        dtype: of the result; by default that of input and parameters.
        param_dtype: in which the parameters are stored; the running averages are stored in at least float32.
        use_bias: whether to add a learned bias.
        use_scale: whether to multiply by a learned scale.
        bias_init: initialiser of the bias.
        scale_init: initialiser of the scale.
        axis_name: name of a mapped axis over which the moments are averaged as well.
        axis_index_groups: groups of indices along that axis to average within, see `jax.lax.pmean`.
        use_fast_variance: whether to compute the variance as `E[x²] - E[x]²`, in one pass over the input.
        promote_dtype: replaces the function that decides the dtype of the result.
        ctx: only needed for initialisers that draw random numbers.
        bias_metadata: metadata of the bias's Variable.
        scale_metadata: metadata of the scale's Variable.

    >>> import nnx, jax.numpy as jnp
    >>> layer = nnx.BatchNorm(3, momentum=0.9, ctx=nnx.context(0))
    >>> y = layer(jnp.full((4, 3), 10.0), use_running_average=False)
    >>> [round(m, 3) for m in layer.mean.tolist()]
    [1.0, 1.0, 1.0]
    """

    logical_axes = dict.fromkeys(("scale", "bias", "mean", "var"), ("norm",))

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool | None = None,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: InitializerLike = default_bias_init,
        scale_init: InitializerLike = default_scale_init,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = promote_dtype,
        ctx: Context | None = None,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
        scale_metadata: Mapping[str, Any] = NO_METADATA,
    ):
        self.num_features = num_features
        self.use_running_average = use_running_average
        self.axis = axis
        self.momentum = momentum
        self.epsilon = epsilon
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.axis_name = axis_name
        self.axis_index_groups = as_groups(axis_index_groups)
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype
        stat_dtype = statistics_dtype(self.param_dtype)
        self.mean = BatchStat(zeros(None, (num_features,), stat_dtype))
        self.var = BatchStat(ones(None, (num_features,), stat_dtype))
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

    def __call__(
        self,
        x: Array,
        use_running_average: bool | None = None,
        *,
        mask: Array | None = None,
        ctx: Context | None = None,
    ) -> Array:
        check_features(self, x, self.num_features, (self.axis,))
        check_mask(self, x, mask)
        if resolve_mode(self, "use_running_average", use_running_average, ctx):
            mean, var = self.mean, self.var
        else:
            if x.ndim == 1 and self.axis_name is None:
                raise ValueError(NO_BATCH_AXIS.format(shape=x.shape))
            mean, var = _batch_moments(
                x,
                mask,
                axis=self.axis,
                fast=self.use_fast_variance,
                axis_name=self.axis_name,
                axis_index_groups=self.axis_index_groups,
            )
            self.mean = _running(self.mean, mean, momentum=self.momentum)
            self.var = _running(self.var, var, momentum=self.momentum)
        settings = {"axis": self.axis, "epsilon": self.epsilon, "dtype": self.dtype}
        if self.promote_dtype is promote_dtype:
            return _normalize_compiled(x, mean, var, self.scale, self.bias, **settings)
        return _normalize(x, mean, var, self.scale, self.bias, **settings, promote=self.promote_dtype)
