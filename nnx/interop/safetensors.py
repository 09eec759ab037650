"""safetensors in and out, for the state of a model: one file, or several with an index.

The names in the files are the paths of the State. What is shared is written once; other names for it are accepted when
it is read.
"""

import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx.core.info import ModuleBase
from nnx.core.repr import short
from nnx.core.state import State
from nnx.interop.safetensors_format import Pending, TensorFile, write_file
from nnx.training.checkpoint import LoadReport
from nnx.training.entries import Entries, resolve_alias
from nnx.training.manifest import CheckpointError, check_savable

NOT_STATE = "{function} takes a State or a Module, got {got}."
SAVE_FAILED = "Could not save to {path}: {reason}."
NO_FILE = "There is no safetensors file at {path}{more}."
BAD_INDEX = "The index {path} cannot be read: {reason}."
NO_SHARD = "The index {path} names the file {file!r}, which is missing."
NOT_IN_SHARD = "The index {path} says that {name!r} is in {file!r}, but it is not."
BAD_SIZE = 'max_shard_size is a number of bytes or a text such as "5GB" or "500MB", got {size!r}.'
DOES_NOT_FIT = """{path} does not fit the target.
{differences}
Take what fits with load_safetensors(path, target, strict=False)."""
IN_PART = "{path} fits the target only in part; the State that was returned has what fits.\n{differences}"
TWO_VALUES = "two different values, {path!r} and {alias!r}, for what is shared in the target"

