"""A model in safetensors files: one file, or several *shards* with an index that says which tensor is in which shard.

A model has one name, its *file*, e.g. `model.safetensors`. The index is `model.safetensors.index.json` next to it; if
both exist, the file wins. Saving never touches files that a reader may be using: new shards get unused names, the index
is replaced last, and the old shards are removed after that. A killed process therefore leaves either the old model or
the new one. Any other files it leaves behind are removed by the next save.

The index and all of its shards carry the same random *save id*, so files from two saves are never read as one model,
however they were mixed.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nnx.storage.errors import CheckpointError, first_line
from nnx.storage.files import atomic_file, remove_leftovers, sync_directory, unique_token
from nnx.storage.safetensors.file import Pending, TensorFile, write_tensors

NO_FILE = "There is no safetensors file at {path}{more}."
SEVERAL = ": the directory contains {names}; pass the path of one of them"
BAD_INDEX = "The index {path} cannot be read: {reason}."
OUTSIDE = "The index {path} names the file {file!r}, which is not a file in its directory."
NO_SHARD = "The index {path} names the file {file!r}, which is missing."
NOT_IN_SHARD = "The index {path} says that {name!r} is in {file!r}, but it is not."
NOT_IN_INDEX = "The index {path} does not list {name!r}, which is in {file!r}."
MIXED = "The index {path} and the file {file!r} are from two different saves. Copy the files of one save together."

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
ONLY_PICKLES = (
    "{path} holds weights as pickles ({names}). A pickle can run code when it is opened, so none is read. Convert it "
    "to safetensors where you trust it: `safetensors.torch.save_file(torch.load(name, weights_only=True), new_name)`."
)

SAVE_ID, SHARD_OF = "nnx.save_id", "nnx.shard_of"
_SHARD = re.compile(r"-\d{5}-of-(?P<count>\d{5})\.[^.]+")
_ATTEMPTS = 20


def index_path(file: Path) -> Path:
    """Returns the path of the index of a model."""
    return file.with_name(f"{file.name}.index.json")


def holds_safetensors(path: Path) -> bool:
    """Whether a path leads to a safetensors file or index, or to a directory that contains one."""
    if path.is_dir():
        return any(True for pattern in ("*.safetensors", "*.safetensors.index.json") for _ in path.glob(pattern))
    return path.is_file() or index_path(path).is_file()


def refuse_pickles(path: Path) -> None:
    """Raises an error if a path leads to a pickle, or to a directory that contains pickles and no safetensors."""
    if path.is_dir():
        names = (
            [] if holds_safetensors(path) else sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
        )
        if names:
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise FileNotFoundError(ONLY_PICKLES.format(path=path, names=shown))
    elif path.suffix in PICKLES and path.is_file():
        with open(path, "rb") as file:
            start = file.read(9)
        if not start.endswith(b"{"):  # safetensors under that name have the length of their header first
            raise CheckpointError(ONLY_PICKLES.format(path=path.parent, names=path.name))


# Reading


class Index(NamedTuple):
    """The shard of each tensor by name, and the save id if NNX wrote the index."""

    weight_map: dict[str, str]
    save_id: str | None


def open_model(source: Path, opened: contextlib.ExitStack) -> dict[str, TensorFile]:
    """Opens the files of a model.

    Args:
        source: the file, an index, or a directory that contains one model.
        opened: the stack that will close the files.

    Returns:
        The file of each tensor, by name.

    Raises:
        FileNotFoundError: there is no model.
        CheckpointError: a file is malformed, missing, outside the directory, or from another save.
    """
    for _ in range(_ATTEMPTS):
        before = _state_of_disk(source)
        with contextlib.ExitStack() as stack:
            try:
                files = _open_once(source, stack)
            except OSError:  # also a CheckpointError; a save may have replaced the model in the meantime
                if _state_of_disk(source) == before:
                    raise
                continue
            opened.enter_context(stack.pop_all())
            return files
    with contextlib.ExitStack() as stack:
        files = _open_once(source, stack)
        opened.enter_context(stack.pop_all())
    return files


def _open_once(source: Path, opened: contextlib.ExitStack) -> dict[str, TensorFile]:
    source = _locate(source)
    if source.suffix == ".json":
        return _open_shards(source, opened)
    file = opened.enter_context(TensorFile(source))
    return dict.fromkeys(file.tensors, file)


def _locate(source: Path) -> Path:
    """Returns the file or index to open."""
    if source.is_dir():
        indexed = {file.name.removesuffix(".index.json") for file in source.glob("*.safetensors.index.json")}
        single = {file.name for file in source.glob("*.safetensors") if not _is_shard(file.name)}
        found = indexed | single
        if len(found) > 1 and len(indexed) == 1:
            found = indexed
        if len(found) != 1:
            names = ", ".join(sorted(found)) or "none"
            raise FileNotFoundError(NO_FILE.format(path=source, more=SEVERAL.format(names=names)))
        source = source / found.pop()
    if not source.is_file() and index_path(source).is_file():
        source = index_path(source)
    if not source.is_file():
        raise FileNotFoundError(NO_FILE.format(path=source, more=""))
    return source


def _is_shard(name: str) -> bool:
    """Whether a file is one of several shards, and so not a model without its index."""
    match = _SHARD.search(name)
    return match is not None and match.end() == len(name) and int(match["count"]) > 1


def _open_shards(path: Path, opened: contextlib.ExitStack) -> dict[str, TensorFile]:
    index = read_index(path)
    shards: dict[str, TensorFile] = {}
    for file in dict.fromkeys(index.weight_map.values()):
        shard = shards[file] = opened.enter_context(TensorFile(_shard_path(path, file)))
        if index.save_id is not None and shard.metadata.get(SAVE_ID) != index.save_id:
            raise CheckpointError(MIXED.format(path=path, file=file))
        unlisted = next((name for name in shard.tensors if index.weight_map.get(name) != file), None)
        if unlisted is not None:
            raise CheckpointError(NOT_IN_INDEX.format(path=path, name=unlisted, file=file))
    for name, file in index.weight_map.items():
        if name not in shards[file].tensors:
            raise CheckpointError(NOT_IN_SHARD.format(path=path, name=name, file=file))
    return {name: shards[file] for name, file in index.weight_map.items()}


def read_index(path: Path) -> Index:
    """Reads an index.

    Raises:
        CheckpointError: the index is malformed.
    """
    try:
        fields = json.loads(path.read_bytes().decode("utf-8"))
        weight_map, metadata = fields["weight_map"], fields.get("metadata") or {}
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError("its weight_map must map the names of tensors to the names of files")
        save_id = metadata.get(SAVE_ID)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = first_line(error)
        raise CheckpointError(BAD_INDEX.format(path=path, reason=reason)) from error
    return Index(weight_map, save_id)


def _shard_path(index: Path, file: str) -> Path:
    """Returns the path of a shard, after checking that it is in the directory of its index."""
    path = index.with_name("x") if not file or "\0" in file else index.parent / file
    if path.name != file or "\\" in file or ":" in file or file in (".", ".."):
        raise CheckpointError(OUTSIDE.format(path=index, file=file))
    # In a download cache, the index and its shards can be links into another directory. A link is followed to the
    # directory in which the index itself really is, and nowhere else.
    try:
        real = path.resolve(strict=True)
        homes = (index.parent.resolve(), index.resolve().parent)
    except (OSError, RuntimeError):
        raise CheckpointError(NO_SHARD.format(path=index, file=file)) from None
    if real.parent not in homes:
        raise CheckpointError(OUTSIDE.format(path=index, file=file))
    if not real.is_file():
        raise CheckpointError(NO_SHARD.format(path=index, file=file))
    return path


def _state_of_disk(source: Path) -> Any:
    """Returns a value that changes with every save."""
    try:
        found = _locate(source)
        stat = found.stat()
        return found, stat.st_ino, stat.st_mtime_ns
    except OSError:
        return None


# Writing


Shards = Sequence[Mapping[str, Pending]]
"""The tensors to write to each shard, or to the only file."""


def divide(tensors: Mapping[str, Pending], limit: int | None) -> Shards:
    """Divides tensors among shards of at most `limit` bytes; a larger tensor gets its own shard."""
    shards: list[dict[str, Pending]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if limit is not None and shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def write_model(file: Path, shards: Shards, arrays: Iterator[np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes a model, replacing one that exists. The caller holds the lock of the file.

    Args:
        file: the name of the model.
        shards: the tensors to write to each shard.
        arrays: the data of the tensors, shard by shard, each in its `data_order`.
        metadata: the text to store in every file, by name.
    """
    # The names of the file, its shards, its index, and the lock of earlier versions.
    own = rf"{re.escape(file.name)}(\.index\.json)?|{_shard_pattern(file)}|\.{re.escape(file.name)}\.lock"
    remove_leftovers(file.parent, re.compile(own))
    old_shards = _shards_of(file)
    if len(shards) == 1:
        with atomic_file(file) as opened:
            write_tensors(opened, shards[0], arrays, metadata)
        index_path(file).unlink(missing_ok=True)
    else:
        _write_shards(file, shards, arrays, metadata)
        file.unlink(missing_ok=True)
    sync_directory(file.parent)
    for shard in old_shards:
        shard.unlink(missing_ok=True)


