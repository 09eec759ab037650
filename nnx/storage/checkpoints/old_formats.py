"""Reading checkpoints of the formats before version 3, which `array_reader` reads.

Orbax wrote the array data of version 1. Version 2 is that of NNX 0.2: each process wrote one data file,
`<process>.bin`, with the parts of arrays that it owned, and one index, `<process>.json`, with the position and checksum
of each chunk.
"""

import dataclasses
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from nnx.core.extras import require
from nnx.core.repr import short
from nnx.storage.aligned_memory import aligned_zeros
from nnx.storage.checkpoints.manifest import DAMAGED, Manifest
from nnx.storage.checksum import checksum
from nnx.storage.errors import DamagedError, first_line
from nnx.storage.files import inside, open_regular
from nnx.storage.locations import Location
from nnx.storage.placing import Box

READ_FAILED = "The checkpoint at {path} could not be read: {reason}. Nothing was loaded. Load an earlier one."

_ROOT = "."  # the name of the array if the target was a single array, whose path is empty


class Format1Reader:
    """Reads parts of the arrays of a checkpoint of version 1. It has no checksums, so `check` does nothing."""

    def __init__(self, place: Location, manifest: Manifest, verify: bool = True):
        assert place.local is not None
        self._directory, self._manifest = place.local, manifest
        for name, file in manifest.files.items():
            self._check_size(name, file.size)
        self._orbax = require("orbax.checkpoint", "checkpoint", "nnx.load of a checkpoint of format version 1")

    def _check_size(self, name: str, size: int) -> None:
        try:
            path = inside(self._directory, f"{self._manifest.data}/{name}")
            found = os.stat(path, follow_symlinks=False)
            reason = "" if found.st_size == size else f"has {found.st_size} bytes instead of {size}"
        except (OSError, ValueError) as error:
            reason = f"cannot be read ({error})"
        if reason:
            reason = f"the file {self._manifest.data}/{name} {reason}"
            raise DamagedError(DAMAGED.format(path=self._directory, reason=reason))

    def check(self, wanted: Mapping[str, Sequence[Box]]) -> None:
        pass

    def read(self, wanted: Mapping[str, Sequence[Box]]) -> dict[str, list[np.ndarray]]:
        """Reads the wanted boxes.

        Raises:
            DamagedError: Orbax cannot read them.
        """
        whole = {path or _ROOT: self._orbax.RestoreArgs(restore_type=np.ndarray) for path in wanted}
        checkpointer = self._orbax.Checkpointer(self._orbax.PyTreeCheckpointHandler())
        try:
            request = self._orbax.args.PyTreeRestore(
                item=dict.fromkeys(whole, 0), restore_args=whole, partial_restore=True
            )
            arrays = checkpointer.restore(self._directory / self._manifest.data, args=request)
        except Exception as error:
            reason = first_line(error)
            raise DamagedError(READ_FAILED.format(path=self._directory, reason=reason)) from error
        finally:
            checkpointer.close()
        return {path: self._parts(path, arrays[path or _ROOT], boxes) for path, boxes in wanted.items()}

    def _parts(self, path: str, array: Any, boxes: Sequence[Box]) -> list[np.ndarray]:
        dtype = self._manifest.entries[path].data_dtype  # the array may have been stored in a wider dtype
        return [np.ascontiguousarray(np.asarray(array)[box.slices()]).astype(dtype, copy=False) for box in boxes]

    def close(self) -> None:
        pass


