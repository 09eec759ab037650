"""One safetensors file: reading tensors and parts of them, and writing them one at a time.

In files written by NNX, checksums cover the bytes of every tensor. They are stored in the metadata as `nnx.crc32`: the
size of a *chunk*, then the CRC-32 of every chunk of every tensor, in the order of the data. Each tensor starts a new
chunk, so reading one part of a tensor verifies only the chunks it overlaps. A CRC-32 notices every change of one or two
bits and every burst of up to 32 bits in a chunk, and misses one in four billion of all other changes. `zlib` computes
it at 4 GB/s on each core. Files of NNX 0.2 have `nnx.checksums` instead, made by `nnx/storage/checksum.py`.

Tensors are read into fresh memory rather than copied from a memory map: the pages of a map count toward the memory of
the process as long as the map exists, which would make a load peak at twice the size of the model.
"""

import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from nnx.storage.aligned_memory import aligned_bytes, populate
from nnx.storage.checksum import checksum
from nnx.storage.errors import CheckpointError, first_line
from nnx.storage.safetensors.header import INVALID, MAX_LENGTH, Header, Tensor, make_header, parse_header
from nnx.storage.transfer_bar import moved

CHUNK = 2**22  # bytes; large enough for cheap reads, small enough that reading one part does not read much more
THREADS = min(8, os.cpu_count() or 1)
CRCS, OLD_CHECKSUMS = "nnx.crc32", "nnx.checksums"

WRONG_CHECKSUM = """{path} is damaged: the bytes of {name!r} do not match their checksum. Nothing was loaded. If \
another program changed the values and kept the metadata, load with verify=False."""
NOT_READABLE = "{path} cannot be read: {reason}."


class TensorFile:
    """A safetensors file opened for reading, with a header that has been checked; a context manager.

    Attributes:
        path: the path of the file.
        tensors: the tensors it contains, by name.
        metadata: the text stored with them, by name.
        chunk: the size of a chunk in bytes.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file: BinaryIO = open(path, "rb", buffering=0)
        except OSError as error:
            raise CheckpointError(NOT_READABLE.format(path=path, reason=first_line(error))) from error
        try:
            self._start, header = _read_header(path, self._file)
            self.tensors, self.metadata = header
            self.chunk, self._checksums, self._checksum = _parse_checksums(path, header)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; arrays that `mapped` returned stay valid."""
        self._file.close()

    @property
    def has_checksums(self) -> bool:
        """Whether the file has the checksums that NNX writes."""
        return bool(self._checksums)

    def mapped(self) -> dict[str, np.ndarray]:
        """Returns every tensor as a read-only view of the file; its bytes are read when they are used."""
        try:
            data = np.memmap(self._file, np.uint8, "r")[self._start :]
        except OSError as error:
            raise CheckpointError(NOT_READABLE.format(path=self.path, reason=first_line(error))) from error
        return {
            name: data[tensor.start : tensor.end].view(tensor.dtype).reshape(tensor.shape)
            for name, tensor in self.tensors.items()
        }

    def read(
        self,
        name: str,
        start: int = 0,
        stop: int | None = None,
        *,
        verify: bool = True,
        into: np.ndarray | None = None,
    ) -> np.ndarray:
        """Reads a tensor, or the range `[start:stop]` of its first axis.

        Args:
            name: the name of the tensor.
            start, stop: the range; all of it by default.
            verify: whether to compare the bytes with their checksums, if the file has any.
            into: bytes to read into, at least as many as needed; by default, fresh memory. They are read by this thread
                alone, because a caller that has memory ready usually has its own threads.

        Raises:
            CheckpointError: the file has become shorter, or a checksum does not match.
        """
        tensor = self.tensors[name]
        first, last = 0, tensor.nbytes
        shape = tensor.shape
        if stop is not None:
            row = math.prod(shape[1:]) * tensor.dtype.itemsize
            first, last, shape = start * row, stop * row, (stop - start, *shape[1:])
        buffer = aligned_bytes(last - first) if into is None else into[: last - first]
        chunks = range(first // self.chunk, -(-last // self.chunk))

        def read_chunk(chunk: int) -> None:
            if into is None:
                populate(buffer[max(chunk * self.chunk - first, 0) : (chunk + 1) * self.chunk - first])
            self._read_chunk(name, chunk, buffer, first, last, verify)

        if into is None and len(chunks) > 1 and THREADS > 1:
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(read_chunk, chunks))
        else:
            for chunk in chunks:
                read_chunk(chunk)
        return buffer.view(tensor.dtype).reshape(shape)

    def _read_chunk(self, name: str, chunk: int, buffer: np.ndarray, first: int, last: int, verify: bool) -> None:
        """Reads the overlap of a chunk with the bytes `[first:last]` of a tensor, which the buffer will hold."""
        tensor = self.tensors[name]
        start, stop = chunk * self.chunk, min((chunk + 1) * self.chunk, tensor.nbytes)
        low, high = max(start, first), min(stop, last)
        wanted = buffer[low - first : high - first]
        expected = self._checksums[name][chunk] if verify and name in self._checksums else None
        if expected is None or (low, high) == (start, stop):
            whole = wanted
            self._read_at(tensor.start + low, wanted)
        else:  # a checksum can only be verified over the whole chunk
            whole = aligned_bytes(stop - start)
            self._read_at(tensor.start + start, whole)
            wanted[:] = whole[low - start : high - start]
        if expected is not None and self._checksum(whole) != expected:
            raise CheckpointError(WRONG_CHECKSUM.format(path=self.path, name=name))

    def _read_at(self, position: int, buffer: np.ndarray) -> None:
        view, position = buffer.data, self._start + position
        try:
            while view:
                count = _read_into(self._file, view, position)
                if count == 0:
                    raise CheckpointError(INVALID.format(path=self.path, reason="it became shorter while it was read"))
                view, position = view[count:], position + count
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(NOT_READABLE.format(path=self.path, reason=first_line(error))) from error


