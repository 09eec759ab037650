"""The arrays of a checkpoint in its data folder: arrays of zarr 3, opened with TensorStore.

A large array has a folder of its own, named by a number. The small arrays that a process writes follow each other in
one array of bytes, its *pack*: a file and a checksum for each of thousands of small arrays would take longer than their
data. Every chunk, and the index of the chunks in each file, ends with its CRC-32C.

A CRC-32C says nothing about the place of a chunk: two files that are exchanged pass. So the manifest has the
*fingerprint* of each file, the CRC-32Cs at the ends of its chunks, which cost next to nothing to read again. In an
object store, where each of them is a request, the first one has to do.

Other programs can read a data folder: the metadata has the path of each array. A load does not read the metadata, since
the manifest has everything in it, with a checksum.

A *shard* is the part of an array that one device held when it was saved; all shards of an array have the same shape. A
shard is written as one *file*, or as several if it is very large, so no two processes write to the same file. A file
consists of *chunks*, the units that are compressed, verified and read; here they are not compressed.

A chunk is a run of rows that is contiguous in C order. If the number of rows has no divisor of a suitable size, the
last chunk is padded, and so are the files. Padding inside the array shifts what comes after it, so the stored array can
be larger than the saved one: its second shard begins at `stride`, not at `shard`.
"""

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nnx.storage.files import open_regular
from nnx.storage.locations import Location, context, tensorstore
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


# The arrays in the data folder


_NATIVE = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
}


REMOTE = 8
"""The digits of a fingerprint that was made in an object store."""


def stored_dtype(dtype: Any) -> np.dtype[Any]:
    """Returns the dtype in which an array is stored: its own, or bytes if zarr does not have it."""
    dtype = np.dtype(dtype)
    return dtype if dtype.name in _NATIVE else np.dtype(f"uint{8 * dtype.itemsize}")


def pack_name(process: int) -> str:
    """Returns the name of the folder with the small arrays that a process has written."""
    return f"pack-{process}"


def open_array(folder: Location, grid: Grid, dtype: Any, create: dict[str, str] | None = None) -> Any:
    """Opens an array.

    Args:
        folder: the folder of the array.
        grid: its layout.
        dtype: the dtype of the saved array.
        create: attributes for the metadata, to be written; None if they are there, or another process writes them.
    """
    dtype = stored_dtype(dtype)
    checked = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    sharding = {"chunk_shape": grid.chunk, "codecs": checked, "index_codecs": checked}
    spec = {
        "driver": "zarr3",
        "kvstore": folder.store(sync=False),
        # Neither may a lost file be read as zeros, nor zeros be left out.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
        "metadata": {
            "shape": grid.stored_shape,
            "data_type": dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": grid.file}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},  # fewer directories
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            **({} if create is None else {"attributes": create}),
        },
    }
    how = {"assume_metadata": True} if create is None else {"create": True}
    return tensorstore().open(spec, open=True, context=context(), **how)


def file_of(grid: Grid, chunk: tuple[int, ...]) -> str:
    """Returns the name of the file that holds a chunk, given by its first index in the stored array."""
    return ".".join(["c", *[str(at // size) for at, size in zip(chunk, grid.file, strict=True)]])


def chunk_in_file(raw: bytes, grid: Grid, chunk: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns a chunk from the bytes of its file, whatever its checksum.

    Raises:
        ValueError: the chunk is not there.
    """
    counts = [file // size for file, size in zip(grid.file, grid.chunk, strict=True)]
    inner = [at % file // size for at, file, size in zip(chunk, grid.file, grid.chunk, strict=True)]
    end = len(raw) - 4  # of the index: an offset and a size for each chunk
    index = np.frombuffer(raw[max(0, end - 16 * math.prod(counts)) : max(0, end)], "<u8")
    offset, size = index.reshape(*counts, 2)[tuple(inner)].tolist()
    found = raw[offset : offset + size - 4]
    return np.frombuffer(found, stored_dtype(dtype)).reshape(grid.chunk)


def fingerprints(data: Location, files: Mapping[str, tuple[Grid, Any]]) -> dict[str, str]:
    """Returns the fingerprints of files, as hexadecimal digits; none of those that cannot be read.

    Args:
        data: the data folder.
        files: the layout and dtype of the array in each file, by the name of the file in the folder.
    """
    found: dict[str, str] = {}
    remote: dict[str, range] = {}
    for name, (grid, dtype) in files.items():
        step = math.prod(grid.chunk) * stored_dtype(dtype).itemsize + 4
        if data.local is None:
            remote[name] = range(step - 4, step)
            continue
        count = math.prod(size // chunk for size, chunk in zip(grid.file, grid.chunk, strict=True))
        with contextlib.suppress(OSError), open_regular(data.local / name) as file:
            end = os.fstat(file.fileno()).st_size - 16 * count - 4  # the index: an offset and a size for each chunk
            digits = []
            for at in range(step - 4, end, step):
                file.seek(at)
                digits.append(file.read(4).hex())
            found[name] = "".join(digits)
    return found | {name: value.hex() for name, value in data.ranges(remote).items()}
