"""Arrays for tests of layers. They come from numpy: `jax.random` would compile a program for every shape."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def numpy_normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Any:
    """Returns standard normal numbers as a numpy array."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    """Returns the same numbers as a JAX array."""
    return jnp.asarray(numpy_normal(*shape, seed=seed))
