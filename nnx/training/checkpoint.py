"""Saving and loading: `save(path, obj)` and `load(path, target)`.

Arrays are saved under their paths, each part by the process that has it, and read into the shardings of the target.
A load first finds out all that could be wrong (paths, shapes, dtypes, and the checksum of every byte it needs), and
only then changes the target, part by part: each old array can go before the next new one is read.
"""

import contextlib
import os
import signal
import threading
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

from nnx.core.processes import Exchange, ProcessError
from nnx.training.chunk_reader import ChunkReader
from nnx.training.chunks import Box
from nnx.training.entries import Entries
from nnx.training.manifest import FILE_NAME, CheckpointError, DamagedError, Manifest, read_manifest
from nnx.training.matching import LoadReport as LoadReport
from nnx.training.matching import match
from nnx.training.orbax_format import OrbaxReader
from nnx.training.places import Place
from nnx.training.records import Record
from nnx.training.renaming import renamed
from nnx.training.saving import Saving

T = TypeVar("T")

DOES_NOT_FIT = """The checkpoint at {path} does not fit the target. Nothing was loaded.
{differences}
Build the target as the saved object was built, or load what fits with nnx.load(path, target, strict=False)."""
LOADED_IN_PART = """The checkpoint at {path} fits the target only in part; the rest of the target was left as it was.
{differences}"""
SETTINGS_CHANGED = """The checkpoint at {path} was loaded, but the target is not set up as the saved object was:
{changes}"""
FILLED_IN_PART = """The checkpoint at {path} was checked, but could not be read again: {reason}. The target is filled \
in part: build it again before loading another checkpoint."""
OTHER_MANIFEST = """Process {peer} and process 0 read different checkpoints at {path}: another job is saving there, or \
the processes do not share a disk. Nothing was loaded."""

_SMALL = 16 << 20  # how many bytes are read at a time, even if no array is that large


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
        return _load_all(directory, verify, rename)
    loading = _Loading(directory, target, strict, cast, verify, rename)
    filled = loading.run()
    if report is not None:
        report.__dict__.update(loading.report.__dict__)
    elif loading.report:
        warnings.warn(LOADED_IN_PART.format(path=directory, differences=loading.report), stacklevel=2)
    elif loading.report.changed:
        changed = "\n".join(loading.report.changes())
        warnings.warn(SETTINGS_CHANGED.format(path=directory, changes=changed), stacklevel=2)
    return filled


def _reader(directory: Path, manifest: Manifest, verify: bool) -> ChunkReader | OrbaxReader:
    if manifest.version == 1:
        return OrbaxReader(directory, manifest)
    return ChunkReader(directory, manifest, verify)


def _load_all(directory: Path, verify: bool, rename: Mapping[str, str] | None) -> Any:
    """What a checkpoint holds, as nested dicts by the segments of the paths."""
    manifest = read_manifest(directory)
    names = renamed(manifest.entries, rename or {})
    whole = {path: _host_place(record) for path, record in manifest.entries.items()}
    with contextlib.closing(_reader(directory, manifest, verify)) as reader:
        boxes = {path: whole[path].boxes(record) for path, record in manifest.entries.items() if record.has_data}
        parts = reader.read(boxes) if boxes else {}
    root: dict[str, Any] = {}
    for name, path in names.items():
        value = whole[path].value(manifest.entries[path], parts.pop(path, None))
        if name == "":
            return value
        *parents, last = name.split("/")
        inner = root
        for segment in parents:
            inner = inner.setdefault(segment, {})
        inner[last] = value
    return root


def _host_place(record: Record) -> Place:
    return Place("numpy", record.data_dtype, record.shape) if record.kind == "array" else Place("number")


