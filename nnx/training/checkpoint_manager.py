"""CheckpointManager: the checkpoints of one run by step, written while training goes on, the old ones removed."""

import atexit
import contextlib
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

from nnx.core.files import unique_token
from nnx.core.processes import Exchange, ProcessError, on_first
from nnx.core.writer_lock import WriterLock
from nnx.training import sigterm
from nnx.training.checkpoint import Saving, load
from nnx.training.entries import fills_in_place
from nnx.training.manifest import LOCK_NAME, CheckpointError, DamagedError
from nnx.training.saving import SAVE_FAILED
from nnx.training.steps import Steps

T = TypeVar("T")

NO_STEPS = "There is no finished checkpoint in {directory}."
NO_STEP = "There is no finished checkpoint of step {step} in {directory}; the steps there are: {steps}."
BAD_STEP = "A step is an int from 0 on, got {step!r}."
STEP_EXISTS = """Step {step} was saved to {directory} before; the last step there is {latest}. Save later steps, or \
overwrite it with manager.save(..., overwrite=True)."""
LOWER_STEP = """Step {step} comes before step {latest}, which was saved to {directory}. Resume from the last step, or \
go back with manager.save(..., overwrite=True), which removes the steps after {step}."""
NO_METRIC = """CheckpointManager(keep_best={keep_best}) keeps the best by metrics[{metric!r}], but save got the \
metrics: {given}. Pass manager.save(step, obj, metrics={{{metric!r}: value}})."""
SKIPPED = """Resumed from step {step}, because later checkpoints in {directory} are damaged:
{damages}
They are removed when the next step is saved."""
NOT_IN_PLACE = """resume fills its target in place, and {target} cannot change: put it into a dict, or use \
manager.load(target, manager.latest_step()). Nothing was loaded."""
ENDED_TOO_EARLY = """nnx.CheckpointManager: the program ended while a checkpoint was being written to {directory}; \
it could not be completed: {error}
End with manager.wait(), or use the manager as `with nnx.CheckpointManager(...) as manager:`."""