# Version 2


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The position of a part of an array: the file, the bytes in it, their checksum, and the box they fill."""

    file: str
    offset: int
    size: int
    checksum: int
    box: Box


class Format2Reader:
    """Reads parts of the arrays of one checkpoint of version 2.

    The files stay open, so a save that replaces them in the meantime does not matter.

    Raises:
        DamagedError: a file is missing or has another size, or an index is damaged or does not cover the arrays.
    """

    def __init__(self, place: Location, manifest: Manifest, verify: bool = True):
        assert place.local is not None
        self._directory, self._manifest, self._verify = place.local, manifest, verify
        self._files: dict[str, BinaryIO] = {}
        self._chunks: dict[str, list[Chunk]] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        entries = {path: entry for path, entry in self._manifest.entries.items() if entry.has_data}
        shapes = {path: (entry.data_shape, entry.data_dtype.itemsize) for path, entry in entries.items()}
        for name, expected in self._manifest.files.items():
            try:
                file = open_regular(inside(self._directory, f"{self._manifest.data}/{name}"))
            except FileNotFoundError:
                raise self._damaged(name, "is missing") from None
            except (OSError, ValueError) as error:
                raise self._damaged(name, f"cannot be opened ({error})") from error
            self._files[name] = file
            size = os.fstat(file.fileno()).st_size
            if size != expected.size:
                raise self._damaged(name, f"has {size} bytes instead of {expected.size}")
            if name.endswith(".json"):
                self._read_index(name, file.read(), shapes)
        for path, (shape, _) in shapes.items():
            covered = sum(chunk.box.size for chunk in self._chunks.get(path, ()))
            if covered != Box((0,) * len(shape), shape).size:
                raise self._damaged("*.json", f"cover {covered} elements of {path!r}, whose shape is {list(shape)}")

    def _read_index(self, name: str, text: bytes, shapes: Mapping[str, Any]) -> None:
        data_file, crc32 = name.removesuffix(".json") + ".bin", self._manifest.files[name].crc32
        if crc32 is not None and zlib.crc32(text) != crc32:
            raise self._damaged(name, "does not have the checksum it was saved with")
        if data_file not in self._manifest.files:
            raise self._damaged(name, f"belongs to {data_file}, which the manifest does not name")
        try:
            found = _parse_index(text, data_file, self._manifest.files[data_file].size, shapes)
        except (ValueError, TypeError, RecursionError) as error:
            raise self._damaged(name, f"cannot be read ({error})") from error
        for path, chunks in found.items():
            self._chunks.setdefault(path, []).extend(chunks)

    def _damaged(self, file: str, what: str) -> DamagedError:
        reason = f"the file {self._manifest.data}/{file} {what}"
        return DamagedError(DAMAGED.format(path=self._directory, reason=reason))

    def check(self, wanted: Mapping[str, Sequence[Box]]) -> None:
        """Verifies the checksums of all chunks that are needed.

        Raises:
            DamagedError: a chunk differs from what was saved.
        """
        for path, boxes in wanted.items():
            for chunk in self._needed(path, boxes):
                self._read(chunk)

    def read(self, wanted: Mapping[str, Sequence[Box]]) -> dict[str, list[np.ndarray]]:
        """Reads the wanted boxes.

        Raises:
            DamagedError: a chunk differs from what was saved.
        """
        found: dict[str, list[np.ndarray]] = {}
        for path, boxes in wanted.items():
            dtype = self._manifest.entries[path].data_dtype
            found[path] = [aligned_zeros(box.shape, dtype) for box in boxes]
            for chunk in self._needed(path, boxes):
                values = self._read(chunk).view(dtype).reshape(chunk.box.shape)
                for box, array in zip(boxes, found[path], strict=True):
                    overlap = chunk.box.overlap(box)
                    if overlap is not None:
                        array[overlap.slices(box.start)] = values[overlap.slices(chunk.box.start)]
        return found

    def _needed(self, path: str, boxes: Sequence[Box]) -> list[Chunk]:
        return [chunk for chunk in self._chunks[path] if any(chunk.box.overlap(box) for box in boxes)]

    def _read(self, chunk: Chunk) -> np.ndarray:
        try:
            data = np.frombuffer(os.pread(self._files[chunk.file].fileno(), chunk.size, chunk.offset), np.uint8)
        except OSError as error:
            raise self._damaged(chunk.file, f"cannot be read ({error})") from error
        if len(data) != chunk.size:
            raise self._damaged(chunk.file, "has become shorter")
        if self._verify and checksum(data) != chunk.checksum:
            where = f"bytes {chunk.offset} to {chunk.offset + chunk.size}"
            raise self._damaged(chunk.file, f"differs from what was saved: the checksum of {where} does not match")
        return data

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _parse_index(text: bytes, file: str, file_size: int, shapes: Mapping[str, Any]) -> dict[str, list[Chunk]]:
    """Reads an index: the chunks by path.

    Raises:
        ValueError, TypeError: the text is not an index of these arrays.
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
