"""Products with a quantized weight on a GPU, where XLA's own are slow.

A few rows, as in decoding: most of the time goes into reading the weight, and a kernel reads the integers alone
(`quantized_kernel`). Many rows, as in prompts: the weight is dequantized first, once, and the product is that of
ordinary matrices. XLA would convert integers again and again inside of it, in a kernel that is slower than the
library's. Everything else is left to XLA: numbers of rows in between, gradients, computation in float32, other devices,
and programs for several of them.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from nnx.nn.quantized.quantized import as_operand, check_scale, is_per_channel, to_weight
from nnx.nn.quantized.quantized_tiling import MOST_ROWS, Tiling, make_tiling
from nnx.nn.support.settings import cast, statistics_dtype
from nnx.sharding.explicit import is_split
from nnx.sharding.target import target

Implementation = Literal["triton", "xla"]


MANY_ROWS = 512
"""From so many rows on, writing a dequantized weight takes little of the time of the product."""


class _ProductSettings(NamedTuple):
    """What is known about a product when it is compiled; `group_size` is None where the weight is dequantized first."""

    group_size: int | None
    transposed: bool
    dtype: Any
    implementation: Implementation | None


def quantized_product(
    x: jax.Array,
    integers: jax.Array,
    scale: jax.Array,
    num_inputs: int = 1,
    *,
    transposed: bool = False,
    dtype: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array | None:
    """Returns the product of `x` with a quantized weight, and None if it is left to XLA.

    Args:
        x: the left operand, `[..., *inputs]`.
        integers: the integers of the weight, `[*inputs, *outputs]`, or `[*outputs, *inputs]` if `transposed`.
        scale: the scale of the weight.
        num_inputs: the number of axes that are summed over.
        transposed: whether those are the last axes of the weight.
        dtype: the dtype of the result; by default, that of `x`.
        implementation: "triton" for the kernel, interpreted where there is no GPU, or "xla" for ordinary operations. By
            default, there is a result only on a single GPU, for rows in half precision, a few or many.

    Returns:
        The product, `[..., *outputs]`, or None.
    """
    num_outputs = integers.ndim - num_inputs
    summed = tuple(range(num_outputs, integers.ndim) if transposed else range(num_inputs))
    check_scale(integers, scale, summed)
    kept = integers.shape[:num_outputs] if transposed else integers.shape[num_inputs:]
    batch, inputs = x.shape[: x.ndim - num_inputs], math.prod(x.shape[x.ndim - num_inputs :])
    rows, outputs = math.prod(batch), math.prod(kept)
    groups = None if is_per_channel(integers, scale, summed) else scale.shape[summed[0]]
    group_size: int | None = inputs // (groups or 1)
    wanted = implementation is not None or _kernel_pays(x, integers, rows)
    if not wanted or _tiling(rows, inputs, outputs, group_size, integers, transposed) is None:
        group_size = None
        if implementation is not None or not _dequantizing_pays(x, integers, rows):
            return None
    grouped = () if groups is None else (groups,)
    settings = _ProductSettings(group_size, transposed, jnp.dtype(dtype or x.dtype), implementation)
    y = _product(
        settings,
        jnp.reshape(x, (rows, inputs)),
        jnp.reshape(integers, (outputs, inputs) if transposed else (inputs, outputs)),
        jnp.reshape(scale, (outputs, *grouped) if transposed else (*grouped, outputs)),
    )
    return jnp.reshape(y, (*batch, *kept))


def _tiling(
    rows: Any, inputs: int, outputs: int, group_size: int | None, integers: jax.Array, transposed: bool
) -> Tiling | None:
    assert group_size is not None
    return make_tiling(rows, inputs, outputs, group_size, 4 if integers.dtype == jnp.int4 else 8, transposed)


def _kernel_pays(x: jax.Array, integers: jax.Array, rows: Any) -> bool:
    few = isinstance(rows, int) and 0 < rows <= MOST_ROWS  # and not a symbolic size, as in `nnx.export`
    return few and _is_half_on_gpu(x, integers) and target(x, integers).triton_obstacle is None


def _dequantizing_pays(x: jax.Array, integers: jax.Array, rows: Any) -> bool:
    return isinstance(rows, int) and rows >= MANY_ROWS and _is_half_on_gpu(x, integers)


def _is_half_on_gpu(x: jax.Array, integers: jax.Array) -> bool:
    at = target(x, integers)
    alone = at.platform == "gpu" and at.devices == 1 and not is_split((x, integers))
    return alone and x.dtype in (jnp.bfloat16, jnp.float16)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(settings: _ProductSettings, x: jax.Array, integers: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the product `[rows, outputs]` of matrices."""
    if settings.implementation == "xla":
        return _ordinary(settings, x, integers, scale)
    if settings.group_size is None:
        return _dequantized(settings, x, integers, scale)
    return _kernel_product(settings)(x, integers, scale)


