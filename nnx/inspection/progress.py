"""The progress of a run, and two ways to show it: a bar on a terminal, plain lines everywhere else."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple, TextIO, cast

from nnx.inspection.metrics_file import Record

WINDOW = 50  # the number of calls over which the rate is measured
SHORTEST = 0.2
"""The seconds below which there is no rate yet: JAX returns from the first calls before their steps have run."""


THROUGHPUT = ("tokens_per_second", "flops_per_second", "mfu")
"""The fields of a record that a Progress computes."""


class Work(NamedTuple):
    """What one step does: tokens and floating-point operations, and how many of these the devices can do per second."""

    tokens: float | None = None
    flops: float | None = None
    peak_flops: float | None = None


NO_WORK = Work()


class Progress:
    """The steps done, their rate and the time left."""

    def __init__(self, total: int | None, work: Work = NO_WORK):
        self.total = total
        self.work = work
        self.done: int = 0
        self._times: deque[tuple[float, int]] = deque(maxlen=WINDOW)

    def advance(self, step: int) -> None:
        """Records that a step, counted from 0, has just been completed."""
        self.done = step + 1 if self.total is None else min(step + 1, self.total)
        if self._times and step == self._times[-1][1]:  # more metrics for the same step
            return
        if self._times and step < self._times[-1][1]:  # the run went back to an earlier step
            self._times.clear()
        self._times.append((time.perf_counter(), step))

    @property
    def rate(self) -> float | None:
        """The steps per second over the last calls; None if there were too few, or all in a moment."""
        if len(self._times) < 2:
            return None
        (start, first), (end, last) = self._times[0], self._times[-1]
        return (last - first) / (end - start) if end - start >= SHORTEST else None

    @property
    def seconds_left(self) -> float | None:
        """The time the remaining steps will take at this rate; None if that is unknown."""
        rate = self.rate
        return None if self.total is None or not rate else (self.total - self.done) / rate

    def throughput(self) -> dict[str, float]:
        """Returns the tokens and operations per second and the model FLOPs utilization, as far as they are known."""
        rate, (tokens, flops, peak) = self.rate, self.work
        if not rate:
            return {}
        values = (
            tokens and tokens * rate,
            flops and flops * rate,
            flops and peak and flops * rate / peak,
        )
        return {name: value for name, value in zip(THROUGHPUT, values, strict=True) if value is not None}

    def __str__(self) -> str:
        rate, left = self.rate, self.seconds_left
        texts = []
        if rate:
            texts.append(f"{rate:,.0f} steps/s" if rate >= 100 else f"{rate:.3g} steps/s")
        done = self.throughput()
        if "tokens_per_second" in done:
            texts.append(f"{done['tokens_per_second']:,.0f} tokens/s")
        if "mfu" in done:
            texts.append(f"{done['mfu']:.1%} MFU")
        elif "flops_per_second" in done:
            texts.append(f"{_short(done['flops_per_second'])}FLOP/s")
        if left:
            texts.append(f"{duration(left)} left")
        return "  ".join(texts)


def _short(value: float) -> str:
    """Returns a number with three digits and the prefix for the unit that follows, e.g. `12.3 k` or `1.2 T`."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "


def duration(seconds: float) -> str:
    """Returns a time as hours, minutes and seconds, e.g. `1:02:03` or `0:45`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def metrics_text(record: Record) -> str:
    """Returns the metrics of a record in one line."""
    shown = {name: value for name, value in record.items() if name not in ("step", "time", *THROUGHPUT)}
    return "  ".join(f"{name} {digits(value)}" for name, value in shown.items())


def digits(value: int | float) -> str:
    """Returns a number with four decimals, or in powers of ten."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.3e}"


class Screen:
    """A text stream that never raises: after the first error, nothing more is written to it."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self.is_gone: bool = False

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding)))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def isatty(self) -> bool:
        return not self.is_gone and self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def _attempt(self, work: Callable[[], Any]) -> None:
        if not self.is_gone:
            try:
                work()
            except (OSError, ValueError):  # the reading end is gone; the stream was closed
                self.is_gone = True


def printable(text: str) -> str:
    """Returns text without control characters, which could move the cursor or end the line."""
    return "".join(c if c.isprintable() else "?" for c in text)


def make_progress_display(
    name: str,
    total: int | None,
    stream: TextIO | None,
    interval: float,
    curve_lines: Callable[[], Sequence[str]] = list,
) -> "Bar | Lines | None":
    """Returns a bar with a curve below it if the stream can show one, else lines; None without a stream."""
    if stream is None:  # a program without a console has no standard error
        return None
    screen = Screen(stream)
    try:
        return Bar(name, total, screen, curve_lines) if _can_move(screen) else Lines(name, screen, interval)
    except Exception:  # rich allows one bar at a time, or the bar cannot be drawn on this screen
        return Lines(name, screen, interval)


def _can_move(screen: Screen) -> bool:
    """Whether a screen can show something that moves, and rich is installed to draw it."""
    if find_spec("rich") is None:
        return False
    from rich.console import Console

    console = Console(file=cast(TextIO, screen))
    return console.is_terminal or console.is_jupyter


class Lines:
    """Prints a line per record, but at most one every `interval` seconds; the last record is always shown."""

    def __init__(self, name: str, screen: Screen, interval: float):
        self.name = name
        self.screen = screen
        self.interval = interval
        self._last = float("-inf")
        self._waiting: Record | None = None

    def show(self, record: Record, progress: Progress) -> bool:
        """Prints the record or keeps it for later; returns whether the screen still works."""
        self._waiting = record
        now = time.perf_counter()
        if now - self._last >= self.interval:
            self._last = now
            self._print(progress)
        return not self.screen.is_gone

    def close(self, progress: Progress) -> None:
        """Prints the record that was kept, if any."""
        if self._waiting is not None:
            self._print(progress)

    def _print(self, progress: Progress) -> None:
        record, self._waiting = self._waiting, None
        assert record is not None
        of = "" if progress.total is None else f"/{progress.total}"
        parts = [f"{self.name} {record['step'] + 1}{of}", metrics_text(record), str(progress)]
        print(printable("  ".join(part for part in parts if part)), file=self.screen, flush=True)


class Bar:
    """A progress bar with metrics, rate and time left, and the curve of a metric below it."""

    def __init__(self, name: str, total: int | None, screen: Screen, curve_lines: Callable[[], Sequence[str]] = list):
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.text import Text

        # markup=False, because metric names are plain text and rich would read brackets in them as styles.
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}", markup=False),
            TextColumn("{task.fields[rate]}", style="cyan", markup=False),
        )
        self._screen = screen
        console = Console(file=cast(TextIO, screen))
        self._bar = RichProgress(*columns, console=console)
        self._task = self._bar.add_task(printable(name), total=total, metrics="", rate="")

        def picture() -> Group:
            return Group(self._bar.get_renderable(), *(Text(line, no_wrap=True) for line in curve_lines()))

        self._live = Live(get_renderable=picture, console=console, refresh_per_second=10)
        self._live.start()

    def show(self, record: Record, progress: Progress) -> bool:
        """Moves the bar to the record; returns whether the screen still works."""
        self._update(progress, metrics=printable(metrics_text(record)))
        if self._screen.is_gone:
            self._live.stop()
        return not self._screen.is_gone

    def close(self, progress: Progress) -> None:
        """Updates the bar a last time and leaves it on the screen, with the cursor below it."""
        self._update(progress)
        self._live.stop()

    def _update(self, progress: Progress, **fields: Any) -> None:
        self._bar.update(self._task, completed=progress.done, rate=str(progress), **fields)
