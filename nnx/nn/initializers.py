"""Initializers: functions `(key, shape, dtype) -> array` that make the first value of a parameter.

All of `jax.nn.initializers` is here. `zeros` and `ones` are factories like the others (`zeros()`), and may still be
given uncalled, as in JAX (`bias_init=zeros`).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, overload

import jax
import jax.numpy as jnp
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


@partial(jax.jit, static_argnums=(0, 1, 2))
def _filled(value: int, shape: tuple[int, ...], dtype: Any) -> Array:
    return jnp.full(shape, value, dtype)


def _zeros(key: Any, shape: Sequence[int], dtype: Any = float, out_sharding: Any = None) -> Array:
    if out_sharding is not None:
        return jax.nn.initializers.zeros(key, shape, dtype, out_sharding)
    return _filled(0, tuple(shape), dtype)


def _ones(key: Any, shape: Sequence[int], dtype: Any = float, out_sharding: Any = None) -> Array:
    if out_sharding is not None:
        return jax.nn.initializers.ones(key, shape, dtype, out_sharding)
    return _filled(1, tuple(shape), dtype)


@overload
def zeros() -> Initializer: ...
@overload
def zeros(key: Any, shape: Sequence[int], dtype: Any = ..., out_sharding: Any = ...) -> Array: ...
def zeros(*args: Any, **kwargs: Any) -> Any:
    """The initializer of zeros: `zeros()`, or `zeros` itself.

    >>> zeros()(None, (2,), "float32").tolist()
    [0.0, 0.0]
    """
    return _zeros(*args, **kwargs) if args or kwargs else _zeros


@overload
def ones() -> Initializer: ...
@overload
def ones(key: Any, shape: Sequence[int], dtype: Any = ..., out_sharding: Any = ...) -> Array: ...
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
