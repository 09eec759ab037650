"""Reading a tensor as the value that replaces another one: a number, a NumPy array, or an array on devices."""

from typing import Any

import jax
import numpy as np

from nnx.storage.aligned_memory import aligned_copy
from nnx.storage.fitting import bound_sharding
from nnx.storage.placing import Bounds, place_parts
from nnx.storage.safetensors.source import Source


def read_like(source: Source, name: str, old: Any, *, verify: bool) -> Any:
    """Reads a tensor as a value like `old`, which it will replace: a number, a NumPy array, or an array on devices.

    A sharded array is read part by part, so no more of it is in memory than this process needs. If a part is not
    contiguous in the file, the whole rows around it are read temporarily.
    """
    impl = source.notes.keys.get(name)
    sharding = bound_sharding(old)
    if impl is not None:
        key = jax.random.wrap_key_data(jax.device_put(source.read(name, verify=verify)), impl=impl)
        return key if sharding is None else jax.device_put(key, sharding)
    if not hasattr(old, "shape"):
        return type(old)(source.read(name, verify=verify).item())
    if isinstance(old, (np.ndarray, np.generic)):
        array = source.read(name, verify=verify).astype(old.dtype, copy=False)
        return array if isinstance(old, np.ndarray) else array[()]
    dtype = jax.dtypes.canonicalize_dtype(old.dtype)
    if sharding is None:
        return jax.device_put(source.read(name, verify=verify).astype(dtype, copy=False))
    return _place_parts(source, name, sharding, dtype, verify)


def _place_parts(source: Source, name: str, sharding: Any, dtype: Any, verify: bool) -> jax.Array:
    """Reads the parts of a tensor that belong to the devices of this process."""
    rows, rows_at = np.empty(0), None

    def read(bounds: Bounds) -> np.ndarray:
        nonlocal rows, rows_at
        if bounds[:1] != rows_at:  # parts of the same rows follow each other
            rows = np.empty(0)  # frees the memory of the old ones before more is read
            rows, rows_at = source.read(name, *sum(bounds[:1], ()), verify=verify), bounds[:1]
        inner = (slice(None), *(slice(*bound) for bound in bounds[1:]))[: rows.ndim]
        part = rows if rows[inner].shape == rows.shape else aligned_copy(rows[inner])
        return part.astype(dtype, copy=False)

    return place_parts(source.tensor(name).shape, sharding, dtype, read)
