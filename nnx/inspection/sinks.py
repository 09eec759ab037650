"""Destinations for the metrics of a TrainLog besides its own file: TensorBoard, Weights & Biases, or any function.

A *sink* is a callable `sink(step, values)`, with `values` a dict of plain numbers. If it has `flush` or `close`, the
log calls them when it flushes or closes. If it has `image` or `histogram`, they receive arrays: `sink.image(step, name,
pixels)` with uint8 pixels `(count, height, width, channels)`, and `sink.histogram(step, name, numbers)` with a vector.
"""

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from nnx.core.extras import require
from nnx.storage.files import local_path, unique_token

Sink = Callable[[int, dict[str, float]], Any]


class WandbRun(Protocol):
    """The part of a `wandb` run that is used here."""

    def log(self, data: dict[str, Any], step: int | None = None) -> Any: ...


def wandb_sink(run: WandbRun) -> "WandbSink":
    """Returns a sink that logs to a Weights & Biases run, which stays open for you to finish.

    Args:
        run: the run, as `wandb.init(...)` returns it.

    >>> import io
    >>> class FakeRun:
    ...     def log(self, data, step=None):
    ...         print(step, data)
    >>> with nnx.TrainLog(file=io.StringIO()) as log:
    ...     _ = log.add_sink(nnx.wandb_sink(FakeRun()))
    ...     log(0, loss=0.5)
    0 {'loss': 0.5}
    """
    return WandbSink(run)


class WandbSink:
    """A sink that logs to a Weights & Biases run: see `nnx.wandb_sink`."""

    def __init__(self, run: WandbRun):
        self._run = run

    def __call__(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Logs images, uint8 `(count, height, width, channels)`."""
        make = self._package().Image
        self._run.log({name: [make(image[..., 0] if image.shape[-1] == 1 else image) for image in pixels]}, step=step)

    def histogram(self, step: int, name: str, numbers: np.ndarray) -> None:
        """Logs the distribution of numbers; those that are not finite are left out."""
        self._run.log({name: self._package().Histogram(numbers[np.isfinite(numbers)])}, step=step)

    def _package(self) -> Any:
        return sys.modules[type(self._run).__module__.partition(".")[0]]  # wandb, which has made the run


def tensorboard_sink(directory: str | os.PathLike[str]) -> "TensorBoardSink":
    """Returns a sink that writes TensorBoard event files. Needs tensorboardX (the extra "tensorboard").

    Args:
        directory: the directory to write them to; pass it, or one above it, to `tensorboard --logdir`.

    >>> import io, tempfile
    >>> with nnx.TrainLog(file=io.StringIO()) as log:
    ...     _ = log.add_sink(nnx.tensorboard_sink(tempfile.mkdtemp()))
    ...     log(0, loss=0.5)
    """
    return TensorBoardSink(directory)


class TensorBoardSink:
    """A sink that writes TensorBoard event files: see `nnx.tensorboard_sink`."""

    def __init__(self, directory: str | os.PathLike[str]):
        package = require("tensorboardX", "tensorboard", "nnx.tensorboard_sink")
        self._directory = str(local_path(directory))
        self._open: Callable[..., Any] = package.SummaryWriter
        self._writer: Any = None

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._opened().add_scalar(name, value, step)

    def _opened(self) -> Any:
        if self._writer is None:  # opened only now, so that only the process that logs creates a file
            # Event files are named after the second in which they are opened, so without a suffix one opened in the
            # same second would replace another.
            self._writer = self._open(self._directory, filename_suffix=f".{unique_token()}")
        return self._writer

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Writes images, uint8 `(count, height, width, channels)`, side by side."""
        self._opened().add_image(name, np.concatenate([*pixels], axis=1), step, dataformats="HWC")

    def histogram(self, step: int, name: str, numbers: np.ndarray) -> None:
        """Writes the distribution of numbers; those that are not finite are left out."""
        finite = numbers[np.isfinite(numbers)]
        if finite.size:
            self._opened().add_histogram(name, finite, step)

    def flush(self) -> None:
        """Writes what is buffered."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Closes the event file; the next value opens another one."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
