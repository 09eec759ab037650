"""What a run of a benchmark measured, as a JSON file.

`make bench` writes its records to `benchmarks/results`, which git ignores; the GPU benchmarks write one where `--out`
says. Records of whole runs on a quiet machine are kept in `benchmarks/stored`, one file per benchmark, and every figure
in the README and the docs is taken from there (`tools/figures.py`). A record holds

- `benchmark`: the name of the file;
- `command`: what to run to measure it again;
- `date`, `machine` and `versions`;
- `whole`: False for a quick, tiny or partial run, which cannot be stored;
- `figures`: for each row, its `unit` and the `values` of the contenders, by name. A row of `make bench` also has a
  `result`, which is what its goal is about: the ratio of two values, or our own time.

    {"benchmark": "adam_step", ..., "figures": {
        "Adam step through nnx.Optimizer, 30 Variables": {
            "unit": "s", "values": {"nnx": 7.1e-05, "raw optax": 7.4e-05}, "result": 0.961, "goal": "≤ 1.1 × raw"}}}

Optional: `notes`, remarks about single contenders, by name, which the tables repeat.
"""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Mapping
from typing import Any

import jax

import nnx

STORED = pathlib.Path(__file__).parent / "stored"
RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGES = ("jax", "optax", "flax", "equinox", "torch", "transformers")

Figures = dict[str, dict[str, Any]]


def make_record(benchmark: str, command: str, figures: Figures, *, whole: bool, **more: Any) -> dict[str, Any]:
    """Returns the record of a run that ended now, on this machine."""
    return {
        "benchmark": benchmark,
        "command": command,
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **versions()},
        "whole": whole,
        **more,
        "figures": figures,
    }


def row(unit: str, values: Mapping[str, float | None], **more: Any) -> dict[str, Any]:
    """Returns one row of the figures; contenders that did not take part are None, and are left out."""
    return {"unit": unit, "values": {name: value for name, value in values.items() if value is not None}, **more}


def write(path: pathlib.Path, record: Mapping[str, Any]) -> None:
    """Writes a record as JSON that people can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: pathlib.Path) -> dict[str, Any]:
    """Returns the record in a file."""
    return json.loads(path.read_text(encoding="utf-8"))


def machine() -> str:
    """Describes this machine in words: its accelerators if it has any, else its processor."""
    devices = jax.devices()
    if devices[0].platform != "cpu":
        count = "one" if len(devices) == 1 else str(len(devices))
        return f"{count} {devices[0].device_kind}"
    return f"{os.cpu_count()} CPU cores ({_processor()})"


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    """Returns the versions of those packages of interest that are installed."""
    found = {"nnx": nnx.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
