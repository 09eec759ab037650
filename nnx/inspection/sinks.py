"""Destinations for the metrics of a TrainLog besides its own file: TensorBoard, Weights & Biases, or any function.

A *sink* is a callable `sink(step, values)`, with `values` a dict of plain numbers. If it has `flush` or `close`, the
log calls them when it flushes or closes.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from nnx.core.extras import require
from nnx.storage.files import local_path, unique_token

Sink = Callable[[int, dict[str, float]], Any]


class Run(Protocol):
    """The part of a `wandb` run that is used here."""

    def log(self, data: dict[str, Any], step: int | None = None) -> Any: ...


def wandb_sink(run: Run) -> Sink:
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
    return lambda step, values: run.log(values, step=step)


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
        if self._writer is None:  # opened only now, so that only the process that logs creates a file
            # Event files are named after the second in which they are opened, so without a suffix one opened in the
            # same second would replace another.
            self._writer = self._open(self._directory, filename_suffix=f".{unique_token()}")
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Writes what is buffered."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Closes the event file; the next value opens another one."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
