"""Initializers: functions `(key, shape, dtype) -> array` that make the first value of a parameter.

All of `jax.nn.initializers` is here. `zeros` and `ones` are factories like the others (`zeros()`), and may still be
given uncalled, as in JAX (`bias_init=zeros`).
"""

import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.nn.initializers import Initializer as Initializer
from jax.nn.initializers import constant as constant
from jax.nn.initializers import delta_orthogonal as delta_orthogonal
from jax.nn.initializers import glorot_normal as glorot_normal
from jax.nn.initializers import glorot_uniform as glorot_uniform
from jax.nn.initializers import he_normal as he_normal
from jax.nn.initializers import he_uniform as he_uniform
from jax.nn.initializers import kaiming_normal as kaiming_normal
from jax.nn.initializers import kaiming_uniform as kaiming_uniform
from jax.nn.initializers import lecun_normal as lecun_normal
from jax.nn.initializers import lecun_uniform as lecun_uniform
from jax.nn.initializers import normal as normal
from jax.nn.initializers import orthogonal as orthogonal
from jax.nn.initializers import truncated_normal as truncated_normal
from jax.nn.initializers import uniform as uniform
from jax.nn.initializers import variance_scaling as variance_scaling
from jax.nn.initializers import xavier_normal as xavier_normal
from jax.nn.initializers import xavier_uniform as xavier_uniform

from nnx.core.trace import is_eager
from nnx.nn.support.draws import DTYPES, FILLED_BY_PROGRAM_AFTER, LARGEST, is_ordinary, owned

_filled_by_numpy: Counter[Any] = Counter()


def _filled(value: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """Returns an array of one value: from numpy if it is small, because compiling a program takes far longer."""
    if dtype in DTYPES and math.prod(shape) <= LARGEST and is_eager() and is_ordinary():
        kind = value, shape, dtype
        if _filled_by_numpy[kind] < FILLED_BY_PROGRAM_AFTER:
            _filled_by_numpy[kind] += 1
            return owned(np.full(shape, value, dtype))
    return _filled_by_program(value, shape, dtype)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _filled_by_program(value: int, shape: tuple[int, ...], dtype: Any) -> Array:
    return jnp.full(shape, value, dtype)


def _zeros(key: Any, shape: int | Sequence[int], dtype: Any = None, out_sharding: Any = None) -> Array:
    if out_sharding is not None:
        return jax.nn.initializers.zeros(key, _as_tuple(shape), dtype, out_sharding)
    return _filled(0, _as_tuple(shape), float if dtype is None else dtype)


def _ones(key: Any, shape: int | Sequence[int], dtype: Any = None, out_sharding: Any = None) -> Array:
    if out_sharding is not None:
        return jax.nn.initializers.ones(key, _as_tuple(shape), dtype, out_sharding)
    return _filled(1, _as_tuple(shape), float if dtype is None else dtype)


def _as_tuple(shape: int | Sequence[int]) -> tuple[int, ...]:
    """A shape as `_filled_by_program` is cached by it: Python ints, however they were given."""
    if isinstance(shape, Iterable):
        return tuple([operator.index(size) for size in shape])
    return (operator.index(shape),)


@overload
def zeros() -> Initializer: ...
@overload
def zeros(key: Any, shape: int | Sequence[int], dtype: Any = ..., out_sharding: Any = ...) -> Array: ...
def zeros(*args: Any, **kwargs: Any) -> Any:
    """The initializer of zeros: `zeros()`, or `zeros` itself.

    >>> zeros()(None, (2,), "float32").tolist()
    [0.0, 0.0]
    """
    return _zeros(*args, **kwargs) if args or kwargs else _zeros


@overload
def ones() -> Initializer: ...
@overload
def ones(key: Any, shape: int | Sequence[int], dtype: Any = ..., out_sharding: Any = ...) -> Array: ...
def ones(*args: Any, **kwargs: Any) -> Any:
    """The initializer of ones: `ones()`, or `ones` itself.

    >>> ones()(None, (2,), "float32").tolist()
    [1.0, 1.0]
    """
    return _ones(*args, **kwargs) if args or kwargs else _ones


def zeros_init() -> Initializer:
    """The same as `zeros()`."""
    return _zeros


def ones_init() -> Initializer:
    """The same as `ones()`."""
    return _ones
