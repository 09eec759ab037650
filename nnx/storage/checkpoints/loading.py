"""A load in progress: everything that can fail is checked first, then the target is filled.

Arrays are read into the shardings of the target; each process reads the parts of its own devices. Before anything is
changed, every process has compared paths, shapes and dtypes, and verified the checksum of every byte it needs. Then the
target is filled part by part: each old array can be freed before the next new one is read, so a load needs little more
memory than the target.
"""

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from nnx.storage.checkpoints.array_reader import ArrayReader
from nnx.storage.checkpoints.manifest import FILE_NAME, Manifest, read_manifest
from nnx.storage.checkpoints.matching import match_entries
from nnx.storage.checkpoints.old_formats import Format1Reader, Format2Reader
from nnx.storage.entry import Entry
from nnx.storage.errors import CheckpointError, DamagedError, LoadReport, first_line
from nnx.storage.expected import Expected
from nnx.storage.leaves import Leaves
from nnx.storage.locations import Location
from nnx.storage.placing import Box
from nnx.storage.processes import Exchange, ProcessError
from nnx.storage.renaming import renamed, selected
from nnx.storage.transfer_bar import transfer

DOES_NOT_FIT = """The checkpoint at {path} does not fit the target. Nothing was loaded.
{differences}
Build the target as the saved object was built, or load what fits with nnx.load(path, target, strict=False)."""
FILLED_IN_PART = """The checkpoint at {path} was checked, but could not be read again: {reason}. The target is only \
filled in part: build it again before loading another checkpoint."""
REPLACED = "another job keeps replacing it"
OTHER_MANIFEST = """Process {peer} and process 0 read different checkpoints at {path}: another job is saving there, or \
the processes do not share a disk. Nothing was loaded."""

_ATTEMPTS = 20  # to read a checkpoint that another job keeps replacing in the meantime
SMALL = 1 << 30
"""The bytes that may always be read at once, even if no array is that large."""


_READERS = {1: Format1Reader, 2: Format2Reader, 3: ArrayReader}  # by the version of the format
Reader = Format1Reader | Format2Reader | ArrayReader


def load_all(place: Location, verify: bool, rename: Mapping[str, str] | None, only: str | Sequence[str] | None) -> Any:
    """Returns the contents of a checkpoint as nested dicts, by the segments of the paths."""
    for attempt in range(_ATTEMPTS):
        before = _generation(place)
        try:
            manifest = read_manifest(place)
            names = renamed(manifest.entries, rename or {})
            names = {name: names[name] for name in names if name in selected(names, only)} if only else names
            values = _read_all(place, manifest, verify, names.values())
            break
        except DamagedError:
            if attempt == _ATTEMPTS - 1 or _generation(place) == before:
                raise
    root: dict[str, Any] = {}
    for name, path in names.items():
        value = values.pop(path)
        if name == "":
            return value
        *parents, last = name.split("/")
        inner: Any = root
        for segment in parents:
            inner = inner.setdefault(segment, {}) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and last not in inner:
            inner[last] = value
        else:  # a key that contains "/", below the path of another value
            root[name] = value
    return root


def _read_all(place: Location, manifest: Manifest, verify: bool, paths: Iterable[str]) -> dict[str, Any]:
    """Returns values as they are kept on the host, by path."""
    expected = {path: _kept_on_host(manifest.entries[path]) for path in paths}
    parts = WantedParts(manifest, expected, {path: path for path in expected})
    if not parts.have_data(expected):
        return parts.values(expected, None)
    with contextlib.closing(_READERS[manifest.version](place, manifest, verify)) as reader:
        with transfer("loading", place, sum(map(parts.size, expected))):
            return parts.values(expected, reader)


def _kept_on_host(entry: Entry) -> Expected:
    return Expected("numpy", entry.data_dtype, entry.shape) if entry.kind == "array" else Expected("number")


