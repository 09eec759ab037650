"""The manifest of a checkpoint: its contents in JSON, and the sign that it is finished.

A checkpoint is a directory with `manifest.json` and one folder of array data. The manifest has the name of the folder,
which is unique to one save, and the size of every file in it. It is written last and put in place by one atomic rename.
A directory without a manifest is therefore an interrupted save, and a save over an older checkpoint has either happened
completely or not at all.

A manifest may come from an untrusted source: every field is checked before it is used, and its first line has the
CRC-32 of the rest.
"""

import dataclasses
import re
import shutil
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from nnx.core.repr import short
from nnx.storage.entry import Entry, parse_entry
from nnx.storage.errors import CheckpointError, DamagedError
from nnx.storage.files import atomic_file, inside, unique_token
from nnx.storage.sealed import is_intact, read_object, seal

FORMAT = "nnx checkpoint"
VERSION = 2
FILE_NAME = "manifest.json"
LOCK_NAME = ".lock"
DATA_PREFIX = "nnx-data-"

NO_CHECKPOINT = "There is no checkpoint at {path}: {reason}."
UNFINISHED = """{path} is not a finished checkpoint: it has no {file}, which is written last, so the save was \
interrupted. Load an earlier one."""
DAMAGED = "The checkpoint at {path} is damaged: {reason}. Nothing was loaded. Load an earlier one."
OTHER_FORMAT = "{path} is not an NNX checkpoint: the format in its {file} is {found!r}, expected {expected!r}."
NEWER = "The checkpoint at {path} has format version {found}; this version of NNX reads up to version {known}."


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A file in the data folder: its size in bytes, and its checksum if it is always read whole."""

    size: int
    crc32: int | None = None


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint, without its array data.

    Attributes:
        data: the name of the folder with the array data; empty if there are no arrays.
        files: the files in the folder, by name.
        entries: the saved values, by path.
        aliases: the canonical path for each other path of a shared entry, or for the beginning of such paths.
        modules: the class of each Module, by path.
        hyperparameters: the static attributes of each Module as text, by path.
        info: additional information, e.g. step and metrics.
        version: the version of the format.
        checksum: the CRC-32 of the file it was read from, which distinguishes two saves to one path.
    """

    data: str
    files: Mapping[str, DataFile]
    entries: Mapping[str, Entry]
    aliases: Mapping[str, str]
    modules: Mapping[str, str]
    hyperparameters: Mapping[str, list[str]]
    info: Mapping[str, Any]
    version: int = VERSION
    checksum: int = 0

    def to_json(self) -> str:
        """Returns the manifest as JSON, sealed with its checksum."""
        fields = {
            "format": FORMAT,
            "version": VERSION,
            "jax": jax.__version__,
            "data": self.data,
            "files": {
                name: {"size": file.size, **({} if file.crc32 is None else {"crc32": file.crc32})}
                for name, file in self.files.items()
            },
            "entries": {path: entry.to_json() for path, entry in self.entries.items()},
            "aliases": dict(self.aliases),
            "modules": dict(self.modules),
            "hyperparameters": dict(self.hyperparameters),
            "info": dict(self.info),
        }
        return seal(fields)


# Files


