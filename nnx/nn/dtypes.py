"""Dtypes of layers.

A layer has up to three dtypes: *param_dtype*, in which its parameters are stored; *dtype*, in which it computes
(`None`: whatever inputs and parameters promote to); and, for layers that average, the *statistics dtype*, which is
never narrower than float32.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

PromoteDtype = Callable[..., tuple[Any, ...]]

_FLOAT32 = np.dtype(np.float32)
_INEXACT = frozenset(np.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64, jnp.complex64))


@cache
def as_dtype(dtype: DTypeLike) -> np.dtype:
    """`dtype`, however it is spelled, as a `numpy.dtype`."""
    return np.dtype(dtype)


def as_optional_dtype(dtype: DTypeLike | None) -> np.dtype | None:
    """Like `as_dtype`, where `None` stands for "infer it"."""
    return None if dtype is None else as_dtype(dtype)


def cast(x: Array, dtype: np.dtype) -> Array:
    """`x` in `dtype`; `x` itself, with nothing traced, where it already is."""
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)


def infer_dtype(arrays: tuple[Any, ...], dtype: DTypeLike | None = None, inexact: bool = True) -> np.dtype:
    """The dtype `promote_dtype` brings these arrays to."""
    if dtype is not None:
        return as_dtype(dtype)
    present = [a for a in arrays if a is not None]
    first = present[0].dtype
    if first in _INEXACT and all(a.dtype == first for a in present):
        return first
    target = jnp.result_type(*present)
    if inexact and not jnp.issubdtype(target, jnp.inexact):
        target = jnp.promote_types(target, jnp.float32)
    return target


def promote_dtype(arrays: tuple[Any, ...], /, dtype: DTypeLike | None = None, inexact: bool = True) -> tuple[Any, ...]:
    """Brings arrays to one dtype.

    Args:
        arrays: the arrays; a `None` among them stays `None`.
        dtype: the dtype to bring them to; by default the one they promote to.
        inexact: whether a dtype that is inferred must be floating point (or complex).

    Returns:
        The arrays, in order; those that have the dtype already are returned as they are.

    >>> import jax.numpy as jnp
    >>> x, w, b = promote_dtype((jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.float32), None))
    >>> x.dtype, w.dtype, b
    (dtype('float32'), dtype('float32'), None)
    """
    target = infer_dtype(arrays, dtype, inexact)
    return tuple(None if a is None else cast(a, target) for a in arrays)


def statistics_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which values of `dtype` are averaged: at least float32."""
    return dtype if dtype == _FLOAT32 else jnp.promote_types(dtype, jnp.float32)
