"""Saving and loading: `save(path, obj)`, `load(path, target)` and `checkpoint_entries(path)`."""

import contextlib
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

from nnx.core.hints.hints import refuse_foreign_file
from nnx.storage.checkpoints.loading import Loading, load_all
from nnx.storage.checkpoints.manifest import read_manifest
from nnx.storage.checkpoints.saving import Saving
from nnx.storage.errors import LoadReport
from nnx.storage.locations import location
from nnx.storage.safetensors.shards import holds_safetensors, open_model
from nnx.storage.safetensors.source import Source
from nnx.storage.transfer_bar import transfer

T = TypeVar("T")

LOADED_IN_PART = """The checkpoint at {path} fits the target only in part; the rest of the target was not changed.
{differences}"""
SETTINGS_CHANGED = """The checkpoint at {path} was loaded, but some settings of the target differ from the saved object:
{changes}"""


def save(path: str | os.PathLike[str], obj: Any) -> None:
    """Saves an object to a directory or an object store, replacing an existing checkpoint.

    The new checkpoint replaces an older one in one step, once it is complete: an interrupted save leaves the older one
    intact. Arrays, typed keys, numbers, strings and states of data iterators are saved by path. Static attributes are
    not saved, so build the target of `load` with the code that built the object.

    With several processes, each of them must call this function, with the same path and an object of the same
    structure. It returns when all of them see the new checkpoint. Values that are not spread over the processes are
    taken from process 0.

    Args:
        path: the directory or URL (`gs://`, `s3://`) to save to.
        obj: a Module, State, TrainState, Optimizer, metric, Context, data iterator, or a dict (any pytree) of them and
            of arrays, numbers, strings and bytes.

    Raises:
        CheckpointError: the checkpoint could not be written, or another job has saved to the path meanwhile. It is both
            an OSError and a ValueError.
        TypeError: a value is not data, or has a dtype that cannot be saved.
        ValueError: an array has no values (it is abstract, traced or donated).

    >>> import tempfile
    >>> model, ctx = nnx.Linear(2, 3, ctx=nnx.context(0)), nnx.context(dropout=1)
    >>> path = tempfile.mkdtemp() + "/checkpoint"
    >>> nnx.save(path, {"model": model, "ctx": ctx, "epoch": 4})
    >>> other = nnx.Linear(2, 3, ctx=nnx.context(5))
    >>> restored = nnx.load(path, {"model": other, "ctx": ctx, "epoch": 0})
    >>> restored["epoch"], bool((other.kernel == model.kernel).all())
    (4, True)
    """
    saving = Saving(location(path), obj, wait=True)
    with transfer("saving", path, saving.size):
        saving.finish()