def new_data_folder() -> str:
    """Returns a unique name for the data folder of one save."""
    return f"{DATA_PREFIX}{unique_token()}"


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Puts the manifest in place, which finishes the checkpoint: all files it names must be on the disk already."""
    with atomic_file(directory / FILE_NAME) as file:
        file.write(manifest.to_json().encode())


_DATA_FOLDER = re.compile(rf"{DATA_PREFIX}([0-9a-f]{{16}}|\d+)(\.orbax-checkpoint-tmp.*)?")


def remove_data(directory: Path, *, but: str) -> None:
    """Removes the data folders of earlier and interrupted saves: all but the one that the manifest names."""
    for folder in directory.glob(f"{DATA_PREFIX}*"):
        if folder.name != but and _DATA_FOLDER.fullmatch(folder.name) and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)


def is_finished(directory: Path) -> bool:
    """Whether a directory is a finished checkpoint."""
    return (directory / FILE_NAME).is_file()


def read_manifest_or_none(path: Path) -> Manifest | None:
    """Returns the manifest of a finished checkpoint; None if there is none that can be read."""
    try:
        return read_manifest(path) if is_finished(path) else None
    except OSError:
        return None


def read_manifest(directory: Path) -> Manifest:
    """Reads and checks a manifest, including that its files exist and have the right sizes.

    Raises:
        FileNotFoundError: there is nothing at the path.
        CheckpointError: the path is not a finished checkpoint of a known format, or the checkpoint is damaged.
    """
    if not directory.exists():
        raise FileNotFoundError(NO_CHECKPOINT.format(path=directory, reason="the path does not exist"))
    if not directory.is_dir():
        raise CheckpointError(NO_CHECKPOINT.format(path=directory, reason="it is a file, not a directory"))
    if not is_finished(directory):
        if any(is_finished(inner) for inner in directory.iterdir()):
            reason = "it holds checkpoints by step; use nnx.CheckpointManager, or the path of one step"
            raise CheckpointError(NO_CHECKPOINT.format(path=directory, reason=reason))
        raise DamagedError(UNFINISHED.format(path=directory, file=FILE_NAME))
    manifest = _parse(directory)
    for name, file in manifest.files.items():
        reason = _size_error(directory, manifest.data, name, file.size)
        if reason:
            raise DamagedError(DAMAGED.format(path=directory, reason=f"the file {manifest.data}/{name} {reason}"))
    return manifest


def _size_error(directory: Path, data: str, name: str, size: int) -> str:
    try:
        path = inside(directory, f"{data}/{name}")
    except ValueError as error:
        return f"is not a file of it ({error})"
    try:
        found = path.stat()  # asked once: another job may replace the checkpoint between two questions
    except OSError:
        found = None
    if found is None or not stat.S_ISREG(found.st_mode):
        return "is missing"
    return "" if found.st_size == size else f"has {found.st_size} bytes instead of {size}"


def _parse(directory: Path) -> Manifest:
    try:
        fields, raw = read_object(directory / FILE_NAME)
        found, version = fields["format"], fields["version"]
        if found != FORMAT:
            text = OTHER_FORMAT.format(path=directory, file=FILE_NAME, found=short(found), expected=FORMAT)
            raise CheckpointError(text)
        if type(version) is not int:
            raise ValueError(f"the version is {short(version)}")
        if version > VERSION:
            raise CheckpointError(NEWER.format(path=directory, found=version, known=VERSION))
        if version >= 2 and not is_intact(raw):
            raise ValueError("its checksum does not match: it differs from what was saved")
        return dataclasses.replace(_manifest_of(fields, version), checksum=zlib.crc32(raw))
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        reason = f"{FILE_NAME} cannot be read ({type(error).__name__}: {short(str(error))})"
        raise DamagedError(DAMAGED.format(path=directory, reason=reason)) from error


def _manifest_of(fields: Mapping[str, Any], version: int) -> Manifest:
    data = fields["data"]
    if not isinstance(data, str) or (data and _DATA_FOLDER.fullmatch(data) is None):
        raise ValueError(f"the data folder is {short(data)}")
    return Manifest(
        data,
        {name: _data_file(file) for name, file in _table(fields["files"], "files", dict if version > 1 else int)},
        {path: parse_entry(entry) for path, entry in _table(fields["entries"], "entries", dict)},
        dict(_table(fields["aliases"], "aliases", str)),
        dict(_table(fields["modules"], "modules", str)),
        {path: _texts(lines) for path, lines in _table(fields.get("hyperparameters", {}), "hyperparameters", list)},
        dict(_table(fields["info"], "info", object)),
        version,
    )


def _table(found: Any, name: str, expected: type) -> Any:
    if not isinstance(found, dict) or any(not isinstance(value, expected) for value in found.values()):
        raise ValueError(f"{name!r} is {short(found)}")
    return found.items()


def _data_file(found: Any) -> DataFile:
    fields = {"size": found} if isinstance(found, int) else found
    if set(fields) - {"size", "crc32"} or any(type(n) is not int or n < 0 for n in fields.values()):
        raise ValueError(f"a file is {short(found)}")
    return DataFile(**fields)


def _texts(lines: Any) -> list[str]:
    if any(not isinstance(line, str) for line in lines):
        raise ValueError(f"hyperparameters are {short(lines)}")
    return lines
