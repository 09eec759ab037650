"""Writing the array data of a checkpoint: transfers, checksums and writes run concurrently, in a few threads."""

import os
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nnx.storage.checkpoints.chunks import Box, Chunk, Piece, boxes, index_text
from nnx.storage.checkpoints.workers import Workers
from nnx.storage.checksum import checksum
from nnx.storage.files import open_exclusive, sync_directory, sync_file

THREADS = 4
IN_FLIGHT = 256 << 20
"""The maximum number of bytes waiting to be written, so that transfers do not fill the memory of the host."""


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


def write_pieces(folder: Path, process: int, pieces: Sequence[Piece]) -> dict[str, dict[str, int]]:
    """Writes the pieces of one process and their index, and syncs both to the disk.

    Args:
        folder: the data folder.
        process: the index of the process, which names the files.
        pieces: the parts of arrays to write.

    Returns:
        The size of each file, and the checksum of the index, by file name.
    """
    name = f"{process}.bin"
    placed: list[tuple[str, int, int, Box, Future[int]]] = []
    offset = 0
    with open_exclusive(folder / name) as file:
        # The workers write to the file until this block ends, so the file has to be closed after them.
        with Workers(THREADS) as workers:
            room = _Room(IN_FLIGHT)
            for piece in pieces:
                data = np.asarray(piece.values, order="C")
                flat = data.reshape(-1).view(np.uint8)
                first = 0
                for box in boxes(piece.start, data.shape, data.dtype.itemsize):
                    size = box.size * data.dtype.itemsize
                    room.enter(size)
                    part = flat[first : first + size]
                    placed.append(
                        (piece.path, offset, size, box, workers.submit(_write, file.fileno(), part, offset, room))
                    )
                    first, offset = first + size, offset + size
        chunks: dict[str, list[Chunk]] = {}
        for path, start, size, box, written in placed:
            chunks.setdefault(path, []).append(Chunk(name, start, size, written.result(), box))
        sync_file(file)
    index = index_text(chunks).encode()
    with open_exclusive(folder / f"{process}.json") as file:
        file.write(index)
        sync_file(file)
    sync_directory(folder)
    return {name: {"size": offset}, f"{process}.json": {"size": len(index), "crc32": zlib.crc32(index)}}


def _write(handle: int, data: Any, offset: int, room: "_Room") -> int:
    """Writes bytes to their place in a file and returns their checksum; both release the GIL."""
    try:
        view = memoryview(data)
        written = 0
        while written < len(view):
            written += os.pwrite(handle, view[written:], offset + written)
        return checksum(data)
    finally:
        room.leave(len(data))


class _Room:
    """Limits the bytes in flight; an item larger than the limit is admitted alone."""

    def __init__(self, size: int):
        self._size, self._used = size, 0
        self._changed = threading.Condition()

    def enter(self, size: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + size <= self._size)
            self._used += size

    def leave(self, size: int) -> None:
        with self._changed:
            self._used -= size
            self._changed.notify()
