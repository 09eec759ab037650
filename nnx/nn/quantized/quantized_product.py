"""Products of a few rows with a quantized weight, as in decoding, where most of the time goes into reading the weight.

XLA converts integers inside of a product only if they have 8 bits and their scale can wait until after it. Otherwise it
writes the converted matrix to memory first. On a GPU, a few rows are therefore multiplied with 4-bit integers by a
kernel that reads the integers alone (`quantized_kernel`). Everything else is left to XLA: 8-bit integers, with which it
is as fast from 8 rows on (`nnx.generate` never has fewer), many rows (prompts, training), computation in float32, other
devices, and programs for several of them.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from nnx.nn.quantized.quantized import as_operand, check_scale, is_per_channel
from nnx.nn.quantized.quantized_tiling import MOST_ROWS, Tiling, make_tiling
from nnx.nn.support.settings import cast, statistics_dtype
from nnx.sharding.explicit import is_split
from nnx.sharding.target import target

Implementation = Literal["triton", "xla"]


class _Settings(NamedTuple):
    """What is known about a product when it is compiled."""

    tiling: Tiling
    transposed: bool
    dtype: Any
    implementation: Implementation | None


def multiply_few_rows(
    x: jax.Array,
    integers: jax.Array,
    scale: jax.Array,
    num_inputs: int = 1,
    *,
    transposed: bool = False,
    dtype: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array | None:
    """Returns the product of `x` with a quantized weight if the kernel suits it, and None otherwise.

    Args:
        x: the left operand, `[..., *inputs]`.
        integers: the integers of the weight, `[*inputs, *outputs]`, or `[*outputs, *inputs]` if `transposed`.
        scale: the scale of the weight.
        num_inputs: the number of axes that are summed over.
        transposed: whether those are the last axes of the weight.
        dtype: the dtype of the result; by default, that of `x`.
        implementation: "triton" for the kernel, interpreted where there is no GPU, or "xla" for ordinary operations. By
            default, there is a result only on a single GPU, for a few rows in half precision and 4-bit integers.

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
    if implementation is None and not _kernel_pays(x, integers, rows):
        return None
    tiling = make_tiling(inputs, outputs, inputs // (groups or 1))
    if tiling is None:
        return None
    grouped = () if groups is None else (groups,)
    settings = _Settings(tiling, transposed, jnp.dtype(dtype or x.dtype), implementation)
    y = _product(
        settings,
        jnp.reshape(x, (rows, inputs)),
        jnp.reshape(integers, (outputs, inputs) if transposed else (inputs, outputs)),
        jnp.reshape(scale, (outputs, *grouped) if transposed else (*grouped, outputs)),
    )
    return jnp.reshape(y, (*batch, *kept))


def _kernel_pays(x: jax.Array, integers: jax.Array, rows: Any) -> bool:
    at = target(x, integers)
    return (
        at.platform == "gpu"
        and at.devices == 1
        and not is_split((x, integers))
        and x.dtype in (jnp.bfloat16, jnp.float16)
        and integers.dtype == jnp.int4
        and isinstance(rows, int)  # and not a symbolic size, as in `nnx.export`
        and 0 < rows <= MOST_ROWS
        and at.triton_obstacle is None
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(settings: _Settings, x: jax.Array, integers: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the product `[rows, outputs]` of matrices."""
    if settings.implementation == "xla":
        return _ordinary(settings, x, integers, scale)
    return _kernel_product(settings)(x, integers, scale)


def _product_jvp(settings: _Settings, primals: Any, tangents: Any) -> tuple[jax.Array, Any]:
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
def _kernel_product(settings: _Settings) -> Any:
    """Returns a function that multiplies with the kernel, and knows what to do under `jax.vmap`."""
    ordinary = functools.partial(_ordinary, settings)

    def kernel(x: jax.Array, integers: jax.Array, scale: jax.Array, interpret: bool) -> jax.Array:
        from nnx.nn.quantized.quantized_kernel import multiply  # Pallas takes long to import

        tiling, transposed, dtype, _ = settings
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


def _ordinary(settings: _Settings, x: jax.Array, integers: jax.Array, scale: jax.Array) -> jax.Array:
    summed = (1 if settings.transposed else 0,)
    operand, after = as_operand(integers, scale, summed, x.dtype)
    y = lax.dot_general(x, operand, (((1,), summed), ((), ())), preferred_element_type=statistics_dtype(x.dtype))
    return cast(y if after is None else y * after, settings.dtype)
