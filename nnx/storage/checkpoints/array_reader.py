"""Reading the array data of a checkpoint: only the chunks that are needed, each verified, a few at a time.

A chunk that one box needs is read straight into its place. One that several boxes need (the parts of other devices than
those that saved it) is read once, into memory that is used again and again, and copied from there: fresh memory costs
more than reading.
"""

import collections
import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nnx.storage.aligned_memory import aligned_arrays, aligned_bytes
from nnx.storage.checkpoints.manifest import DAMAGED, Manifest, PackedPart
from nnx.storage.checkpoints.zarr import (
    REMOTE,
    Grid,
    chunk_in_file,
    file_of,
    fingerprints,
    open_array,
    pack_name,
    stored_dtype,
)
from nnx.storage.errors import DamagedError
from nnx.storage.locations import Location, reason_of, refuse_special, tensorstore
from nnx.storage.placing import Box
from nnx.storage.transfer_bar import moved

IN_FLIGHT = min(max((os.cpu_count() or 1) // 2, 1), 16)
"""The chunks that are read at once from a local disk. With more of them than processors, they leave the processor's
cache before they are copied, and the system provides fresh memory for each."""
IN_FLIGHT_REMOTE = 64
"""The chunks that are read at once from an object store, which takes longer to answer."""
Wanted = Mapping[str, Sequence[Box]]
"""The boxes of each array that this process needs, by path."""


class ArrayReader:
    """Reads parts of the arrays of one checkpoint.

    Args:
        place: the location of the checkpoint.
        manifest: the manifest of the checkpoint.
        verify: whether to refuse data whose checksum does not match.

    Raises:
        DamagedError: the data folder is not what a save writes.
    """

    def __init__(self, place: Location, manifest: Manifest, verify: bool = True):
        self._place, self._manifest, self._verify = place, manifest, verify
        self._in_flight = IN_FLIGHT_REMOTE if place.local is None else IN_FLIGHT
        self._spare: list[np.ndarray] = []  # memory for chunks
        self._checked: set[str] = set()  # files with the right fingerprint
        if place.local is not None:
            self._refuse_links()

    def _refuse_links(self) -> None:
        """Refuses a data folder that is a link or contains one, or anything else but files and folders."""
        assert self._place.local is not None
        top = self._place.local / self._manifest.data
        try:
            for directory, folders, names in os.walk(top):
                special = [name for name in folders if os.path.islink(os.path.join(directory, name))]
                if special or os.path.islink(directory):
                    raise OSError(f"{special[0] if special else self._manifest.data} is a symbolic link")
                for name in names:
                    refuse_special(top.joinpath(directory, name))
        except OSError as error:
            raise self._damaged(f"its data folder {self._manifest.data} is not one: {error}") from error

    def _damaged(self, reason: str) -> DamagedError:
        return DamagedError(DAMAGED.format(path=self._place, reason=reason))

    def check(self, wanted: Wanted) -> None:
        """Verifies the checksums of all chunks that are needed, without keeping their data.

        Raises:
            DamagedError: a chunk differs from what was saved.
        """
        large = (self._array(path, [(box, None) for box in boxes]) for path, boxes in self._large(wanted))
        destinations = [
            (part.process, _Destination(self._bytes_of(path, part), None)) for path, part in self._needed(wanted)
        ]
        self._read_all(itertools.chain(large, self._packs(destinations)))

    def read(self, wanted: Wanted) -> dict[str, list[np.ndarray]]:
        """Reads the wanted boxes.

        Args:
            wanted: the boxes of each array, by path.

        Returns:
            The data of the boxes, in the same order, by path.

        Raises:
            DamagedError: a chunk differs from what was saved.
        """
        entries = self._manifest.entries
        memory = iter(
            aligned_arrays([(box.shape, entries[path].data_dtype) for path in wanted for box in wanted[path]])
        )
        found = {path: list(itertools.islice(memory, len(boxes))) for path, boxes in wanted.items()}
        large = (self._array(path, list(zip(boxes, found[path], strict=True))) for path, boxes in self._large(wanted))
        copies: list[tuple[PackedPart, np.ndarray, Box, np.ndarray]] = []
        destinations = [
            (part.process, destination)
            for path, part in self._needed(wanted)
            for destination in self._places_of(path, part, list(zip(wanted[path], found[path], strict=True)), copies)
        ]
        self._read_all(itertools.chain(large, self._packs(destinations)))
        for part, values, box, array in copies:
            overlap = part.box.overlap(box)
            assert overlap is not None
            array[overlap.slices(box.start)] = values[overlap.slices(part.box.start)]
        return found

    def close(self) -> None:
        self._spare.clear()

    # What is where

    def _large(self, wanted: Wanted) -> Iterator[tuple[str, Sequence[Box]]]:
        return ((path, boxes) for path, boxes in wanted.items() if path in self._manifest.arrays)

    def _array(self, path: str, destinations: Iterable[tuple[Box, np.ndarray | None]]) -> "_Array":
        number, grid = self._manifest.arrays[path]
        stored: list[_Destination] = []
        for box, memory in destinations:
            for index, inside in grid.places(box):
                start = tuple([part.start for part in index])
                shape = tuple([part.stop - part.start for part in index])
                stored.append(_Destination(Box(start, shape), None if memory is None else memory[inside]))
        return _Array(str(number), grid, self._manifest.entries[path].data_dtype, stored)

    def _needed(self, wanted: Wanted) -> list[tuple[str, PackedPart]]:
        """Returns the parts of small arrays that overlap what is wanted."""
        return [
            (path, part)
            for path, boxes in wanted.items()
            for part in self._manifest.parts.get(path, ())
            if part.box == boxes[0] or any(part.box.overlap(box) for box in boxes)
        ]

    def _bytes_of(self, path: str, part: PackedPart) -> Box:
        """Returns the bytes of a part, as a box of its pack."""
        return Box((part.offset,), (part.box.size * self._manifest.entries[path].data_dtype.itemsize,))

    def _places_of(
        self,
        path: str,
        part: PackedPart,
        wanted: Sequence[tuple[Box, np.ndarray]],
        copies: list[tuple[PackedPart, np.ndarray, Box, np.ndarray]],
    ) -> Iterator["_Destination"]:
        """Yields where the bytes of a part belong; adds to `copies` what has to be copied from the whole part."""
        if len(wanted) == 1 and wanted[0][0] == part.box:
            yield _Destination(self._bytes_of(path, part), wanted[0][1].reshape(-1).view(np.uint8))
            return
        dtype = self._manifest.entries[path].data_dtype
        values = None
        for box, array in wanted:
            overlap = part.box.overlap(box)
            if overlap is None:
                continue
            memory = array[overlap.slices(box.start)]
            if overlap.is_contiguous_in(part.box) and overlap.is_contiguous_in(box):
                first = part.offset + overlap.offset_in(part.box) * dtype.itemsize
                yield _Destination(Box((first,), (memory.nbytes,)), memory.reshape(-1).view(np.uint8))
                continue
            if values is None:
                values = np.empty(part.box.shape, dtype)
                yield _Destination(self._bytes_of(path, part), values.reshape(-1).view(np.uint8))
            copies.append((part, values, box, array))

    def _packs(self, destinations: Iterable[tuple[int, "_Destination"]]) -> Iterator["_Array"]:
        """Yields the packs to be read, given where their bytes belong, by process."""
        by_process: dict[int, list[_Destination]] = {}
        for process, destination in destinations:
            by_process.setdefault(process, []).append(destination)
        for process, found in by_process.items():
            grid = self._manifest.packs[process]
            assert grid is not None  # or the manifest would have been refused
            yield _Array(pack_name(process), grid, np.dtype(np.uint8), found)

    # Reading chunks

    def _read_all(self, arrays: Iterable["_Array"]) -> None:
        flights: collections.deque[_Flight] = collections.deque()
        needed = [(array, list(array.chunks())) for array in arrays]
        if self._verify:
            self._check_files(needed)
        try:
            for array, chunks in needed:
                with self._as_damage(array, ""):
                    opened = open_array(self._place / self._manifest.data / array.folder, array.grid, array.dtype)
                    opened = opened.result()
                for start, destinations in chunks:
                    flights.append(self._start(array, opened, start, destinations))
                    if len(flights) > self._in_flight:
                        self._end(flights.popleft())
            while flights:
                self._end(flights.popleft())
        finally:
            for flight in flights:  # after an error: nothing may write to memory that is given back
                flight.done.exception()

    def _check_files(self, needed: Iterable[tuple["_Array", "_Chunks"]]) -> None:
        """Compares the fingerprints of the files that are about to be read, each file once."""
        files: dict[str, tuple[Grid, Any]] = {}
        for array, chunks in needed:
            for name in {f"{array.folder}/{file_of(array.grid, start)}" for start, _ in chunks} - self._checked:
                if name in self._manifest.fingerprints:
                    files[name] = array.grid, array.dtype
        try:
            found = fingerprints(self._place / self._manifest.data, files)
        except OSError as error:  # of an object store; files that cannot be read are reported when they are needed
            raise self._damaged(f"the files of {self._manifest.data} cannot be read ({error})") from error
        for name, have in found.items():
            saved = self._manifest.fingerprints[name]
            if REMOTE in (len(have), len(saved)):  # one of them was made in an object store
                saved, have = saved[:REMOTE], have[:REMOTE]
            if have != saved:
                reason = f"the file {self._manifest.data}/{name} differs from what was saved, or is another one"
                raise self._damaged(reason)
        self._checked.update(found)

    def _start(
        self, array: "_Array", opened: Any, start: tuple[int, ...], destinations: list["_Destination"]
    ) -> "_Flight":
        """Begins to read a chunk: into its place if there is one, else into spare memory."""
        stored = stored_dtype(array.dtype)
        if len(destinations) == 1 and destinations[0].memory is not None:
            box, memory, spare = destinations[0].box, destinations[0].memory.view(stored), None
        else:
            first = tuple(map(min, zip(*(destination.box.start for destination in destinations), strict=True)))
            end = tuple(map(max, zip(*(destination.box.end for destination in destinations), strict=True)))
            box = Box(first, tuple([b - a for a, b in zip(first, end, strict=True)]))
            size = box.size * stored.itemsize
            spare = self._spare.pop() if self._spare else None
            if spare is None or len(spare) < size:
                spare = aligned_bytes(size)
            memory = spare[:size].view(stored).reshape(box.shape)
        done = tensorstore().array(memory, copy=False, write=True).write(opened[box.slices()])
        return _Flight(array, start, destinations, box, memory, spare, done)

    def _end(self, flight: "_Flight") -> None:
        """Waits for a chunk, and copies it to where it belongs if it is not there yet."""
        values, origin = flight.memory, flight.box.start
        with self._as_damage(flight.array, file_of(flight.array.grid, flight.start)):
            try:
                flight.done.result()
            except ValueError:
                if self._verify:
                    raise
                values, origin = self._unverified(flight), flight.start
        if values is not flight.memory or flight.spare is not None:
            for box, memory in flight.destinations:
                if memory is not None:
                    memory[...] = values[box.slices(origin)].view(memory.dtype)
        if flight.spare is not None:
            self._spare.append(flight.spare)
        moved(flight.memory.nbytes)

    def _unverified(self, flight: "_Flight") -> np.ndarray:
        """Returns a chunk whose checksum does not match, because that was asked for."""
        array = flight.array
        raw = (self._place / self._manifest.data / array.folder).read(file_of(array.grid, flight.start)).value
        return chunk_in_file(raw or b"", array.grid, flight.start, array.dtype)

    @contextlib.contextmanager
    def _as_damage(self, array: "_Array", file: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            name = "/".join(filter(None, (self._manifest.data, array.folder, file)))
            reason = f"the file {name} differs from what was saved, or cannot be read ({reason_of(error)})"
            raise self._damaged(reason) from error


class _Destination(NamedTuple):
    """A box in the coordinates of a stored array, and the memory for its values; None if they are only verified."""

    box: Box
    memory: np.ndarray | None


class _Array(NamedTuple):
    """An array that is read: its folder, layout and dtype, and where its values go."""

    folder: str
    grid: Grid
    dtype: np.dtype[Any]
    destinations: list[_Destination]

    def chunks(self) -> Iterator[tuple[tuple[int, ...], list[_Destination]]]:
        """Yields the first index of each chunk that is needed, and the parts of the destinations in it."""
        found: dict[tuple[int, ...], list[_Destination]] = {}
        for destination in self.destinations:
            first = tuple([at // size * size for at, size in zip(destination.box.start, self.grid.chunk, strict=True)])
            limits = zip(first, self.grid.chunk, destination.box.end, strict=True)
            if all([at + size >= end for at, size, end in limits]):  # in one chunk, as most small arrays are
                found.setdefault(first, []).append(destination)
                continue
            ranges = map(range, first, destination.box.end, self.grid.chunk)
            for start in itertools.product(*ranges):
                part = destination.box.overlap(Box(start, self.grid.chunk))
                assert part is not None
                memory = None if destination.memory is None else destination.memory[part.slices(destination.box.start)]
                found.setdefault(start, []).append(_Destination(part, memory))
        return iter(found.items())


_Chunks = list[tuple[tuple[int, ...], list[_Destination]]]
"""The first index of each chunk that is needed, and the parts of the destinations in it."""


class _Flight(NamedTuple):
    """A chunk that is being read: its first index, the destinations, the box that is read and the memory it goes to.

    The memory is `spare` memory, unless it is that of the only destination.
    """

    array: _Array
    start: tuple[int, ...]
    destinations: list[_Destination]
    box: Box
    memory: np.ndarray
    spare: np.ndarray | None
    done: Any
