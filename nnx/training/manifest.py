"""The manifest of a checkpoint: what it holds, in JSON, and the mark that it is finished.

A checkpoint is a directory with `manifest.json` and one folder of array data. The manifest names the folder, and the
size of every file in it; it is written last and put in place by one atomic rename. So a directory without a manifest is
an interrupted save, and a save over an older checkpoint either has happened or has not.

The *record* of an entry says what it is without its data: kind, shape, dtype, and the Variable type it was held in.
"""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from nnx.core.repr import short
from nnx.training.entries import Entries

FORMAT = "nnx checkpoint"
VERSION = 1
FILE_NAME = "manifest.json"
DATA_PREFIX = "nnx-data-"

NO_CHECKPOINT = "There is no checkpoint at {path}: {reason}."
UNFINISHED = """{path} is not a finished checkpoint: it has no {file}, which is written last, so saving was \
interrupted before it was complete. Load an earlier one."""
DAMAGED = "The checkpoint at {path} is damaged: {reason}. Nothing was loaded. Load an earlier one."
OTHER_FORMAT = "{path} is not a checkpoint of this library: its {file} says {found!r}, expected {expected!r}."
NEWER = "The checkpoint at {path} has format version {found}; this version of the library reads up to {known}."
NOT_SAVABLE = """Cannot save {path!r}: {value} is no data. Arrays, keys, numbers, strings, Modules, Contexts and \
pytrees of them can be saved."""
ABSTRACT = """Cannot save {path!r}: it is {value}, which has no values. An abstract model (from nnx.eval_shape) can be \
a target of nnx.load."""
TRACED = "Cannot save {path!r}: it is {value}. Save outside of jit and other transforms."
DELETED = """Cannot save {path!r}: its buffer was deleted, most likely donated to a compiled step. Save what the step \
returned or updated."""


class CheckpointError(OSError, ValueError):
    """A checkpoint cannot be written, is damaged, or does not fit its target. The message names the paths."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        data: the name of the folder with the array data; empty where there are no arrays.
        files: the size in bytes of each file in it, by path.
        entries: the record of each entry, by path.
        aliases: further paths of what is shared, or beginnings of them, each with the canonical one.
        modules: the class of each Module, by path.
        info: whatever else belongs to it, e.g. step and metrics.
    """

    data: str
    files: Mapping[str, int]
    entries: Mapping[str, dict[str, Any]]
    aliases: Mapping[str, str]
    modules: Mapping[str, str]
    info: Mapping[str, Any]

    def to_json(self) -> str:
        fields = {"format": FORMAT, "version": VERSION, "jax": jax.__version__, **dataclasses.asdict(self)}
        return json.dumps(fields, indent=1)


def record_of(path: str, value: Any, type_name: str) -> dict[str, Any]:
    """What a leaf is, without its data.

    Raises:
        TypeError: it cannot be saved.
    """
    record: dict[str, Any] = {"type": type_name} if type_name else {}
    number = None if isinstance(value, np.generic) else _number_type(value)
    if number is not None:
        stored = [value.real, value.imag] if number is complex else number(value)
        return {**record, "kind": "number", "dtype": number.__name__, "value": stored}
    if isinstance(value, str):
        return {**record, "kind": "text", "value": value}
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise TypeError(NOT_SAVABLE.format(path=path, value=short(value)))
    record |= {"kind": "array", "dtype": str(value.dtype), "shape": list(value.shape)}
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        record["kind"] = "key"
        if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
            record["impl"] = str(jax.random.key_impl(value))
    elif getattr(value, "weak_type", False) and value.shape == ():
        record["weak"] = True
    return record


def _number_type(value: Any) -> Any:
    return next((cls for cls in (bool, int, float, complex) if isinstance(value, cls)), None)


def check_savable(path: str, value: Any) -> None:
    """Raises if a leaf has no values to save."""
    if isinstance(value, jax.ShapeDtypeStruct):
        raise ValueError(ABSTRACT.format(path=path, value=short(value)))
    if isinstance(value, jax.core.Tracer):
        raise ValueError(TRACED.format(path=path, value=short(value)))
    if isinstance(value, jax.Array) and value.is_deleted():
        raise ValueError(DELETED.format(path=path))


