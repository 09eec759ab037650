"""Batch normalization: the layer whose moments span examples and are kept as running averages."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.variables.variables import BatchStat
from nnx.nn.initializers import ones, zeros
from nnx.nn.norms.norm_base import IndexGroups, NormBase, moments, rescale
from nnx.nn.support.checks import check_sizes
from nnx.nn.support.parameters import NO_METADATA, AxisNames, InitializerLike, default_bias_init, default_scale_init
from nnx.nn.support.settings import (
    Hook,
    PromoteDtype,
    cast,
    compiled_body,
    default_promote_dtype,
    resolve_mode,
    result_dtype,
    statistics_dtype,
)

NO_BATCH_AXIS = (
    "BatchNorm expected a batch to average over, got an input of shape {shape}, whose only axis holds the features. "
    "Pass a batch, `x[None]`; or `use_running_average=True`; or, under `vmap`, build the layer with `axis_name`."
)
COMPLEX_INPUT = (
    "BatchNorm got a complex input ({dtype}) in training, and its running mean is real (param_dtype={param_dtype}): it "
    "would lose the imaginary part. Build the layer with `param_dtype=jnp.complex64`."
)


@compiled_body
def _normalize_by(
    x: jax.Array,
    mean: jax.Array,
    var: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    axis: int,
    epsilon: float,
    dtype: Any,
    promote: Hook[PromoteDtype] = default_promote_dtype,
) -> jax.Array:
    """Normalizes `x` by moments from elsewhere, with one entry per feature."""
    out_dtype = result_dtype((x, scale, bias), dtype, promote)
    layout = [1] * x.ndim
    layout[axis] = x.shape[axis]
    x = cast(x, statistics_dtype(x.dtype))
    y = rescale(x, jnp.reshape(mean, layout), jnp.reshape(var, layout), scale, bias, (axis,), epsilon)
    return cast(y, out_dtype)


@compiled_body
def _batch_moments(
    x: jax.Array, mask: jax.Array | None, *, axis: int, axis_name: Any, axis_index_groups: Any
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns mean and variance over all axes but `axis`, with one entry per feature, and which of them are known.

    The last is `None` if all are, because there is a batch and no mask.
    """
    x = cast(x, statistics_dtype(x.dtype))
    axes = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    mean, var, known = moments(x, mask, axes, center=True, axis_name=axis_name, axis_index_groups=axis_index_groups)
    assert mean is not None
    known = None if known is True else jnp.broadcast_to(known, var.shape)
    return jnp.reshape(mean, (-1,)), jnp.reshape(var, (-1,)), None if known is None else jnp.reshape(known, (-1,))


@compiled_body
def _running_average(old: jax.Array, new: jax.Array, known: jax.Array | None, *, momentum: float) -> jax.Array:
    """Returns `old` moved toward `new` where that is known, in the dtype of `old`."""
    # The statistics of earlier batches are data, not a function of the parameters: no gradient flows through them.
    moved = cast(momentum * old + (1.0 - momentum) * lax.stop_gradient(new), old.dtype)
    return moved if known is None else jnp.where(known, moved, old)


class BatchNorm(NormBase):
    """Batch normalization: mean 0 and variance 1 over all axes but the features; shape `(batch, ..., num_features)`.

    In training, the layer uses the moments of the batch and moves the running averages `mean` and `var` (`BatchStat`)
    toward them; with `use_running_average`, it uses the running averages instead. The mode comes from the call, else
    the instance, else the Context's flag `use_running_average`. Without any valid entry (an empty batch, a mask that is
    false everywhere), the running averages do not change, and the moments are taken to be 0 and 1.

    Args:
        num_features: the number of features.
        use_running_average: the mode of the instance; `None` to decide in the call or by the Context.
        axis: the feature axis.
        momentum: the weight of the old value in the running averages.
        epsilon: a small number added to the variance.
        dtype: the dtype of the result; by default, the dtype that input and parameters promote to.
        param_dtype: the dtype in which the parameters are stored; the running averages use at least float32.
        use_bias: whether to add a learned bias.
        use_scale: whether to multiply by a learned scale.
        bias_init: the initializer of the bias.
        scale_init: the initializer of the scale.
        axis_name: the name of a mapped axis over which the moments are averaged as well.
        axis_index_groups: groups of indices along that axis to average within, see `jax.lax.pmean`.
        use_fast_variance: accepted as in Flax, without effect: the variance never cancels, and takes one pass.
        promote_dtype: a replacement for the function that decides the dtype of the result.
        ctx: the Context; needed only for initializers that draw random numbers.
        bias_metadata: metadata of the bias's Variable.
        scale_metadata: metadata of the scale's Variable.

    >>> layer = nnx.BatchNorm(3, momentum=0.9, ctx=nnx.context(0))
    >>> y = layer(jnp.full((4, 3), 10.0), use_running_average=False)
    >>> [round(m, 3) for m in layer.mean.tolist()]
    [1.0, 1.0, 1.0]
    """

    logical_axes: ClassVar[AxisNames] = dict.fromkeys(("scale", "bias", "mean", "var"), ("norm",))

    use_running_average: bool | None
    axis: int
    momentum: float
    mean: jax.Array
    var: jax.Array

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
        self.use_running_average = use_running_average
        self.axis = axis
        self.momentum = momentum
        stat_dtype = statistics_dtype(self.param_dtype)
        self.mean = BatchStat(zeros(None, (num_features,), stat_dtype))
        # The variance of complex numbers is real.
        self.var = BatchStat(ones(None, (num_features,), jnp.finfo(stat_dtype).dtype))

    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
        ctx: Context | None = None,
    ) -> jax.Array:
        """Normalizes `x`.

        Args:
            x: an array of shape `(batch, ..., num_features)`.
            use_running_average: the mode of this call; overrides the instance's and the Context's.
            mask: an array that is true for the entries that count toward the moments.
            ctx: the Context, for its flag `use_running_average`.

        Returns:
            An array of the same shape.
        """
        self._check(x, mask, (self.axis,))
        if resolve_mode(self, "use_running_average", use_running_average, ctx):
            mean, var = self.mean, self.var
        else:
            if x.ndim == 1 and self.axis_name is None:
                raise ValueError(NO_BATCH_AXIS.format(shape=x.shape))
            if jnp.iscomplexobj(x) and not jnp.iscomplexobj(self.mean):
                raise ValueError(COMPLEX_INPUT.format(dtype=x.dtype, param_dtype=self.param_dtype))
            mean, var, known = _batch_moments(
                x, mask, axis=self.axis, axis_name=self.axis_name, axis_index_groups=self.axis_index_groups
            )
            self.mean = _running_average(self.mean, mean, known, momentum=self.momentum)
            self.var = _running_average(self.var, var, known, momentum=self.momentum)
        return _normalize_by(
            x,
            mean,
            var,
            self.scale,
            self.bias,
            axis=self.axis,
            epsilon=self.epsilon,
            dtype=self.dtype,
            promote=self.promote_dtype,
        )
