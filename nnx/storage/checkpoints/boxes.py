"""Boxes and pieces: the parts of arrays that a process reads or writes.

A *box* is a rectangular part of an array: the index where it starts, and its shape. A *piece* is a box with its values,
in the memory of one device or host.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from nnx.storage.placing import bounds_of


class Box(NamedTuple):
    """A rectangular part of an array."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple([a + n for a, n in zip(self.start, self.shape, strict=True)])

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


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Returns the box of an index, in the form in which JAX describes the part of an array on a device."""
    bounds = bounds_of(index, shape)
    return Box(tuple([start for start, _ in bounds]), tuple([max(stop - start, 0) for start, stop in bounds]))


class Piece(NamedTuple):
    """A part of an array that this process writes: the path of the entry, the start of the part, and its values."""

    path: str
    start: tuple[int, ...]
    values: Any


def pieces_of(path: str, value: Any, elsewhere: bool = False) -> Iterator[Piece]:
    """Yields the pieces of an array that this process has to write; together, the processes write each part once.

    Process 0 writes an array that every process has in full (a counter, a Module that was not made by `init_sharded`).
    If an array is spread over the processes, each part is written by the process that has its first copy.

    Args:
        path: the path of the entry.
        value: the array.
        elsewhere: whether process 0 holds no part of the array.
    """
    if not isinstance(value, jax.Array):
        if jax.process_index() == 0:
            yield Piece(path, (0,) * np.ndim(value), value)
    elif jax.process_count() == 1 and isinstance(value.sharding, jax.sharding.SingleDeviceSharding):
        yield Piece(path, (0,) * value.ndim, value)  # the common case, without asking JAX for the shards
    elif not value.is_fully_addressable or jax.process_index() == 0 or elsewhere:
        for shard in value.addressable_shards:
            if shard.replica_id == 0:
                yield Piece(path, box_of(shard.index, value.shape).start, shard.data)


def on_host(pieces: Sequence[Piece]) -> list[Piece]:
    """Copies pieces to the host, so that later changes to the arrays do not affect them."""
    for piece in pieces:
        if isinstance(piece.values, jax.Array):
            piece.values.copy_to_host_async()
    return [piece._replace(values=_snapshot(piece.values)) for piece in pieces]


def _snapshot(values: Any) -> np.ndarray:
    # A numpy array can change, so it is copied. A jax.Array on the CPU need not be: while this view of its buffer
    # exists, JAX does not donate the buffer but copies it.
    return np.array(values) if isinstance(values, (np.ndarray, np.generic)) else np.asarray(values)
