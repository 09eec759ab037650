"""TrainLog: what a run reports while it goes on, to the person watching and to the disk.

A *record* is one step with its metrics. It goes to the metrics file as soon as its values are there (see metrics_file)
and to a *view*: a progress bar on a terminal, plain lines elsewhere. The training loop never waits for a value: a
record whose arrays are still being computed is kept pending, and only when too many are does the log wait for the
oldest.
"""

import contextlib
import pathlib
import sys
import time
from collections import deque
from importlib.util import find_spec
from typing import Any, TextIO

import jax
import numpy as np

from nnx.core.extras import require
from nnx.core.repr import short
from nnx.inspection.metrics_file import Record, open_to_append, read_metrics, to_line
from nnx.inspection.plots import plot_metrics
from nnx.inspection.progress import Bar, Lines, Progress, has_screen

MAX_PENDING = 16

NOT_A_NUMBER = """The metric {name!r} of step {step} is {value}, and a metric is one number. Reduce it first, e.g. \
{name}={name}.mean()."""

OWN_NAMES = """{name!r} cannot be the name of a metric: it is a field of every record. Choose another one."""


class TrainLog:
    """Logs a training run: a progress bar or plain lines, a file of metrics, a plot of the loss.

    Args:
      total: the number of steps of the whole run, for the bar and the time left; steps count from 0 as in `range`.
      path: a folder for `metrics.jsonl` and `loss.png`; a log that is there already is continued. None writes nothing.
      name: what the bar or the lines are called.
      interval: seconds between plain lines, at least; the file gets every record.
      plot: draw `loss.png` at the end; by default where matplotlib is installed (the extra "plot").
      file: where to show progress; standard error by default. A bar needs a terminal, and rich (the extra "display").

    In a run of several processes only the first one shows and writes anything.

    >>> import sys
    >>> with nnx.TrainLog(total=3, file=sys.stdout, interval=0) as log:
    ...     for step in range(3):
    ...         log(step, loss=1 / (step + 1))
    train 1/3  loss 1.0000
    train 2/3  loss 0.5000 ... steps/s ... left
    train 3/3  loss 0.3333 ... steps/s
    """

    def __init__(
        self,
        total: int | None = None,
        path: Any = None,
        *,
        name: str = "train",
        interval: float = 1.0,
        plot: bool | None = None,
        file: TextIO | None = None,
    ):
        self.total = total
        self.path = None if path is None else pathlib.Path(path)
        self.name = name
        self.interval = interval
        self._plots = find_spec("matplotlib") is not None if plot is None else plot
        if plot:
            require("matplotlib", "plot", "nnx.TrainLog(plot=True)")
        self._stream = file
        self._metrics_file: TextIO | None = None
        self._view: Bar | Lines | None = None
        self._progress = Progress(total)
        self._pending: deque[tuple[int, float, dict[str, Any]]] = deque()

    def __enter__(self) -> "TrainLog":
        self._open()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is None:
            self.close()
            return
        for last in (self.flush, self._hide, self._finish_files):  # the run's own error is the one to be seen
            with contextlib.suppress(Exception):
                last()

    def __call__(self, step: int, **metrics: Any) -> None:
        """Logs the metrics of one step.

        Args:
          step: counted from 0.
          **metrics: numbers, or arrays of one element; values still being computed are not waited for.

        Raises:
          TypeError: a metric is no number.
          ValueError: a metric is called "time".
        """
        if not self._open():
            return
        step = int(step)
        self._pending.append((step, time.time(), {k: _held(step, k, v) for k, v in metrics.items()}))
        self._progress.advance(step)
        while self._pending and (len(self._pending) > MAX_PENDING or _is_ready(self._pending[0])):
            self._emit(*self._pending.popleft())

    def close(self) -> None:
        """Writes what is pending, ends the bar and draws the plot; `with` does it."""
        self.flush()
        self._hide()
        self._finish_files()

    def flush(self) -> None:
        """Waits for the values that are pending and writes them."""
        while self._pending:
            self._emit(*self._pending.popleft())
        if self._metrics_file is not None:
            self._metrics_file.flush()

    def plot(self) -> pathlib.Path | None:
        """Draws the losses so far (or all metrics, where none is called a loss) into `loss.png`."""
        self.flush()
        if self.path is None or not (self.path / "metrics.jsonl").exists():
            return None
        records = read_metrics(self.path)
        names = {name for record in records for name in record}
        losses = sorted(name for name in names if "loss" in name)
        return plot_metrics(records, self.path / "loss.png", names=losses or None, title=self.name)

    def _open(self) -> bool:
        """Opens file and view where they are not open yet; not in the second and further processes of a run."""
        if self._view is not None:
            return True
        if jax.process_index() != 0:
            return False
        stream = sys.stderr if self._stream is None else self._stream
        if self.path is not None:
            self._metrics_file = open_to_append(self.path / "metrics.jsonl")
        self._view = (
            Bar(self.name, self.total, stream) if has_screen(stream) else Lines(self.name, stream, self.interval)
        )
        return True

    def _emit(self, step: int, now: float, metrics: dict[str, Any]) -> None:
        record: Record = {"step": step, "time": round(now, 3), **{k: _number(v) for k, v in metrics.items()}}
        if self._metrics_file is not None:
            self._metrics_file.write(to_line(record))
            self._metrics_file.flush()
        if self._view is not None:
            self._view.show(record, self._progress)

    def _hide(self) -> None:
        view, self._view = self._view, None
        if view is not None:
            view.close(self._progress)

    def _finish_files(self) -> None:
        file, self._metrics_file = self._metrics_file, None
        if file is not None:
            file.close()
            if self._plots and self._progress.done:
                self.plot()


def _held(step: int, name: str, value: Any) -> Any:
    """The value as it can be kept: an array of its own, since the caller may donate theirs."""
    if name == "time":
        raise ValueError(OWN_NAMES.format(name=name))
    if isinstance(value, jax.Array) and value.size == 1:
        return value.copy()
    if isinstance(value, (bool, int, float, np.generic)) or (isinstance(value, np.ndarray) and value.size == 1):
        return value
    raise TypeError(NOT_A_NUMBER.format(name=name, step=step, value=short(value)))


def _is_ready(pending: tuple[int, float, dict[str, Any]]) -> bool:
    arrays: list[Any] = [value for value in pending[2].values() if isinstance(value, jax.Array)]
    return all(array.is_ready() for array in arrays)


def _number(value: Any) -> int | float:
    number = np.asarray(value).reshape(())
    return int(number) if number.dtype.kind in "iub" else float(number)
