"""Draws the benchmark charts of docs/performance.md from the records in benchmarks/stored.

    python tools/benchmark_bars.py            write the charts
    python tools/benchmark_bars.py --check    fail if the charts show other figures than the records

A *chart* is an SVG of horizontal bars in docs/assets/diagrams. It has *groups*, one for each contender, with one bar
for each measurement. Equal figures draw equal files, byte for byte.
"""

import argparse
import json
import pathlib
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
STORED = ROOT / "benchmarks" / "stored"
DIAGRAMS = ROOT / "docs" / "assets" / "diagrams"

WIDTH, LABEL, BAR, GAP, HEADER = 400, 92, 17, 14, 30  # narrow: a phone shows it at nine tenths of its size
SHOWN = 1.2  # how much larger it is where there is room
DIGIT = 7.5  # the width of a character of a figure, at most
STYLE = """<style>
.dg:root { color: #24292f }
@media (prefers-color-scheme: dark) { .dg:root { color: #e6edf3 } }
.dg .name { font-weight: 600; font-size: 14px }
.dg .note { font-size: 12.5px; opacity: .8 }
.dg .ours { fill: #4f7cff }
.dg .other { fill: #8b93a7; fill-opacity: .75 }
.dg .one { stroke: currentColor; stroke-opacity: .5; stroke-dasharray: 3 3 }
</style>"""
FONT = "-apple-system, BlinkMacSystemFont, &quot;Segoe UI&quot;, Helvetica, Arial, sans-serif"


class Group(NamedTuple):
    """A contender and its figures, each as it is printed and as a number."""

    name: str
    bars: list[tuple[str, float]]
    ours: bool


class Chart(NamedTuple):
    """What a chart shows: its title, the measurements (one bar of each group), and the contenders."""

    title: str
    measurements: list[str]
    groups: list[Group]
    line_at: float | None = None


def figures(benchmark: str) -> dict[str, dict[str, float]]:
    """The values of every row of a stored record, by contender."""
    record = json.loads((STORED / f"{benchmark}.json").read_text())
    return {name: row["values"] for name, row in record["figures"].items()}


def step_chart() -> Chart:
    """The time of a training step, as a multiple of the time by hand."""
    rows = figures("train_step")
    sizes = (3, 30, 300)
    by_size = [rows[f"step over {size} Variables, kernels and counters change"] for size in sizes]
    names = {
        "raw": "raw jax.jit",
        "nnx": "nnx.jit",
        "equinox": "equinox filter_jit",
        "flax cached_partial": "flax nnx.jit + cached_partial",
        "flax": "flax nnx.jit",
    }
    groups = []
    for key, name in names.items():
        ratios = [values[key] / values["raw"] for values in by_size]
        bars = [(f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}", ratio) for ratio in ratios]
        groups.append(Group(name, bars, ours=key == "nnx"))
    return Chart("Time of one training step; by hand = 1", [f"{size} Variables" for size in sizes], groups, line_at=1.0)


def program_chart() -> Chart:
    """The speed of a whole program on the CPU, in tens of steps."""
    (seconds,) = figures("dqn").values()
    names = {
        "raw": "hand-written JAX",
        "nnx": "NNX",
        "equinox": "Equinox",
        "flax cached_partial": "flax + cached_partial",
        "torch": "PyTorch, eager",
        "flax": "flax nnx.jit",
    }
    speeds = {key: round(1 / seconds[key], -1) for key in names if key in seconds}
    groups = [Group(names[key], [(f"{speed:,.0f}", speed)], ours=key == "nnx") for key, speed in speeds.items()]
    return Chart("DQN on CartPole: environment steps per second", [""], groups)


def bridge_chart() -> Chart:
    """The time of a training step of models of other libraries, there and here, in microseconds."""
    rows = figures("bridges")
    names = {
        "flax": "Flax NNX",
        "equinox": "Equinox",
        "linen": "Flax Linen",
        "haiku": "Haiku",
        "functions": "functions",
    }
    steps = {name: rows[f"step of a wrapped model, {name}"] for name in names}
    native, wrapped = (
        [(f"{1e6 * step[key or name]:.0f}", 1e6 * step[key or name]) for name, step in steps.items()]
        for key in ("", "nnx")
    )
    groups = [Group("in its own library", native, ours=False), Group("with nnx.bridge", wrapped, ours=True)]
    return Chart("One training step of a model, in microseconds", [*names.values()], groups)


def gpu_chart() -> Chart:
    """Tokens per second of training on a GPU."""
    speeds = figures("gpu_train_gpt2")["tokens per second, median"]
    names = {
        "nnx": "NNX",
        "hand-written JAX": "hand-written JAX",
        "the same, tuned": "hand-written JAX, tuned",
        "torch.compile": "torch.compile",
        "torch, cuDNN": "torch.compile, cuDNN",
        "torch, autotune": "torch.compile, autotuned",
    }
    groups = [Group(name, [(f"{speeds[key]:,.0f}", speeds[key])], ours=key == "nnx") for key, name in names.items()]
    return Chart("GPT-2 small on one H200: tokens per second", [""], groups)


CHARTS = {
    "step-time": step_chart,
    "dqn-speed": program_chart,
    "bridges": bridge_chart,
    "gpu-training": gpu_chart,
}


def draw(chart: Chart) -> str:
    """The SVG of a chart."""
    bars = [bar for group in chart.groups for bar in group.bars]
    one_bar = len(chart.measurements) == 1
    left = 172 if one_bar else LABEL
    room = 8 + DIGIT * max(len(text) for text, _ in bars)  # for the figure behind the longest bar
    scale = (WIDTH - left - room) / max(value for _, value in bars)
    body, y = [], HEADER
    for group in chart.groups:
        if not one_bar:
            body.append(f'<text class="name" x="0" y="{y + 12}">{group.name}</text>')
            y += 19
        for measurement, (text, value) in zip(chart.measurements, group.bars):
            label, width = group.name if one_bar else measurement, value * scale
            kind = "ours" if group.ours else "other"
            body.append(f'<text class="note" x="{left - 8}" y="{y + 13}" text-anchor="end">{label}</text>')
            body.append(f'<rect class="{kind}" x="{left}" y="{y + 1}" width="{width:.1f}" height="{BAR - 3}" rx="2"/>')
            body.append(f'<text class="note" x="{left + width + 6:.1f}" y="{y + 13}">{text}</text>')
            y += BAR + (7 if one_bar else 0)
        if chart.line_at is not None:
            x = left + chart.line_at * scale
            body.append(f'<path class="one" d="M{x:.1f} {y - len(group.bars) * BAR - 1}V{y}"/>')
        y += 0 if one_bar else GAP
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH * SHOWN:.0f}" '
        f'height="{y * SHOWN:.0f}" class="dg" font-family="{FONT}" fill="currentColor">'
    )
    title = f'<text class="name" x="0" y="14">{chart.title}</text>'
    return "\n".join([opening, STYLE, title, *body, "</svg>", ""])


def drawings() -> dict[pathlib.Path, str]:
    """Every chart's file and what it has to contain."""
    return {DIAGRAMS / f"{name}.svg": draw(chart()) for name, chart in CHARTS.items()}


def main() -> int:
    """Writes the charts, or checks them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    old = [path for path, svg in drawings().items() if not path.exists() or path.read_text() != svg]
    if args.check:
        for path in old:
            print(f"{path.relative_to(ROOT)} does not show the figures in {STORED.relative_to(ROOT)}")
        return bool(old)
    for path, svg in drawings().items():
        path.write_text(svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
