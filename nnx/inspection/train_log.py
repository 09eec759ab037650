"""TrainLog: what a run reports while it is going on, to the person watching, to the disk and to other tools.

A *record* is one call: a step with its metrics. As soon as its values are computed, it is sent to the metrics file (see
metrics_file), to the *sinks* (see sinks), and to a progress bar on a terminal, or plain lines elsewhere. A record whose
arrays are still being computed is kept *pending*, so the training loop does not wait for it. Only when too many are
pending does the log wait for the oldest.

A log must never end a run that has taken weeks. Mistakes that show up in the first call (a metric that is not a number)
are errors; failures that can happen later (a full disk, a closed terminal, a sink without network) are at most a
warning, once.
"""

import contextlib
import math
import os
import pathlib
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple, TextIO, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from nnx.core.extras import require
from nnx.core.repr import short
from nnx.core.state.state import State
from nnx.inspection.curve import Curve, Notebook
from nnx.inspection.display import in_notebook
from nnx.inspection.metrics_file import MetricsWriter, Record, read_metrics
from nnx.inspection.plots import plot_metrics
from nnx.inspection.progress import THROUGHPUT, Bar, Lines, Progress, Work, make_progress_display
from nnx.inspection.sinks import Sink, tensorboard_sink
from nnx.storage.errors import first_line
from nnx.storage.files import local_path
from nnx.storage.processes import is_first

MAX_PENDING = 16  # records

NOT_A_NUMBER = """The metric {name!r} of step {step} is {value}, and a metric is one number. Reduce it first, e.g. \
{name}={name}.mean()."""
OWN_NAMES = "{name!r} cannot be the name of a metric: it is a field of every record. Choose another one."
NOT_POSITIVE = "nnx.TrainLog: {name} is a positive number, got {value}."
TWO_PATHS = "nnx.TrainLog was given two paths, {total} and {path}. The first argument is the number of steps."
NOT_PICTURES = """The image {name!r} of step {step} is {value}; an image has the shape (height, width) or (height, \
width, channels), or one more axis in front for several, with 1, 3 or 4 channels."""
PEAK_ALONE = """nnx.TrainLog: peak_flops={peak} needs to be positive, and needs flops_per_step, got {flops}: the model \
FLOPs utilization is what a step does, divided by what the devices could do in that time."""
BAD_STEP = "A step is an integer, got {step}."
NOT_A_SINK = "A sink is a function of a step and a dict of values, e.g. nnx.wandb_sink(run), got {sink}."
TRACED = """nnx.TrainLog was called inside a transform, where {name!r} has no value yet; nothing is logged there. \
Return the metric and log it outside, or log from jax.debug.callback."""
NO_VALUE = "The metric {name!r} of step {step} has no value ({reason}) and was not logged."
WRITE_FAILED = "The metrics of step {step} could not be written to {path} ({reason}). The run continues."
SINK_FAILED = "The sink {sink} failed at step {step} ({reason}). It is still called at later steps. The run continues."
PLOT_FAILED = "The metrics in {path} could not be plotted ({reason})."

S = TypeVar("S", bound=Sink)


class PendingRecord(NamedTuple):
    """A record whose values may not have been computed yet."""

    step: int
    time: float
    metrics: dict[str, Any]

    @property
    def is_ready(self) -> bool:
        arrays: list[Any] = [value for value in self.metrics.values() if isinstance(value, jax.Array)]
        return all(array.is_ready() for array in arrays)


