"""Placing: an array on its devices, made from parts that are read one after the other.

A *box* is a rectangular part of an array: the index where it starts, and its shape. A host that computes, a CPU, gets
its part as it will be used (`place_parts`). Accelerators rearrange and convert faster than the host does, so they get
*pieces* of their parts as they are stored (`Assembly`).
"""

import functools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
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

    def prepare(self, piece: Sequence[int], dtype: Any) -> None:
        """Compiles what `add` will need for pieces of a shape and dtype; can run in any thread."""
        stored = tuple([piece[axis] for axis in self._order])
        if self._is_whole(stored):
            self._arranging(stored, dtype)
        else:
            self._zeros()
            self._writing(stored, dtype)

    def add(self, pieces: Sequence[jax.Array], start: Sequence[int]) -> None:
        """Adds a piece of the part of each device, at a position in the part."""
        stored, piece = pieces[0].shape, self._joined(pieces)
        if self._is_whole(stored):
            arrange = self._arranging(stored, piece.dtype)
            self._array = piece if arrange is None else arrange(piece)
            return
        array = self._zeros()() if self._array is None else self._array
        self._array = self._writing(stored, piece.dtype)(array, piece, np.asarray(start, np.int32))

    def _is_whole(self, stored: tuple[int, ...]) -> bool:
        return math.prod(stored) == math.prod(self.part)

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
        form = self._form(pieces[0].shape, pieces[0].dtype)
        return jax.make_array_from_single_device_arrays(form.shape, form.sharding, list(pieces), dtype=form.dtype)

    def _form(self, stored: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """Returns the form of the array of which the pieces are the parts."""
        if not isinstance(self._sharding, NamedSharding):
            return jax.ShapeDtypeStruct(stored, dtype, sharding=self._sharding)
        counts = [size // part for size, part in zip(self._shape, self.part, strict=True)]
        shape = tuple([size * counts[axis] for size, axis in zip(stored, self._order, strict=True)])
        sharding = NamedSharding(self._sharding.mesh, _reordered(self._sharding, self._order))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    # Programs

    def _program(self, kind: str, work: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[..., Any]:
        """Returns a compiled program; each is compiled once, by the thread that needs it first."""
        key = (kind, self._sharding, self._order, self._dtype, self._shape, arguments)

        def compiled() -> Callable[..., Any]:
            return jax.jit(work, out_shardings=self._sharding, **options).lower(*arguments).compile()

        return _programs.get(key, compiled)

    def _zeros(self) -> Callable[[], jax.Array]:
        return self._program("zeros", lambda: jnp.zeros(self._shape, self._dtype))

    def _arranging(self, stored: tuple[int, ...], dtype: Any) -> Callable[[jax.Array], jax.Array] | None:
        """Returns a program that puts the axes of a piece in their order and converts it, if anything is to be done."""
        if self._order == tuple(range(len(self._order))) and dtype == self._dtype:
            return None
        work = functools.partial(_arranged, order=self._order, dtype=self._dtype)
        return self._program("arrange", work, self._form(stored, dtype))

    def _writing(self, stored: tuple[int, ...], dtype: Any) -> Callable[..., jax.Array]:
        """Returns a program that writes a piece of the part of each device into the part, whose memory it reuses."""

        def write(part: jax.Array, piece: jax.Array, start: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(part, _arranged(piece, self._order, part.dtype), [*start])

        work = write
        if isinstance(self._sharding, NamedSharding):
            specs = (self._sharding.spec, _reordered(self._sharding, self._order), PartitionSpec())
            work = jax.shard_map(
                write, mesh=self._sharding.mesh, in_specs=specs, out_specs=self._sharding.spec, check_vma=False
            )
        array = jax.ShapeDtypeStruct(self._shape, self._dtype, sharding=self._sharding)
        start = jax.ShapeDtypeStruct((len(self._shape),), np.int32)
        return self._program("write", work, array, self._form(stored, dtype), start, donate_argnums=0)


def _reordered(sharding: NamedSharding, order: Sequence[int]) -> PartitionSpec:
    spec = [*sharding.spec, *[None] * (len(order) - len(sharding.spec))]
    return PartitionSpec(*[spec[axis] for axis in order])


def _arranged(piece: jax.Array, order: Sequence[int], dtype: Any) -> jax.Array:
    return jax.lax.transpose(piece, np.argsort(order)).astype(dtype)


class _Programs:
    """Compiled programs, by what they are for. Threads that need the same one wait for the first of them."""

    def __init__(self) -> None:
        self._found: dict[Any, Future[Callable[..., Any]]] = {}
        self._lock = threading.Lock()

    def get(self, key: Any, compiled: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        with self._lock:
            future = self._found.get(key)
            is_first = future is None
            if future is None:
                if len(self._found) >= _MOST_PROGRAMS:
                    self._found.clear()
                future = self._found[key] = Future()
        if is_first:
            try:
                future.set_result(compiled())
            except BaseException as error:
                with self._lock:
                    self._found.pop(key, None)
                future.set_exception(error)
        return future.result()


_MOST_PROGRAMS = 256
_programs = _Programs()
