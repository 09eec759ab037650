"""The arrays of a checkpoint in its data folder: arrays of zarr 3, opened with TensorStore.

A large array has a folder of its own, named by a number. The small arrays that a process writes follow each other in
one array of bytes, its *pack*: a file and a checksum for each of thousands of small arrays would take longer than their
data. Every chunk, and the index of the chunks in each file, ends with its CRC-32C.

A CRC-32C says nothing about the place of a chunk: two files that are exchanged pass. So the manifest has the
*fingerprint* of each file, the CRC-32Cs at the ends of its chunks, which cost next to nothing to read again. In an
object store, where each of them is a request, the first one has to do.

Other programs can read a data folder: the metadata has the path of each array. A load does not read the metadata, since
the manifest has everything in it, with a checksum.
"""

import contextlib
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from nnx.storage.checkpoints.grid import Grid
from nnx.storage.files import open_regular
from nnx.storage.locations import Location, context, tensorstore

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
