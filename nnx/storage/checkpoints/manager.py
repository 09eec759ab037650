"""CheckpointManager: the checkpoints of one run, by step. It writes them during training and removes old ones."""

import atexit
import json
import operator
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import jax
from jax.experimental import multihost_utils

from nnx.core.hints.hints import add_hints, explain_keywords
from nnx.core.hints.table import CHECKPOINT_MANAGER
from nnx.core.repr import short
from nnx.storage.checkpoints import sigterm
from nnx.storage.checkpoints.checkpoint import load
from nnx.storage.checkpoints.saving import SAVE_FAILED, Saving
from nnx.storage.checkpoints.steps import Rest, Steps, remove
from nnx.storage.errors import CheckpointError, DamagedError
from nnx.storage.files import unique_token
from nnx.storage.leaves import fills_in_place
from nnx.storage.locations import location
from nnx.storage.processes import Exchange, ProcessError, on_first

T = TypeVar("T")

NO_STEPS = "There is no finished checkpoint in {directory}."
NO_STEP = "There is no finished checkpoint of step {step} in {directory}; the available steps are: {steps}."
BAD_STEP = "A step is an integer, 0 or larger, got {step!r}."
BAD_KEEP_LAST = "CheckpointManager keeps at least the last checkpoint: keep_last >= 1, got {got}."
BAD_PERIOD = "keep_period is at least 1, got {got}."
BAD_MODE = 'best_mode is "min" or "max", got {got!r}.'
BAD_STEPS = "every_steps is at least 1, got {got}."
BAD_MINUTES = "every_minutes is more than 0, got {got}."
STEP_EXISTS = """Step {step} was saved to {directory} before; the last step there is {latest}. Save later steps, or \
overwrite it with manager.save(..., overwrite=True)."""
LOWER_STEP = """Step {step} comes before step {latest}, which was saved to {directory}. Resume from the last step, or \
go back with manager.save(..., overwrite=True), which removes the steps after {step}."""
NO_METRIC = """CheckpointManager(keep_best={keep_best}) keeps the best by metrics[{metric!r}], but save got the \
metrics: {given}. Pass manager.save(step, obj, metrics={{{metric!r}: value}})."""
READ_ONLY = "This CheckpointManager of {directory} cannot save: it was made with read_only=True."
BAD_METADATA = """metadata is stored as JSON, which cannot hold {got}: {reason}. Pass strings, numbers, lists and \
dicts of them; arrays belong to the saved object."""
SKIPPED = """Resumed from step {step}, because later checkpoints in {directory} are damaged:
{damages}
They will be removed when the next step is saved."""
NOT_IN_PLACE = """resume fills its target in place, and {target} cannot change: put it into a dict, or use \
manager.load(target, manager.latest_step()). Nothing was loaded."""
ENDED_TOO_EARLY = """nnx.CheckpointManager: the program ended while a checkpoint was being written to {directory}; it \
could not be completed: {error}
End with manager.wait(), or use the manager as `with nnx.CheckpointManager(...) as manager:`."""