class TrainLog:
    """Logs a training run: a progress bar or plain lines, a file of metrics, a plot of the loss.

    Args:
        total: the number of steps of the whole run, for the bar and the time left; steps count from 0 as in `range`. A
            path in its place, as in `nnx.TrainLog("run")`, is taken for `path`.
        path: a folder for `metrics.jsonl` and `loss.png`; an existing log is continued. None writes no files.
        name: the name shown with the bar or the lines.
        interval: the minimum number of seconds between plain lines; the file gets every record.
        plot: whether to draw `loss.png` at the end; by default if matplotlib is installed (the extra "plot").
        file: the stream to show progress on; standard error by default. A bar needs a terminal and rich (the extra
            "display").
        tokens_per_step: the number of tokens in a batch. Records then have `tokens_per_second`.
        flops_per_step: the floating-point operations of a step, forward and backward. Records then have
            `flops_per_second`.
        peak_flops: the operations per second that all devices together can do. With `flops_per_step`, records then have
            `mfu`, the model FLOPs utilization: the fraction of the peak that is reached.
        tensorboard: a directory for the event files of TensorBoard (the extra "tensorboard"), as with
            `log.add_sink(nnx.tensorboard_sink(directory))`.
        curve: whether to draw a curve that is updated in place, below the bar of a terminal or in the output of a
            notebook cell; or the names of the metrics to draw. By default, notebooks show those with "loss" in their
            names.

    In a run of several processes only the first one shows and writes anything. Threads can share a log.

    >>> import sys
    >>> with nnx.TrainLog(total=3, file=sys.stdout, interval=0) as log:
    ...     for step in range(3):
    ...         log(step, loss=1 / (step + 1))
    train 1/3  loss 1.0000
    train 2/3  loss 0.5000
    train 3/3  loss 0.3333
    """

    def __init__(
        self,
        total: int | str | os.PathLike[str] | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        name: str = "train",
        interval: float = 1.0,
        plot: bool | None = None,
        file: TextIO | None = None,
        tokens_per_step: float | None = None,
        flops_per_step: float | None = None,
        peak_flops: float | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
        curve: bool | str | Sequence[str] | None = None,
    ):
        if isinstance(total, (str, os.PathLike)):
            if path is not None:
                raise TypeError(TWO_PATHS.format(total=short(total), path=short(path)))
            total, path = None, total
        for argument, value in {"tokens_per_step": tokens_per_step, "flops_per_step": flops_per_step}.items():
            if value is not None and not value > 0:
                raise ValueError(NOT_POSITIVE.format(name=argument, value=short(value)))
        if peak_flops is not None and (flops_per_step is None or not peak_flops > 0):
            raise ValueError(PEAK_ALONE.format(peak=short(peak_flops), flops=short(flops_per_step)))
        self.total: int | None = total
        self.path: pathlib.Path | None = None if path is None else local_path(path)
        self.name = name
        self.interval = interval
        self._plots = find_spec("matplotlib") is not None if plot is None else plot
        if plot:
            require("matplotlib", "plot", "nnx.TrainLog(plot=True)")
        self._stream = file
        self._is_open = False
        self._metrics_file: MetricsWriter | None = None
        self._display: Bar | Lines | Notebook | None = None
        names = None if curve is None or isinstance(curve, bool) else [curve] if isinstance(curve, str) else [*curve]
        self._curve: Curve | None = None if curve is False else Curve(names)
        self._is_drawn = curve is not None  # also on a terminal
        self._sinks: list[Any] = [] if tensorboard is None else [tensorboard_sink(tensorboard)]
        self._progress = Progress(total, Work(tokens_per_step, flops_per_step, peak_flops))
        self._pending: deque[PendingRecord] = deque()
        self._shown: Record = {}
        self._warned: set[str] = set()
        self._lock = threading.RLock()

    def __enter__(self) -> "TrainLog":
        self._open()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is None:
            self.close()
            return
        for last in (self.flush, self._finish):  # an error here must not hide the one that ended the run
            with contextlib.suppress(Exception):
                last()

    def __call__(self, step: int, **metrics: Any) -> None:
        """Logs metrics of one step; several calls for the same step make up one record.

        Args:
            step: the step, counted from 0.
            **metrics: numbers, or arrays of one element; values still being computed are not waited for.

        Raises:
            TypeError: a metric is not a number, or the step is not an integer.
            ValueError: a metric has the name of a field that the log writes itself, such as "time".
        """
        with self._lock:
            if not self._open():
                return
            traced = next((k for k, v in {"step": step, **metrics}.items() if isinstance(v, jax.core.Tracer)), None)
            if traced is not None:
                self._warn("traced", TRACED.format(name=traced))
                return
            number = _step_number(step)
            held = {name: self._held(number, name, value) for name, value in metrics.items()}
            self._progress.advance(number)
            values = {k: v for k, v in held.items() if v is not None} | self._progress.throughput()
            self._pending.append(PendingRecord(number, time.time(), values))
            while self._pending and (len(self._pending) > MAX_PENDING or self._pending[0].is_ready):
                self._emit(self._pending.popleft())

    def images(self, step: int, **images: Any) -> None:
        """Sends images to the sinks that take them, such as TensorBoard's and Weights & Biases'.

        Args:
            step: the step, counted from 0.
            **images: arrays `(height, width)`, `(height, width, channels)` or `(count, height, width, channels)` with
                1, 3 or 4 channels: floats from 0 to 1, or integers from 0 to 255.

        Raises:
            ValueError: an array does not have such a shape.
        """
        number = _step_number(step)
        for name, image in images.items():
            array = np.asarray(image)
            if not 2 <= array.ndim <= 4 or (array.ndim > 2 and array.shape[-1] not in (1, 3, 4)):
                raise ValueError(NOT_PICTURES.format(name=name, step=number, value=short(array)))
            array = array[..., None] if array.ndim == 2 else array
            self._send("image", number, name, _pixels(array[None] if array.ndim == 3 else array))

    def histograms(self, step: int, **values: Any) -> None:
        """Sends the distributions of arrays to the sinks that take them.

        Args:
            step: the step, counted from 0.
            **values: arrays of any shape, or a State, which has a histogram per path: `params=model.filter(nnx.Param)`.
        """
        number = _step_number(step)
        for name, value in values.items():
            parts = (
                {f"{name}/{path}": leaf for path, leaf in value.arrays().items()} if isinstance(value, State) else {}
            )
            for label, array in (parts or {name: value}).items():
                self._send("histogram", number, label, np.asarray(array, np.float32).reshape(-1))

    def _send(self, what: str, step: int, name: str, array: np.ndarray) -> None:
        """Calls a method of the sinks that have it, after the records so far: some sinks take steps in order only."""
        with self._lock:
            if not self._open():
                return
            while self._pending:
                self._emit(self._pending.popleft())
            for sink in self._sinks:
                try:
                    getattr(sink, what, lambda *arguments: None)(step, name, array)
                except Exception as error:
                    self._warn(f"sink {id(sink)}", SINK_FAILED.format(sink=sink, step=step, reason=first_line(error)))

    def add_sink(self, sink: S) -> S:
        """Sends every record to a function as well, `sink(step, values)`, and returns the function.

        In a run of several processes only the first one calls it. A sink that raises causes one warning.

        Args:
            sink: a callable such as `nnx.tensorboard_sink(directory)` or `nnx.wandb_sink(run)`. If it has methods
                `flush` and `close`, they are called when the log is flushed and closed. If it has methods `image` and
                `histogram`, of a step, a name and a NumPy array, they receive what `images` and `histograms` are given.

        Raises:
            TypeError: the sink is not callable.

        >>> import io
        >>> with nnx.TrainLog(file=io.StringIO()) as log:
        ...     _ = log.add_sink(lambda step, values: print(step, values))
        ...     log(0, loss=0.5)
        0 {'loss': 0.5}
        """
        if not callable(sink):
            raise TypeError(NOT_A_SINK.format(sink=short(sink)))
        self._sinks.append(sink)
        return sink

    def close(self) -> None:
        """Writes the pending records, ends the bar and draws the plot; leaving a `with` block does it automatically."""
        with self._lock:
            self.flush()
            self._finish()

    def flush(self) -> None:
        """Waits for the pending records and writes them."""
        with self._lock:
            while self._pending:
                self._emit(self._pending.popleft())
            self._tell_sinks("flush")

    def plot(self) -> pathlib.Path | None:
        """Draws the losses so far (or all metrics, if none has "loss" in its name) into `loss.png`.

        Returns:
            The path of the image; None if there is nothing to draw, or if this is not the first process of a run.
        """
        self.flush()
        if self.path is None or not is_first() or not (self.path / "metrics.jsonl").exists():
            return None
        records = read_metrics(self.path)
        names = {name for record in records for name in record}
        losses = sorted(name for name in names if "loss" in name)
        return plot_metrics(records, self.path / "loss.png", names=losses or None, title=self.name)

    def _open(self) -> bool:
        """Opens file and progress display, if this is the first process of a run, and returns whether they are open."""
        if self._is_open:
            return True
        if not is_first():
            return False
        if self.path is not None:
            self._metrics_file = MetricsWriter(self.path / "metrics.jsonl")
        self._display = self._make_display()
        self._is_open = True
        return True

    def _make_display(self) -> Bar | Lines | Notebook | None:
        curve = self._curve
        if curve is not None and self._stream is None and in_notebook():
            return Notebook(self.name, curve, self.interval)
        stream = sys.stderr if self._stream is None else self._stream
        lines = curve.lines if curve is not None and self._is_drawn else list
        return make_progress_display(self.name, self.total, stream, self.interval, lines)

    def _held(self, step: int, name: str, value: Any) -> Any:
        """Returns a copy of a value that is safe to keep, since the caller may donate the buffer of the original."""
        if name in ("time", *THROUGHPUT):
            raise ValueError(OWN_NAMES.format(name=name))
        if not _is_number(value):
            raise TypeError(NOT_A_NUMBER.format(name=name, step=step, value=short(value)))
        try:
            if isinstance(value, jax.Array):
                # For an array that is spread over processes, take the local part: a computation on the whole array
                # would have to run on every process, and only this one logs. `x.copy()` would be a computation, too,
                # which JAX refuses under the mesh of `jax.set_mesh` if the part is on one of its devices only.
                part = value if value.is_fully_addressable else value.addressable_data(0)
                return jax.device_put(part, part.sharding, may_alias=False)
            return np.array(value)
        except (RuntimeError, IndexError) as error:  # the buffer was donated; no part of the array is local
            self._warn(f"value {name}", NO_VALUE.format(name=name, step=step, reason=first_line(error)))
            return None

    def _emit(self, pending: PendingRecord) -> None:
        values = {name: _number(value) for name, value in pending.metrics.items()}
        step = pending.step
        record: Record = {"step": step, "time": round(pending.time, 3), **values}
        if self._metrics_file is not None:
            try:
                self._metrics_file.write(record)
            except (OSError, ValueError) as error:
                assert self.path is not None
                self._warn("file", WRITE_FAILED.format(step=step, path=self.path, reason=first_line(error)))
        for sink in self._sinks:
            try:
                sink(step, dict(values))
            except Exception as error:
                self._warn(f"sink {id(sink)}", SINK_FAILED.format(sink=sink, step=step, reason=first_line(error)))
        self._shown = {**self._shown, **record} if self._shown.get("step") == step else record
        if self._curve is not None:
            self._curve.add({"step": step, **values})
        if self._display is not None and not self._display.show(self._shown, self._progress):
            self._display = None

    def _finish(self) -> None:
        display, self._display = self._display, None
        if display is not None:
            display.close(self._progress)
        self._tell_sinks("close")
        file, self._metrics_file = self._metrics_file, None
        self._is_open = False
        if file is not None:
            file.close()
            if self._plots and self._progress.done:
                try:
                    self.plot()
                except Exception as error:
                    self._warn("plot", PLOT_FAILED.format(path=self.path, reason=first_line(error)))

    def _tell_sinks(self, what: str) -> None:
        for sink in self._sinks if self._is_open else ():
            try:
                getattr(sink, what, lambda: None)()
            except Exception as error:
                text = SINK_FAILED.format(sink=sink, step=self._shown.get("step"), reason=first_line(error))
                self._warn(f"sink {id(sink)}", text)

    def _warn(self, subject: str, text: str) -> None:
        """Warns once per subject."""
        if subject not in self._warned:
            self._warned.add(subject)
            with contextlib.suppress(ValueError, OSError):  # standard error may be closed
                warnings.warn(text, stacklevel=3)


