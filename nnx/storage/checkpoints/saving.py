"""A save in progress, on one process or several: first the data, then the manifest; all wait until it is visible."""

import contextlib
import dataclasses
import json
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from nnx.storage.checkpoints.array_writer import Piece, on_host, pieces_of, write_pieces
from nnx.storage.checkpoints.manifest import (
    FILE_NAME,
    Manifest,
    PackedPart,
    Zarr,
    claim,
    is_claim,
    leftovers,
    new_data_folder,
)
from nnx.storage.checkpoints.zarr import Grid, grid_of
from nnx.storage.entry import Entry, check_dtype, check_savable, entry_of
from nnx.storage.errors import CheckpointError, first_line
from nnx.storage.leaves import Leaves
from nnx.storage.locations import Location
from nnx.storage.placing import Box
from nnx.storage.processes import Exchange, ProcessError

SAVE_FAILED = "Could not save to {path}: {reason}. Earlier checkpoints are intact."
NOT_A_DIRECTORY = "Could not save to {path}: a checkpoint is a directory, and there is a file with that name."
OVERTAKEN = """Could not save to {path}: another job has saved there, or has begun to, since this save began. Nothing \
was replaced. Give each job its own path."""
DIFFERENT_OBJECTS = """The processes save different things to {path}: the paths, shapes or dtypes on process {peer} \
differ from those on process 0. Every process must pass an object of the same structure."""
NOT_SHARED = "Process {process} does not see what process 0 wrote to {path}. Save to a disk that all processes share."

LARGE = 8 << 20
"""The bytes of a shard from which an array has files of its own: each file costs a few milliseconds on most disks."""
VISIBLE_WITHIN = 60.0
"""The seconds a shared disk may take until a process sees what another one wrote."""
_SHARED = "shared"  # what process 0 writes to the data folder, to see whether the others see it


