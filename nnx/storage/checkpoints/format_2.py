"""Reading checkpoints of format version 2, which NNX 0.2 wrote: `array_reader` reads version 3.

Each process wrote one data file, `<process>.bin`, with the parts of arrays that it owned, and one index,
`<process>.json`, with the position and checksum of each chunk.
"""

import dataclasses
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from nnx.core.repr import short
from nnx.storage.aligned_memory import aligned_zeros
from nnx.storage.checkpoints.manifest import DAMAGED, Manifest
from nnx.storage.checksum import checksum
from nnx.storage.errors import DamagedError
from nnx.storage.files import inside, open_regular
from nnx.storage.locations import Location
from nnx.storage.placing import Box


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
