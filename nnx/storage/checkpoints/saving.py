"""A save in progress, on one process or several: first the data, then the manifest; all wait until it is visible."""

import contextlib
import dataclasses
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from nnx.storage.checkpoints.chunk_writer import on_host, write_pieces
from nnx.storage.checkpoints.chunks import Piece, pieces_of
from nnx.storage.checkpoints.manifest import (
    FILE_NAME,
    LOCK_NAME,
    DataFile,
    Manifest,
    new_data_folder,
    read_manifest_or_none,
    remove_data,
    write_manifest,
)
from nnx.storage.entry import Entry, check_dtype, check_savable, entry_of
from nnx.storage.errors import CheckpointError, first_line
from nnx.storage.files import local_path, remove_leftovers, sync_directory
from nnx.storage.leaves import Leaves
from nnx.storage.processes import Exchange, ProcessError
from nnx.storage.writer_lock import WriterLock

SAVE_FAILED = "Could not save to {path}: {reason}. Earlier checkpoints are intact."
NOT_A_DIRECTORY = "Could not save to {path}: a checkpoint is a directory, and there is a file with that name."
DIFFERENT_OBJECTS = """The processes save different things to {path}: the paths, shapes or dtypes on process {peer} \
differ from those on process 0. Every process must pass an object of the same structure."""
NOT_SHARED = "Process {process} does not see what process 0 wrote to {path}. Save to a disk that all processes share."

VISIBLE_WITHIN = 60.0
"""The seconds a shared disk may take until a process sees what another one wrote."""


class Saving:
    """A save in progress. Once it is constructed, the values have left the devices; `finish` completes it.

    Args:
        path: the directory to save to.
        obj: the object to save.
        info: additional information for the manifest.
        wait: whether `finish` follows immediately, so that values can stay on the devices until they are written.
    """

    def __init__(
        self, path: str | os.PathLike[str], obj: Any, info: Mapping[str, Any] | None = None, *, wait: bool = False
    ):
        self._path = local_path(path).absolute()
        self._exchange = Exchange(f"nnx.save({str(self._path)!r})")
        self._lock: WriterLock | None = None
        self._data = ""
        with self._cleaning_up():
            prepared = self._exchange.together(lambda: self._prepare(obj, info))
            for peer, (_, digest, _) in enumerate(prepared):
                if digest != prepared[0][1]:
                    raise CheckpointError(DIFFERENT_OBJECTS.format(path=self._path, peer=peer))
            self._data, elsewhere = prepared[0][0], set(prepared[0][2])
            self._exchange.together(lambda: self._take(elsewhere, on_hosts=not wait))

    def _prepare(self, obj: Any, info: Mapping[str, Any] | None) -> tuple[str, int, list[str]]:
        """Examines the object and, on process 0, creates the data folder.

        Returns:
            The name of the folder, a digest of the structure, and the paths of arrays that process 0 has no part of.
        """
        leaves = Leaves(obj)
        self._arrays: dict[str, Any] = {}
        self._entries: dict[str, Entry] = {}
        for path, leaf in leaves.by_path.items():
            check_savable(path, leaf.value)
            check_dtype(path, leaf.value)
            entry = self._entries[path] = entry_of(path, leaf.value, leaf.type)
            if entry.has_data:
                self._arrays[path] = jax.random.key_data(leaf.value) if entry.kind == "key" else leaf.value
        self._manifest = Manifest(
            "", {}, self._entries, leaves.aliases, leaves.modules, leaves.hyperparameters, dict(info or {})
        )
        elsewhere = [
            path
            for path, value in self._arrays.items()
            if isinstance(value, jax.Array) and not value.addressable_shards
        ]
        data = self._make_folder() if jax.process_index() == 0 else ""
        structure = [(path, entry.kind, entry.dtype, entry.shape) for path, entry in self._entries.items()]
        return data, zlib.crc32(json.dumps(structure).encode()), elsewhere

    def _make_folder(self) -> str:
        """Acquires the lock, removes what killed saves left behind, and creates a folder for the data."""
        if self._path.exists() and not self._path.is_dir():
            raise CheckpointError(NOT_A_DIRECTORY.format(path=self._path))
        self._path.mkdir(parents=True, exist_ok=True)
        self._lock = WriterLock(self._path / LOCK_NAME, self._path)
        self._lock.acquire()
        before = read_manifest_or_none(self._path)
        # A manifest that cannot be read may name any of the folders, so all of them stay.
        if before is not None or not (self._path / FILE_NAME).exists():
            remove_data(self._path, but=before.data if before else "")
        remove_leftovers(self._path)
        if not self._arrays:
            return ""
        data = new_data_folder()
        (self._path / data).mkdir()
        return data

    def _take(self, elsewhere: set[str], on_hosts: bool) -> None:
        """Takes the parts of the arrays that this process writes."""
        pieces: list[Piece] = []
        for path, value in self._arrays.items():
            pieces += pieces_of(path, value, path in elsewhere)
        self._pieces, self._arrays = on_host(pieces) if on_hosts else pieces, {}

    def finish(self) -> None:
        """Waits until every process has written its data, and finishes the checkpoint.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        with self._cleaning_up():
            files = self._exchange.together(self._write)
            self._exchange.on_first(lambda: self._commit({name: file for part in files for name, file in part.items()}))
            self._exchange.together(self._see)
        self._release()

    def _write(self) -> dict[str, dict[str, int]]:
        pieces, self._pieces = self._pieces, []
        if not pieces:
            return {}
        folder = self._path / self._data
        self._wait_for(folder.is_dir)  # process 0 created it, but a shared disk may show it a little later
        return write_pieces(folder, jax.process_index(), pieces)

    def _see(self) -> None:
        """Waits until this process sees the new manifest as well."""
        if jax.process_index() != 0:
            manifest, data = self._path / FILE_NAME, json.dumps(self._data).encode()
            self._wait_for(lambda: manifest.is_file() and data in manifest.read_bytes())

    def _wait_for(self, seen: Callable[[], bool]) -> None:
        deadline = time.monotonic() + VISIBLE_WITHIN
        while not seen():
            if time.monotonic() > deadline:
                raise CheckpointError(NOT_SHARED.format(path=self._path, process=jax.process_index()))
            time.sleep(0.02)

    def _commit(self, files: Mapping[str, dict[str, int]]) -> None:
        assert self._lock is not None
        found = {name: DataFile(**file) for name, file in files.items()}
        self._lock.check()
        write_manifest(self._path, dataclasses.replace(self._manifest, data=self._data, files=found))
        sync_directory(self._path.parent)
        remove_data(self._path, but=self._data)

    @contextlib.contextmanager
    def _cleaning_up(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(OSError):
                self._remove_unfinished()
            self._release()
            if isinstance(error, CheckpointError) or not isinstance(error, (OSError, ProcessError, MemoryError)):
                raise
            reason = first_line(error).rstrip(".")
            raise CheckpointError(SAVE_FAILED.format(path=self._path, reason=reason)) from error

    def _remove_unfinished(self) -> None:
        if self._lock is not None and self._data:
            before = read_manifest_or_none(self._path)
            if before is None or before.data != self._data:
                shutil.rmtree(self._path / self._data, ignore_errors=True)

    def _release(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._lock.release()
            self._lock = None
