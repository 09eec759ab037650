"""Placing: an array on its devices, made from parts that are read one after the other.

*Bounds* are a rectangular part of an array, as a range `(start, stop)` per axis.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

Bounds = tuple[tuple[int, int], ...]


def bounds_of(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    """Returns the bounds of an index, in the form in which JAX describes the part of an array on a device."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def whole(shape: tuple[int, ...]) -> Bounds:
    """Returns the bounds of a whole array."""
    return tuple((0, size) for size in shape)


def place_parts(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, dtype: Any, read: Callable[[Bounds], np.ndarray]
) -> jax.Array:
    """Returns an array on the devices of this process.

    Args:
        shape, sharding, dtype: those of the array.
        read: a function that returns the part within given bounds. It is called once for copies of the same part, and
            in order, so that it can keep what neighboring parts have in common.
    """
    indices = sharding.addressable_devices_indices_map(shape).items()
    by_bounds = [(bounds_of(index, shape), device) for device, index in indices if index is not None]
    arrays: list[jax.Array] = []
    part, part_at = np.empty(0), None
    for bounds, device in sorted(by_bounds, key=lambda item: (item[0], item[1].id)):
        if bounds != part_at:
            del part  # frees its memory before the next one is read
            part, part_at = read(bounds), bounds
        arrays.append(jax.device_put(part, device))
    array = jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)
    # JAX copies in the background. Without waiting, the host copies of many arrays would be in memory at once.
    return array.block_until_ready()
