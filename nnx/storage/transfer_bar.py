"""A bar for loads and saves that take long, on the terminal of the person who waits for them.

It appears after a second, on standard error if that is a terminal, and disappears at the end. With the extra `display`
it is a bar of rich, otherwise one line of text. `NNX_PROGRESS=0` in the environment turns it off. Saves in the
background have none.
"""

import contextlib
import contextvars
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from nnx.storage.processes import is_first

AFTER = 1.0
"""The seconds after which a bar appears."""
_EVERY = 0.1  # seconds between two drawings

_bar: contextvars.ContextVar["TransferBar | None"] = contextvars.ContextVar("nnx_transfer_bar", default=None)


@contextlib.contextmanager
def transfer(verb: str, path: Any, size: int, *, stream: TextIO | None = None) -> Iterator[None]:
    """Shows how much of a number of bytes has been moved inside the block, as `moved` is called there.

    Args:
        verb, path: what is going on, such as "loading" and "run/last", of which the end is shown.
        size: the number of bytes.
        stream: where to draw; standard error by default.
    """
    stream = sys.stderr if stream is None else stream
    if stream is None or _bar.get() is not None or not _is_watched(stream):
        yield
        return
    name = os.fsdecode(path).rstrip("/").rpartition("/")[2]
    bar = TransferBar(f"{verb} {name}", size, stream)
    token = _bar.set(bar)
    try:
        yield
    finally:
        _bar.reset(token)
        bar.close()


def moved(size: int) -> None:
    """Tells the bar of the current transfer, if there is one, that bytes have arrived."""
    bar = _bar.get()
    if bar is not None:
        bar.add(size)


def _is_watched(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.environ.get("NNX_PROGRESS") != "0" and is_first()
    except ValueError:  # it was closed
        return False


class TransferBar:
    """The bar of one transfer; see `transfer`."""

    def __init__(self, what: str, size: int, stream: TextIO):
        self._what, self._size, self._stream = what, size, stream
        self._begun = self._drawn = time.monotonic()
        self._done = 0
        self._draw: Callable[[int], None] | None = None
        self._end: Callable[[], Any] = lambda: None

    def add(self, size: int) -> None:
        self._done = min(self._done + size, self._size)
        now = time.monotonic()
        if now - self._begun < AFTER or now - self._drawn < _EVERY:
            return
        self._drawn = now
        # A bar is never the reason that a load fails: the terminal may be gone, or another bar of rich is there.
        with contextlib.suppress(Exception):
            if self._draw is None:
                self._draw = self._text
                with contextlib.suppress(ImportError):
                    self._draw = self._rich()
            self._draw(self._done)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._end()

    def _text(self, done: int) -> None:
        rate = done / max(time.monotonic() - self._begun, 1e-9)
        line = f"{self._what}: {done / 1e9:.2f} of {self._size / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s"
        self._stream.write(f"\r{line[:100]:<100}")
        self._stream.flush()
        self._end = lambda: self._stream.write("\r" + 100 * " " + "\r")

    def _rich(self) -> Callable[[int], None]:
        from rich import progress
        from rich.console import Console

        columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.DownloadColumn())
        bar = progress.Progress(
            *columns,
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=Console(file=self._stream),
            transient=True,
        )
        bar.start()
        self._end = bar.stop
        task = bar.add_task(self._what, total=self._size)
        return lambda done: bar.update(task, completed=done)