def record_text(record: Mapping[str, Any]) -> str:
    """A record for people: `float32[3,4]`."""
    if record["kind"] == "text":
        return "a string"
    if record["kind"] == "number":
        return f"the number {_number(record)!r}"
    return f"{record['dtype']}[{','.join(map(str, record['shape']))}]"


def _number(record: Mapping[str, Any]) -> Any:
    return complex(*record["value"]) if record["dtype"] == "complex" else record["value"]


def plain_value(record: Mapping[str, Any]) -> Any:
    """The value of a number or text, which the manifest holds itself."""
    return record["value"] if record["kind"] == "text" else _number(record)


def records_of(entries: Entries) -> dict[str, dict[str, Any]]:
    """The records of a target's entries."""
    return {path: record_of(path, entry.value, entry.type) for path, entry in entries.leaves.items()}


# Files


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Puts the manifest in place, when everything it names is on the disk: that makes a checkpoint a finished one."""
    for file in manifest.files:
        _sync(directory / manifest.data / file)
    if manifest.data:
        for folder, _, _ in os.walk(directory / manifest.data):
            _sync(Path(folder))
    temporary = directory / f".{FILE_NAME}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, directory / FILE_NAME)
    _sync(directory)
    _sync(directory.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def data_files(folder: Path) -> dict[str, int]:
    """The size of every file in a folder, by its path there."""
    return {str(file.relative_to(folder)): file.stat().st_size for file in sorted(folder.rglob("*")) if file.is_file()}


def is_finished(directory: Path) -> bool:
    """Whether a directory is a finished checkpoint."""
    return (directory / FILE_NAME).is_file()


def read_manifest(directory: Path) -> Manifest:
    """Reads and checks a manifest, and that its files are all there and whole.

    Raises:
        FileNotFoundError: there is nothing at the path.
        CheckpointError: what is there is no finished checkpoint of a known format, or damaged.
    """
    if not directory.exists():
        raise FileNotFoundError(NO_CHECKPOINT.format(path=directory, reason="the path does not exist"))
    if not directory.is_dir():
        raise CheckpointError(NO_CHECKPOINT.format(path=directory, reason="it is a file, not a directory"))
    if not is_finished(directory):
        if any(is_finished(inner) for inner in directory.iterdir()):
            reason = "it holds checkpoints by step; use nnx.CheckpointManager, or the path of one step"
            raise CheckpointError(NO_CHECKPOINT.format(path=directory, reason=reason))
        raise CheckpointError(UNFINISHED.format(path=directory, file=FILE_NAME))
    manifest = _parse(directory)
    for file, size in manifest.files.items():
        there = directory / manifest.data / file
        if not there.is_file():
            raise CheckpointError(DAMAGED.format(path=directory, reason=f"the file {manifest.data}/{file} is missing"))
        if there.stat().st_size != size:
            reason = f"the file {manifest.data}/{file} has {there.stat().st_size} bytes instead of {size}"
            raise CheckpointError(DAMAGED.format(path=directory, reason=reason))
    return manifest


def _parse(directory: Path) -> Manifest:
    try:
        fields = json.loads((directory / FILE_NAME).read_text(encoding="utf-8"))
        found, version = fields["format"], fields["version"]
        if found != FORMAT:
            text = OTHER_FORMAT.format(path=directory, file=FILE_NAME, found=found, expected=FORMAT)
            raise CheckpointError(text)
        if version > VERSION:
            raise CheckpointError(NEWER.format(path=directory, found=version, known=VERSION))
        return Manifest(**{field.name: fields[field.name] for field in dataclasses.fields(Manifest)})
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{FILE_NAME} cannot be read ({type(error).__name__}: {error})"
        raise CheckpointError(DAMAGED.format(path=directory, reason=reason)) from error


_DATA_FOLDER = re.compile(rf"{DATA_PREFIX}\d+(\.orbax-checkpoint-tmp.*)?")


def remove_data(directory: Path, *, but: str) -> None:
    """Removes the data folders of a checkpoint that its manifest does not name: of earlier and of interrupted saves."""
    for folder in directory.glob(f"{DATA_PREFIX}*"):
        if folder.name != but and _DATA_FOLDER.fullmatch(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