class CheckpointEntry(NamedTuple):
    """The description of one entry of a checkpoint.

    Attributes:
        kind: "array", "key" (typed random keys), "number" (a Python number), "text" (a string), "bytes", or "state"
            (that of a data iterator).
        shape: the shape; empty for everything but arrays and keys.
        dtype: the name of the dtype, or of the Python type of a number; otherwise empty.
        type: the name of the Variable type that held it; empty if there was none.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    type: str


def checkpoint_entries(path: str | os.PathLike[str]) -> dict[str, CheckpointEntry]:
    """Lists what a checkpoint or a safetensors file contains, by path, without reading arrays.

    Args:
        path: the directory or URL of a checkpoint; or a safetensors file, an index, or a directory that contains one of
            them.

    Returns:
        The type, shape and dtype of each entry, by path.

    Raises:
        FileNotFoundError: there is nothing at the path.
        CheckpointError: the file or directory is damaged, malformed or incomplete.

    >>> import tempfile
    >>> path, model = tempfile.mkdtemp(), nnx.Linear(2, 3, ctx=nnx.context(0))
    >>> nnx.save(path + "/model", model)
    >>> for name, entry in nnx.checkpoint_entries(path + "/model").items():
    ...     print(name, entry.dtype, entry.shape, entry.type)
    bias float32 (3,) Param
    kernel float32 (2, 3) Param
    >>> nnx.save_safetensors(path + "/model.safetensors", model)
    >>> sorted(nnx.checkpoint_entries(path + "/model.safetensors"))
    ['bias', 'kernel']
    """
    place = location(path)
    if place.local is not None and holds_safetensors(place.local):
        return entries_of_safetensors(place.local)
    entries = read_manifest(place).entries
    return {name: CheckpointEntry(entry.kind, entry.shape, entry.dtype, entry.type) for name, entry in entries.items()}


def entries_of_safetensors(path: Path) -> dict[str, CheckpointEntry]:
    """Lists the tensors of a safetensors file, an index or a directory.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: a file is malformed.
    """
    with contextlib.ExitStack() as opened:
        source = Source(open_model(path, opened), None)
        entries = {name: source.describe(name) for name in source.names}
        return {name: CheckpointEntry(entry.kind, entry.shape, entry.dtype, "") for name, entry in entries.items()}


# Loading


@overload
def load(
    path: str | os.PathLike[str],
    *,
    verify: bool = True,
    rename: Mapping[str, str] | None = None,
    only: str | Sequence[str] | None = None,
) -> Any: ...


@overload
def load(
    path: str | os.PathLike[str],
    target: T,
    *,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    rename: Mapping[str, str] | None = None,
    only: str | Sequence[str] | None = None,
    report: LoadReport | None = None,
) -> T: ...


_NO_TARGET: Any = object()


def load(
    path: str | os.PathLike[str],
    target: Any = _NO_TARGET,
    *,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    rename: Mapping[str, str] | None = None,
    only: str | Sequence[str] | None = None,
    report: LoadReport | None = None,
) -> Any:
    """Fills a target from a checkpoint and returns it; without a target, returns the contents of the checkpoint.

    Modules, Contexts, dicts and lists are filled in place; immutable targets (a State, a TrainState, an array) are
    returned as new objects. Arrays take the sharding of those in the target, which may be abstract
    (`nnx.eval_shape`): each device then reads its own part.

    A static attribute that has changed since the checkpoint was saved (a Dropout rate, clipping added to the optimizer)
    is reported as a warning, or in `report`.

    Args:
        path: the directory or URL that was given to `save`.
        target: an object of the structure that was saved, with any values. Without one, a nested dict of NumPy arrays
            and values is returned, nested by the segments of their paths.
        strict: whether everything must fit. If False, the values that fit are loaded, and the others are reported and
            left unchanged; optimizer state is then also found if a transformation was added to the chain or removed.
        cast: whether to convert values of a different dtype to that of the target. A complex value never fits a real
            one.
        verify: whether to verify the checksums of the data that are read.
        rename: new names for paths of the checkpoint, e.g. `{"old/**": "new/**"}`; the first pattern that matches is
            used.
        only: the part to load, as a path or a pattern, or several: `only="model"` loads the model of a run. Whatever
            is elsewhere, in the checkpoint or in the target, is ignored.
        report: a LoadReport to fill with the entries that do not fit and the settings that changed, instead of
            warning.

    Returns:
        The target, a new object in place of an immutable target, or the nested dict.

    Raises:
        FileNotFoundError: there is nothing at the path.
        CheckpointError: the checkpoint is damaged or incomplete, or does not fit and `strict` is set. The target is
            unchanged.
        ValueError: a pattern of `rename` or `only` matches nothing.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/model"
    >>> nnx.save(path, nnx.Linear(2, 3, ctx=nnx.context(0)))
    >>> model = nnx.load(path, nnx.Linear(2, 3, ctx=nnx.context(1)))
    >>> nnx.load(path)["kernel"].shape
    (2, 3)
    """
    place = location(path)
    if place.local is not None:
        refuse_foreign_file(place.local)
    if target is _NO_TARGET:
        return load_all(place, verify, rename, only)
    loading = Loading(place, target, strict, cast, verify, rename, only)
    filled = loading.run()
    if report is not None:
        report.__dict__.update(loading.report.__dict__)
    elif loading.report:
        warnings.warn(LOADED_IN_PART.format(path=place, differences=loading.report), stacklevel=2)
    elif loading.report.changed:
        changed = "\n".join(loading.report.changes())
        warnings.warn(SETTINGS_CHANGED.format(path=place, changes=changed), stacklevel=2)
    return filled
