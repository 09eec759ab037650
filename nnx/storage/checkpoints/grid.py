"""How a large array is laid out as an array of zarr 3: in shards, files and chunks.

A *shard* is the part of an array that one device held when it was saved; all shards of an array have the same shape. A
shard is written as one *file*, or as several if it is very large, so no two processes write to the same file. A file
consists of *chunks*, the units that are compressed, verified and read; here they are not compressed.

A chunk is a run of rows that is contiguous in C order. If the number of rows has no divisor of a suitable size, the
last chunk is padded, and so are the files. Padding inside the array shifts what comes after it, so the stored array can
be larger than the saved one: its second shard begins at `stride`, not at `shard`.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from nnx.storage.placing import Box

CHUNK = 4 << 20
"""The maximum size of a chunk in bytes, unless a single element is larger."""
FILE = 256 << 20
"""The maximum size of a file in bytes. TensorStore assembles a file in memory before it writes it."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """The layout of an array.

    Attributes:
        shape: the shape of the array.
        shard: the shape of the part that one device held.
        file: the shape of what one file holds, a multiple of `chunk` in every dimension.
        chunk: the shape of a chunk.
    """

    shape: tuple[int, ...]
    shard: tuple[int, ...]
    file: tuple[int, ...]
    chunk: tuple[int, ...]

    @property
    def stride(self) -> tuple[int, ...]:
        """The distance between the beginnings of two shards in the stored array."""
        return tuple([-(-n // f) * f for n, f in zip(self.shard, self.file, strict=True)])

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the stored array, which includes the padding between shards, but not that at the end."""
        dimensions = zip(self.shape, self.shard, self.stride, strict=True)
        return tuple([(n - 1) // size * stride + (n - 1) % size + 1 for n, size, stride in dimensions])

    def places(self, box: Box) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Yields where the parts of a box are stored: the index in the stored array, and that in the box."""
        ranges = [
            list(_unpadded_runs(first, count, size, stride))
            for first, count, size, stride in zip(box.start, box.shape, self.shard, self.stride, strict=True)
        ]
        for runs in itertools.product(*ranges):
            yield tuple([stored for stored, _ in runs]), tuple([inside for _, inside in runs])

    def files(self, index: Sequence[slice]) -> Iterator[tuple[int, ...]]:
        """Yields the first index of each file that holds a part of the stored array."""
        ranges = [range(i.start // n * n, i.stop, n) for i, n in zip(index, self.file, strict=True)]
        return itertools.product(*ranges)


def _unpadded_runs(first: int, count: int, size: int, stride: int) -> Iterator[tuple[slice, slice]]:
    """Yields where the runs of a range are stored: one if there is no padding, else one for each shard."""
    if stride == size or first // size == (first + count - 1) // size:
        start = first // size * stride + first % size
        yield slice(start, start + count), slice(0, count)
        return
    done = 0
    while done < count:
        shard, inner = divmod(first + done, size)
        step = min(size - inner, count - done)
        yield slice(shard * stride + inner, shard * stride + inner + step), slice(done, done + step)
        done += step


def grid_of(shape: Sequence[int], shard: Sequence[int], itemsize: int, file_size: int | None = None) -> Grid:
    """Returns the layout of an array that was held in parts of the shape `shard`, in files of at most some bytes."""
    chunk = _cut(shard, CHUNK // itemsize)
    counts = [-(-n // size) for n, size in zip(shard, chunk, strict=True)]  # of chunks
    chunks = _cut(counts, (file_size or FILE) // (math.prod(chunk) * itemsize))
    file = tuple([n * size for n, size in zip(chunks, chunk, strict=True)])
    return Grid(tuple(shape), tuple(shard), file, chunk)


def _cut(shape: Sequence[int], limit: int) -> tuple[int, ...]:
    """Returns the shape of equal parts that are contiguous in C order and have at most `limit` elements, at least one.

    One dimension is cut; those before it are divided into single rows, and those after it are whole.
    """
    parts = []
    for axis, size in enumerate(shape):
        most = min(size, max(1, limit // math.prod(shape[axis + 1 :])))
        divisor = next((n for n in range(most, max(most // 2, most - 1000), -1) if size % n == 0), None)
        count = -(-size // most)
        parts.append(divisor or -(-size // count))
    return tuple(parts)
