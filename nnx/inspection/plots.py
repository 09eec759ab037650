"""Plots of a run: metrics over steps, drawn by matplotlib without touching its global state."""

import math
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from nnx.core.extras import require
from nnx.inspection.metrics_file import read_metrics
from nnx.storage.files import atomic_file, local_path
from nnx.storage.processes import is_first

NOTHING_TO_PLOT = (
    "There is nothing to plot: none of the {count} records has {wanted}. The metrics in them are: {names}."
)


def plot_metrics(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    path: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    title: str | None = None,
) -> pathlib.Path:
    """Draws metrics over steps into an image file.

    Metrics that end in the same word ("loss", "valid_loss") share a panel. Needs matplotlib (the extra "plot").

    Args:
        source: a metrics file, the folder it is in (see `nnx.TrainLog`), or records: mappings that each have a "step".
        path: the image file to write; its extension selects the format, e.g. ".png" or ".svg".
        names: the metrics to draw; all of them by default.
        title: a title above the plot.

    Returns:
        The path of the image. In a run of several processes only the first one draws it.

    Raises:
        ValueError: no record has one of the metrics.
    """
    file = local_path(path)
    # First check whether there are several processes at all: is_first() initializes the devices, which a script that
    # only plots does not need.
    if jax.distributed.is_initialized() and not is_first():
        return file
    figure_module = require("matplotlib.figure", "plot", "nnx.plot_metrics")
    records = read_metrics(source) if isinstance(source, (str, os.PathLike)) else list(source)
    series = _series(records, names)
    panels = _panels(series)
    figure = figure_module.Figure(figsize=(7, 3.2 * len(panels)), layout="constrained")
    for at, (word, members) in enumerate(panels.items()):
        axes = figure.add_subplot(len(panels), 1, at + 1)
        for name in members:
            steps, values = zip(*series[name], strict=True)
            axes.plot(steps, values, label=label_text(name), marker="." if len(steps) < 20 else None)
        axes.set_ylabel(label_text(word))
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if len(members) > 1 or members[0] != word:
            axes.legend()
        if at == len(panels) - 1:
            axes.set_xlabel("step")
    if title:
        figure.suptitle(label_text(title))
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as stream:
        figure.savefig(stream, dpi=120, format=file.suffix.removeprefix(".") or None)
    return file


def label_text(text: str) -> str:
    """Returns a name escaped for matplotlib, which typesets text between dollar signs and hides labels like `_name`."""
    shown = "".join(c if c.isprintable() else "?" for c in text).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def _series(records: Sequence[Mapping[str, Any]], names: Sequence[str] | None) -> dict[str, list[tuple[int, float]]]:
    """Returns the steps and values of each metric, leaving out anything that is not a number."""
    series: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, value in record.items():
            if name not in ("step", "time") and isinstance(value, (int, float)) and (names is None or name in names):
                series.setdefault(name, []).append((record["step"], _to_float(value)))
    if not series:
        known = sorted({name for record in records for name in record} - {"step", "time"})
        wanted = "a metric" if names is None else f"one of {list(names)}"
        raise ValueError(NOTHING_TO_PLOT.format(count=len(records), wanted=wanted, names=", ".join(known) or "none"))
    return series


def _to_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer too large for a float
        return math.inf if value > 0 else -math.inf


def _panels(names: Iterable[str]) -> dict[str, list[str]]:
    panels: dict[str, list[str]] = {}
    for name in names:
        panels.setdefault(re.split(r"[/_ ]", name)[-1], []).append(name)
    return panels