class WantedParts:
    """The parts of arrays that this process reads for each path of the target.

    Args:
        manifest: the manifest of the checkpoint.
        expected: what the target expects, by path.
        found: the paths in the checkpoint, by path of the target.
    """

    def __init__(self, manifest: Manifest, expected: Mapping[str, Expected], found: Mapping[str, str]):
        self._expected, self._found = expected, found
        self._entries = {path: manifest.entries[saved] for path, saved in found.items()}
        self._boxes = {path: expected[path].boxes(entry) for path, entry in self._entries.items() if entry.has_data}
        self._sizes = {
            path: sum([box.size for box in boxes]) * self._entries[path].data_dtype.itemsize
            for path, boxes in self._boxes.items()
        }

    def have_data(self, paths: Iterable[str]) -> bool:
        """Whether anything has to be read for some paths."""
        return any(path in self._boxes for path in paths)

    def size(self, path: str) -> int:
        """Returns the bytes to be read for a path."""
        return self._sizes.get(path, 0)

    def boxes(self, paths: Iterable[str]) -> dict[str, list[Box]]:
        """Returns the boxes to read, by path in the checkpoint; two values may need the same array."""
        wanted: dict[str, list[Box]] = {}
        for path in paths:
            if path in self._boxes:
                boxes = wanted.setdefault(self._found[path], [])
                boxes += [box for box in self._boxes[path] if box not in boxes] if boxes else self._boxes[path]
        return wanted

    def values(self, paths: Iterable[str], reader: "Reader | None") -> dict[str, Any]:
        """Reads values and returns them as the target expects them, by path."""
        boxes = self.boxes(paths)
        parts = reader.read(boxes) if reader is not None and boxes else {}
        read = {saved: dict(zip(boxes[saved], parts[saved], strict=True)).__getitem__ for saved in boxes}
        return {
            path: self._expected[path].value(self._entries[path], read.get(self._found[path], _nothing))
            for path in paths
        }


def _nothing(box: Box) -> np.ndarray:
    raise AssertionError(box)  # of an entry without data, nothing is read


class _Prepared(NamedTuple):
    """What preparing a load on one process led to: the checksum of the manifest it found, or the error."""

    checksum: int
    error: str = ""
    damaged: bool = False
    replaced: bool = False  # whether the checkpoint was replaced by another one in the meantime


def _generation(place: Location) -> bytes | None:
    """Returns a value that changes when a checkpoint is replaced; None if it cannot be read."""
    try:
        return place.read(FILE_NAME, 1).generation
    except OSError:
        return None