class _Loading:
    """One load into a target: everything that can fail comes first, on every process, then the target is filled."""

    def __init__(
        self,
        directory: Path,
        target: Any,
        strict: bool,
        cast: bool,
        verify: bool,
        rename: Mapping[str, str] | None,
    ):
        self._directory, self._target = directory, target
        self._strict, self._cast, self._verify, self._rename = strict, cast, verify, rename
        self._reader: ChunkReader | OrbaxReader | None = None
        self.report = LoadReport()

    def run(self) -> Any:
        try:
            self._agree()
            if self._first is not None:
                return self._entries.fill(self._first)
            with _no_interrupt():
                return self._fill_part_by_part()
        finally:
            if self._reader is not None:
                self._reader.close()

    def _agree(self) -> None:
        """Prepares on every process; what fails on one fails on all, before anything is changed."""
        failure: list[Exception] = []

        def prepare() -> Any:
            try:
                self._prepare()
            except (CheckpointError, FileNotFoundError) as error:
                failure.append(error)
                return [isinstance(error, DamagedError), str(error)]
            return self._checksum

        try:
            outcomes = Exchange(f"nnx.load({str(self._directory)!r})").together(prepare)
        except ProcessError as error:
            raise CheckpointError(str(error)) from error
        if failure:
            raise failure[0]
        for peer, outcome in enumerate(outcomes):
            if isinstance(outcome, list):
                damaged, text = outcome
                raise (DamagedError if damaged else CheckpointError)(f"Process {peer}: {text}")
            if outcome != outcomes[0]:
                raise CheckpointError(OTHER_MANIFEST.format(peer=peer, path=self._directory))

    def _prepare(self) -> None:
        manifest = self._manifest = read_manifest(self._directory)
        self._checksum = zlib.crc32((self._directory / FILE_NAME).read_bytes()) if manifest.data else 0
        entries = self._entries = Entries(self._target)
        entries.check_level()
        self._places = {path: Place.of(entry.value) for path, entry in entries.leaves.items()}
        self._found, self.report = match(
            manifest, entries, self._places, strict=self._strict, cast=self._cast, rename=self._rename
        )
        if self.report and self._strict:
            raise CheckpointError(DOES_NOT_FIT.format(path=self._directory, differences=self.report))
        entries.release()
        if any(manifest.entries[saved].has_data for saved in self._found.values()):
            self._reader = _reader(self._directory, manifest, self._verify)
        self._groups = self._grouped()
        # What is read in one go is checked while it is read. Otherwise it is all checked first, and kept by nobody:
        # nothing of the target may change before the last byte is known to be right.
        self._first: dict[str, Any] | None = self._values(self._groups[0]) if len(self._groups) == 1 else None
        if self._first is None and self._verify and self._reader is not None:
            self._reader.check({path: boxes for group in self._groups for path, boxes in self._boxes(group).items()})

    def _grouped(self) -> list[list[str]]:
        """The paths of the target in groups that are read together: none larger than the largest array needs to be."""
        units = [[path for path in unit if path in self._found] for unit in self._entries.units()]
        sizes = [sum(map(self._bytes, unit)) for unit in units]
        limit = max(_SMALL, *map(self._bytes, self._found)) if self._found else _SMALL
        groups: list[list[str]] = [[]]
        used = 0
        for unit, size in zip(units, sizes, strict=True):
            if used and used + size > limit:
                groups.append([])
                used = 0
            groups[-1] += unit
            used += size
        return groups

    def _bytes(self, path: str) -> int:
        record = self._manifest.entries[self._found[path]]
        if not record.has_data:
            return 0
        return sum(box.size for box in self._places[path].boxes(record)) * record.data_dtype.itemsize

    def _boxes(self, group: list[str]) -> dict[str, list[Box]]:
        """The boxes to read for a group, by path in the checkpoint; two places may want the same array."""
        wanted: dict[str, list[Box]] = {}
        for path in group:
            saved = self._found[path]
            record = self._manifest.entries[saved]
            if record.has_data:
                boxes = wanted.setdefault(saved, [])
                boxes += [box for box in self._places[path].boxes(record) if box not in boxes]
        return wanted

    def _values(self, group: list[str], verify: bool | None = None) -> dict[str, Any]:
        boxes = self._boxes(group)
        parts = self._reader.read(boxes, verify=verify) if self._reader is not None and boxes else {}
        values: dict[str, Any] = {}
        for path in group:
            saved, place = self._found[path], self._places[path]
            record = self._manifest.entries[saved]
            own = None
            if record.has_data:
                by_box = dict(zip(boxes[saved], parts[saved], strict=True))
                own = [by_box[box] for box in place.boxes(record)]
            values[path] = place.value(record, own)
        return values

    def _fill_part_by_part(self) -> Any:
        outside: dict[str, Any] = {}
        own = set(self._entries.units()[-1])
        try:
            for group in self._groups:
                values = self._values(group, verify=False)
                outside |= {path: value for path, value in values.items() if path in own}
                self._entries.fill_cells(values)
                del values
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CheckpointError(FILLED_IN_PART.format(path=self._directory, reason=reason)) from error
        return self._entries.fill_outside(outside)


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Lets Ctrl-C wait until the block has ended: a target must not stay half filled."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        raise KeyboardInterrupt