def _read_into(file: BinaryIO, view: memoryview, position: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [view], position)
    # Windows has no positional read, and threads must not share a file position, so each call opens the file again.
    with open(file.name, "rb", buffering=0) as own:
        own.seek(position)
        return own.readinto(view) or 0


def _read_header(path: Path, file: BinaryIO) -> tuple[int, Header]:
    try:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_LENGTH):
            raise CheckpointError(INVALID.format(path=path, reason=f"its {size} bytes do not contain a header"))
        text = b""
        while len(text) < length:
            more = file.read(length - len(text))
            if not more:
                raise CheckpointError(INVALID.format(path=path, reason="it became shorter while it was read"))
            text += more
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(NOT_READABLE.format(path=path, reason=first_line(error))) from error
    return 8 + length, parse_header(path, text, size - 8 - length)


def _parse_checksums(path: Path, header: Header) -> tuple[int, dict[str, Sequence[int]], Callable[[Any], int]]:
    """Returns the size of a chunk, the checksums of the chunks of each tensor, if the file has them, and their kind."""
    kinds: dict[str, Callable[[Any], int]] = {CRCS: zlib.crc32, OLD_CHECKSUMS: checksum}
    kind = next((kind for kind in kinds if kind in header.metadata), None)
    if kind is None:
        return CHUNK, {}, zlib.crc32
    size, _, digits = header.metadata[kind].partition(":")
    try:
        chunk = int(size)
        values = np.frombuffer(bytes.fromhex(digits), ">u4").tolist()
        if chunk < 1:
            raise ValueError
    except ValueError as error:
        raise CheckpointError(INVALID.format(path=path, reason=f"its {kind} is malformed")) from error
    found: dict[str, Sequence[int]] = {}
    at = 0
    for name, tensor in sorted(header.tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        count = _chunk_count(tensor, chunk)
        found[name] = values[at : at + count]
        at += count
    if at != len(values):
        reason = f"its {kind} has {len(values)} checksums for {at} chunks"
        raise CheckpointError(INVALID.format(path=path, reason=reason))
    return chunk, found, kinds[kind]


def _chunk_count(tensor: Tensor, chunk: int) -> int:
    return -(-tensor.nbytes // chunk)


# Writing


class Pending(NamedTuple):
    """A tensor that is about to be written."""

    dtype: Any
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    file: BinaryIO, tensors: Mapping[str, Pending], arrays: Iterator[np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes a whole safetensors file, one tensor at a time.

    Args:
        file: an empty file, opened for writing.
        tensors: the dtypes and shapes of the tensors to write, by name.
        arrays: the data of the tensors, in `data_order`; taken one at a time, so only one has to be in memory.
        metadata: the text to store, by name; the checksums are added to it.
    """
    _, placed = make_header(tensors, metadata)
    count = sum(_chunk_count(tensor, CHUNK) for tensor in placed.values())
    blank, _ = make_header(tensors, {**metadata, CRCS: _checksum_text([0] * count)})
    file.write(len(blank).to_bytes(8, "little") + blank)
    found: list[int] = []
    with ThreadPoolExecutor(THREADS) as pool:  # the checksums of an array are computed while it is being written
        for _ in placed:
            chunks = list(_chunks(next(arrays)))
            checksums = pool.map(zlib.crc32, chunks)
            for chunk in chunks:
                file.write(chunk.data)
            found += checksums
            moved(sum([chunk.nbytes for chunk in chunks]))
            chunk = chunks = checksums = None  # they would keep the array in memory while the next one is made
    # A checksum has a fixed number of digits, so this header has the length of the blank one it replaces.
    header, _ = make_header(tensors, {**metadata, CRCS: _checksum_text(found)})
    file.seek(8)
    file.write(header)


def _chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]


def _checksum_text(values: Sequence[int]) -> str:
    return f"{CHUNK}:{np.array(values, '>u4').tobytes().hex()}"