_KEYS, _ALIASES = "nnx.keys", "nnx.aliases"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def save_safetensors(
    path: str | os.PathLike[str],
    state: Any,
    *,
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a State to a safetensors file.

    Args:
        path: the file, e.g. `model.safetensors`.
        state: a State, or a Module for all of its state.
        max_shard_size: bytes, or a text such as `"5GB"`. A larger State is written to several files
            (`model-00001-of-00003.safetensors` ...) with an index, `model.safetensors.index.json`.
        metadata: free text to write into the files.

    Raises:
        ValueError: a dtype the format does not have.
        CheckpointError: the files could not be written.

    >>> import tempfile
    >>> model = nnx.Linear(2, 3, ctx=nnx.context(0))
    >>> path = tempfile.mkdtemp() + "/model.safetensors"
    >>> nnx.save_safetensors(path, model.filter(nnx.Param))
    >>> state = nnx.load_safetensors(path, model.filter(nnx.Param))
    >>> state == model.filter(nnx.Param)
    True
    """
    file = Path(path).absolute()
    limit = _bytes(max_shard_size)
    entries = Entries(_checked(state, "save_safetensors"))
    tensors, notes = _pending(entries)
    shards = _shards(tensors, limit)
    index = _index_path(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if len(shards) == 1:
            write_file(file, tensors, {**(metadata or {}), **notes})
            index.unlink(missing_ok=True)
            return
        weight_map: dict[str, str] = {}
        for i, shard in enumerate(shards):
            name = f"{file.stem}-{i + 1:05}-of-{len(shards):05}{file.suffix}"
            write_file(file.with_name(name), {n: tensors[n] for n in shard}, {**(metadata or {}), **notes})
            weight_map.update(dict.fromkeys(shard, name))
        total = sum(tensor.nbytes for tensor in tensors.values())
        temporary = index.with_name(f".{index.name}.tmp")
        temporary.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))
        os.replace(temporary, index)
        file.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(SAVE_FAILED.format(path=file, reason=f"{type(error).__name__}: {error}")) from error


def load_safetensors(
    path: str | os.PathLike[str],
    target: Any,
    *,
    strict: bool = True,
    cast: bool = False,
    report: LoadReport | None = None,
) -> State:
    """Reads a State from safetensors; write it into a Module with `model.update_state(state)`.

    Args:
        path: a file, an index, or a directory that holds one of them.
        target: a State or Module that says what is expected: paths, types, shapes, dtypes and shardings. It may be
            abstract, and is not changed. Sharded arrays are read part by part.
        strict: whether names, shapes and dtypes must agree. If not, the State has what fits, and the rest is reported.
        cast: whether values of another dtype are converted.
        report: is filled with what did not fit, in place of a warning.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: a file is damaged, or does not fit.
    """
    source = Path(path).absolute()
    expected = _checked(target, "load_safetensors")
    files = _open(source)
    expected = expected.get_state() if isinstance(expected, ModuleBase) else expected  # type: ignore[attr-defined]
    entries = Entries(expected)
    aliases = Entries(target).aliases if isinstance(target, ModuleBase) else {}
    notes = _notes(files)
    found, differences = _match(files, entries, aliases, notes, cast)
    if differences and strict:
        raise CheckpointError(DOES_NOT_FIT.format(path=source, differences=differences))
    values = {
        place: _placed(files[name].array(name), entries.leaves[place].value, notes[_KEYS].get(name))
        for place, name in found.items()
    }
    lost = {_owner(place, expected) for place in entries.leaves if place not in values}
    loaded = entries.fill(values).filter(lambda path, leaf: path not in lost)
    if report is not None:
        report.__dict__.update(differences.__dict__)
    elif differences:
        warnings.warn(IN_PART.format(path=source, differences=differences), stacklevel=2)
    return loaded


def _checked(state: Any, function: str) -> Any:
    if not isinstance(state, (State, ModuleBase)):
        raise TypeError(NOT_STATE.format(function=function, got=short(state)))
    return state


# Writing


def _pending(entries: Entries) -> tuple[dict[str, Pending], dict[str, str]]:
    tensors: dict[str, Pending] = {}
    keys: dict[str, str] = {}
    for path, (value, _) in entries.leaves.items():
        check_savable(path, value)
        array = value if hasattr(value, "shape") else jnp.asarray(value)
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            keys[path] = str(jax.random.key_impl(array))
            array = jax.random.key_data(array)
        tensors[path] = Pending(jnp.dtype(array.dtype), tuple(array.shape), lambda array=array: np.asarray(array))
    notes = {_KEYS: keys, _ALIASES: entries.aliases}
    return tensors, {name: json.dumps(note) for name, note in notes.items() if note}


def _shards(tensors: Mapping[str, Pending], limit: int | None) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if limit is not None and shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards


def _bytes(size: int | str | None) -> int | None:
    if size is None or (isinstance(size, int) and size > 0):
        return size
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    if parts is None or parts[2].upper() not in _UNITS:
        raise ValueError(BAD_SIZE.format(size=size))
    return int(float(parts[1]) * _UNITS[parts[2].upper()])


def _index_path(file: Path) -> Path:
    return file.with_name(f"{file.name}.index.json")


# Reading


def _open(source: Path) -> dict[str, TensorFile]:
    """The file that each tensor is in, by name."""
    if source.is_dir():
        candidates = [*sorted(source.glob("*.safetensors.index.json")), *sorted(source.glob("*.safetensors"))]
        indices = [file for file in candidates if file.suffix == ".json"]
        if len(indices or candidates) != 1:
            names = ", ".join(file.name for file in candidates) or "none"
            raise FileNotFoundError(
                NO_FILE.format(path=source, more=f": the directory holds {names}; name one of them")
            )
        source = (indices or candidates)[0]
    elif not source.is_file() and _index_path(source).is_file():
        source = _index_path(source)
    if not source.is_file():
        raise FileNotFoundError(NO_FILE.format(path=source, more=""))
    if source.suffix != ".json":
        file = TensorFile(source)
        return dict.fromkeys(file.tensors, file)
    return dict(_open_shards(source))


def _open_shards(index: Path) -> Iterator[tuple[str, TensorFile]]:
    try:
        weight_map: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(BAD_INDEX.format(path=index, reason=f"{type(error).__name__}: {error}")) from error
    opened: dict[str, TensorFile] = {}
    for name, file in weight_map.items():
        if file not in opened:
            if not index.with_name(file).is_file():
                raise CheckpointError(NO_SHARD.format(path=index, file=file))
            opened[file] = TensorFile(index.with_name(file))
        if name not in opened[file].tensors:
            raise CheckpointError(NOT_IN_SHARD.format(path=index, name=name, file=file))
        yield name, opened[file]


def _notes(files: Mapping[str, TensorFile]) -> dict[str, dict[str, str]]:
    notes: dict[str, dict[str, str]] = {_KEYS: {}, _ALIASES: {}}
    for file in {id(file): file for file in files.values()}.values():
        for name, note in notes.items():
            note.update(json.loads(file.metadata.get(name, "{}")))
    return notes


def _match(
    files: Mapping[str, TensorFile],
    entries: Entries,
    aliases: Mapping[str, str],
    notes: Mapping[str, Mapping[str, str]],
    cast: bool,
) -> tuple[dict[str, str], LoadReport]:
    """For each path of the target the name in the files that fits; and all that does not."""
    report = LoadReport()
    found: dict[str, str] = {}
    places: dict[str, list[str]] = {}
    for name in files:
        places.setdefault(resolve_alias(name, aliases), []).append(name)
    known: set[str] = set()
    for path, (value, _) in entries.leaves.items():
        names = places.get(path) or [n for n in (resolve_alias(path, notes[_ALIASES]),) if n in files]
        if not names:
            report.missing.append(path)
            continue
        known.update(names)
        name = path if path in names else names[0]
        have, want = _text(files[name].tensors[name], notes[_KEYS].get(name)), _wanted_text(value)
        other = next((n for n in names if not _same(files, n, name)), None)
        if other is not None:
            report.mismatched[path] = (TWO_VALUES.format(path=name, alias=other), want)
        elif have == want or (_fits_loosely(files[name].tensors[name], value, cast) and not notes[_KEYS].get(name)):
            found[path] = name
        else:
            report.mismatched[path] = (have, want)
    report.unexpected = [name for name in files if name not in known]
    return found, report


def _same(files: Mapping[str, TensorFile], a: str, b: str) -> bool:
    return a == b or np.array_equal(files[a].array(a), files[b].array(b))


def _text(tensor: Any, impl: str | None) -> str:
    dtype, shape = (tensor.dtype, tensor.shape) if impl is None else (_key_dtype(impl), tensor.shape[:-1])
    return f"{dtype}[{','.join(map(str, shape))}]"


def _wanted_text(value: Any) -> str:
    if not hasattr(value, "shape"):
        return f"the number {value!r}"
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def _key_dtype(impl: str) -> Any:
    return jax.random.key(0, impl=impl).dtype


def _fits_loosely(tensor: Any, value: Any, cast: bool) -> bool:
    if not hasattr(value, "shape"):
        return tensor.shape == () and (cast or jnp.asarray(value).dtype == tensor.dtype)
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return cast and not is_key and tensor.shape == value.shape


def _placed(array: np.ndarray, old: Any, impl: str | None) -> Any:
    """A tensor as a value of the kind of `old`, at its place."""
    if impl is not None:
        key = jax.random.wrap_key_data(jnp.asarray(np.array(array)), impl=impl)
        return key if _sharding(old) is None else jax.device_put(key, _sharding(old))
    if not hasattr(old, "shape"):
        return type(old)(array.item())
    dtype = jnp.dtype(old.dtype)
    if isinstance(old, np.generic):
        return array.astype(dtype)[()]
    if isinstance(old, np.ndarray):
        return np.array(array, dtype)
    sharding = _sharding(old)
    if sharding is None:
        return jnp.asarray(np.array(array, dtype))  # a copy: the file may change
    return jax.make_array_from_callback(array.shape, sharding, lambda at: np.array(array[at], dtype))


def _sharding(old: Any) -> Any:
    if isinstance(old, jax.ShapeDtypeStruct):
        return old.sharding
    return old.sharding if isinstance(old, jax.Array) and old.committed else None


def _owner(path: str, state: State) -> str:
    """The path of the leaf of a State that an entry is part of."""
    while path not in state:
        path = path.rpartition("/")[0]
    return path
