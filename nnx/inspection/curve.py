"""The curve of a metric while a run goes on: in a terminal as characters, in a notebook as SVG, updated in place."""

import html
import importlib
import math
import time
from collections.abc import Sequence
from typing import Any

from nnx.inspection.metrics_file import Record
from nnx.inspection.progress import Progress, digits, metrics_text

MAX_POINTS = 512  # per metric; with more, neighbors become their mean
ROWS, COLUMNS = 8, 60  # characters of the curve in a terminal
COLORS = ("#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#b83280")
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character: four rows, two columns


class Curve:
    """The values of some metrics so far.

    Args:
        names: the metrics; None takes those with "loss" in their name.
    """

    def __init__(self, names: Sequence[str] | None = None):
        self.names = names
        self.points: dict[str, list[tuple[float, float]]] = {}
        self._width: dict[str, int] = {}  # how many values a point is the mean of
        self._waiting: dict[str, list[tuple[float, float]]] = {}

    def add(self, record: Record) -> None:
        """Adds the values of a record that are finite."""
        for name, value in record.items():
            chosen = "loss" in name if self.names is None else name in self.names
            if chosen and name not in ("step", "time") and math.isfinite(value):
                self._append(name, float(record["step"]), float(value))

    def _append(self, name: str, step: float, value: float) -> None:
        points, waiting = self.points.setdefault(name, []), self._waiting.setdefault(name, [])
        waiting.append((step, value))
        if len(waiting) == self._width.setdefault(name, 1):
            points.append(_mean(waiting))
            waiting.clear()
        if len(points) > MAX_POINTS:
            points[:] = [_mean(points[i : i + 2]) for i in range(0, len(points) - 1, 2)]
            self._width[name] *= 2

    def lines(self, columns: int = COLUMNS, rows: int = ROWS) -> list[str]:
        """Returns the curve of the first metric as lines of braille characters, with its range at the left."""
        name, points = next(((n, p) for n, p in self.points.items() if len(p) > 1), ("", []))
        if not points:
            return []
        (left, right), (low, high) = _range(x for x, _ in points), _range(y for _, y in points)
        cells = [[0] * columns for _ in range(rows)]
        for (x, y), (next_x, next_y) in zip(points, points[1:]):
            for part in range(9):  # enough for a line without gaps between neighbors
                at = part / 8
                column = round((x + (next_x - x) * at - left) / (right - left) * (2 * columns - 1))
                row = round((high - y - (next_y - y) * at) / (high - low) * (4 * rows - 1))
                cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
        labels = [digits(high), *[""] * (rows - 2), digits(low)]
        width = max(map(len, labels))
        body = [f"{label:>{width}} │{''.join(chr(0x2800 + c) for c in row)}" for label, row in zip(labels, cells)]
        return [f"{'':{width}}  {name}", *body]

    def svg(self, width: int = 560, height: int = 200) -> str:
        """Returns the curves of all metrics as SVG; an empty text if there are no two points yet."""
        series = {name: points for name, points in self.points.items() if len(points) > 1}
        if not series:
            return ""
        values = [point for points in series.values() for point in points]
        (left, right), (low, high) = _range(x for x, _ in values), _range(y for _, y in values)
        x0, x1, y0, y1 = 62, width - 12, 12, height - 24
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif" font-size="11">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]
        for part in range(5):
            y, value = y0 + (y1 - y0) * part / 4, high - (high - low) * part / 4
            parts.append(f'<path d="M{x0},{y:.1f} H{x1}" stroke="#e2e6ea"/>')
            parts.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#666">{digits(value)}</text>')
        for step, anchor, x in ((left, "start", x0), (right, "end", x1)):
            parts.append(f'<text x="{x}" y="{height - 8}" text-anchor="{anchor}" fill="#666">step {step:,.0f}</text>')
        for number, (name, points) in enumerate(series.items()):
            color = COLORS[number % len(COLORS)]
            place = [
                f"{x0 + (x - left) / (right - left) * (x1 - x0):.1f},{y0 + (high - y) / (high - low) * (y1 - y0):.1f}"
                for x, y in points
            ]
            parts.append(f'<polyline points="{" ".join(place)}" fill="none" stroke="{color}" stroke-width="1.6"/>')
            label = f'x="{x1 - 4}" y="{y0 + 12 + 14 * number}"'
            parts.append(f'<text {label} text-anchor="end" fill="{color}">{html.escape(name)}</text>')
        return "".join([*parts, "</svg>"])


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


def _range(values: Any) -> tuple[float, float]:
    found = list(values)
    low, high = min(found), max(found)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


class Notebook:
    """Shows a run in the output of a notebook cell: its metrics and curves, in place."""

    def __init__(self, name: str, curve: Curve, interval: float):
        display = importlib.import_module("IPython.display").display  # it is running
        self.name, self.curve, self.interval = name, curve, interval
        self._last = float("-inf")
        self._record: Record = {}
        self._handle: Any = display({"text/plain": name}, raw=True, display_id=True)

    def show(self, record: Record, progress: Progress) -> bool:
        """Updates the output, at most once per `interval` seconds; returns True, since a notebook is always there."""
        self._record = record
        if time.perf_counter() - self._last >= self.interval:
            self._last = time.perf_counter()
            self._update(progress)
        return True

    def close(self, progress: Progress) -> None:
        """Shows the last record."""
        self._update(progress)

    def _update(self, progress: Progress) -> None:
        of = "" if progress.total is None else f"/{progress.total}"
        parts = [f"{self.name} {progress.done}{of}", metrics_text(self._record), str(progress)]
        text = "  ".join(part for part in parts if part)
        page = f"<div><pre>{html.escape(text)}</pre>{self.curve.svg()}</div>"
        self._handle.update({"text/html": page, "text/plain": text}, raw=True)
