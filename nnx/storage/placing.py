"""Placing: an array on its devices, made from parts that are read one after the other.

*Bounds* are a rectangular part of an array, as a range `(start, stop)` per axis. A host that computes, a CPU, gets each
part as it will be used (`place_parts`). Accelerators rearrange and convert faster than the host does, so they get
*pieces* of their parts as they are stored (`Assembly`).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

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
    arrays: list[jax.Array] = []
    part, part_at = np.empty(0), None
    for bounds, device in sorted(parts_of(shape, sharding), key=lambda item: (item[0], item[1].id)):
        if bounds != part_at:
            del part  # frees its memory before the next one is read
            part, part_at = read(bounds), bounds
        arrays.append(jax.device_put(part, device))
    array = jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)
    # JAX copies in the background. Without waiting, the host copies of many arrays would be in memory at once.
    return array.block_until_ready()


def parts_of(shape: tuple[int, ...], sharding: jax.sharding.Sharding | None) -> list[tuple[Bounds, Any]]:
    """Returns the bounds of the part on each device of this process; without a sharding, JAX chooses the device."""
    if sharding is None:
        return [(whole(shape), None)]
    indices = sharding.addressable_devices_indices_map(shape).items()
    return [(bounds_of(index, shape), device) for device, index in indices if index is not None]


# On accelerators


def takes_pieces(sharding: jax.sharding.Sharding | None) -> bool:
    """Whether the devices of a sharding rearrange what they are sent, and an `Assembly` knows how to address them."""
    devices = jnp.zeros(()).devices() if sharding is None else sharding.device_set
    return rearranges({device.platform for device in devices}) and (
        sharding is None
        or isinstance(sharding, SingleDeviceSharding)
        or (isinstance(sharding, NamedSharding) and sharding.memory_kind in (None, "device"))
    )


def rearranges(platforms: set[str]) -> bool:
    """Whether devices rearrange arrays faster than the host could do it for them. (Tests say that CPUs do.)"""
    return "cpu" not in platforms


class Assembly:
    """An array that is put together on its devices, from pieces whose axes are in the order of a file.

    Every device gets a *piece* of its own part at a time. The pieces of all devices have the same shape and the same
    position in their parts, so one program, compiled once, writes them into place, and nothing is sent between devices.

    Args:
        shape, dtype, sharding: those of the array; the devices are such that `takes_pieces` is true.
        order: the axis of the array for each axis of a piece.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, sharding: Any, order: tuple[int, ...]):
        self._shape, self._dtype, self._order = shape, jnp.dtype(dtype), order
        self._sharding: NamedSharding | SingleDeviceSharding | None = sharding
        self.part: tuple[int, ...] = shape if sharding is None else sharding.shard_shape(shape)
        self._array: jax.Array | None = None

    def add(self, pieces: Sequence[jax.Array], start: Sequence[int]) -> None:
        """Adds a piece of the part of each device, at a position in the part."""
        piece = self._joined(pieces)
        if math.prod(pieces[0].shape) == math.prod(self.part):  # the only one
            if self._order != tuple(range(len(self._order))) or piece.dtype != self._dtype:
                piece = _arranging(self._sharding, self._order, self._dtype)(piece)
            self._array = piece
            return
        if self._array is None:
            self._array = jnp.zeros(self._shape, self._dtype, device=self._sharding)
        self._array = _writing(self._sharding, self._order)(self._array, piece, np.asarray(start, np.int32))

    def finish(self) -> jax.Array:
        """Returns the array, to which everything has been added; its devices may still be at work."""
        assert self._array is not None
        return self._array

    def _joined(self, pieces: Sequence[jax.Array]) -> jax.Array:
        """Returns the pieces as the parts of one array."""
        if not isinstance(self._sharding, NamedSharding):
            return pieces[0]
        counts = [size // part for size, part in zip(self._shape, self.part, strict=True)]
        shape = tuple([size * counts[axis] for size, axis in zip(pieces[0].shape, self._order, strict=True)])
        sharding = NamedSharding(self._sharding.mesh, _reordered(self._sharding, self._order))
        return jax.make_array_from_single_device_arrays(shape, sharding, list(pieces), dtype=pieces[0].dtype)


def _reordered(sharding: NamedSharding, order: Sequence[int]) -> PartitionSpec:
    spec = [*sharding.spec, *[None] * (len(order) - len(sharding.spec))]
    return PartitionSpec(*[spec[axis] for axis in order])


@functools.lru_cache(maxsize=256)
def _arranging(sharding: Any, order: tuple[int, ...], dtype: Any) -> Callable[[jax.Array], jax.Array]:
    """Returns a program that puts the axes of a piece in their order and converts it."""
    return jax.jit(lambda piece: _arranged(piece, order, dtype), out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _writing(sharding: Any, order: tuple[int, ...]) -> Callable[..., jax.Array]:
    """Returns a program that writes a piece of the part of each device into the part, which it reuses."""

    def write(part: jax.Array, piece: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(part, _arranged(piece, order, part.dtype), [*start])

    if isinstance(sharding, NamedSharding):
        specs = (sharding.spec, _reordered(sharding, order), PartitionSpec())
        local = jax.shard_map(write, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec, check_vma=False)
        return jax.jit(local, out_shardings=sharding, donate_argnums=0)
    return jax.jit(write, out_shardings=sharding, donate_argnums=0)


def _arranged(piece: jax.Array, order: Sequence[int], dtype: Any) -> jax.Array:
    return jax.lax.transpose(piece, np.argsort(order)).astype(dtype)
