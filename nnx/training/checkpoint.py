"""Saving and loading: `save(path, obj)`, `load(path, target)` and `checkpoint_entries(path)`."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

from nnx.training.loading import Loading, load_all
from nnx.training.manifest import read_manifest
from nnx.training.matching import LoadReport as LoadReport
from nnx.training.saving import Saving

T = TypeVar("T")

LOADED_IN_PART = """The checkpoint at {path} fits the target only in part; the rest of the target was left as it was.
{differences}"""
SETTINGS_CHANGED = """The checkpoint at {path} was loaded, but the target is not set up as the saved object was:
{changes}"""


def save(path: str | os.PathLike[str], obj: Any) -> None:
    """Saves an object to a directory, replacing the checkpoint that may be there.

    The new checkpoint takes the place of an older one at once, when it is complete: an interrupted save leaves the
    older one. Arrays, typed keys, numbers and strings are saved by path; static attributes are not, so the target of
    `load` is built by the code that built the object.

    With several processes every one of them must call it, with the same path and an object of the same structure; it
    returns when all of them see the new checkpoint. Values that are not spread over the processes are those of
    process 0.

    Args:
        path: the directory.
        obj: a Module, State, TrainState, Optimizer, metric, Context, or a dict (any pytree) of them and of arrays and
            numbers.

    Raises:
        CheckpointError: it could not be written, or another job is writing there; an OSError and a ValueError.

    >>> import tempfile
    >>> model, ctx = nnx.Linear(2, 3, ctx=nnx.context(0)), nnx.context(dropout=1)
    >>> path = tempfile.mkdtemp() + "/checkpoint"
    >>> nnx.save(path, {"model": model, "ctx": ctx, "epoch": 4})
    >>> other = nnx.Linear(2, 3, ctx=nnx.context(5))
    >>> restored = nnx.load(path, {"model": other, "ctx": ctx, "epoch": 0})
    >>> restored["epoch"], bool((other.kernel == model.kernel).all())
    (4, True)
    """
    Saving(path, obj, wait=True).finish()


class CheckpointEntry(NamedTuple):
    """What a checkpoint holds under one path.

    Attributes:
        kind: "array", "key" (typed random keys), "number" (a Python number) or "text" (a string).
        shape: the shape; empty for numbers and strings.
        dtype: the name of the dtype, or of the Python type of a number; empty for strings.
        type: the name of the Variable type it was held in; empty if there was none.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    type: str


def checkpoint_entries(path: str | os.PathLike[str]) -> dict[str, CheckpointEntry]:
    """Lists what a checkpoint holds, by path, without reading arrays.

    Raises:
        FileNotFoundError: there is nothing at the path.
        CheckpointError: it is damaged or unfinished.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/model"
    >>> nnx.save(path, nnx.Linear(2, 3, ctx=nnx.context(0)))
    >>> for name, entry in nnx.checkpoint_entries(path).items():
    ...     print(name, entry.dtype, entry.shape, entry.type)
    bias float32 (3,) Param
    kernel float32 (2, 3) Param
    """
    manifest = read_manifest(Path(path).absolute())
    return {
        name: CheckpointEntry(record.kind, record.shape, record.dtype, record.type)
        for name, record in manifest.entries.items()
    }


# Loading


@overload
def load(
    path: str | os.PathLike[str],
    *,
    verify: bool = True,
    rename: Mapping[str, str] | None = None,
) -> Any: ...


@overload
def load(
    path: str | os.PathLike[str],
    target: T,
    strict: bool = True,
    *,
    cast: bool = False,
    verify: bool = True,
    rename: Mapping[str, str] | None = None,
    report: LoadReport | None = None,
) -> T: ...


_NO_TARGET: Any = object()


def load(
    path: str | os.PathLike[str],
    target: Any = _NO_TARGET,
    strict: bool = True,
    *,
    cast: bool = False,
    verify: bool = True,
    rename: Mapping[str, str] | None = None,
    report: LoadReport | None = None,
) -> Any:
    """Fills a target from a checkpoint and returns it; without a target, returns what is there.

    Modules, Contexts, dicts and lists are filled in place; immutable targets (a State, a TrainState, an array) are
    returned as new objects. Arrays take the sharding of those in the target, which may be abstract
    (`nnx.eval_shape`): each device then reads its own part.

    A static attribute that is not what it was when the checkpoint was saved (a Dropout rate, a clipping that was
    added to the optimizer) is reported as a warning, or in `report`.

    Args:
        path: the directory that was given to `save`.
        target: an object of the structure that was saved, with any values. Without one, a nested dict of numpy arrays
            and values is returned, by the segments of their paths.
        strict: whether everything must fit. If not, what fits is loaded, and the rest is reported and left as it is;
            optimizer state is then also found when a transformation was added to the chain or removed.
        cast: whether values of another dtype are converted to that of the target.
        verify: whether the checksums of the data that are read are compared.
        rename: new names for paths of the checkpoint, e.g. `{"old/**": "new/**"}`; the first pattern that matches
            counts.
        report: is filled with what did not fit or has changed, in place of a warning.

    Raises:
        FileNotFoundError: there is nothing at the path.
        CheckpointError: it is damaged or unfinished, or, if `strict`, does not fit. The target is as it was.
        ValueError: a pattern of `rename` matches nothing.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/model"
    >>> nnx.save(path, nnx.Linear(2, 3, ctx=nnx.context(0)))
    >>> model = nnx.load(path, nnx.Linear(2, 3, ctx=nnx.context(1)))
    >>> nnx.load(path)["kernel"].shape
    (2, 3)
    """
    directory = Path(path).absolute()
    if target is _NO_TARGET:
        return load_all(directory, verify, rename)
    loading = Loading(directory, target, strict, cast, verify, rename)
    filled = loading.run()
    if report is not None:
        report.__dict__.update(loading.report.__dict__)
    elif loading.report:
        warnings.warn(LOADED_IN_PART.format(path=directory, differences=loading.report), stacklevel=2)
    elif loading.report.changed:
        changed = "\n".join(loading.report.changes())
        warnings.warn(SETTINGS_CHANGED.format(path=directory, changes=changed), stacklevel=2)
    return filled