def _step_number(step: Any) -> int:
    is_integer = isinstance(step, (int, np.integer)) or (
        isinstance(step, (jax.Array, np.ndarray)) and step.size == 1 and jnp.issubdtype(step.dtype, jnp.integer)
    )
    if not is_integer or isinstance(step, bool):
        raise TypeError(BAD_STEP.format(step=short(step)))
    return int(step) if not isinstance(step, (jax.Array, np.ndarray)) else int(np.asarray(step).item())


def _pixels(array: np.ndarray) -> np.ndarray:
    """Returns images as integers from 0 to 255."""
    if array.dtype == bool or np.issubdtype(array.dtype, np.integer):
        return (array * 255 if array.dtype == bool else np.clip(array, 0, 255)).astype(np.uint8)
    return np.clip(np.nan_to_num(array.astype(np.float32)) * 255 + 0.5, 0, 255).astype(np.uint8)


def _is_number(value: Any) -> bool:
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        is_real = jnp.issubdtype(value.dtype, jnp.number) and not jnp.issubdtype(value.dtype, jnp.complexfloating)
        return value.size == 1 and (is_real or value.dtype == bool)
    return isinstance(value, (bool, int, float))


def _number(value: Any) -> int | float:
    number = np.asarray(value).reshape(())
    if number.dtype.kind in "iub":
        return int(number)
    try:
        return float(number)
    except OverflowError:  # a Python integer too large for a float
        return math.inf if number > 0 else -math.inf
