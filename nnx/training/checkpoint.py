"""Saving and loading: `save(path, obj)` and `load(path, target)`, with the array data written and read by Orbax.

Arrays are written under their paths, sharded as they are, and read into the shardings of the target. Nothing is changed
in the target before everything has been checked and read.
"""

import dataclasses
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from nnx.core.extras import require
from nnx.training.entries import Entries, resolve_alias
from nnx.training.manifest import (
    DATA_PREFIX,
    CheckpointError,
    Manifest,
    check_savable,
    data_files,
    is_finished,
    plain_value,
    read_manifest,
    record_of,
    record_text,
    records_of,
    remove_data,
    write_manifest,
)

T = TypeVar("T")

SAVE_FAILED = "Could not save to {path}: {reason}. Checkpoints that were finished before are intact."
NOT_A_DIRECTORY = "Could not save to {path}: a checkpoint is a directory, and there is a file of that name."
READ_FAILED = "The checkpoint at {path} could not be read: {reason}. Nothing was loaded. Load an earlier one."
DOES_NOT_FIT = """The checkpoint at {path} does not fit the target. Nothing was loaded.
{differences}
Build the target as the saved object was built, or load what fits with nnx.load(path, target, strict=False)."""
LOADED_IN_PART = """The checkpoint at {path} fits the target only in part; the rest of the target was left as it was.
{differences}"""

_ROOT = "."  # the name of the array where the target is one array, whose path is empty


# Saving


def save(path: str | os.PathLike[str], obj: Any) -> None:
    """Saves an object to a directory, replacing the checkpoint that may be there.

    The new checkpoint takes the place of an older one at once, when it is complete: an interrupted save leaves the
    older one. Arrays, typed keys, numbers and strings are saved by path; static attributes are not, so that the target
    of `load` is built by the code that built the object.

    Args:
        path: the directory.
        obj: a Module, State, TrainState, Optimizer, metric, Context, or a dict (any pytree) of them and of arrays and
            numbers.

    Raises:
        CheckpointError: it could not be written; an OSError and a ValueError.

    >>> import tempfile
    >>> model, ctx = nnx.Linear(2, 3, ctx=nnx.context(0)), nnx.context(dropout=1)
    >>> path = tempfile.mkdtemp() + "/checkpoint"
    >>> nnx.save(path, {"model": model, "ctx": ctx, "epoch": 4})
    >>> other = nnx.Linear(2, 3, ctx=nnx.context(5))
    >>> restored = nnx.load(path, {"model": other, "ctx": ctx, "epoch": 0})
    >>> restored["epoch"], bool((other.kernel == model.kernel).all())
    (4, True)
    """
    Saving(path, obj).finish()


class Saving:
    """A save under way: when it is made, the values have left the devices; `finish` completes it."""

    def __init__(self, path: str | os.PathLike[str], obj: Any, info: Mapping[str, Any] | None = None):
        self._path = Path(path).absolute()
        entries = Entries(obj)
        records = records_of(entries)
        arrays: dict[str, Any] = {}
        for name, record in records.items():
            value = entries.leaves[name].value
            check_savable(name, value)
            if _has_data(record):
                arrays[name or _ROOT] = _storable(value, record)
        self._orbax = require("orbax.checkpoint", "checkpoint", "nnx.save") if arrays else None
        self._checkpointer: Any = None
        try:
            self._data = self._prepare() if arrays else ""
            if self._orbax is not None:
                # made at once: if that fails in the background, the writers wait for the directory for minutes
                options = self._orbax.AsyncOptions(create_directories_asynchronously=False)
                handler = self._orbax.PyTreeCheckpointHandler()
                self._checkpointer = self._orbax.AsyncCheckpointer(handler, async_options=options)
                self._checkpointer.save(self._path / self._data, args=self._orbax.args.PyTreeSave(arrays))
            else:
                self._path.mkdir(parents=True, exist_ok=True)
        except Exception as error:
            self._close()
            raise self._failed(error) from error
        self._manifest = Manifest(self._data, {}, records, entries.aliases, entries.modules, dict(info or {}))

    def _prepare(self) -> str:
        """Makes the directory and names the folder for the data; nobody else's folder has that name."""
        if self._path.exists() and not self._path.is_dir():
            raise CheckpointError(NOT_A_DIRECTORY.format(path=self._path))
        before = read_manifest_or_none(self._path)
        if jax.process_index() == 0:
            self._path.mkdir(parents=True, exist_ok=True)
            remove_data(self._path, but=before.data if before else "")
        number = int(before.data.removeprefix(DATA_PREFIX)) + 1 if before and before.data else 0
        return f"{DATA_PREFIX}{number}"

    def finish(self) -> None:
        """Waits until the data are written, and makes the checkpoint a finished one.

        Raises:
            CheckpointError: it could not be written.
        """
        try:
            if self._checkpointer is not None:
                self._checkpointer.wait_until_finished()
            if jax.process_index() == 0:
                files = data_files(self._path / self._data) if self._data else {}
                write_manifest(self._path, dataclasses.replace(self._manifest, files=files))
                remove_data(self._path, but=self._data)
        except Exception as error:
            raise self._failed(error) from error
        finally:
            self._close()

    def _failed(self, error: Exception) -> Exception:
        if isinstance(error, CheckpointError):
            return error
        if jax.process_index() == 0:
            before = read_manifest_or_none(self._path)
            remove_data(self._path, but=before.data if before else "")
        return CheckpointError(SAVE_FAILED.format(path=self._path, reason=_first_line(error)))

    def _close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()