class Loading:
    """One load into a target: everything that can fail happens first, on every process, then the target is filled."""

    def __init__(
        self,
        place: Location,
        target: Any,
        strict: bool,
        cast: bool,
        verify: bool,
        rename: Mapping[str, str] | None,
        only: str | Sequence[str] | None,
    ):
        self._place, self._target = place, target
        self._strict, self._cast, self._verify, self._rename, self._only = strict, cast, verify, rename, only
        self._reader: Reader | None = None
        self._filled: Any = None
        self._first: dict[str, Any] = {}
        self.report: LoadReport = LoadReport()

    def run(self) -> Any:
        try:
            exchange = Exchange(f"nnx.load({str(self._place)!r})")
            self._agree(exchange)
            for _ in range(_ATTEMPTS):
                if not any(exchange.together(self._try_to_fill)):
                    return self._filled
                try:
                    self._agree(exchange)
                except (CheckpointError, FileNotFoundError) as error:  # the new checkpoint does not fit
                    raise CheckpointError(FILLED_IN_PART.format(path=self._place, reason=first_line(error))) from error
            raise CheckpointError(FILLED_IN_PART.format(path=self._place, reason=REPLACED))
        except ProcessError as error:
            raise CheckpointError(str(error)) from error
        finally:
            self._close()

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _agree(self, exchange: Exchange) -> None:
        """Prepares on every process; a failure on one is raised on all, before anything is changed."""
        outcomes: list[_Prepared] = []
        for attempt in range(_ATTEMPTS):
            outcomes = [_Prepared(*outcome) for outcome in exchange.together(self._try_to_prepare)]
            same = len({outcome.checksum for outcome in outcomes}) == 1
            if same and not any(outcome.replaced for outcome in outcomes):
                break
            time.sleep(0.02 * attempt)  # another job has just saved there; all processes read the new one
        if self._failure is not None:
            raise self._failure
        for peer, outcome in enumerate(outcomes):
            if outcome.error:
                raise (DamagedError if outcome.damaged else CheckpointError)(f"Process {peer}: {outcome.error}")
            if outcome.checksum != outcomes[0].checksum:
                raise CheckpointError(OTHER_MANIFEST.format(peer=peer, path=self._place))

    def _try_to_prepare(self) -> "_Prepared":
        self._failure: Exception | None = None
        self._close()
        self._first = {}  # frees what a failed attempt has read
        self._generation = _generation(self._place)
        try:
            self._prepare()
        except (CheckpointError, FileNotFoundError) as error:
            self._failure = error
            damaged = isinstance(error, DamagedError)
            replaced = damaged and self._is_replaced()
            return _Prepared(0, str(error), damaged, replaced)
        return _Prepared(self._manifest.checksum)

    def _is_replaced(self) -> bool:
        return _generation(self._place) != self._generation

    def _prepare(self) -> None:
        manifest = self._manifest = read_manifest(self._place)
        leaves = self._target_leaves = Leaves(self._target)
        leaves.check_level()
        self._expected = {path: Expected.of(leaf.value) for path, leaf in leaves.by_path.items()}
        self._found, self.report = match_entries(
            manifest,
            leaves,
            self._expected,
            strict=self._strict,
            cast=self._cast,
            rename=self._rename,
            only=self._only,
        )
        if self.report and self._strict:
            raise CheckpointError(DOES_NOT_FIT.format(path=self._place, differences=self.report))
        leaves.release()
        self._parts = WantedParts(manifest, self._expected, self._found)
        if self._parts.have_data(self._found):
            self._reader = _READERS[manifest.version](self._place, manifest, self._verify)
        self._groups = self._grouped()
        # The first group is verified while it is read. The others are read twice: now, to be verified and dropped, and
        # again once nothing can fail anymore, because keeping them would take the memory of a second target.
        rest = list(itertools.chain(*self._groups[1:]))
        with transfer("loading", self._place, self._size(self._groups[0] + (rest if self._verify else []))):
            self._first = self._parts.values(self._groups[0], self._reader)
            if self._verify and self._reader is not None:
                self._reader.check(self._parts.boxes(rest))

    def _size(self, paths: Iterable[str]) -> int:
        return sum(map(self._parts.size, paths))

    def _grouped(self) -> list[list[str]]:
        """Returns the paths of the target in groups that are read together, each about as large as the largest array.

        Only arrays in Modules free memory when they are replaced. If there are none (the target is abstract, or a
        pytree that is rebuilt), everything is read in one go.
        """
        units = [[path for path in unit if path in self._found] for unit in self._target_leaves.units()]
        sizes = [sum(map(self._parts.size, unit)) for unit in units]
        limit = max(SMALL, *map(self._parts.size, self._found)) if self._found else SMALL
        makes_room = [path for unit in units[:-1] for path in unit if not self._expected[path].abstract]
        if sum(map(self._parts.size, makes_room)) <= limit:
            return [[path for unit in units for path in unit]]
        groups: list[list[str]] = [[]]
        used = 0
        for unit, size in zip(units, sizes, strict=True):
            if used and used + size > limit:
                groups.append([])
                used = 0
            groups[-1] += unit
            used += size
        return groups

    def _try_to_fill(self) -> bool:
        """Fills the target; returns whether the checkpoint was replaced meanwhile, so that all have to begin again."""
        self._target_leaves.set_iterators(self._states())
        if len(self._groups) == 1:
            self._filled = self._target_leaves.fill(self._first)
            return False
        try:
            rest = self._size(itertools.chain(*self._groups[1:]))
            with _no_interrupt(), transfer("filling the target from", self._place, rest):
                self._filled = self._fill_part_by_part()
        except Exception as error:
            if isinstance(error, DamagedError) and self._is_replaced():
                return True
            reason = first_line(error)
            raise CheckpointError(FILLED_IN_PART.format(path=self._place, reason=reason)) from error
        return False

    def _states(self) -> dict[str, Any]:
        """Returns the states of the data iterators of this process, by path."""
        entries = {path: self._manifest.entries[saved] for path, saved in self._found.items()}
        return {path: e.plain_value[jax.process_index()] for path, e in entries.items() if e.kind == "state"}

    def _fill_part_by_part(self) -> Any:
        outside: dict[str, Any] = {}
        own = set(self._target_leaves.units()[-1])
        for number, group in enumerate(self._groups):
            values = self._parts.values(group, self._reader) if number else self._first
            self._first = {}
            outside |= {path: value for path, value in values.items() if path in own}
            self._target_leaves.fill_cells(values)
            del values
        return self._target_leaves.fill_outside(outside)


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Delays Ctrl-C until the end of the block, because a target must not be left half filled."""
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
