"""Saving and loading the state of a model as safetensors: one file, or several with an index.

The names in the files are the paths of the State. Shared values are written once; when they are read, any of their
paths is accepted.
"""

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from nnx.core.module.module import Module
from nnx.core.repr import short
from nnx.core.state.state import State
from nnx.storage.entry import check_savable, describe
from nnx.storage.errors import CheckpointError, LoadReport, first_line
from nnx.storage.expected import Expected
from nnx.storage.files import local_path, only_writer, sync_directory
from nnx.storage.leaves import Leaves
from nnx.storage.matching import TWO_VALUES, Texts, match, misfit
from nnx.storage.processes import Exchange, ProcessError, is_first
from nnx.storage.safetensors.file import Pending
from nnx.storage.safetensors.header import data_order, make_header
from nnx.storage.safetensors.shards import Shards, divide, open_model, refuse_pickles, write_model
from nnx.storage.safetensors.source import Notes, Source
from nnx.storage.transfer_bar import transfer

NOT_STATE = "{function} takes a State or a Module, got {got}."
NOT_ARRAY = "Cannot save {path!r} as safetensors: {value} is not an array or a number. Leave it out of the State."
SAVE_FAILED = "Could not save to {path}: {reason}. A model saved there before is still intact."
BAD_SIZE = 'max_shard_size is a number of bytes or a string such as "5GB" or "500MB", got {size!r}.'
DOES_NOT_FIT = """{path} does not fit the target.
{differences}
Take what fits with load_safetensors(path, target, strict=False)."""
IN_PART = "{path} fits the target only in part; the returned State has the entries that fit.\n{differences}"
NOT_NESTED = """{path} contains both {name!r} and {inside!r}, so its names are not those of one nested dict. Load it \
with a target, or with rename={{{name!r}: ...}}."""
ONLY_WITH_TARGET = (
    "load_safetensors without a target returns everything in the file, so {option} has no effect. Remove it."
)

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def save_safetensors(
    path: str | os.PathLike[str],
    state: Any,
    *,
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a State to a safetensors file.

    The new file or files replace the old ones in one step, once they are complete: a killed process leaves either the
    old model or the new one. A second writer of the same path waits for the first. With several processes, all of them
    must call this function; the arrays are collected one by one, process 0 writes them, and all processes return when
    the file is complete.

    Args:
        path: the file to write, e.g. `model.safetensors`.
        state: a State, or a Module for all of its state.
        max_shard_size: the maximum size of a file, in bytes or as a string such as `"5GB"`. A larger State is written
            to several files (`model-00001-of-00003.safetensors` ...) with an index, `model.safetensors.index.json`.
        metadata: additional text to store in the files, by name.

    Raises:
        TypeError: `state` is neither a State nor a Module.
        ValueError: a value, dtype or name cannot be expressed in the format; the message names the path.
        CheckpointError: the files could not be written.

    >>> import tempfile
    >>> model = nnx.Linear(2, 3, ctx=nnx.context(0))
    >>> path = tempfile.mkdtemp() + "/model.safetensors"
    >>> nnx.save_safetensors(path, model.filter(nnx.Param))
    >>> state = nnx.load_safetensors(path, model.filter(nnx.Param))
    >>> state == model.filter(nnx.Param)
    True
    """
    leaves = Leaves(_checked(state, "save_safetensors"))
    values, notes = _values(leaves)
    texts = {**(metadata or {}), **notes.to_metadata()}
    tensors = {name: Pending(jnp.dtype(array.dtype), tuple(array.shape)) for name, array in values.items()}
    write_arrays(path, tensors, values.__getitem__, max_shard_size=max_shard_size, metadata=texts)


def write_arrays(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Pending],
    make: Callable[[str], Any],
    *,
    max_shard_size: int | str | None,
    metadata: Mapping[str, str],
) -> None:
    """Writes arrays that are made one at a time, each just before it is written.

    Args:
        path, max_shard_size: as in `save_safetensors`.
        tensors: the dtypes and shapes of the arrays, by name.
        make: a function that returns the array of a name. With several processes, each of them calls it for each name.
        metadata: the text to store in the files, by name.
    """
    file = local_path(path).absolute()
    limit = _bytes(max_shard_size)
    make_header(tensors, metadata)  # raises, if it must, before anything is written
    shards = divide(tensors, limit)
    ordered = (make(name) for shard in shards for name in data_order(shard))
    arrays = (_to_host(array) for array in ordered if is_first() or _is_spread(array))
    try:
        with transfer("saving", file, sum([tensor.nbytes for tensor in tensors.values()])):
            Exchange(f"nnx.save_safetensors({str(path)!r})").together(lambda: _write(file, shards, arrays, metadata))
    except (OSError, ProcessError, jax.errors.JaxRuntimeError) as error:  # the last one if a process died meanwhile
        raise CheckpointError(SAVE_FAILED.format(path=file, reason=first_line(error))) from error


def _write(file: Path, shards: Shards, arrays: Iterator[np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes the files on process 0; on the others, takes part in collecting the arrays."""
    try:
        if is_first():
            file.parent.mkdir(parents=True, exist_ok=True)
            with only_writer(file):
                write_model(file, shards, arrays, metadata)
            sync_directory(file.parent)
    finally:
        # Collecting an array takes every process. If process 0 fails to write, the others still go through all arrays,
        # and would wait for it forever if it did not do so as well.
        for _ in arrays if jax.process_count() > 1 else ():
            pass


_NO_TARGET: Any = object()


@overload
def load_safetensors(
    path: str | os.PathLike[str], *, rename: Mapping[str, str] | None = None, verify: bool = True
) -> dict[str, Any]: ...
@overload
def load_safetensors(
    path: str | os.PathLike[str],
    target: Any,
    *,
    strict: bool = True,
    cast: bool = False,
    report: LoadReport | None = None,
    rename: Mapping[str, str] | None = None,
    verify: bool = True,
) -> State: ...
def load_safetensors(
    path: str | os.PathLike[str],
    target: Any = _NO_TARGET,
    *,
    strict: bool = True,
    cast: bool = False,
    report: LoadReport | None = None,
    rename: Mapping[str, str] | None = None,
    verify: bool = True,
) -> Any:
    """Reads a State from safetensors; write it into a Module with `model.update_state(state)`.

    Arrays are read one at a time, so memory peaks at the model plus its largest array; a process reads only its own
    part of a sharded array. Without a target, everything in the files is returned as a nested dict of memory-mapped
    NumPy arrays: they are read-only, and their bytes are read (without verification) when they are used.

    Args:
        path: a file, an index, or a directory that contains one of them.
        target: a State or Module that defines the expected paths, types, shapes, dtypes and shardings. It can be
            abstract, and is not changed.
        strict: whether names, shapes and dtypes must agree. If False, the State has the entries that fit, and the
            others are reported.
        cast: whether to convert values of a different dtype, including 64-bit ones if JAX has no 64-bit types. A
            complex value never fits a real one.
        report: a LoadReport to fill with the entries that do not fit, instead of a warning.
        rename: new paths for those in the file, e.g. `{"old/**": "new/**"}`; `*` matches text within a segment,
            `**` any number of segments.
        verify: whether to check the bytes against the checksums that `save_safetensors` writes.

    Returns:
        A State, or the nested dict.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: a file is damaged or malformed, or does not fit the target.
        TypeError: the target is neither a State nor a Module, or an option was given that only applies to a target.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/model.safetensors"
    >>> nnx.save_safetensors(path, nnx.State({"encoder/w": jnp.ones(2)}))
    >>> nnx.load_safetensors(path)["encoder"]["w"].tolist()
    [1.0, 1.0]
    >>> list(nnx.load_safetensors(path, nnx.State({"body/w": jnp.zeros(2)}), rename={"encoder/**": "body/**"}))
    ['body/w']
    """
    file = local_path(path).absolute()
    refuse_pickles(file)
    if target is _NO_TARGET:
        _refuse_options(strict=strict is not True, cast=cast, report=report is not None)
        with contextlib.ExitStack() as opened:
            return _nested(file, Source(open_model(file, opened), rename).mapped())
    expected = _checked(target, "load_safetensors")
    expected = Module.get_state(expected) if isinstance(expected, Module) else expected
    leaves = Leaves(expected)
    aliases = Leaves(target).aliases if isinstance(target, Module) else {}
    with contextlib.ExitStack() as opened:
        source = Source(open_model(file, opened), rename)
        found, differences = _matched(source, leaves, aliases, cast)
        if differences and strict:
            raise CheckpointError(DOES_NOT_FIT.format(path=file, differences=differences))
        with transfer("loading", file, sum([source.tensor(name).nbytes for name in found.values()])):
            values = {
                path: source.value(name, Expected.of(leaves.by_path[path].value), verify=verify)
                for path, name in found.items()
            }
    lost = {_owner(path, expected) for path in leaves.by_path if path not in values}
    loaded = leaves.fill(values).filter(lambda path, leaf: path not in lost)
    if report is not None:
        report.__dict__.update(differences.__dict__)
    elif differences:
        warnings.warn(IN_PART.format(path=file, differences=differences), stacklevel=2)
    return loaded


def _checked(state: Any, function: str) -> Any:
    if not isinstance(state, (State, Module)):
        raise TypeError(NOT_STATE.format(function=function, got=short(state)))
    return state


# Saving


def _values(leaves: Leaves) -> tuple[dict[str, Any], Notes]:
    """Returns the arrays to write, with PRNG keys as their raw data, and the notes about them."""
    arrays: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for path, (value, _) in leaves.by_path.items():
        check_savable(path, value)
        array = value if hasattr(value, "shape") else _number(path, value)
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            keys[path] = str(jax.random.key_impl(array))
            array = jax.random.key_data(array)
        arrays[path] = array
    return arrays, Notes(keys, leaves.aliases)


def _number(path: str, value: Any) -> np.ndarray:
    if not isinstance(value, (bool, int, float, complex)):
        raise ValueError(NOT_ARRAY.format(path=path, value=short(value)))
    array = np.asarray(value)
    # Numbers are saved in the dtype JAX would use; an integer that does not fit into it keeps its 64 bits.
    narrow = array.astype(jax.dtypes.canonicalize_dtype(array.dtype)) if array.dtype != object else array
    return narrow if array.dtype.kind not in "iu" or narrow == array else array


def _to_host(array: Any) -> np.ndarray:
    """Returns a whole array on the host, collected from all processes if it is spread over them."""
    if _is_spread(array):
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def _is_spread(array: Any) -> bool:
    """Whether an array is spread over processes, so that none of them has all of it."""
    return isinstance(array, jax.Array) and not array.is_fully_addressable and not array.is_fully_replicated


def _bytes(size: int | str | None) -> int | None:
    if size is None or (isinstance(size, int) and size > 0):
        return size
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
    if parts is None or parts[2].upper() not in _UNITS:
        raise ValueError(BAD_SIZE.format(size=size))
    return int(float(parts[1]) * _UNITS[parts[2].upper()])


# Loading


def _refuse_options(**given: bool) -> None:
    for option, is_given in given.items():
        if is_given:
            raise TypeError(ONLY_WITH_TARGET.format(option=f"{option}="))


def _matched(
    source: Source, leaves: Leaves, aliases: Mapping[str, str], cast: bool
) -> tuple[dict[str, str], LoadReport]:
    """Returns the name of the tensor for each path of a target, and what does not fit."""

    def wanted(path: str) -> Any:
        leaf = leaves.by_path[path]
        return describe(leaf.value, leaf.type) or short(leaf.value)

    def misfit_at(path: str, name: str) -> Texts | None:
        have, want = source.describe(name), wanted(path)
        on_host = Expected.of(leaves.by_path[path].value).on_host
        reason = "" if isinstance(want, str) else misfit(have, want, "any" if cast else "same", on_host=on_host)
        return None if reason is None else (f"{have}{reason}", str(want))

    def conflict(path: str, name: str, other: str) -> Texts | None:
        have = TWO_VALUES.format(have=source.describe(other), other=name)
        return None if source.is_same(name, other) else (have, str(wanted(path)))

    report = LoadReport()
    return match(source.named(leaves, aliases), source.names, misfit_at, report, conflict), report


def _nested(file: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns arrays as a nested dict, by the segments of their names."""
    root: dict[str, Any] = {}
    for name, array in arrays.items():
        *segments, last = name.split("/")
        node = root
        for depth, segment in enumerate(segments):
            node = node.setdefault(segment, {})
            if not isinstance(node, dict):
                above = "/".join(segments[: depth + 1])
                raise CheckpointError(NOT_NESTED.format(path=file, name=above, inside=name))
        if last in node:
            inside = next(other for other in arrays if other.startswith(f"{name}/"))
            raise CheckpointError(NOT_NESTED.format(path=file, name=name, inside=inside))
        node[last] = array
    return root


def _owner(path: str, state: State) -> str:
    """Returns the path of the leaf of a State that an entry is part of."""
    while path not in state:
        path = path.rpartition("/")[0]
    return path