def read_manifest_or_none(path: Path) -> Manifest | None:
    """The manifest of a finished checkpoint, if there is a readable one."""
    try:
        return read_manifest(path) if is_finished(path) else None
    except OSError:
        return None


def _storable(value: Any, record: dict[str, Any]) -> Any:
    """A leaf as an array of a dtype that the files know."""
    if record["kind"] == "key":
        return jax.random.key_data(value)
    if isinstance(value, (np.ndarray, np.generic)):
        value = np.array(value)  # a copy: it may change while it is being written
    stored = _stored_dtype(value.dtype)
    if stored != value.dtype:
        record["stored"] = str(stored)
        return value.astype(stored)
    return value


def _stored_dtype(dtype: Any) -> Any:
    tensorstore = require("tensorstore", "checkpoint", "nnx.save")
    try:
        tensorstore.dtype(str(dtype))
        return dtype
    except ValueError:  # four-bit integers and the like: in the next larger that holds all of their values
        if jnp.issubdtype(dtype, jnp.unsignedinteger):
            return jnp.dtype(jnp.uint8)
        return jnp.dtype(jnp.int8 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32)


# Loading


@dataclasses.dataclass
class LoadReport:
    """What did not fit when a checkpoint was loaded with `strict=False`.

    Attributes:
        missing: paths of the target that the checkpoint does not have.
        unexpected: paths of the checkpoint that the target does not have.
        mismatched: for each path of another shape, dtype or kind, what the checkpoint has and what the target has.
    """

    missing: list[str] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    mismatched: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        lines = []
        if self.missing:
            lines.append(f"- missing from the checkpoint: {_listing(self.missing)}")
        if self.unexpected:
            lines.append(f"- in the checkpoint, but not in the target: {_listing(self.unexpected)}")
        shown = list(self.mismatched.items())[:12]
        lines += [f"- {path!r} is {have} in the checkpoint and {want} in the target" for path, (have, want) in shown]
        if len(self.mismatched) > len(shown):
            lines.append(f"- and {len(self.mismatched) - len(shown)} more of another shape or dtype")
        return "\n".join(lines)


def load(
    path: str | os.PathLike[str],
    target: T,
    strict: bool = True,
    *,
    cast: bool = False,
    report: LoadReport | None = None,
) -> T:
    """Fills a target from a checkpoint and returns it.

    Modules, Contexts and a dict are filled in place; of what cannot change (a State, a TrainState, an array) a new one
    is returned. Arrays take the sharding of those in the target, which may be abstract (`nnx.eval_shape`): each device
    then reads its own part.

    Args:
        path: what was given to `save`.
        target: an object of the structure that was saved, with any values.
        strict: whether everything must fit. If not, what fits is loaded, and the rest is reported and left as it is.
        cast: whether values of another dtype are converted to that of the target.
        report: is filled with what did not fit, in place of a warning.

    Raises:
        FileNotFoundError: there is nothing at the path.
        CheckpointError: it is damaged or unfinished, or, if `strict`, does not fit. The target is as it was.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/model"
    >>> nnx.save(path, nnx.Linear(2, 3, ctx=nnx.context(0)))
    >>> model = nnx.load(path, nnx.Linear(2, 3, ctx=nnx.context(1)))
    """
    directory = Path(path).absolute()
    manifest = read_manifest(directory)
    entries = Entries(target)
    found, differences = _match(manifest, entries, cast)
    if differences and strict:
        raise CheckpointError(DOES_NOT_FIT.format(path=directory, differences=differences))
    values = _read(directory, manifest, {name: (saved, entries.leaves[name].value) for name, saved in found.items()})
    filled = entries.fill(values)
    if report is not None:
        report.__dict__.update(differences.__dict__)
    elif differences:
        warnings.warn(LOADED_IN_PART.format(path=directory, differences=differences), stacklevel=2)
    return filled


def _match(manifest: Manifest, entries: Entries, cast: bool) -> tuple[dict[str, str], LoadReport]:
    """For each path of the target the path in the checkpoint that fits; and all that does not."""
    report = LoadReport()
    found: dict[str, str] = {}
    known: set[str] = set()
    wanted_as = {resolve_alias(path, entries.aliases): path for path in manifest.entries}
    for path, entry in entries.leaves.items():
        saved = next(
            (
                name
                for name in (path, resolve_alias(path, manifest.aliases), wanted_as.get(path))
                if name is not None and name in manifest.entries
            ),
            None,
        )
        if saved is None:
            report.missing.append(path)
            continue
        have, want = manifest.entries[saved], record_of(path, entry.value, entry.type)
        if _fits(have, want, cast):
            found[path] = saved
        else:
            report.mismatched[path] = (record_text(have), record_text(want))
            known.add(saved)
    known.update(found.values())
    report.unexpected = [name for name in manifest.entries if name not in known]
    return found, report


