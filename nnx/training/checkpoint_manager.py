"""CheckpointManager: the checkpoints of one run by step, written while training goes on, the old ones removed."""

import concurrent.futures.thread  # noqa: F401  (its exit hook must be there before ours: see _finish_before_exit)
import os
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import jax

from nnx.training.checkpoint import Saving, load
from nnx.training.manifest import CheckpointError, is_finished, read_manifest_or_none

T = TypeVar("T")

NO_STEPS = "There is no finished checkpoint in {directory}."
NO_STEP = "There is no finished checkpoint of step {step} in {directory}; the steps there are: {steps}."
BAD_STEP = "A step is an int from 0 on, got {step!r}."
STEP_EXISTS = """Step {step} was saved to {directory} before; the last step there is {latest}. Save later steps, or \
overwrite it with manager.save(..., overwrite=True)."""
NO_METRIC = """CheckpointManager(keep_best={keep_best}) keeps the best by metrics[{metric!r}], but save got the \
metrics: {given}. Pass manager.save(step, obj, metrics={{{metric!r}: value}})."""

ENDED_TOO_EARLY = """nnx.CheckpointManager: the program ended while a checkpoint was being written to {directory}; \
it could not be completed: {error}
End with manager.wait(), or use the manager as `with nnx.CheckpointManager(...) as manager:`."""

_TRASH = ".removed-"


class CheckpointManager:
    """Saves and loads the checkpoints of a run.

    Each step is a directory of its own, as `nnx.save` writes it. Saving returns as soon as the values have left the
    devices, and is completed in the background; an error there is raised by the next call. An interrupted save leaves
    the earlier ones.

    Use it in a `with` block, or call `wait` at the end: a program that ends may cut the last save short.

    Args:
        directory: where the steps go; made if need be.
        keep_last: how many of the latest steps to keep, at least 1; None keeps all.
        keep_best: how many of the best to keep beside them.
        best_metric: the metric, of those given to `save`, that says which is best.
        best_mode: whether the least or the largest is best.
        asynchronous: whether saving is completed in the background.

    >>> import tempfile
    >>> model = nnx.Linear(2, 3, ctx=nnx.context(0))
    >>> with nnx.CheckpointManager(tempfile.mkdtemp(), keep_last=2) as manager:
    ...     start = manager.resume({"model": model})  # None: there is nothing yet
    ...     for step in range(4):
    ...         manager.save(step, {"model": model})
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
    ):
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"CheckpointManager keeps at least the last checkpoint: keep_last >= 1, got {keep_last}.")
        if best_mode not in ("min", "max"):
            raise ValueError(f'best_mode is "min" or "max", got {best_mode!r}.')
        self.directory = Path(directory).absolute()
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._best_metric = best_metric
        self._best_mode = best_mode
        self._asynchronous = asynchronous
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None

    # What there is

    def steps(self) -> list[int]:
        """The steps that have a finished checkpoint, in order."""
        if not self.directory.is_dir():
            return []
        found = [int(path.name) for path in self.directory.iterdir() if path.name.isdecimal() and is_finished(path)]
        return sorted(found)

    def latest_step(self) -> int | None:
        """The last step that has a finished checkpoint."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The step with the best metric; of equals the latest."""
        ranked = self._ranked()
        return ranked[0] if ranked else None

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics that were saved with a step."""
        manifest = read_manifest_or_none(self._path(step))
        return dict(manifest.info.get("metrics", {})) if manifest is not None else {}

    def _ranked(self) -> list[int]:
        """The steps that have the metric, the best first; NaN is worse than anything."""
        sign = 1 if self._best_mode == "min" else -1
        scored = [(step, self.metrics(step).get(self._best_metric)) for step in self.steps()]
        return [
            step
            for step, score in sorted(
                ((step, score) for step, score in scored if score is not None),
                key=lambda item: (item[1] != item[1], sign * item[1] if item[1] == item[1] else 0.0, -item[0]),
            )
        ]

    def _path(self, step: int) -> Path:
        return self.directory / str(step)

    # Saving

    def save(self, step: int, obj: Any, *, metrics: Mapping[str, Any] | None = None, overwrite: bool = False) -> None:
        """Saves an object as a step.

        Args:
            step: its number.
            obj: what `nnx.save` takes.
            metrics: numbers to keep with it.
            overwrite: whether a step that was saved before may be replaced.

        Raises:
            CheckpointError: this one, or the one that was being written, could not be written.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(BAD_STEP.format(step=step))
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        if self._keep_best and self._best_metric not in numbers:
            given = ", ".join(numbers) or "none"
            text = NO_METRIC.format(keep_best=self._keep_best, metric=self._best_metric, given=given)
            raise ValueError(text)
        self.wait()
        if not overwrite and is_finished(self._path(step)):
            raise ValueError(STEP_EXISTS.format(step=step, directory=self.directory, latest=self.latest_step()))
        saving = Saving(self._path(step), obj, {"step": step, "metrics": numbers})
        if self._asynchronous:
            self._writer = threading.Thread(target=self._complete, args=(saving,), name=f"nnx-save-{step}")
            self._writer.start()
            _unfinished.add(self)
        else:
            saving.finish()
            self._remove_old()

    def _complete(self, saving: Saving) -> None:
        try:
            saving.finish()
            self._remove_old()
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Waits until what was saved is on the disk.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
            _unfinished.discard(self)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Waits, as `wait` does. The manager can still be used afterwards."""
        self.wait()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait()

    def _remove_old(self) -> None:
        if jax.process_index() != 0:
            return
        for leftover in self.directory.glob(f"{_TRASH}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        if self._keep_last is None:
            return
        steps = self.steps()
        kept = {*steps[-self._keep_last :], *self._ranked()[: self._keep_best]}
        for step in steps:
            if step not in kept:
                # renamed first: a step that is half removed must not look like one
                trash = self.directory / f"{_TRASH}{step}"
                os.replace(self._path(step), trash)
                shutil.rmtree(trash, ignore_errors=True)

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
        step = steps[-1] if step is None else step
        if step not in steps:
            shown = ", ".join(map(str, steps))
            raise FileNotFoundError(NO_STEP.format(step=step, directory=self.directory, steps=shown))
        return load(self._path(step), target, **options)

    def resume(self, target: Any, **options: Any) -> int | None:
        """Fills a target from the latest step and returns its number; None where there is no checkpoint yet.

        The target must be one that is filled in place: a Module, a Context, or a dict.
        """
        self.wait()
        step = self.latest_step()
        if step is not None:
            filled = self.load(target, step, **options)
            if filled is not target:
                raise CheckpointError(
                    f"resume fills its target in place, and {type(target).__name__} cannot change: put it into a dict, "
                    "or use manager.load(target, manager.latest_step())."
                )
        return step


_unfinished: set[CheckpointManager] = set()
"""The managers that have something to write; a program that ends waits for them."""


def _finish_before_exit() -> None:
    for manager in list(_unfinished):
        try:
            manager.wait()
        except Exception as error:
            print(ENDED_TOO_EARLY.format(directory=manager.directory, error=error), file=sys.stderr)


# Orbax works in thread pools, which take no work any more when `atexit` functions run. The hooks of `threading` run
# earlier, the last one first. From Python 3.12 on no thread can be started even there, so a program has to call `wait`.
_register = getattr(threading, "_register_atexit", None)
if _register is not None:
    _register(_finish_before_exit)
