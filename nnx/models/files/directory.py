"""The directory of a published model: its `config.json` and its weights, or an error that names what is there.

People pass what they have: the path of a file, the directory of an adapter, a clone without its large files (git-lfs
leaves a *pointer* of a few lines in place of each), shards without their index. What can be opened is opened.
"""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from nnx.storage.errors import CheckpointError
from nnx.storage.safetensors.file import TensorFile
from nnx.storage.safetensors.shards import holds_safetensors, open_model

NO_DIRECTORY = (
    "There is no directory {path}. nnx.models reads local directories and never downloads: fetch the files first, for "
    "example with `hf download MODEL --local-dir DIRECTORY`, and pass that directory."
)
IS_A_FILE = "{path} is a file. Pass the directory that holds config.json and the weights: {parent}"
NO_CONFIG = "{path} contains no config.json, so it is not the directory of a published model."
IS_AN_ADAPTER = (
    "{path} is the directory of a low-rank adapter (adapter_config.json), not of a model. Open the model it was "
    "trained on{base}, and add the adapter: `nnx.models.load_adapter(model, {shown!r})`."
)
NO_WEIGHTS = "{path} contains no safetensors file."
BAD_JSON = "{path} cannot be read as JSON: {reason}."
IS_A_POINTER = (
    "{path} is a pointer of git-lfs, a few lines of text in place of the file itself. Fetch the files with `git lfs "
    "pull` in that directory, or with `hf download`."
)
MISSING_SHARDS = "{path} holds {have} of {count} shards of a model, and no index; missing are {names}."
TWICE = "{name!r} is in two of the shards in {path}, which have no index that says which one counts."

_ADAPTER = "adapter_config.json"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_POINTER = b"version https://git-lfs"


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, which may start with a byte order mark.

    Raises:
        ValueError: it is not JSON, not an object, or a pointer of git-lfs.
    """
    content = file.read_bytes()
    if content.startswith(_POINTER):
        raise ValueError(IS_A_POINTER.format(path=file))
    try:
        fields = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(BAD_JSON.format(path=file, reason=error)) from error
    if not isinstance(fields, dict):
        raise ValueError(BAD_JSON.format(path=file, reason="it is not an object"))
    return fields


def read_entries(directory: Path) -> dict[str, Any]:
    """Returns the entries of the `config.json` in a directory."""
    if directory.is_file():
        raise NotADirectoryError(IS_A_FILE.format(path=directory, parent=directory.parent))
    if not directory.is_dir():
        raise FileNotFoundError(NO_DIRECTORY.format(path=directory))
    file = directory / "config.json"
    is_adapter = (directory / _ADAPTER).is_file()
    if not file.is_file() and not is_adapter:
        raise FileNotFoundError(NO_CONFIG.format(path=directory))
    if is_adapter and not _model_files(directory):
        base = read_json(directory / _ADAPTER).get("base_model_name_or_path")
        named = f" ({base})" if isinstance(base, str) and base else ""
        raise FileNotFoundError(IS_AN_ADAPTER.format(path=directory, base=named, shown=directory.name))
    return read_json(file)


def open_weights(directory: Path, opened: contextlib.ExitStack) -> dict[str, TensorFile]:
    """Opens the weights in a directory; returns the file of each tensor, by name.

    Args:
        directory: the directory.
        opened: the stack that will close the files.

    Raises:
        FileNotFoundError: there are no weights, or not all of them.
        CheckpointError: a file is damaged.
    """
    for file in directory.glob("*.safetensors"):
        if file.is_file() and file.stat().st_size < 1024:
            with open(file, "rb") as content:
                if content.read(len(_POINTER)) == _POINTER:
                    raise FileNotFoundError(IS_A_POINTER.format(path=file))
    usual = directory / "model.safetensors"  # directories can contain other safetensors files as well
    if holds_safetensors(usual):
        return open_model(usual, opened)
    if not holds_safetensors(directory):
        raise FileNotFoundError(NO_WEIGHTS.format(path=directory))
    shards = _shards_without_index(directory)
    return open_model(directory, opened) if shards is None else _open_shards(directory, shards, opened)


def _model_files(directory: Path) -> list[Path]:
    """Returns the files of a directory that can hold the weights of a model, rather than those of an adapter."""
    return [file for file in directory.glob("*.safetensors*") if not file.name.startswith("adapter_model")]


def _shards_without_index(directory: Path) -> list[Path] | None:
    """Returns the shards of the only model in a directory, if it has some and no index, after checking for gaps."""
    if any(True for _ in directory.glob("*.index.json")):
        return None
    files = {file.name: _SHARD.fullmatch(file.name) for file in _model_files(directory)}
    if not files or not all(files.values()):
        return None
    stems = {(match["stem"], match["count"]) for match in files.values() if match is not None}
    if len(stems) != 1:
        return None
    ((stem, count),) = stems
    wanted = [f"{stem}-{number:05}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
    missing = [name for name in wanted if name not in files]
    if missing:
        names = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise FileNotFoundError(
            MISSING_SHARDS.format(path=directory, have=len(wanted) - len(missing), count=len(wanted), names=names)
        )
    return [directory / name for name in wanted]


def _open_shards(directory: Path, shards: list[Path], opened: contextlib.ExitStack) -> dict[str, TensorFile]:
    files: dict[str, TensorFile] = {}
    for shard in shards:
        file = opened.enter_context(TensorFile(shard))
        for name in file.tensors:
            if name in files:
                raise CheckpointError(TWICE.format(name=name, path=directory))
            files[name] = file
    return files