def _fits(have: Mapping[str, Any], want: Mapping[str, Any], cast: bool) -> bool:
    kinds = have["kind"], want["kind"]
    if "text" in kinds or "key" in kinds:
        return kinds[0] == kinds[1] and all(have.get(k) == want.get(k) for k in ("shape", "dtype"))
    if "number" in kinds:  # a Python number, and the scalar that a compiled step has made of it
        return have.get("shape", []) == want.get("shape", []) and (cast or _sort(have) == _sort(want))
    return have["shape"] == want["shape"] and (cast or have["dtype"] == want["dtype"])


def _sort(record: Mapping[str, Any]) -> Any:
    dtype = jnp.dtype(record["dtype"])
    return next(sort for sort in (jnp.bool_, jnp.integer, jnp.inexact) if jnp.issubdtype(dtype, sort))


def _read(directory: Path, manifest: Manifest, wanted: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """The values of the entries by target path: those of arrays are read, for the place where the old value is."""
    places = {saved: old for saved, old in wanted.values() if _has_data(manifest.entries[saved])}
    arrays: dict[str, Any] = {}
    if places:
        orbax = require("orbax.checkpoint", "checkpoint", "nnx.load")
        arguments = {
            saved or _ROOT: _restore_args(orbax, manifest.entries[saved], old) for saved, old in places.items()
        }
        checkpointer = orbax.Checkpointer(orbax.PyTreeCheckpointHandler())
        try:
            request = orbax.args.PyTreeRestore(
                item=dict.fromkeys(arguments, 0), restore_args=arguments, partial_restore=True
            )
            arrays = checkpointer.restore(directory / manifest.data, args=request)
        except Exception as error:
            raise CheckpointError(READ_FAILED.format(path=directory, reason=_first_line(error))) from error
        finally:
            checkpointer.close()
    return {
        path: _value(manifest.entries[saved], arrays.get(saved or _ROOT), old) for path, (saved, old) in wanted.items()
    }


def _has_data(record: Mapping[str, Any]) -> bool:
    return record["kind"] in ("array", "key") and 0 not in record["shape"]


def _restore_args(orbax: Any, record: Mapping[str, Any], old: Any) -> Any:
    sharding = _sharding(old)
    if sharding is None or record["kind"] == "key" or record.get("weak"):
        return orbax.RestoreArgs(restore_type=np.ndarray)
    dtype = None if "stored" in record else old.dtype
    return orbax.ArrayRestoreArgs(sharding=sharding, dtype=dtype)


def _sharding(old: Any) -> Any:
    """Where a value of the target is bound to be; None for numpy arrays, numbers, and arrays that JAX may move."""
    if isinstance(old, jax.ShapeDtypeStruct):
        return old.sharding
    return old.sharding if isinstance(old, jax.Array) and old.committed else None


def _value(record: Mapping[str, Any], array: Any, old: Any) -> Any:
    """A value as it is put into the target, in the place of `old`."""
    if record["kind"] == "text":
        return record["value"]
    if record["kind"] == "number":
        value = plain_value(record)
        if not hasattr(old, "shape") or getattr(old, "weak_type", False):
            return value
        return _placed(np.asarray(value, old.dtype), old)
    if array is None:
        array = _empty(record)
    if record["kind"] == "key":
        return _placed(jax.random.wrap_key_data(jnp.asarray(array), impl=record["impl"]), old)
    if not hasattr(old, "shape"):  # a Python number in the target: the scalar that was saved
        return jnp.asarray(array.item()) if record.get("weak") else jnp.asarray(array)
    if "stored" in record or array.dtype != old.dtype:
        array = array.astype(old.dtype)
    if record.get("weak"):
        weak = jnp.asarray(array.item())
        array = weak if weak.dtype == array.dtype else array
    return _placed(array, old)


def _empty(record: Mapping[str, Any]) -> Any:
    """The data of an entry that has no elements, for which there are no files."""
    if record["kind"] == "array":
        return np.zeros(record["shape"], jnp.dtype(record["dtype"]))
    key_shape = jax.random.key_data(jax.random.key(0, impl=record["impl"])).shape
    return np.zeros((*record["shape"], *key_shape), np.uint32)


def _placed(array: Any, old: Any) -> Any:
    """An array as a value of the kind of `old`, at its place."""
    if isinstance(old, np.generic):
        return np.asarray(array)[()]
    if isinstance(old, np.ndarray):
        return np.asarray(array)
    sharding = _sharding(old)
    if sharding is not None:
        return array if isinstance(array, jax.Array) and array.sharding == sharding else jax.device_put(array, sharding)
    return jnp.asarray(array)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _listing(paths: list[str]) -> str:
    return ", ".join(map(repr, paths[:12])) + (f" and {len(paths) - 12} more" if len(paths) > 12 else "")
