"""Writing the array data of a checkpoint: TensorStore copies, computes checksums and writes in its own threads.

A *piece* is a box of an array with its values, in the memory of one device or host, that one process writes.
"""

import collections
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from nnx.storage.checkpoints.manifest import PackedPart, Zarr
from nnx.storage.checkpoints.zarr import Grid, file_of, fingerprints, grid_of, open_array, pack_name, stored_dtype
from nnx.storage.entry import Entry
from nnx.storage.files import sync_directory
from nnx.storage.locations import Location, reason_of
from nnx.storage.placing import Box
from nnx.storage.transfer_bar import moved

IN_FLIGHT = 256 << 20
"""The maximum number of bytes waiting to be written, so that transfers do not fill the memory of the host."""
PACK_FILE = 32 << 20
"""The maximum size of a file of a pack in bytes. Batches of that size are copied in memory that is used again."""


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
                yield Piece(path, Box.of(shard.index, value.shape).start, shard.data)


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


def write_pieces(
    folder: Location, process: int, pieces: Sequence[Piece], arrays: Mapping[str, Zarr], entries: Mapping[str, Entry]
) -> tuple[Grid | None, dict[str, list[PackedPart]], dict[str, str]]:
    """Writes the pieces of one process, and syncs them to the disk if it is a local one.

    Args:
        folder: the data folder.
        process: the index of the process; process 0 writes the metadata of all arrays.
        pieces: the parts of arrays to write.
        arrays: the positions of the large arrays; the others are small.
        entries: the entries of all arrays.

    Returns:
        The layout of the pack, the positions in it, by path, and the fingerprint of each file, by its name.

    Raises:
        OSError: the data could not be written.
    """
    writes, files = _WriteQueue(folder), {}
    opened: dict[str, Any] = {}
    try:
        if process == 0:  # also of arrays that this process has no part of
            for path, (number, grid) in arrays.items():
                opened[path] = open_array(folder / str(number), grid, entries[path].data_dtype, {"path": path})
        for piece in pieces:
            if piece.path in arrays:
                number, grid = arrays[piece.path]
                data = np.asarray(piece.values)
                if piece.path not in opened:
                    opened[piece.path] = open_array(folder / str(number), grid, data.dtype)
                for stored, inside in grid.places(Box(piece.start, data.shape)):
                    names = [f"{number}/{file_of(grid, first)}" for first in grid.files(stored)]
                    files |= dict.fromkeys(names, (grid, data.dtype))
                    writes.add(names, opened[piece.path].result()[stored], data[inside])
        grid, parts, data = _pack([piece for piece in pieces if piece.path not in arrays], process)
        if grid is not None:
            name = pack_name(process)
            pack = open_array(folder / name, grid, np.uint8, {"of process": str(process)}).result()
            for start, size, batch in _batches(data, grid.file[0]):
                file, memory = f"{name}/{file_of(grid, (start,))}", writes.memory(size)
                files[file] = grid, np.uint8
                writes.add([file], pack[start : start + size], np.concatenate(batch, out=memory), memory)
        writes.finish()
    except ValueError as error:  # what TensorStore raises, whatever happened
        writes.abandon()
        raise OSError(reason_of(error)) from error
    except BaseException:
        writes.abandon()
        raise
    return grid, parts, fingerprints(folder, files)


def _pack(
    pieces: Sequence[Piece], process: int
) -> tuple[Grid | None, dict[str, list[PackedPart]], Sequence[np.ndarray]]:
    """Puts small arrays one after the other: the layout of the pack, the positions in it, and the bytes of each."""
    parts: dict[str, list[PackedPart]] = {}
    data: list[np.ndarray] = []
    offset = 0
    for piece in pieces:
        values = np.asarray(piece.values, order="C")
        parts.setdefault(piece.path, []).append(PackedPart(process, offset, Box(piece.start, values.shape)))
        data.append(values.reshape(-1).view(np.uint8))
        offset += values.nbytes
    return grid_of((offset,), (offset,), 1, PACK_FILE) if offset else None, parts, data


def _batches(data: Iterable[np.ndarray], size: int) -> Iterator[tuple[int, int, list[np.ndarray]]]:
    """Yields bytes in batches of one size, the last one smaller: the offset, the size, and the parts of each."""
    batch: list[np.ndarray] = []
    room, start = size, 0
    for part in data:
        while len(part):
            batch.append(part[:room])
            part, room = part[room:], room - len(batch[-1])
            if not room:
                yield start, size, batch
                batch, room, start = [], size, start + size
    if batch:
        yield start, size - room, batch


class _Write(NamedTuple):
    """A write in progress: its files, how many bytes, the future of TensorStore, and memory to use again, if any."""

    files: list[str]
    size: int
    done: Any
    memory: np.ndarray | None


class _WriteQueue:
    """The writes in progress, of a limited number of bytes; one that is larger than the limit goes alone.

    As soon as a file on a local disk is complete, the system is asked to write it there, and only at the end is it
    waited for: what is written by then shares a commit of the file system's journal, where waiting for each file takes
    one for each. There are no threads for it, because a program that ends still finishes its save, and can start none.

    Args:
        folder: the data folder.
    """

    def __init__(self, folder: Location) -> None:
        self._folder = folder.local
        self._files: list[str] = []  # those that are complete
        self._pending: collections.deque[_Write] = collections.deque()
        self._size = 0
        self._spare: list[np.ndarray] = []

    def memory(self, size: int) -> np.ndarray:
        """Returns memory for a batch; that of an earlier one, if possible, since fresh memory costs time."""
        while not self._spare and self._size + size > 2 * PACK_FILE:
            self._await_first()
        memory = self._spare.pop() if self._spare else np.empty(size, np.uint8)
        return memory[:size] if len(memory) >= size else np.empty(size, np.uint8)

    def add(self, files: list[str], target: Any, data: np.ndarray, memory: np.ndarray | None = None) -> None:
        while self._pending and self._size + data.nbytes > IN_FLIGHT:
            self._await_first()
        # The data do not change until then: they are immutable, or have been copied for this save.
        done = target.write(data.view(stored_dtype(data.dtype)), can_reference_source_data_indefinitely=True)
        self._pending.append(_Write(files, data.nbytes, done, memory))
        self._size += data.nbytes

    def _await_first(self) -> None:
        first = self._pending.popleft()
        self._size -= first.size
        first.done.result()
        if first.memory is not None:
            self._spare.append(first.memory)
        if self._folder is not None:
            self._files += first.files
            for name in first.files:
                _begin_sync(self._folder / name)
        moved(first.size)

    def finish(self) -> None:
        """Waits until everything is written, and on the disk if it is a local one."""
        while self._pending:
            self._await_first()
        if self._folder is not None:
            for name in self._files:
                _sync(self._folder / name)
            for folder in [*self._folder.iterdir(), self._folder]:
                if folder.is_dir():
                    sync_directory(folder)

    def abandon(self) -> None:
        """Waits without looking at the results, so that nothing is written any more when the caller cleans up."""
        for write in self._pending:
            write.done.exception()


def _begin_sync(file: Path) -> None:
    """Asks the system to begin to write a file to the disk, if there is a way to ask."""
    if hasattr(os, "posix_fadvise"):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)  # what is not yet on the disk stays in memory
        except OSError:  # advice is never the reason that a save fails
            pass
        finally:
            os.close(handle)


def _sync(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