class CheckpointManager:
    """Saves and loads the checkpoints of a run.

    Each step is a directory as `nnx.save` writes it. `save` returns as soon as the values have left the devices, and
    the rest happens in the background; an error there is raised by the next call. An interrupted save leaves the
    earlier checkpoints intact. A program that gets SIGTERM, or ends, first completes the save in progress.

    With several processes, each of them must make the same calls. All see the same steps, and `wait` returns when the
    checkpoint is visible to all of them.

    Args:
        directory: the directory or URL of the steps; the first save creates it.
        keep_last: the number of latest steps to keep, at least 1; None keeps all. The one just saved is always kept.
        keep_period: the interval of steps to keep for good: multiples of it are not removed, whatever `keep_last` says.
        keep_best: the number of best steps to keep in addition.
        best_metric: the metric that decides which step is best, one of those given to `save`.
        best_mode: "min" if the smallest value is best, "max" if the largest is.
        asynchronous: whether to complete saves in the background.
        every_steps: the interval in steps: only multiples of it are saved. Call `save` at every step and let the
            manager decide.
        every_minutes: the interval in minutes since the last save. With both intervals, either one is enough.
        save_on_sigterm: whether the next call of `save` after SIGTERM saves in any case and then ends the program.
        read_only: whether `save` is refused, for a program that only looks at the run of another one.

    >>> import tempfile
    >>> model = nnx.Linear(2, 3, ctx=nnx.context(0))
    >>> with nnx.CheckpointManager(tempfile.mkdtemp(), keep_last=2) as manager:
    ...     start = manager.resume({"model": model})  # None: there is nothing yet
    ...     for step in range(4):
    ...         saved = manager.save(step, {"model": model})
    ...     manager.wait()
    ...     manager.steps()
    [2, 3]
    """

    @explain_keywords
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = 3,
        keep_period: int | None = None,
        keep_best: int = 0,
        best_metric: str = "loss",
        best_mode: Literal["min", "max"] = "min",
        asynchronous: bool = True,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        save_on_sigterm: bool = False,
        read_only: bool = False,
    ):
        if keep_last is not None and keep_last < 1:
            raise ValueError(BAD_KEEP_LAST.format(got=keep_last))
        if keep_period is not None and keep_period < 1:
            raise ValueError(BAD_PERIOD.format(got=keep_period))
        if best_mode not in ("min", "max"):
            raise ValueError(BAD_MODE.format(got=best_mode))
        if every_steps is not None and every_steps < 1:
            raise ValueError(BAD_STEPS.format(got=every_steps))
        if every_minutes is not None and not every_minutes > 0:
            raise ValueError(BAD_MINUTES.format(got=every_minutes))
        self._steps = Steps(location(directory))
        local = self._steps.place.local
        self.directory: Path | str = str(self._steps.place) if local is None else local
        self._keep_last = keep_last
        self._keep_period = keep_period
        self._keep_best = keep_best
        self._best_metric = best_metric
        self._best_mode = best_mode
        self._asynchronous = asynchronous
        self._every_steps = every_steps
        self._every_minutes = every_minutes
        self._save_on_sigterm = save_on_sigterm
        self._read_only = read_only
        self._last_time = time.monotonic()
        self._damaged: set[int] = set()  # the steps that `resume` found to be damaged
        self._writing: list[_Writing] = []  # the saves in progress, and those that still remove old data
        self._error: BaseException | None = None
        self._busy = False  # whether the main thread is saving, which a signal handler cannot wait for
        self._ending = False  # whether SIGTERM has arrived

    # Questions

    def steps(self) -> list[int]:
        """Returns the steps that have a finished checkpoint, in order."""
        return self._ask("steps()", self._finished)

    def latest_step(self) -> int | None:
        """Returns the last step that has a finished checkpoint; None if there is none."""
        return self._ask("latest_step()", lambda: max(self._finished(), default=None))

    def best_step(self) -> int | None:
        """Returns the step with the best metric, the latest one if several are equally good; None if no step has it."""
        return self._ask("best_step()", lambda: next(iter(self._ranked()), None))

    def metrics(self, step: int) -> dict[str, float]:
        """Returns the metrics that were saved with a step."""
        return self._ask("metrics()", lambda: self._metrics(step))

    def metadata(self, step: int) -> dict[str, Any]:
        """Returns the metadata that was saved with a step."""
        return self._ask("metadata()", lambda: dict(self._steps.info(step).get("metadata") or {}))

    def _ask(self, what: str, question: Callable[[], T]) -> T:
        """Asks process 0, so that all processes get the same answer."""
        try:
            return on_first(f"CheckpointManager({str(self.directory)!r}).{what}", question)
        except ProcessError as error:
            raise CheckpointError(str(error)) from error

    def _finished(self) -> list[int]:
        return [step for step in self._steps.finished() if step not in self._damaged]

    def _metrics(self, step: int) -> dict[str, float]:
        found = self._steps.info(step).get("metrics", {})
        return dict(found) if isinstance(found, dict) else {}

    def _ranked(self) -> list[int]:
        """Returns the steps that have the metric, the best one first; NaN counts as the worst value."""
        sign = 1 if self._best_mode == "min" else -1
        scored = [(step, self._metrics(step).get(self._best_metric)) for step in self._finished()]
        numbers = [(step, score) for step, score in scored if isinstance(score, (int, float))]
        # NaN, which differs from itself, sorts last. Among equal scores, the latest step comes first.
        numbers.sort(key=lambda item: (item[1] != item[1], sign * item[1] if item[1] == item[1] else 0.0, -item[0]))
        return [step for step, _ in numbers]

    # Saving

    def save(
        self,
        step: int,
        obj: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        force: bool = False,
    ) -> bool:
        """Saves an object as a step, if the step is due.

        Args:
            step: the number of the step; any integer, including those of NumPy and JAX.
            obj: the object to save, as in `nnx.save`.
            metrics: numbers to store with it, by name.
            metadata: anything else to store with it that JSON can hold, by name.
            overwrite: whether the step may be saved if it does not come after the last one. The steps after it belong
                to an abandoned part of the run; they are removed once this one is complete.
            force: whether to save even if the step is not due by `every_steps` and `every_minutes`.

        Returns:
            Whether the step was saved.

        Raises:
            ValueError: the step was saved before, comes before the last one, or lacks the metric of `keep_best`.
            CheckpointError: this step, or the one still being written, could not be written.
        """
        if self._read_only:
            raise ValueError(READ_ONLY.format(directory=self.directory))
        number = _step_number(step)
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        if self._keep_best and self._best_metric not in numbers:
            given = ", ".join(numbers) or "none"
            text = NO_METRIC.format(keep_best=self._keep_best, metric=self._best_metric, given=given)
            raise ValueError(text)
        if self._save_on_sigterm:
            sigterm.watch(self)
        ending = self._must_end(number)
        if not (force or ending or self._is_due(number)):
            return False
        self._wait_for_save()
        saved = not (ending and number in self.steps())
        if saved:
            self._save(number, obj, {"metrics": numbers, "metadata": _plain(metadata)}, overwrite)
        if ending or self._ending:
            self.wait()
            self._end()
        return saved

    def _is_due(self, step: int) -> bool:
        if self._every_steps is None and self._every_minutes is None:
            return True
        if self._every_steps is not None and step % self._every_steps == 0:
            return True
        if self._every_minutes is None:
            return False
        seconds = 60 * self._every_minutes
        return self._ask("is_due", lambda: time.monotonic() - self._last_time >= seconds)

    def _save(self, step: int, obj: Any, info: Mapping[str, Any], overwrite: bool) -> None:
        self._busy = True
        sigterm.watch(self)
        try:
            save = unique_token()
            self._ask(f"save({step})", lambda: self._begin(step, save, overwrite))
            exchange = Exchange(f"CheckpointManager({str(self.directory)!r}).save({step})")
            info = {"step": step, **info, "save": save}
            saving = Saving(self._steps.path(step), obj, info, wait=not self._asynchronous)
            writing = _Writing(lambda done: self._complete(step, saving, exchange, done))
            if self._asynchronous:
                self._writing.append(writing)
                _unfinished.add(self)
                writing.start()
            else:
                writing.run()
            self._last_time = time.monotonic()
        finally:
            self._busy = False
            self._unwatch()
        if not self._asynchronous:
            self._raise_error()

    def _begin(self, step: int, save: str, overwrite: bool) -> None:
        """Checks, on process 0, that the step may be saved."""
        try:
            if self._steps.has_intent():
                remove(self._steps.tidy())
            finished = self._finished()
            latest = max(finished, default=-1)
            if step <= latest and not overwrite:
                text = STEP_EXISTS if step in finished else LOWER_STEP
                raise ValueError(text.format(step=step, directory=self.directory, latest=latest))
            # Damaged steps are not among the finished ones, but would be again if they came after the last step.
            if step < max([latest, *self._damaged]):
                self._steps.intend_to_end_at(step, save)
        except OSError as error:
            reason = f"{type(error).__name__}: {error}".rstrip(".")
            raise CheckpointError(SAVE_FAILED.format(path=self._steps.path(step), reason=reason)) from error

    def _complete(self, step: int, saving: Saving, exchange: Exchange, done: threading.Event) -> None:
        """Finishes a save, and removes what is not kept: the manifests before the save is done, the data after it."""
        rests: list[Rest] = []
        try:
            saving.finish()
            exchange.on_first(lambda: rests.extend(self._forget_old(step)))
            self._damaged = {damaged for damaged in self._damaged if damaged < step}
        except BaseException as error:
            self._error = error
        done.set()
        remove(rests)

    def _forget_old(self, saved: int) -> list[Rest]:
        """Removes the manifests of the steps that are not to be kept, after one was saved."""
        rests = self._steps.tidy()
        if self._keep_last is not None:
            steps, period = self._finished(), self._keep_period
            kept = {saved, *steps[-self._keep_last :], *self._ranked()[: self._keep_best]}
            kept.update(step for step in steps if period is not None and step % period == 0)
            rests += self._steps.forget(step for step in self._steps.finished() if step not in kept)
        return rests

    def wait(self) -> None:
        """Waits until the last save is on the disk and visible to all processes, and old steps are removed.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        for writing in self._writing:
            writing.join()
        self._wait_for_save()

    def _wait_for_save(self) -> None:
        """Waits like `wait`, but lets old data be removed in the background."""
        for writing in self._writing:
            writing.done.wait()
        self._forget_writing()
        self._raise_error()

    def _forget_writing(self) -> None:
        """Forgets the saves that are complete, unless they are still removing old data."""
        self._writing = [writing for writing in self._writing if writing.is_alive()]
        if self._is_saved():
            _unfinished.discard(self)
            self._unwatch()

    def _is_saved(self) -> bool:
        return all(writing.done.is_set() for writing in self._writing)

    def _unwatch(self) -> None:
        """Stops handling SIGTERM, unless a save is in progress or `save_on_sigterm` needs it."""
        if self._is_saved() and not self._save_on_sigterm:
            sigterm.unwatch(self)

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Waits like `wait`, and restores the handler of SIGTERM. The manager can still be used afterwards."""
        self.wait()
        sigterm.unwatch(self)
        if self._ending:
            self._end()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Ending early

    def end_soon(self) -> bool:
        """Completes the save in progress and returns whether the program may end now. The SIGTERM handler calls it."""
        if self._save_on_sigterm or self._busy:
            self._ending = True
            return False
        for writing in self._writing:
            writing.done.wait()
        return True

    def _must_end(self, step: int) -> bool:
        """Whether the program has been told to end, by a signal to any of its processes."""
        if self._save_on_sigterm and jax.process_count() > 1:
            self._ending = multihost_utils.reached_preemption_sync_point(step)
        return self._ending and self._save_on_sigterm

    def _end(self) -> None:
        self._ending = False
        if jax.process_count() > 1:
            raise SystemExit(128 + 15)
        sigterm.end_now()

    # Loading

    def load(self, target: T, step: int | None = None, **options: Any) -> T:
        """Fills a target from a step and returns it, as `nnx.load` does.

        Args:
            target: the target to fill.
            step: the step to load; the latest by default.
            **options: further options of `nnx.load`.

        Raises:
            FileNotFoundError: there is no such step.
        """
        self._wait_for_save()
        steps = self.steps()
        if not steps:
            raise FileNotFoundError(NO_STEPS.format(directory=self.directory))
        step = steps[-1] if step is None else _step_number(step)
        if step not in steps:
            shown = ", ".join(map(str, steps))
            raise FileNotFoundError(NO_STEP.format(step=step, directory=self.directory, steps=shown))
        return load(self._steps.path(step), target, **options)

    def resume(self, target: Any, **options: Any) -> int | None:
        """Fills a target from the latest intact step.

        If later steps are damaged, a warning names them, and they are removed when the next step is saved.

        Args:
            target: a target that can be filled in place: a Module, a Context, a dict, a list, or a tuple of them.
            **options: further options of `nnx.load`.

        Returns:
            The number of the step; None if there is no checkpoint.

        Raises:
            CheckpointError: the target cannot be filled in place, does not fit, or every step is damaged.
        """
        self._wait_for_save()
        if not fills_in_place(target):
            raise CheckpointError(NOT_IN_PLACE.format(target=type(target).__name__))
        damages: dict[int, DamagedError] = {}
        for step in reversed(self.steps()):
            try:
                load(self._steps.path(step), target, **options)
            except DamagedError as error:
                damages[step] = error
                continue
            if damages:
                self._damaged |= set(damages)
                listed = "\n".join(f"- step {damaged}: {error}" for damaged, error in damages.items())
                warnings.warn(SKIPPED.format(step=step, directory=self.directory, damages=listed), stacklevel=2)
            return step
        if damages:
            raise next(iter(damages.values()))
        return None


class _Writing(threading.Thread):
    """The thread of one save. `done` is set when the save is complete; old data are removed after that.

    It is not a daemon, so a program that ends waits for it.
    """

    def __init__(self, work: Callable[[threading.Event], None]):
        super().__init__(name="nnx-save")
        self._work = work
        self.done = threading.Event()

    def run(self) -> None:
        self._work(self.done)


def _plain(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    found = dict(metadata or {})
    try:
        json.dumps(found)
    except (TypeError, ValueError) as error:
        raise TypeError(BAD_METADATA.format(got=short(found), reason=error)) from error
    return found


def _step_number(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        raise ValueError(BAD_STEP.format(step=step))
    return number


_unfinished: set[CheckpointManager] = set()
"""The managers with a save in progress. The interpreter waits for their threads before it runs `atexit` hooks."""


def _report_at_exit() -> None:
    for manager in list(_unfinished):
        try:
            manager.wait()
        except Exception as error:
            print(ENDED_TOO_EARLY.format(directory=manager.directory, error=error), file=sys.stderr)


atexit.register(_report_at_exit)
add_hints(CheckpointManager, CHECKPOINT_MANAGER)