class Saving:
    """A save in progress. Once it is constructed, the values have left the devices; `finish` completes it.

    Attributes:
        size: the bytes of array data that this process writes.

    Args:
        place: the location to save to.
        obj: the object to save.
        info: additional information for the manifest.
        wait: whether `finish` follows immediately, so that values can stay on the devices until they are written.
    """

    def __init__(self, place: Location, obj: Any, info: Mapping[str, Any] | None = None, *, wait: bool = False):
        self._place = place
        self._exchange = Exchange(f"nnx.save({str(self._place)!r})")
        self._generation: bytes | None = None  # of the manifest that this save replaces, on process 0
        self._claimed = False
        with self._as_checkpoint_error():
            prepared = self._exchange.together(lambda: self._prepare(obj, info))
            for peer, (_, digest, _, _) in enumerate(prepared):
                if digest != prepared[0][1]:
                    raise CheckpointError(DIFFERENT_OBJECTS.format(path=self._place, peer=peer))
            self._data, _, elsewhere, states = prepared[0]
            for path in states:
                states_by_process = [found[path] for *_, found in prepared]
                self._entries[path] = self._entries[path]._replace(value=states_by_process)
            elsewhere = set(elsewhere)
            self._exchange.together(lambda: self._take(elsewhere, on_hosts=not wait))

    def _prepare(self, obj: Any, info: Mapping[str, Any] | None) -> tuple[str, int, list[str], dict[str, Any]]:
        """Examines the object.

        Returns:
            A name for the data folder, a digest of the structure, the paths of arrays that process 0 has no part of,
            and the states of data iterators by path.
        """
        leaves = Leaves(obj)
        self._values: dict[str, Any] = {}
        self._entries: dict[str, Entry] = {}
        self._arrays: dict[str, Zarr] = {}
        for path, leaf in leaves.by_path.items():
            check_savable(path, leaf.value)
            check_dtype(path, leaf.value)
            entry = self._entries[path] = entry_of(path, leaf.value, leaf.type)
            if entry.has_data:
                value = self._values[path] = jax.random.key_data(leaf.value) if entry.kind == "key" else leaf.value
                self._lay_out(path, entry, value)
        self._manifest = Manifest(
            "", self._entries, leaves.aliases, leaves.modules, leaves.hyperparameters, dict(info or {})
        )
        elsewhere = []
        if jax.process_count() > 1:
            arrays = {path: value for path, value in self._values.items() if isinstance(value, jax.Array)}
            elsewhere = [path for path, value in arrays.items() if not value.addressable_shards]
        self._has_data = bool(self._values)
        return new_data_folder(), self._digest(), elsewhere, leaves.iterator_states()

    def _digest(self) -> int:
        """Returns a checksum of the structure, to compare processes."""
        if jax.process_count() == 1:
            return 0
        structure = [(path, e.kind, e.dtype, e.shape, self._arrays.get(path)) for path, e in self._entries.items()]
        return zlib.crc32(json.dumps(structure, default=dataclasses.astuple).encode())

    def _lay_out(self, path: str, entry: Entry, value: Any) -> None:
        """Gives an array files of its own if its shards are large."""
        shape, itemsize = entry.data_shape, entry.data_dtype.itemsize
        if math.prod(shape) * itemsize < LARGE or not shape:
            return
        shard = value.sharding.shard_shape(shape) if isinstance(value, jax.Array) else shape
        if math.prod(shard) * itemsize >= LARGE:
            self._arrays[path] = Zarr(len(self._arrays), grid_of(shape, shard, itemsize))

    def _take(self, elsewhere: set[str], on_hosts: bool) -> None:
        """Takes the parts of the arrays that this process writes."""
        pieces: list[Piece] = []
        for path, value in self._values.items():
            pieces += pieces_of(path, value, path in elsewhere)
        self._pieces, self._values = on_host(pieces) if on_hosts else pieces, {}
        self.size = sum([piece.values.nbytes for piece in pieces])

    def finish(self) -> None:
        """Writes the data, waits until every process has written its own, and finishes the checkpoint.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        with self._cleaning_up():
            self._exchange.on_first(self._begin)
            if jax.process_count() > 1 and self._has_data:
                self._exchange.together(self._see_data)
            written = self._exchange.together(self._write)
            self._exchange.on_first(lambda: self._commit(written))
            self._exchange.together(self._see_manifest)

    def _begin(self) -> None:
        """Notes what this save replaces; a claim, if there is nothing yet or the rest of a killed save."""
        local = self._place.local
        if local is not None:
            if local.exists() and not local.is_dir():
                raise CheckpointError(NOT_A_DIRECTORY.format(path=self._place))
            local.mkdir(parents=True, exist_ok=True)
        before = self._place.read(FILE_NAME)
        self._generation = before.generation
        if before.value is None or is_claim(before.value):
            self._generation = self._place.replace(FILE_NAME, claim(self._data), before.generation)
            if self._generation is None:
                raise CheckpointError(OVERTAKEN.format(path=self._place))
            self._claimed = True
        if jax.process_count() > 1 and self._has_data:
            (self._place / self._data).write(_SHARED, b"")

    def _see_data(self) -> None:
        """Waits until this process sees the data folder, before it writes to another disk than the others."""
        folder = self._place / self._data
        self._wait_for(lambda: folder.read(_SHARED).value is not None)

    def _write(self) -> Any:
        pieces, self._pieces = self._pieces, []
        if not self._has_data:
            return None, {}, {}
        folder = self._place / self._data
        grid, parts, files = write_pieces(folder, jax.process_index(), pieces, self._arrays, self._entries)
        if jax.process_count() == 1:
            return grid, parts, files
        return grid and dataclasses.astuple(grid), parts, files  # which JSON can hold

    def _commit(self, written: list[Any]) -> None:
        """Finishes the checkpoint, unless another job was faster; then removes what it replaced."""
        packs, parts, files = _joined(written)
        layout = {"arrays": self._arrays, "parts": parts, "packs": packs, "fingerprints": files}
        manifest = dataclasses.replace(self._manifest, data=self._data, **layout)
        # Listed before the commit, and removed after it: any save that had written data by then began before the
        # commit, so it can no longer succeed. What a later one writes is not in the list.
        before = leftovers(self._place, but=self._data)
        assert self._generation is not None
        if self._place.replace(FILE_NAME, manifest.to_json().encode(), self._generation) is None:
            raise CheckpointError(OVERTAKEN.format(path=self._place))
        self._place.sync()
        with contextlib.suppress(OSError):  # the next save tries again
            self._place.remove(before)

    def _see_manifest(self) -> None:
        """Waits until this process sees the new manifest as well."""
        if jax.process_index() != 0:
            self._wait_for(lambda: self._is_own(self._place.read(FILE_NAME).value or b""))

    def _is_own(self, manifest: bytes) -> bool:
        """Whether a manifest is that of this save, finished."""
        return json.dumps(self._data).encode() in manifest and not is_claim(manifest)

    def _wait_for(self, seen: Callable[[], bool]) -> None:
        deadline = time.monotonic() + VISIBLE_WITHIN
        while not seen():
            if time.monotonic() > deadline:
                raise CheckpointError(NOT_SHARED.format(path=self._place, process=jax.process_index()))
            time.sleep(0.02)

    @contextlib.contextmanager
    def _cleaning_up(self) -> Iterator[None]:
        try:
            with self._as_checkpoint_error():
                yield
        except BaseException as error:
            overtaken = False
            with contextlib.suppress(OSError):
                overtaken = self._remove_unfinished()
            if overtaken and isinstance(error, CheckpointError):  # the cause of any other, such as data that are gone
                raise CheckpointError(OVERTAKEN.format(path=self._place)) from error
            raise

    def _remove_unfinished(self) -> bool:
        """Removes what this save has written; returns whether another job has saved to the path meanwhile."""
        if self._generation is None:  # not process 0, or nothing has been written
            return False
        found = self._place.read(FILE_NAME)
        if self._is_own(found.value or b""):
            return False  # finished, although an error followed
        self._place.remove([self._data])
        if found.generation != self._generation:
            return True
        if self._claimed:
            self._place.replace(FILE_NAME, None, self._generation)
        return False

    @contextlib.contextmanager
    def _as_checkpoint_error(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ProcessError, MemoryError) as error:
            if isinstance(error, CheckpointError):
                raise
            reason = first_line(error).rstrip(".")
            raise CheckpointError(SAVE_FAILED.format(path=self._place, reason=reason)) from error


def _joined(written: list[Any]) -> tuple[list[Grid | None], dict[str, list[PackedPart]], dict[str, str]]:
    """Joins what the processes have written: the layout of their packs, the positions in them, and fingerprints."""
    if len(written) == 1:
        grid, parts, files = written[0]
        return [grid], parts, files
    joined: dict[str, list[PackedPart]] = {}
    for _, found, _ in written:
        for path, rows in found.items():
            parts = [
                PackedPart(process, offset, Box(tuple(start), tuple(shape))) for process, offset, (start, shape) in rows
            ]
            joined.setdefault(path, []).extend(parts)
    files = {name: digits for _, _, found in written for name, digits in found.items()}
    return [grid and Grid(*map(tuple, grid)) for grid, _, _ in written], joined, files
