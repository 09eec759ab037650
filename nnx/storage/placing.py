"""Placing: an array on its devices, made from parts that are read one after the other.

A *box* is a rectangular part of an array: the index where it starts, and its shape. A host that computes, a CPU, gets
its part as it will be used (`place_parts`). Accelerators rearrange and convert faster than the host does, so they get
*pieces* of their parts as they are stored (`Assembly`).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding


class Box(NamedTuple):
    """A rectangular part of an array."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """Returns the box that is all of an array."""
        return cls((0,) * len(shape), shape)

    @classmethod
    def of(cls, index: Sequence[slice], shape: Sequence[int]) -> "Box":
        """Returns the box of an index, in the form in which JAX describes the part of an array on a device."""
        bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        return cls(tuple([start for start, _ in bounds]), tuple([max(stop - start, 0) for start, stop in bounds]))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple([a + n for a, n in zip(self.start, self.shape, strict=True)])

    def axes(self, first: int, last: int | None = None) -> "Box":
        """Returns the box along some of its axes."""
        return Box(self.start[first:last], self.shape[first:last])

    def slices(self, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
        """Returns the index of the box in its array, or in one that starts at `origin`."""
        start = self.start if origin is None else [a - b for a, b in zip(self.start, origin, strict=True)]
        return tuple([slice(a, a + n) for a, n in zip(start, self.shape, strict=True)])

    def overlap(self, other: "Box") -> "Box | None":
        """Returns the part that two boxes share, if there is any."""
        start = tuple(map(max, self.start, other.start))
        shape = tuple([end - a for end, a in zip(map(min, self.end, other.end), start, strict=True)])
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def is_contiguous_in(self, outer: "Box") -> bool:
        """Whether the elements of a box follow each other in an array in C order that holds an outer box."""
        leading = next((axis for axis, n in enumerate(self.shape) if n != 1), len(self.shape))
        # It is if it spans the whole outer box in every axis after the first one that varies.
        return self.shape[leading + 1 :] == outer.shape[leading + 1 :]

    def offset_in(self, outer: "Box") -> int:
        """Returns the number of elements before the first one of this box, in an array that holds an outer box."""
        offset = 0
        for first, start, n in zip(self.start, outer.start, outer.shape, strict=True):
            offset = offset * n + first - start
        return offset


def place_parts(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, dtype: Any, read: Callable[[Box], np.ndarray]
) -> jax.Array:
    """Returns an array on the devices of this process, which may still be copying it.

    Args:
        shape, sharding, dtype: those of the array.
        read: a function that returns the part within a box. It is called once for copies of the same part, and in
            order, so that it can keep what neighboring parts have in common.
    """
    arrays: list[jax.Array] = []
    part, part_at = np.empty(0), None
    for box, device in sorted(parts_of(shape, sharding), key=lambda item: (item[0].start, item[1].id)):
        if box != part_at:
            del part  # frees its memory before the next one is read
            part, part_at = read(box), box
        arrays.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)


def parts_of(shape: tuple[int, ...], sharding: jax.sharding.Sharding | None) -> list[tuple[Box, Any]]:
    """Returns the box of the part on each device of this process; without a sharding, JAX chooses the device."""
    if sharding is None:
        return [(Box.whole(shape), None)]
    indices = sharding.addressable_devices_indices_map(shape).items()
    return [(Box.of(index, shape), device) for device, index in indices if index is not None]


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

    def bytes_per_step(self, piece: Sequence[int]) -> int:
        """Returns the bytes of the whole array that are there with one more piece on every device."""
        return math.prod(piece) * self._dtype.itemsize * math.prod(self._shape) // max(1, math.prod(self.part))

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