def _write_shards(file: Path, shards: Shards, arrays: Iterator[np.ndarray], metadata: Mapping[str, str]) -> None:
    save_id = unique_token()
    names = _free_names(file, len(shards), save_id)
    notes = {**metadata, SAVE_ID: save_id, SHARD_OF: file.name}
    weight_map: dict[str, str] = {}
    try:
        for name, shard in zip(names, shards):
            with atomic_file(file.with_name(name)) as opened:
                write_tensors(opened, shard, arrays, notes)
            weight_map.update(dict.fromkeys(shard, name))
        total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        index = {"metadata": {"total_size": total, SAVE_ID: save_id}, "weight_map": weight_map}
        with atomic_file(index_path(file)) as opened:
            opened.write(json.dumps(index, indent=1).encode())
    except BaseException:
        for name in names:
            file.with_name(name).unlink(missing_ok=True)
        raise


def _free_names(file: Path, count: int, save_id: str) -> list[str]:
    """Returns the usual names of the shards, or different ones if one of those is taken."""
    for tag in ("", f"-{save_id}"):
        names = [f"{file.stem}{tag}-{i + 1:05}-of-{count:05}{file.suffix}" for i in range(count)]
        if not any(os.path.lexists(file.with_name(name)) for name in names):
            break
    return names


def _shards_of(file: Path) -> list[Path]:
    """Returns the shards that belong to a model: those in its index, and those left by killed saves."""
    try:
        listed = set(read_index(index_path(file)).weight_map.values())
    except OSError:  # also a CheckpointError
        listed = set()
    candidates = [path for path in file.parent.iterdir() if re.fullmatch(_shard_pattern(file), path.name)]
    return [path for path in candidates if path.name in listed or _note_of(path, SHARD_OF) == file.name]


def _shard_pattern(file: Path) -> str:
    return rf"{re.escape(file.stem)}(-[0-9a-f]{{16}})?-\d{{5}}-of-\d{{5}}{re.escape(file.suffix)}"


def _note_of(path: Path, note: str) -> str | None:
    try:
        with TensorFile(path) as file:
            return file.metadata.get(note)
    except CheckpointError:
        return None