def _product_jvp(settings: _ProductSettings, primals: Any, tangents: Any) -> tuple[jax.Array, Any]:
    # The derivative is linear in each tangent, so ordinary operations can be transposed for gradients.
    (x, integers, scale), (x_tangent, _, scale_tangent) = primals, tangents
    y = _product(settings, x, integers, scale)
    parts = []
    if not isinstance(x_tangent, SymbolicZero):
        parts.append(_ordinary(settings, x_tangent, integers, scale))
    if not isinstance(scale_tangent, SymbolicZero):
        parts.append(_ordinary(settings, x, integers, scale_tangent))
    return y, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(y)


_product.defjvp(_product_jvp, symbolic_zeros=True)


@functools.cache
def _kernel_product(settings: _ProductSettings) -> Any:
    """Returns a function that multiplies with the kernel, and knows what to do under `jax.vmap`."""
    ordinary = functools.partial(_ordinary, settings)

    def kernel(x: jax.Array, integers: jax.Array, scale: jax.Array, interpret: bool) -> jax.Array:
        from nnx.nn.quantized.quantized_kernel import multiply  # Pallas takes long to import

        group_size, transposed, dtype, _ = settings
        (rows, inputs), outputs = x.shape, integers.shape[0 if transposed else 1]
        tiling = _tiling(rows, inputs, outputs, group_size, integers, transposed)
        assert tiling is not None  # the number of rows, which vmap may have changed, has no part in that
        return multiply(x, integers, scale, tiling, transposed=transposed, dtype=dtype, interpret=interpret)

    # A program can be compiled for another platform than the default one, by which the kernel was chosen.
    elsewhere = ordinary if settings.implementation is None else functools.partial(kernel, interpret=True)

    @custom_vmap
    def product(x: jax.Array, integers: jax.Array, scale: jax.Array) -> jax.Array:
        on_gpu = functools.partial(kernel, interpret=False)
        return lax.platform_dependent(x, integers, scale, cuda=on_gpu, default=elsewhere)

    @product.def_vmap
    def _merge(size: int, batched: Any, x: jax.Array, integers: jax.Array, scale: jax.Array) -> tuple[jax.Array, bool]:
        # One program per entry would read the weight once for each, so the rows of all entries are put together.
        if not any(batched[1:]) and size * x.shape[1] <= MOST_ROWS:
            y = product(jnp.reshape(x, (-1, x.shape[-1])), integers, scale)
            return jnp.reshape(y, (*x.shape[:2], -1)), True
        axes = tuple(0 if is_batched else None for is_batched in batched)
        return jax.vmap(ordinary, in_axes=axes)(x, integers, scale), True

    return product


def _dequantized(settings: _ProductSettings, x: jax.Array, integers: jax.Array, scale: jax.Array) -> jax.Array:
    summed = 1 if settings.transposed else 0
    # The barrier keeps XLA from moving the conversion into the product.
    weight = lax.optimization_barrier(to_weight(integers, scale, (summed,), x.dtype))
    return lax.dot_general(x, weight, (((1,), (summed,)), ((), ())), preferred_element_type=settings.dtype)


def _ordinary(settings: _ProductSettings, x: jax.Array, integers: jax.Array, scale: jax.Array) -> jax.Array:
    summed = (1 if settings.transposed else 0,)
    operand, after = as_operand(integers, scale, summed, x.dtype)
    y = lax.dot_general(x, operand, (((1,), summed), ((), ())), preferred_element_type=statistics_dtype(x.dtype))
    return cast(y if after is None else y * after, settings.dtype)
