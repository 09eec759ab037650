"""`nnx.fp8_dot_general`: products in 8-bit floating point for training, in place of `jax.lax.dot_general`.

A product of 8-bit numbers takes half the time of one in bfloat16 on GPUs that have it. Values and weights are rounded
to `float8_e4m3fn`, gradients, which need more range than precision, to `float8_e5m2`. Before that, each array is
divided by a power of two that brings its largest entry just below the largest power of two of the format. The scale is
that of the array at hand (*current scaling*), so there is no state to keep, and nothing to save.

Rounded operands are written as `convert(x8) * scale`, which XLA turns into one call of cuBLASLt where the GPU can
multiply 8-bit numbers, and computes as it stands everywhere else. A power of two is exact in every floating-point
format.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

VALUES, GRADIENTS = jnp.float8_e4m3fn, jnp.float8_e5m2


def fp8_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Multiplies like `jax.lax.dot_general`, with both operands rounded to 8 bits, also in the derivative.

    It is a value for the argument or attribute `dot_general` of linear layers. The parameters stay as they are, in
    float32 or bfloat16; they are rounded each time they are used. Worth its rounding where products take most of the
    time: large layers and many tokens on a GPU that multiplies 8-bit numbers. Leave the head of a language model and
    small layers out.

    >>> ctx = nnx.context(0)
    >>> model = nnx.Sequence([nnx.Linear(64, 64, ctx=ctx), nnx.relu, nnx.Linear(64, 8, ctx=ctx)])
    >>> model[0].dot_general = nnx.fp8_dot_general
    >>> model(jnp.ones((16, 64))).shape
    (16, 8)

    Args:
        lhs, rhs, dimension_numbers, preferred_element_type, out_sharding: as in `jax.lax.dot_general`.
        precision: ignored; the operands have 8 bits.
    """
    dimensions = tuple(tuple(tuple(map(int, axes)) for axes in pair) for pair in dimension_numbers)
    dtype = preferred_element_type or jnp.result_type(lhs, rhs)
    return _product(lhs, rhs, dimensions, jnp.dtype(dtype), out_sharding)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _product(lhs: Any, rhs: Any, dimensions: Any, dtype: Any, out_sharding: Any) -> jax.Array:
    return _forward(lhs, rhs, dimensions, dtype, out_sharding)[0]


def _forward(lhs: Any, rhs: Any, dimensions: Any, dtype: Any, out_sharding: Any) -> tuple[jax.Array, Any]:
    rounded = _rounded(lhs, VALUES), _rounded(rhs, VALUES)
    options = {} if out_sharding is None else {"out_sharding": out_sharding}
    x, y = (_operand(each, jnp.result_type(lhs, rhs)) for each in rounded)
    out = lax.dot_general(x, y, dimensions, preferred_element_type=dtype, **options)
    return out, (*rounded, jnp.zeros((0,), lhs.dtype), jnp.zeros((0,), rhs.dtype))


def _backward(dimensions: Any, dtype: Any, out_sharding: Any, kept: Any, grad: jax.Array) -> tuple[Any, Any]:
    lhs, rhs, *likes = kept
    compute = jnp.result_type(*likes)
    grad = _operand(_rounded(grad, GRADIENTS), compute)
    x, y = _operand(lhs, compute), _operand(rhs, compute)
    # Both gradients are products as well; JAX knows which.
    options = {} if out_sharding is None else {"out_sharding": out_sharding}
    plain = functools.partial(lax.dot_general, dimension_numbers=dimensions, preferred_element_type=compute, **options)
    _, pull = jax.vjp(plain, x, y)
    to_lhs, to_rhs = pull(grad)
    return to_lhs.astype(likes[0].dtype), to_rhs.astype(likes[1].dtype)


_product.defvjp(_forward, _backward)


def _rounded(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns an array divided by a power of two and rounded to 8 bits, and that power of two."""
    _, exponent = jnp.frexp(jnp.max(jnp.abs(x)).astype(jnp.float32))  # the largest entry is below 2 ** exponent
    exponent = jnp.clip(exponent - int(jnp.finfo(dtype).maxexp) + 1, -126, 127)  # infinity and NaN stay what they are
    scale = jnp.ldexp(jnp.float32(1), exponent)
    return (x.astype(jnp.float32) / scale).astype(dtype), scale


def _operand(rounded: tuple[jax.Array, jax.Array], dtype: Any) -> jax.Array:
    values, scale = rounded
    return values.astype(dtype) * scale.astype(dtype)
