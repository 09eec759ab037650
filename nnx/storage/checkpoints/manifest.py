"""The manifest of a checkpoint: its contents in JSON, and the sign that it is finished.

A checkpoint is a location with `manifest.json` and one folder of array data. The manifest has the name of the folder,
which is unique to one save, and the layout of every array in it. It is written last, in one step, and only if nothing
has changed since the save began. A save over an older checkpoint has therefore either happened completely or not at
all, and of two saves at the same time one fails.

Where there is no checkpoint yet, a save begins by writing a *claim*: a manifest that says only that a save has begun.
Whoever removes what a killed save has left behind removes its claim first. If that save is alive after all, it notices
at the end that its claim is gone, and fails.

A manifest may come from an untrusted source: every field is checked before it is used, and its first line has the
CRC-32 of the rest.
"""

import dataclasses
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from nnx.core.repr import short
from nnx.storage.checkpoints.zarr import Grid
from nnx.storage.entry import Entry, parse_entry
from nnx.storage.errors import CheckpointError, DamagedError
from nnx.storage.files import unique_token
from nnx.storage.locations import Location
from nnx.storage.placing import Box
from nnx.storage.sealed import is_intact, parse_object, seal

FORMAT = "nnx checkpoint"
VERSION = 3
FILE_NAME = "manifest.json"
DATA_PREFIX = "nnx-data-"

NO_CHECKPOINT = "There is no checkpoint at {path}: {reason}."
UNFINISHED = """{path} is not a finished checkpoint: it has no {file}, which is written last, so the save was \
interrupted. Load an earlier one."""
PUBLISHED = "it is the directory of a published model: nnx.models.from_pretrained({path!r})"
DAMAGED = "The checkpoint at {path} is damaged: {reason}. Nothing was loaded. Load an earlier one."
OTHER_FORMAT = "{path} is not an NNX checkpoint: the format in its {file} is {found!r}, expected {expected!r}."
NEWER = "The checkpoint at {path} has format version {found}; this version of NNX reads up to version {known}."
OLD_REMOTE = """The checkpoint at {path} has format version {found}, which is read from local disks only: copy it to \
one, load it there and save it again."""

_CLAIM = "unfinished"
_HEAD = 128
"""The bytes at the beginning of a manifest that tell a claim from the manifest of a finished checkpoint."""


class PackedPart(NamedTuple):
    """The position of a part of a small array: the process whose pack it is in, its first byte there, and its box."""

    process: int
    offset: int
    box: Box


class Zarr(NamedTuple):
    """The position of a large array: the number of its folder, and its layout."""

    number: int
    grid: Grid


