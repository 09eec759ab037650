"""The size of arrays on a device."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp


def size_in_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Returns the bytes that an array takes on a device, where two 4-bit numbers share a byte.

    (NumPy, and `jax.Array.nbytes`, count a byte for each of them, which is what they take on the host.)
    """
    count = math.prod(shape)
    if dtype.itemsize > 1 or dtype.kind == "b":
        return count * dtype.itemsize
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return -(-count * info(dtype).bits // 8)
