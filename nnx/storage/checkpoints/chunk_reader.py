"""Reading the array data of a checkpoint: only the chunks that are needed, verified, in a few threads."""

import os
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nnx.storage.aligned_memory import aligned_zeros
from nnx.storage.checkpoints.chunks import Box, Chunk, parse_index
from nnx.storage.checkpoints.manifest import DAMAGED, Manifest
from nnx.storage.checkpoints.workers import Workers
from nnx.storage.checksum import BLOCK, checksum
from nnx.storage.errors import DamagedError
from nnx.storage.files import inside, open_regular

THREADS = 4
Wanted = Mapping[str, Sequence[Box]]
"""The boxes of each array that this process needs, by path."""


class ChunkReader:
    """Reads parts of the arrays of one checkpoint.

    The files stay open, so a save that replaces them in the meantime does not matter.

    Args:
        directory: the directory of the checkpoint.
        manifest: the manifest of the checkpoint.
        verify: whether to verify checksums.

    Raises:
        DamagedError: an index is damaged, or does not cover the arrays.
    """

    def __init__(self, directory: Path, manifest: Manifest, verify: bool = True):
        self._directory, self._manifest, self._verify = directory, manifest, verify
        self._files: dict[str, BinaryIO] = {}
        self._chunks: dict[str, list[Chunk]] = {}
        self._workers = Workers(THREADS)
        self._local = threading.local()
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        entries = {path: entry for path, entry in self._manifest.entries.items() if entry.has_data}
        shapes = {path: (entry.data_shape, entry.data_dtype.itemsize) for path, entry in entries.items()}
        for name, file in self._manifest.files.items():
            if name.endswith(".json"):
                data_file = name.removesuffix(".json") + ".bin"
                self._read_index(name, data_file, shapes)
            else:
                self._files[name] = self._opened(name)
                found = os.fstat(self._files[name].fileno()).st_size
                if found != file.size:
                    raise self._damaged(name, f"has {found} bytes instead of {file.size}")
        for path, (shape, _) in shapes.items():
            covered = sum(chunk.box.size for chunk in self._chunks.get(path, ()))
            if covered != Box((0,) * len(shape), shape).size:
                raise self._damaged(
                    "*.json", f"cover {covered} elements of {path!r}, which has the shape {list(shape)}"
                )

    def _read_index(self, name: str, data_file: str, shapes: Mapping[str, Any]) -> None:
        with self._opened(name) as file:
            text = file.read()
        expected = self._manifest.files[name]
        if len(text) != expected.size:
            raise self._damaged(name, f"has {len(text)} bytes instead of {expected.size}")
        if expected.crc32 is not None and zlib.crc32(text) != expected.crc32:
            raise self._damaged(name, "does not have the checksum it was saved with")
        if data_file not in self._manifest.files:
            raise self._damaged(name, f"belongs to {data_file}, which the manifest does not name")
        try:
            found = parse_index(text, data_file, self._manifest.files[data_file].size, shapes)
        except (ValueError, TypeError, RecursionError) as error:
            raise self._damaged(name, f"cannot be read ({error})") from error
        for path, chunks in found.items():
            self._chunks.setdefault(path, []).extend(chunks)

    def _opened(self, name: str) -> BinaryIO:
        try:
            return open_regular(inside(self._directory, f"{self._manifest.data}/{name}"))
        except FileNotFoundError:
            raise self._damaged(name, "is missing") from None
        except (OSError, ValueError) as error:
            raise self._damaged(name, f"cannot be opened ({error})") from error

    def _damaged(self, file: str, what: str) -> DamagedError:
        reason = f"the file {self._manifest.data}/{file} {what}"
        return DamagedError(DAMAGED.format(path=self._directory, reason=reason))

    # Checking and reading

    def check(self, wanted: Wanted) -> None:
        """Verifies the checksums of all chunks that are needed, without keeping their data.

        Raises:
            DamagedError: a chunk differs from what was saved.
        """
        self._for_each(
            self._check_chunk, [chunk for path, boxes in wanted.items() for chunk in self._needed(path, boxes)]
        )

    def read(self, wanted: Wanted, *, verify: bool | None = None) -> dict[str, list[np.ndarray]]:
        """Reads the wanted boxes.

        Args:
            wanted: the boxes of each array, by path.
            verify: whether to verify checksums; by default, the setting of the reader.

        Returns:
            The data of the boxes, in the same order, by path.

        Raises:
            DamagedError: a chunk differs from what was saved.
        """
        verify = self._verify if verify is None else verify
        found: dict[str, list[np.ndarray]] = {}
        jobs: list[tuple[Chunk, list[tuple[Box, np.ndarray]], bool]] = []
        for path, boxes in wanted.items():
            dtype = self._manifest.entries[path].data_dtype
            found[path] = [aligned_zeros(box.shape, dtype) for box in boxes]
            places = list(zip(boxes, found[path], strict=True))
            jobs += [(chunk, places, verify) for chunk in self._needed(path, boxes)]
        self._for_each(lambda job: self._read_chunk(*job), jobs)
        return found

    def _needed(self, path: str, boxes: Sequence[Box]) -> Iterable[Chunk]:
        return [chunk for chunk in self._chunks[path] if any(chunk.box.overlap(box) for box in boxes)]

    def _for_each(self, work: Callable[[Any], None], jobs: Sequence[Any]) -> None:
        try:
            self._workers.map(work, list(jobs))
        except DamagedError:
            raise
        except OSError as error:
            reason = f"{self._manifest.data} cannot be read ({type(error).__name__}: {error})"
            raise DamagedError(DAMAGED.format(path=self._directory, reason=reason)) from error

    def _check_chunk(self, chunk: Chunk) -> None:
        buffer, found = self._scratch(BLOCK), 0  # a block at a time, so that the data stay in the processor's cache
        for first in range(0, chunk.size, BLOCK):
            part = buffer[: min(BLOCK, chunk.size - first)]
            self._fill(chunk, part, first)
            found = checksum(part, found)
        self._compare(chunk, found)

    def _read_chunk(self, chunk: Chunk, places: Sequence[tuple[Box, np.ndarray]], verify: bool) -> None:
        data: Any
        for box, array in places:
            target = _contiguous_part(chunk.box, box, array)
            if target is not None:  # read it straight into its place, without a copy
                self._fill(chunk, target, 0)
                data, rest = target, [place for place in places if place[1] is not array]
                break
        else:
            data, rest = self._scratch(chunk.size), places
            self._fill(chunk, data, 0)
        if verify:
            self._compare(chunk, checksum(data))
        for box, array in rest:
            overlap = chunk.box.overlap(box)
            if overlap is not None:
                values = data.view(array.dtype).reshape(chunk.box.shape)
                array[overlap.slices(box.start)] = values[overlap.slices(chunk.box.start)]

    def _fill(self, chunk: Chunk, buffer: Any, first: int) -> None:
        view, done = memoryview(buffer), 0
        while done < len(view):
            count = os.preadv(self._files[chunk.file].fileno(), [view[done:]], chunk.offset + first + done)
            if count == 0:
                raise self._damaged(chunk.file, "has become shorter")
            done += count

    def _compare(self, chunk: Chunk, found: int) -> None:
        if found != chunk.checksum:
            where = f"bytes {chunk.offset} to {chunk.offset + chunk.size}"
            raise self._damaged(chunk.file, f"differs from what was saved: the checksum of {where} does not match")

    def _scratch(self, size: int) -> np.ndarray:
        """Returns a buffer that this thread reuses, since fresh memory would have to be paged in again."""
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._local.buffer = np.empty(size, np.uint8)
        return buffer[:size]

    def close(self) -> None:
        self._workers.close()
        for file in self._files.values():
            file.close()


def _contiguous_part(chunk: Box, box: Box, array: np.ndarray) -> np.ndarray | None:
    """Returns the bytes of an array that a chunk fills, if they are contiguous and the chunk fills nothing else."""
    if chunk.overlap(box) != chunk:
        return None
    leading = next((axis for axis, n in enumerate(chunk.shape) if n != 1), len(chunk.shape))
    # A part is contiguous if it spans the whole box in every axis after the first one that varies.
    if chunk.shape[leading + 1 :] != box.shape[leading + 1 :]:
        return None
    part = array[(..., *chunk.slices(box.start))]  # the ellipsis keeps a scalar an array
    return part.reshape(-1).view(np.uint8) if part.flags.c_contiguous else None
