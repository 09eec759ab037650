"""Chunks: how array data are laid out in the files of a checkpoint.

Every process writes one data file, `<process>.bin`, with the parts of arrays that it owns, end to end, and one index,
`<process>.json`, with the position of each part. A *piece* is a part of an array in the memory of one device or host.
A *chunk* is a run of its rows of at most `CHUNK` bytes, in C order, with its own checksum; it is the unit that is
written, read and verified. Every byte of a data file belongs to a chunk, so every byte is covered.

A *box* is a rectangular part of an array: the index where it starts, and its shape.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from nnx.core.repr import short
from nnx.storage.placing import bounds_of

CHUNK = 8 << 20
"""The maximum size of a chunk in bytes, unless a single element is larger."""


class Box(NamedTuple):
    """A rectangular part of an array."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def slices(self, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
        """Returns the index of the box in its array, or in one that starts at `origin`."""
        start = self.start if origin is None else [a - b for a, b in zip(self.start, origin, strict=True)]
        return tuple([slice(a, a + n) for a, n in zip(start, self.shape, strict=True)])

    def overlap(self, other: "Box") -> "Box | None":
        """Returns the part that two boxes share, if there is any."""
        start = tuple(map(max, self.start, other.start))
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)]
        shape = tuple([end - a for end, a in zip(ends, start, strict=True)])
        return Box(start, shape) if all(n > 0 for n in shape) else None


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Returns the box of an index, in the form in which JAX describes the part of an array on a device."""
    bounds = bounds_of(index, shape)
    return Box(tuple([start for start, _ in bounds]), tuple([max(stop - start, 0) for start, stop in bounds]))


class Piece(NamedTuple):
    """A part of an array that this process writes: the path of the entry, the start of the part, and its values."""

    path: str
    start: tuple[int, ...]
    values: Any


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The position of a part of an array: the file, the bytes in it, their checksum, and the box they fill."""

    file: str
    offset: int
    size: int
    checksum: int
    box: Box


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
    elif not value.is_fully_addressable or jax.process_index() == 0 or elsewhere:
        for shard in value.addressable_shards:
            if shard.replica_id == 0:
                yield Piece(path, box_of(shard.index, value.shape).start, shard.data)


def boxes(start: Sequence[int], shape: Sequence[int], itemsize: int) -> Iterator[Box]:
    """Divides a piece into boxes of at most CHUNK bytes, each contiguous in C order."""
    # The first axis whose entries are no larger than a chunk. A chunk is a range of this axis and all of those after
    # it, at one index of those before it, so its bytes follow each other in memory.
    axis = 0
    while axis < len(shape) and math.prod(shape[axis + 1 :]) * itemsize > CHUNK:
        axis += 1
    if axis >= len(shape):
        axis = max(len(shape) - 1, 0)
    if not shape:
        yield Box((), ())
        return
    rows = max(1, CHUNK // (math.prod(shape[axis + 1 :]) * itemsize))
    for prefix in itertools.product(*map(range, shape[:axis])):
        for first in range(0, shape[axis], rows):
            inner = (*prefix, first, *(0,) * (len(shape) - axis - 1))
            size = (*(1,) * axis, min(rows, shape[axis] - first), *shape[axis + 1 :])
            yield Box(tuple([a + b for a, b in zip(start, inner, strict=True)]), size)


# The index


def index_text(chunks: Mapping[str, Sequence[Chunk]]) -> str:
    """Returns the index of one data file as JSON: its chunks by path."""
    rows = {
        path: [[chunk.offset, chunk.size, chunk.checksum, chunk.box.start, chunk.box.shape] for chunk in found]
        for path, found in chunks.items()
    }
    return json.dumps(rows, separators=(",", ":"))


def parse_index(text: bytes, file: str, file_size: int, shapes: Mapping[str, tuple[tuple[int, ...], int]]) -> Any:
    """Reads an index.

    Args:
        text: the JSON of the index.
        file: the name of the data file.
        file_size: the size of that file in bytes.
        shapes: the shape and the bytes per element of every array in the checkpoint, by path.

    Returns:
        The chunks by path.

    Raises:
        ValueError: the text is not what `index_text` writes.
    """
    rows = json.loads(text)
    if not isinstance(rows, dict):
        raise ValueError(f"the index is {short(rows)}")
    found: dict[str, list[Chunk]] = {}
    for path, parts in rows.items():
        if path not in shapes or not isinstance(parts, list):
            raise ValueError(f"the index names {path!r}, which is not an array of this checkpoint")
        found[path] = [_parse_chunk(part, file, file_size, *shapes[path]) for part in parts]
    return found


def _parse_chunk(row: Any, file: str, file_size: int, shape: tuple[int, ...], itemsize: int) -> Chunk:
    offset, size, checksum, start, extent = row
    numbers = (offset, size, checksum, *start, *extent)
    if any(type(n) is not int or n < 0 for n in numbers) or not len(start) == len(extent) == len(shape):
        raise ValueError(f"the index has the chunk {short(row)}")
    box = Box(tuple(start), tuple(extent))
    inside = all(a + n <= whole for a, n, whole in zip(start, extent, shape, strict=True))
    if not inside or size != box.size * itemsize or offset + size > file_size:
        raise ValueError(f"the index has the chunk {short(row)}, which does not fit the array or the file")
    return Chunk(file, offset, size, checksum, box)
