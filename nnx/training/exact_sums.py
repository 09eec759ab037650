"""Sums that stay exact over billions of values, without 64-bit numbers.

A float32 sum stops growing at 2**24 ones, and an int32 counter wraps at 2**31. A *pair* is a sum kept as two float32
numbers: the rounded sum, and the error of the rounding. Together they have 48 bits, so counts are exact up to 2**48,
and the mean of 10**9 values is as precise as float32 allows. The arithmetic is Knuth's two-sum, which relies on XLA not
to reassociate floating-point additions (by default it does not).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Pair = jax.Array
"""A float32 array of shape (2,): the rounded sum, and the error of the rounding."""


def zero() -> Pair:
    """Returns the empty sum."""
    return jnp.zeros(2, jnp.float32)


def from_int(count: int) -> Pair:
    """Returns the exact pair of a Python int below 2**48."""
    high = np.float32(count)
    return jnp.asarray([high, np.float32(count - int(high))], jnp.float32)


@jax.jit
def add(a: Pair, b: Pair) -> Pair:
    """Returns the sum of two pairs."""
    return jnp.stack(_add((a[0], a[1]), (b[0], b[1])))


def subtract(a: Pair, b: Pair) -> Pair:
    """Returns the difference of two pairs."""
    return add(a, -b)


def from_float(x: Any, error: Any = 0) -> Pair:
    """Returns the pair of `x + error`, both float32 scalars."""
    return jnp.stack(_two_sum(jnp.asarray(x, jnp.float32), jnp.asarray(error, jnp.float32)))


def value(pair: Pair) -> jax.Array:
    """Returns the sum as one float32, correctly rounded."""
    return pair[0] + pair[1]


@jax.jit  # outside a compiled step, `reduce` would trace its function again at every call
def exact_sum(x: Any, where: jax.Array | None = None, weights: jax.Array | None = None) -> Pair:
    """Sums all elements of an array into a pair.

    Args:
        x: an array of numbers or booleans. Integers are exact as long as the sum is below 2**48.
        where: a mask; elements where it is False are left out.
        weights: an array of the shape of `x`; each element is multiplied by its weight, and left out if that is 0.
    """
    x = jnp.asarray(x)
    if weights is not None:
        counts = weights != 0 if where is None else where & (weights != 0)
        factors = (jnp.where(counts, factor, jnp.zeros((), factor.dtype)) for factor in (x, weights))
        return _reduced(*_product(*map(_split, factors)))
    if where is not None:
        x = jnp.where(where, x, jnp.zeros((), x.dtype))
    if x.dtype == bool and x.size < 2**31:  # an integer sum is exact, and the fastest way
        x = jnp.sum(x, dtype=jnp.int32)
    return _reduced(*_split(x))


def sum_members(pair: Pair, axis_name: Any) -> Pair:
    """Sums the pairs that the members of a mapped axis hold."""
    gathered = jax.lax.all_gather(pair, axis_name)
    return _reduced(gathered[..., 0], gathered[..., 1])


def _reduced(high: jax.Array, low: jax.Array) -> Pair:
    nothing = np.float32(0)
    return jnp.stack(jax.lax.reduce((high, low), (nothing, nothing), _add, tuple(range(high.ndim))))


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two float32 arrays that add up to `x`, to 48 bits."""
    high = x.astype(jnp.float32)
    if jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize >= 4:
        low_bits = x & 0xFFFF  # both parts have at most 16 significant bits, so float32 holds them exactly
        return _two_sum((x - low_bits).astype(jnp.float32), low_bits.astype(jnp.float32))
    if x.dtype == jnp.float64:
        low = (x - high.astype(x.dtype)).astype(jnp.float32)
        return high, jnp.where(jnp.isfinite(high), low, 0)
    return high, jnp.zeros_like(high)


def _two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """Returns `a + b` rounded, and the exact error of the rounding."""
    total = a + b
    rest = total - a
    error = (a - (total - rest)) + (b - rest)
    return total, jnp.where(jnp.isfinite(total), error, 0)  # the error of an infinite sum would be NaN


def _product(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    """Returns the product of two pairs of arrays, as a pair of arrays."""
    (a_high, a_low), (b_high, b_low) = _halves(a[0]), _halves(b[0])
    rounded = a[0] * b[0]
    # Each product of halves is exact, so it makes no difference whether the compiler fuses it with the addition.
    middle, middle_error = _two_sum(a_high * b_low, a_low * b_high)
    high, error = _two_sum(a_high * b_high, middle)
    rest = error + (middle_error + a_low * b_low) + (a[0] * b[1] + a[1] * b[0])
    # Halves of numbers near the end of the range can become infinite on their own.
    return _two_sum(jnp.where(jnp.isfinite(high), high, rounded), jnp.where(jnp.isfinite(rest), rest, 0))


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two float32 arrays of 12 significant bits that add up to `x`."""
    high = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=11)
    return high, x - high


def _add(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    total, error = _two_sum(a[0], b[0])
    return _two_sum(total, error + (a[1] + b[1]))
