"""Plans as a picture: memory and time as stacked bars."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

from nnx.core.extras import require
from nnx.planning.estimate import RESOURCES
from nnx.storage.files import atomic_file, local_path

_COLORS = ("#3b6fb6", "#7aa6d9", "#9bc1bc", "#c9c9c9", "#b8b0d0", "#e2955c")
_TIMES = ("#3b6fb6", "#9bc1bc", "#e2955c", "#b8b0d0")


def draw(plans: Sequence[Any], path: str | os.PathLike[str]) -> pathlib.Path:
    """Draws what fills the memory of a chip, and below it what the time of a step goes into, with a bar for each plan.

    The picture is narrow, so that its text can be read on a phone and in the column of a page.
    """
    figure_module = require("matplotlib.figure", "plot", "Plan.plot")
    file = local_path(path)
    timed = any(plan.estimate is not None for plan in plans)
    height = 1.6 + 0.5 * len(plans)
    figure = figure_module.Figure(figsize=(4.6, 2 * height if timed else height), layout="constrained")
    axes = figure.subplots(2 if timed else 1, 1, squeeze=False)[:, 0]
    names = [f"{plan.target.name}\n{_mesh(plan)}" for plan in plans]
    _memory(axes[0], plans, names)
    if timed:
        _time(axes[1], plans, names)
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as stream:
        figure.savefig(stream, dpi=120, format=file.suffix.removeprefix(".") or None)
    return file


def _memory(axes: Any, plans: Sequence[Any], names: Sequence[str]) -> None:
    kinds = [*plans[0].parts, "results", "temporary"]
    sizes = [{**plan.parts, "results": plan.results, "temporary": plan.temporary} for plan in plans]
    _bars(axes, names, [(kind, [size[kind] / 2**30 for size in sizes]) for kind in kinds], _COLORS)
    for row, plan in enumerate(plans):
        if plan.target.memory is not None:
            limit = plan.target.memory / 2**30
            axes.plot([limit, limit], [row - 0.42, row + 0.42], color="#c0392b", linewidth=2)
    axes.set_xlabel("GiB on each chip (red: what it has)")


def _time(axes: Any, plans: Sequence[Any], names: Sequence[str]) -> None:
    """Draws compute and memory one after the other; links and host work at the same time, so they are thin bars."""
    found = [plan.estimate for plan in plans]
    stacked = [(kind, [1e3 * getattr(e, kind) if e else 0.0 for e in found]) for kind in RESOURCES[:2]]
    _bars(axes, names, stacked, _TIMES)
    for number, kind in enumerate(RESOURCES[2:]):
        values = [1e3 * getattr(e, kind) if e else 0.0 for e in found]
        if any(values):
            places = [row + 0.36 for row in range(len(plans))]
            axes.barh(places, values, height=0.12, color=_TIMES[2 + number], label=f"{kind}, meanwhile")
    axes.set_xlabel("ms of a step, at least")
    _legend(axes)


def _bars(axes: Any, names: Sequence[str], series: Sequence[tuple[str, list[float]]], colors: Sequence[str]) -> None:
    left = [0.0] * len(names)
    for (kind, values), color in zip(series, colors):
        if any(values):
            axes.barh(range(len(names)), values, left=left, height=0.6, color=color, label=kind)
        left = [a + b for a, b in zip(left, values)]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    _legend(axes)


def _legend(axes: Any) -> None:
    axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=2, frameon=False)


def _mesh(plan: Any) -> str:
    return " × ".join(f"{name}={size}" for name, size in plan.mesh.shape.items())
