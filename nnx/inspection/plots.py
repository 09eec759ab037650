"""Pictures of a run: metrics over steps, drawn by matplotlib without touching its global state."""

import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nnx.core.extras import require
from nnx.inspection.metrics_file import read_metrics

NOTHING_TO_PLOT = """There is nothing to plot: none of the {count} records has {wanted}. The metrics there are: \
{names}."""


def plot_metrics(
    source: Any, path: Any, *, names: Sequence[str] | None = None, title: str | None = None
) -> pathlib.Path:
    """Draws metrics over steps into an image file.

    Metrics that end in the same word ("loss", "valid_loss") share a panel. Needs matplotlib (the extra "plot").

    Args:
      source: a metrics file or the folder it is in (see `nnx.TrainLog`), or records: mappings with a "step" each.
      path: where to write the picture; its ending says the format, e.g. ".png" or ".svg".
      names: the metrics to draw; all of them by default.
      title: above the picture.

    Returns:
      The path of the picture.

    Raises:
      ValueError: no record has one of the metrics.
    """
    figure_module = require("matplotlib.figure", "plot", "nnx.plot_metrics")
    records = read_metrics(source) if isinstance(source, (str, pathlib.PurePath)) else list(source)
    series = _series(records, names)
    panels = _panels(series)
    figure = figure_module.Figure(figsize=(7, 3.2 * len(panels)), layout="constrained")
    for at, (word, members) in enumerate(panels.items()):
        axes = figure.add_subplot(len(panels), 1, at + 1)
        for name in members:
            steps, values = zip(*series[name], strict=True)
            axes.plot(steps, values, label=name, marker="." if len(steps) < 20 else None)
        axes.set_ylabel(word)
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if len(members) > 1 or members[0] != word:
            axes.legend()
        if at == len(panels) - 1:
            axes.set_xlabel("step")
    if title:
        figure.suptitle(title)
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _series(records: Sequence[Mapping[str, Any]], names: Sequence[str] | None) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of each metric; what is no number is left out."""
    series: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, value in record.items():
            if name not in ("step", "time") and isinstance(value, (int, float)) and (names is None or name in names):
                series.setdefault(name, []).append((record["step"], float(value)))
    if not series:
        known = sorted({name for record in records for name in record} - {"step", "time"})
        wanted = "a metric" if names is None else f"one of {list(names)}"
        raise ValueError(NOTHING_TO_PLOT.format(count=len(records), wanted=wanted, names=", ".join(known) or "none"))
    return series


def _panels(names: Iterable[str]) -> dict[str, list[str]]:
    panels: dict[str, list[str]] = {}
    for name in names:
        panels.setdefault(re.split(r"[/_ ]", name)[-1], []).append(name)
    return panels