class CheckpointManager:
    """Saves and loads the checkpoints of a run.

    Each step is its own directory, as `nnx.save` writes it. Saving returns as soon as the values have left the
    devices, and is completed in the background; an error there is raised by the next call. An interrupted save leaves
    the earlier ones. A program that gets SIGTERM, or ends, completes the save under way.

    With several processes every one of them must make the same calls. All see the same steps, and `wait` returns when
    the checkpoint is visible to all.

    Args:
        directory: where the steps go; made if need be.
        keep_last: how many of the latest steps to keep, at least 1; None keeps all. The one just saved is always kept.
        keep_best: how many of the best to keep besides them.
        best_metric: the metric, of those given to `save`, that decides which is best.
        best_mode: whether the least or the largest is best.
        asynchronous: whether saving is completed in the background.
        every_steps: saves only steps that are multiples of it; call `save` at every step and let the manager decide.
        every_minutes: saves only when so many minutes have passed since the last save. With both, either is enough.
        save_on_sigterm: whether, after SIGTERM, the next call of `save` saves in any case, and then ends the program.

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

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = 3,
        keep_best: int = 0,
        best_metric: str = "loss",
        best_mode: Literal["min", "max"] = "min",
        asynchronous: bool = True,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        save_on_sigterm: bool = False,
    ):
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"CheckpointManager keeps at least the last checkpoint: keep_last >= 1, got {keep_last}.")
        if best_mode not in ("min", "max"):
            raise ValueError(f'best_mode is "min" or "max", got {best_mode!r}.')
        if every_steps is not None and every_steps < 1:
            raise ValueError(f"every_steps is at least 1, got {every_steps}.")
        if every_minutes is not None and not every_minutes > 0:
            raise ValueError(f"every_minutes is more than 0, got {every_minutes}.")
        self.directory = Path(directory).absolute()
        self._steps = Steps(self.directory)
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._best_metric = best_metric
        self._best_mode = best_mode
        self._asynchronous = asynchronous
        self._every_steps = every_steps
        self._every_minutes = every_minutes
        self._save_on_sigterm = save_on_sigterm
        self._last_time = time.monotonic()
        self._damaged: set[int] = set()  # steps that `resume` found to be damaged
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None
        self._busy = False  # whether the main thread is saving, which a signal handler cannot wait for
        self._ending = False  # whether SIGTERM has arrived
        self._lock: WriterLock | None = None

    # What there is

    def steps(self) -> list[int]:
        """Returns the steps that have a finished checkpoint, in order."""
        return self._ask("steps()", self._finished)

    def latest_step(self) -> int | None:
        """Returns the last step that has a finished checkpoint."""
        return self._ask("latest_step()", lambda: max(self._finished(), default=None))

    def best_step(self) -> int | None:
        """Returns the step with the best metric; of equals the latest."""
        return self._ask("best_step()", lambda: next(iter(self._ranked()), None))

    def metrics(self, step: int) -> dict[str, float]:
        """Returns the metrics that were saved with a step."""
        return self._ask("metrics()", lambda: self._metrics(step))

    def _ask(self, what: str, question: Callable[[], T]) -> T:
        """Has process 0 look, so that all processes see the same."""
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
        """Returns the steps that have the metric, the best first; NaN is worse than anything."""
        sign = 1 if self._best_mode == "min" else -1
        scored = [(step, self._metrics(step).get(self._best_metric)) for step in self._finished()]
        numbers = [(step, score) for step, score in scored if isinstance(score, (int, float))]
        numbers.sort(key=lambda item: (item[1] != item[1], sign * item[1] if item[1] == item[1] else 0.0, -item[0]))
        return [step for step, _ in numbers]

    # Saving

    def save(
        self,
        step: int,
        obj: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        force: bool = False,
    ) -> bool:
        """Saves an object as a step, if the step is due.

        Args:
            step: its number; any integer, numpy's and JAX's included.
            obj: what `nnx.save` takes.
            metrics: numbers to keep with it.
            overwrite: whether a step that is not after the last one may be saved. Steps after it belong to a part of
                the run that is given up; they are removed when this one is finished.
            force: whether to save even if `every_steps` and `every_minutes` say otherwise.

        Returns:
            Whether the step was saved.

        Raises:
            ValueError: the step was saved before, or comes before the last one.
            CheckpointError: this one, or the one that was being written, could not be written.
        """
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
        self.wait()
        saved = not (ending and number in self.steps())
        if saved:
            self._save(number, obj, numbers, overwrite)
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

    def _save(self, step: int, obj: Any, metrics: Mapping[str, float], overwrite: bool) -> None:
        self._busy = True
        sigterm.watch(self)
        try:
            save = unique_token()
            self._ask(f"save({step})", lambda: self._begin(step, save, overwrite))
            lock, self._lock = self._lock, None
            exchange = Exchange(f"CheckpointManager({str(self.directory)!r}).save({step})")
            try:
                saving = Saving(
                    self._steps.path(step),
                    obj,
                    {"step": step, "metrics": dict(metrics), "save": save},
                    wait=not self._asynchronous,
                )
            except BaseException:
                self._release(lock)
                raise
            if not self._asynchronous:
                self._complete(step, saving, exchange, lock)
            else:
                # the thread is not a daemon: a program that ends waits for it
                arguments = (step, saving, exchange, lock)
                self._writer = threading.Thread(target=self._complete, args=arguments, name=f"nnx-save-{step}")
                _unfinished.add(self)
                self._writer.start()
            self._last_time = time.monotonic()
        finally:
            self._busy = False
            self._unwatch()
        if not self._asynchronous:
            self._raise_error()

    def _begin(self, step: int, save: str, overwrite: bool) -> None:
        """Takes the lock of the directory, on process 0, and checks that the step may be saved."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = WriterLock(self.directory / LOCK_NAME, self.directory)
            lock.acquire()
        except OSError as error:
            reason = f"{type(error).__name__}: {error}".rstrip(".")
            raise CheckpointError(SAVE_FAILED.format(path=self._steps.path(step), reason=reason)) from error
        try:
            self._steps.tidy()
            latest = max(self._finished(), default=-1)
            if step <= latest and not overwrite:
                text = STEP_EXISTS if step in self._finished() else LOWER_STEP
                raise ValueError(text.format(step=step, directory=self.directory, latest=latest))
            if step < max([latest, *self._damaged]):
                self._steps.intend_to_end_at(step, save)
        except BaseException:
            lock.release()
            raise
        self._lock = lock

    def _complete(self, step: int, saving: Saving, exchange: Exchange, lock: WriterLock | None) -> None:
        try:
            saving.finish()
            exchange.on_first(lambda: self._remove_old(step))
            self._damaged = {damaged for damaged in self._damaged if damaged < step}
        except BaseException as error:
            self._error = error
        finally:
            self._release(lock)

    def _release(self, lock: WriterLock | None) -> None:
        if lock is not None:
            with contextlib.suppress(OSError):
                lock.release()

    def _remove_old(self, saved: int) -> None:
        """Removes what is not kept, after a step was saved."""
        self._steps.tidy()
        if self._keep_last is not None:
            steps = self._finished()
            kept = {saved, *steps[-self._keep_last :], *self._ranked()[: self._keep_best]}
            self._steps.remove(step for step in self._steps.finished() if step not in kept)

    def wait(self) -> None:
        """Waits until what was saved is on the disk, and visible to all processes.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
            _unfinished.discard(self)
            self._unwatch()
        self._raise_error()

    def _unwatch(self) -> None:
        """Stops waiting for SIGTERM, unless something is being written or is to be."""
        if self._writer is None and not self._save_on_sigterm:
            sigterm.unwatch(self)

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Waits, as `wait` does, and gives SIGTERM back. The manager can still be used afterwards."""
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
        """Completes the save under way; returns whether the program may end now. Called by the handler of SIGTERM."""
        if self._save_on_sigterm or self._busy:
            self._ending = True
            return False
        if self._writer is not None:
            self._writer.join()
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
        """Fills a target from a step, the latest by default, and returns it; `options` are those of `nnx.load`.

        Raises:
            FileNotFoundError: there is no such step.
        """
        self.wait()
        steps = self.steps()
        if not steps:
            raise FileNotFoundError(NO_STEPS.format(directory=self.directory))
        step = steps[-1] if step is None else _step_number(step)
        if step not in steps:
            shown = ", ".join(map(str, steps))
            raise FileNotFoundError(NO_STEP.format(step=step, directory=self.directory, steps=shown))
        return load(self._steps.path(step), target, **options)

    def resume(self, target: Any, **options: Any) -> int | None:
        """Fills a target from the latest step that is intact and returns its number; None without a checkpoint.

        If later steps are damaged, a warning names them, and they are removed when the next step is saved.

        Args:
            target: one that is filled in place: a Module, a Context, a dict, a list, or a tuple of them.
            **options: those of `nnx.load`.

        Raises:
            CheckpointError: the target cannot be filled in place, does not fit, or every step is damaged.
        """
        self.wait()
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


def _step_number(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        raise ValueError(BAD_STEP.format(step=step))
    return number


_unfinished: set[CheckpointManager] = set()
"""The managers that have something to write. The interpreter waits for their threads before it runs `atexit` hooks."""


def _report_at_exit() -> None:
    for manager in list(_unfinished):
        try:
            manager.wait()
        except Exception as error:
            print(ENDED_TOO_EARLY.format(directory=manager.directory, error=error), file=sys.stderr)


atexit.register(_report_at_exit)