class DataFile(NamedTuple):
    """A file of an older format: its size in bytes, and its checksum if it is always read whole."""

    size: int
    crc32: int | None = None


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint, without its array data.

    Attributes:
        data: the name of the folder with the array data; empty if there are no arrays.
        entries: the saved values, by path.
        aliases: the canonical path for each other path of a shared entry, or for the beginning of such paths.
        modules: the class of each Module, by path.
        hyperparameters: the static attributes of each Module as text, by path.
        info: additional information, e.g. step and metrics.
        arrays: the positions of large arrays, by path.
        parts: the positions of the parts of small arrays, by path.
        packs: the layout of the pack of each process, None where there is none.
        fingerprints: those of the files in the folder, by name (`zarr`); early checkpoints of version 3 have none.
        files: the files in the folder, by name; only in formats before version 3.
        version: the version of the format.
        checksum: the CRC-32 of the file it was read from, which distinguishes two saves to one path.
    """

    data: str
    entries: Mapping[str, Entry]
    aliases: Mapping[str, str]
    modules: Mapping[str, str]
    hyperparameters: Mapping[str, list[str]]
    info: Mapping[str, Any]
    arrays: Mapping[str, Zarr] = dataclasses.field(default_factory=dict)
    parts: Mapping[str, Sequence[PackedPart]] = dataclasses.field(default_factory=dict)
    packs: Sequence[Grid | None] = ()
    fingerprints: Mapping[str, str] = dataclasses.field(default_factory=dict)
    files: Mapping[str, DataFile] = dataclasses.field(default_factory=dict)
    version: int = VERSION
    checksum: int = 0

    def to_json(self) -> str:
        """Returns the manifest as JSON, sealed with its checksum."""
        fields = {
            "format": FORMAT,
            "version": VERSION,
            "jax": jax.__version__,
            "data": self.data,
            "packs": [None if grid is None else _grid_to_json(grid) for grid in self.packs],
            "arrays": {
                path: {"number": array.number, **_grid_to_json(array.grid)} for path, array in self.arrays.items()
            },
            "packed": {path: _parts_to_json(parts, self.entries[path]) for path, parts in self.parts.items()},
            "fingerprints": dict(self.fingerprints),
            "entries": {path: entry.to_json() for path, entry in self.entries.items()},
            "aliases": dict(self.aliases),
            "modules": dict(self.modules),
            "hyperparameters": dict(self.hyperparameters),
            "info": dict(self.info),
        }
        return seal(fields)


def _grid_to_json(grid: Grid) -> dict[str, Any]:
    return {"shape": grid.shape, "shard": grid.shard, "file": grid.file, "chunk": grid.chunk}


def _parts_to_json(parts: Sequence[PackedPart], entry: Entry) -> Any:
    """Returns the positions of the parts of an array; only the offset of an array that is whole in the first pack."""
    first = parts[0]
    if first.process == 0 and first.box.shape == entry.data_shape:
        return first.offset
    return [[part.process, part.offset, part.box.start, part.box.shape] for part in parts]


# Finished, claimed, or neither


def new_data_folder() -> str:
    """Returns a unique name for the data folder of one save."""
    return f"{DATA_PREFIX}{unique_token()}"


def claim(data: str) -> bytes:
    """Returns the manifest of a save that has begun where there was no checkpoint."""
    return seal({_CLAIM: data, "format": FORMAT, "version": VERSION}).encode()


def is_claim(raw: bytes) -> bool:
    """Whether the bytes of a manifest, or the first of them, say that a save has begun and not ended."""
    return f'"{_CLAIM}"'.encode() in raw[:_HEAD]


def are_finished(places: Location, names: Sequence[str]) -> list[bool]:
    """Returns which of the folders at a location are finished checkpoints."""
    heads = places.heads([f"{name}/{FILE_NAME}" for name in names], _HEAD)
    return [head is not None and not is_claim(head) for head in heads]


_DATA_FOLDER = re.compile(rf"{DATA_PREFIX}([0-9a-f]{{16}}|\d+)(\.orbax-checkpoint-tmp.*)?")
_TEMPORARY = re.compile(rf"\.{re.escape(FILE_NAME)}\.[0-9a-f]{{16}}\.tmp|\.lock")  # of earlier versions


def leftovers(place: Location, *, but: str = "") -> list[str]:
    """Returns what saves have written to a location: all data folders except one, and temporary files."""
    names = [name for name in place.names() if _DATA_FOLDER.fullmatch(name) or _TEMPORARY.fullmatch(name)]
    return [name for name in names if name != but]


# Reading


def read_manifest_or_none(place: Location) -> Manifest | None:
    """Returns the manifest of a finished checkpoint; None if there is none that can be read."""
    try:
        return read_manifest(place)
    except OSError:
        return None


def read_manifest(place: Location) -> Manifest:
    """Reads and checks a manifest.

    Raises:
        FileNotFoundError: there is nothing at the location.
        CheckpointError: the location is not a finished checkpoint of a known format, or the checkpoint is damaged.
    """
    if place.local is not None and place.local.exists() and not place.local.is_dir():
        raise CheckpointError(NO_CHECKPOINT.format(path=place, reason="it is a file, not a directory"))
    try:
        raw = place.read(FILE_NAME).value
    except OSError as error:
        raise _unreadable(place, error) from error
    if raw is None:
        raise _absent(place)
    if is_claim(raw):
        raise DamagedError(UNFINISHED.format(path=place, file=FILE_NAME))
    return _parse(place, raw)


def _absent(place: Location) -> OSError:
    names = place.names()
    if not names and (place.local is None or not place.local.exists()):
        return FileNotFoundError(NO_CHECKPOINT.format(path=place, reason="the path does not exist"))
    if any(are_finished(place, names)):
        reason = "it holds checkpoints by step; use nnx.CheckpointManager, or the path of one step"
        return CheckpointError(NO_CHECKPOINT.format(path=place, reason=reason))
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return CheckpointError(NO_CHECKPOINT.format(path=place, reason=PUBLISHED.format(path=str(place))))
    return DamagedError(UNFINISHED.format(path=place, file=FILE_NAME))


def _unreadable(place: Location, error: Exception) -> DamagedError:
    reason = f"{FILE_NAME} cannot be read ({type(error).__name__}: {short(str(error))})"
    return DamagedError(DAMAGED.format(path=place, reason=reason))


def _parse(place: Location, raw: bytes) -> Manifest:
    try:
        fields = parse_object(raw)
        found, version = fields["format"], fields["version"]
        if found != FORMAT:
            text = OTHER_FORMAT.format(path=place, file=FILE_NAME, found=short(found), expected=FORMAT)
            raise CheckpointError(text)
        if type(version) is not int:
            raise ValueError(f"the version is {short(version)}")
        if version > VERSION:
            raise CheckpointError(NEWER.format(path=place, found=short(version), known=VERSION))
        if version >= 2 and not is_intact(raw):
            raise ValueError("its checksum does not match: it differs from what was saved")
        if version < 3 and place.local is None:
            raise CheckpointError(OLD_REMOTE.format(path=place, found=version))
        return dataclasses.replace(_manifest_of(fields, version), checksum=zlib.crc32(raw))
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        raise _unreadable(place, error) from error


def _manifest_of(fields: Mapping[str, Any], version: int) -> Manifest:
    data = fields["data"]
    if not isinstance(data, str) or (data and _DATA_FOLDER.fullmatch(data) is None):
        raise ValueError(f"the data folder is {short(data)}")
    entries = {path: parse_entry(entry) for path, entry in _table(fields["entries"], "entries", dict)}
    manifest = Manifest(
        data,
        entries,
        dict(_table(fields["aliases"], "aliases", str)),
        dict(_table(fields["modules"], "modules", str)),
        {path: _texts(lines) for path, lines in _table(fields.get("hyperparameters", {}), "hyperparameters", list)},
        dict(_table(fields["info"], "info", object)),
        version=version,
    )
    if version < 3:
        files = _table(fields["files"], "files", dict if version > 1 else int)
        return dataclasses.replace(manifest, files={name: _data_file(file) for name, file in files})
    packs = [None if grid is None else _parse_grid(grid) for grid in _list(fields["packs"], "packs")]
    arrays = {
        path: Zarr(_natural(array.get("number")), _parse_grid(array, entries[path]))
        for path, array in _table(fields["arrays"], "arrays", dict)
    }
    packed = _table(fields["packed"], "packed", (int, list))
    parts = {path: list(_parse_parts(found, entries[path], packs)) for path, found in packed}
    _check_complete(entries, arrays, parts)
    known = dict(_table(fields.get("fingerprints", {}), "fingerprints", str))
    return dataclasses.replace(manifest, arrays=arrays, parts=parts, packs=packs, fingerprints=known)


def _table(found: Any, name: str, expected: Any) -> Any:
    if not isinstance(found, dict) or any(not isinstance(value, expected) for value in found.values()):
        raise ValueError(f"{name!r} is {short(found)}")
    return found.items()


def _list(found: Any, name: str) -> list[Any]:
    if not isinstance(found, list):
        raise ValueError(f"{name!r} is {short(found)}")
    return found


def _natural(found: Any) -> int:
    if type(found) is not int or not 0 <= found < 2**62:
        raise ValueError(f"a number is {short(found)}")
    return found


def _parse_grid(found: Any, entry: Entry | None = None) -> Grid:
    """Returns a layout, that of an entry or of a pack, after checking that it makes sense."""
    if not isinstance(found, dict):
        raise ValueError(f"a layout is {short(found)}")
    names = ("shape", "shard", "file", "chunk")
    grid = Grid(*(tuple(map(_natural, _list(found.get(name), name))) for name in names))
    rank = len(grid.shape)
    fits = all(len(sizes) == rank and 0 not in sizes for sizes in (grid.shape, grid.shard, grid.file, grid.chunk))
    fits = fits and all(file % chunk == 0 for file, chunk in zip(grid.file, grid.chunk, strict=True))
    if not fits or math.prod(grid.file) >= 2**48 or (entry is not None and grid.shape != entry.data_shape):
        raise ValueError(f"a layout is {short(found)}")
    return grid


def _parse_parts(found: Any, entry: Entry, packs: Sequence[Grid | None]) -> Iterator[PackedPart]:
    shape, itemsize = entry.data_shape, entry.data_dtype.itemsize
    rows = [(0, found, (0,) * len(shape), shape)] if isinstance(found, int) else found
    for process, offset, start, extent in rows:
        box = Box(tuple(map(_natural, start)), tuple(map(_natural, extent)))
        pack = packs[_natural(process)] if _natural(process) < len(packs) else None
        inside = len(box.start) == len(box.shape) == len(shape)
        inside = inside and all(a + n <= size for a, n, size in zip(box.start, box.shape, shape, strict=True))
        if pack is None or not inside or _natural(offset) + box.size * itemsize > pack.shape[0]:
            raise ValueError(f"a part is {short([process, offset, start, extent])}, which does not fit its array")
        yield PackedPart(process, offset, box)


def _check_complete(
    entries: Mapping[str, Entry], arrays: Mapping[str, Zarr], parts: Mapping[str, Sequence[PackedPart]]
) -> None:
    """Raises a ValueError unless every element of every array is stored once."""
    for path, entry in entries.items():
        if not entry.has_data:
            continue
        covered = sum(part.box.size for part in parts.get(path, ()))
        if (path in arrays) == (path in parts) or (path in parts and covered != math.prod(entry.data_shape)):
            raise ValueError(f"the data of {path!r} is not there, or there twice")


def _data_file(found: Any) -> DataFile:
    fields = {"size": found} if isinstance(found, int) else found
    if set(fields) - {"size", "crc32"} or any(type(n) is not int or n < 0 for n in fields.values()):
        raise ValueError(f"a file is {short(found)}")
    return DataFile(**fields)


def _texts(lines: Any) -> list[str]:
    if any(not isinstance(line, str) for line in lines):
        raise ValueError(f"hyperparameters are {short(lines)}")
    return lines
