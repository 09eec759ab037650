"""The arithmetic of convolutions: paddings that XLA does not know, batch axes, and the bias.

An input has shape `(*batch, *spatial, features)`, and a kernel `(*spatial, in, out)`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import PrecisionLike

from nnx.nn.support.checks import Padding
from nnx.nn.support.settings import Hook, PromoteDtype, compiled_body, default_promote_dtype
from nnx.sharding.explicit import result_sharding, split_like


def _dimension_numbers(dimensions: int) -> lax.ConvDimensionNumbers:
    """Returns the channels-last layout: (batch, *spatial, feature) for arrays, (*spatial, in, out) for kernels."""
    channels_last = (0, dimensions + 1, *range(1, dimensions + 1))
    return lax.ConvDimensionNumbers(channels_last, (dimensions + 1, dimensions, *range(dimensions)), channels_last)


def _with_one_batch_axis(x: jax.Array, dimensions: int) -> tuple[jax.Array, tuple[int, ...]]:
    """Returns `x` with its batch axes flattened into the one that XLA's convolution takes, and their sizes."""
    batch = x.shape[: x.ndim - dimensions - 1]
    return jnp.reshape(x, (math.prod(batch), *x.shape[x.ndim - dimensions - 1 :])), batch


def _with_bias(y: jax.Array, bias: jax.Array | None, batch: tuple[int, ...]) -> jax.Array:
    """Adds the bias to the features, and unflattens the batch axis."""
    if bias is not None:
        bias = split_like(bias, y, (-1,))
        y = y + jnp.reshape(bias, (1,) * (y.ndim - 1) + bias.shape)
    return jnp.reshape(y, batch + y.shape[1:])


def _padded(
    x: jax.Array, padding: Padding, reach: Sequence[int], strides: tuple[int, ...], input_dilation: tuple[int, ...]
) -> tuple[jax.Array, Padding]:
    """Translates the paddings that XLA does not know: some are applied to `x`, the others become numbers."""
    if padding == "CIRCULAR" or padding == "REFLECT":
        mode = "wrap" if padding == "CIRCULAR" else "reflect"
        return jnp.pad(x, ((0, 0), *((r // 2, r - r // 2) for r in reach), (0, 0)), mode=mode), "VALID"
    if padding == "CAUSAL":
        return x, ((reach[0], 0),)
    if isinstance(padding, str) and any(d != 1 for d in input_dilation):
        # `conv_general_dilated` refuses a named padding together with input dilation.
        spread = [(size - 1) * d + 1 for size, d in zip(x.shape[1:-1], input_dilation, strict=True)]
        return x, tuple(lax.padtype_to_pads(spread, [r + 1 for r in reach], strides, padding))
    return x, padding


@compiled_body
def convolve(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
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
    conv_general_dilated: Hook[Callable[..., jax.Array]] = lax.conv_general_dilated,
    promote: Hook[PromoteDtype] = default_promote_dtype,
) -> jax.Array:
    """Convolves `x`, with any number of batch axes, with `kernel` and adds the bias."""
    x, kernel, bias = promote((x, kernel, bias), dtype=dtype)
    n = len(strides)
    x, batch = _with_one_batch_axis(x, n)

    # How far the dilated kernel reaches beyond its first entry.
    reach = [(size - 1) * d for size, d in zip(kernel.shape[:n], kernel_dilation, strict=True)]
    x, padding = _padded(x, padding, reach, strides, input_dilation)
    if out_sharding is None:
        out_sharding = result_sharding((x, range(n + 1)), (kernel, (n + 1,)))
    # Options are passed only when set: a user's `conv_general_dilated` need not know them.
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
        dimension_numbers=_dimension_numbers(n),
        feature_group_count=groups,
        precision=precision,
        **options,
    )
    return _with_bias(y, bias, batch)


def _wrap(y: jax.Array, periods: Sequence[int], offsets: Sequence[int]) -> jax.Array:
    """Adds up entries that are a whole number of periods apart, so that each spatial axis becomes a circle."""
    for axis, (period, offset) in enumerate(zip(periods, offsets, strict=True), start=1):
        missing = -y.shape[axis] % period
        y = jnp.pad(y, [(0, missing if i == axis else 0) for i in range(y.ndim)])
        y = jnp.reshape(y, (*y.shape[:axis], -1, period, *y.shape[axis + 1 :])).sum(axis)
        y = jnp.roll(y, -offset, axis)
    return y


@compiled_body
def convolve_transposed(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    *,
    strides: tuple[int, ...],
    padding: Padding,
    kernel_dilation: tuple[int, ...],
    transpose_kernel: bool,
    dtype: Any,
    precision: PrecisionLike,
    preferred_element_type: Any,
    promote: Hook[PromoteDtype] = default_promote_dtype,
) -> jax.Array:
    """Convolves `x` with the transpose of a strided convolution and adds the bias."""
    x, kernel, bias = promote((x, kernel, bias), dtype=dtype)
    n = len(strides)
    x, batch = _with_one_batch_axis(x, n)
    # "CIRCULAR" and "CAUSAL" start from the full output, everything the kernel reaches, and fold or cut it below.
    y = lax.conv_transpose(
        x,
        kernel,
        strides,
        "VALID" if padding in ("CIRCULAR", "CAUSAL") else padding,
        rhs_dilation=kernel_dilation,
        dimension_numbers=_dimension_numbers(n),
        transpose_kernel=transpose_kernel,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    periods = [size * stride for size, stride in zip(x.shape[1:-1], strides, strict=True)]
    if padding == "CIRCULAR":
        if transpose_kernel:
            # The first input of the `Conv` with the same kernel meets the middle of that kernel, at any stride.
            offsets = [(size - 1) * d // 2 for size, d in zip(kernel.shape[:n], kernel_dilation, strict=True)]
        else:
            # Both ends share what exceeds the period.
            offsets = [(size - period) // 2 for size, period in zip(y.shape[1:-1], periods, strict=True)]
        y = _wrap(y, periods, offsets)
    elif padding == "CAUSAL":
        y = y[:, : periods[0]]
    return _with_bias(y, bias, batch)
