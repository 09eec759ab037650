"""How far a run is, and the two ways of showing it: a bar on a terminal, lines everywhere else."""

import time
from collections import deque
from importlib.util import find_spec
from typing import Any, TextIO

from nnx.inspection.metrics_file import Record

WINDOW = 50  # the calls over which the rate is taken


class Progress:
    """The steps done, their rate and the time left."""

    def __init__(self, total: int | None):
        self.total = total
        self.done = 0
        self._times: deque[tuple[float, int]] = deque(maxlen=WINDOW)

    def advance(self, step: int) -> None:
        """Notes that a step, counted from 0, has been done now."""
        self.done = step + 1 if self.total is None else min(step + 1, self.total)
        if self._times and step <= self._times[-1][1]:  # the run went back to an earlier step
            self._times.clear()
        self._times.append((time.perf_counter(), step))

    @property
    def rate(self) -> float | None:
        """Steps per second over the last calls."""
        if len(self._times) < 2:
            return None
        (start, first), (end, last) = self._times[0], self._times[-1]
        return (last - first) / (end - start) if end > start else None

    @property
    def seconds_left(self) -> float | None:
        """How long the remaining steps will take at this rate."""
        rate = self.rate
        return None if self.total is None or not rate else (self.total - self.done) / rate

    def __str__(self) -> str:
        rate, left = self.rate, self.seconds_left
        texts = []
        if rate:
            texts.append(f"{rate:,.0f} steps/s" if rate >= 100 else f"{rate:.3g} steps/s")
        if left:
            texts.append(f"{duration(left)} left")
        return "  ".join(texts)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, e.g. `1:02:03` or `0:45`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def metrics_text(record: Record) -> str:
    """The metrics of a record in one line."""
    shown = {name: value for name, value in record.items() if name not in ("step", "time")}
    return "  ".join(f"{name} {_digits(value)}" for name, value in shown.items())


def _digits(value: int | float) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.3e}"


def has_screen(stream: TextIO) -> bool:
    """Whether a stream can show something that moves, and rich is there to draw it."""
    if find_spec("rich") is None:
        return False
    from rich.console import Console

    console = Console(file=stream)
    return console.is_terminal or console.is_jupyter


class Lines:
    """A line for a record, not more often than every `interval` seconds; the last record is always shown."""

    def __init__(self, name: str, stream: TextIO, interval: float):
        self.name = name
        self.stream = stream
        self.interval = interval
        self._last = float("-inf")
        self._waiting: Record | None = None

    def show(self, record: Record, progress: Progress) -> None:
        """Prints the record, or keeps it for later."""
        self._waiting = record
        now = time.perf_counter()
        if now - self._last >= self.interval:
            self._last = now
            self._print(progress)

    def close(self, progress: Progress) -> None:
        """Prints what was kept."""
        if self._waiting is not None:
            self._print(progress)

    def _print(self, progress: Progress) -> None:
        record, self._waiting = self._waiting, None
        assert record is not None
        of = "" if progress.total is None else f"/{progress.total}"
        parts = [f"{self.name} {record['step'] + 1}{of}", metrics_text(record), str(progress)]
        print("  ".join(part for part in parts if part), file=self.stream, flush=True)


class Bar:
    """A progress bar with metrics, rate and time left."""

    def __init__(self, name: str, total: int | None, stream: TextIO):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        metrics, rate = TextColumn("{task.fields[metrics]}"), TextColumn("{task.fields[rate]}", style="cyan")
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), metrics, rate)
        self._bar = RichProgress(*columns, console=Console(file=stream))
        self._task = self._bar.add_task(name, total=total, metrics="", rate="")
        self._bar.start()

    def show(self, record: Record, progress: Progress) -> None:
        """Moves the bar to the record."""
        self._update(progress, metrics=metrics_text(record))

    def close(self, progress: Progress) -> None:
        """Leaves the bar as it is and the cursor below it."""
        self._update(progress)
        self._bar.stop()

    def _update(self, progress: Progress, **fields: Any) -> None:
        self._bar.update(self._task, completed=progress.done, rate=str(progress), **fields)
