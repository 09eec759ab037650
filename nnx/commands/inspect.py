"""`python -m nnx inspect PATH`: what a checkpoint, a safetensors file or a published directory holds."""

import argparse
import json
import math
from collections import Counter
from pathlib import Path

import jax.numpy as jnp

import nnx
from nnx.commands.command import Command
from nnx.commands.tables import bytes_text, print_table
from nnx.core.hints.hints import refuse_foreign_file
from nnx.core.sizes import size_in_bytes

MAX_ROWS = 100


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="a checkpoint, a safetensors file, or a directory of one of these")
    parser.add_argument("--depth", type=int, help="one row for everything below the first DEPTH parts of a path")
    parser.add_argument("--all", action="store_true", help=f"show every row; by default the first {MAX_ROWS}")


def _run(arguments: argparse.Namespace) -> int:
    path = arguments.path
    if path.suffix != ".safetensors":
        refuse_foreign_file(path)
    steps = _steps(path)
    if steps:
        print(f"{path}: the checkpoints of {len(steps)} steps; this is the last one, {steps[-1].name}")
        path = steps[-1]
    entries = nnx.checkpoint_entries(path)
    print(f"{path}: {_kind(path)}")
    _print_totals(entries)
    rows = _rows(entries, arguments.depth)
    shown = rows if arguments.all else rows[:MAX_ROWS]
    print_table(("path", "type", "shape", "dtype", "bytes"), shown, right=("bytes",))
    if len(shown) < len(rows):
        print(f"and {len(rows) - len(shown):,} more (--all shows them, --depth 2 groups them)")
    return 0


def _steps(path: Path) -> list[Path]:
    """Returns the checkpoints in the folder of a CheckpointManager, by step."""
    if not path.is_dir():
        return []
    found = [folder for folder in path.iterdir() if folder.is_dir() and folder.name.isdecimal()]
    return sorted(found, key=lambda folder: int(folder.name))


def _kind(path: Path) -> str:
    config = path / "config.json"
    if path.is_dir() and config.is_file():
        fields = json.loads(config.read_text(encoding="utf-8"))
        others = [f for f in ("tokenizer.json", "preprocessor_config.json") if (path / f).is_file()]
        beside = f", with {' and '.join(others)}" if others else ", without a tokenizer"
        return f"a published model of type {fields.get('model_type')!r}{beside}"
    return "safetensors" if path.suffix in (".safetensors", ".json") else "a checkpoint of NNX"


def _elements(entry: nnx.CheckpointEntry) -> int:
    return math.prod(entry.shape) if entry.kind in ("array", "key") else 0


def _bytes(entry: nnx.CheckpointEntry) -> int:
    return size_in_bytes(entry.shape, jnp.dtype(entry.dtype)) if entry.kind == "array" else 0


def _print_totals(entries: dict[str, nnx.CheckpointEntry]) -> None:
    """Prints one row per Variable type and dtype."""
    elements: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for entry in entries.values():
        key = (entry.type or entry.kind, entry.dtype or entry.kind)
        counts[key] += 1
        elements[key] += _elements(entry)
        sizes[key] += _bytes(entry)
    rows = [(*key, f"{counts[key]:,}", f"{elements[key]:,}", bytes_text(sizes[key])) for key in sorted(counts)]
    rows.append(("total", "", f"{len(entries):,}", f"{sum(elements.values()):,}", bytes_text(sum(sizes.values()))))
    print_table(("type", "dtype", "entries", "elements", "bytes"), rows, right=("entries", "elements", "bytes"))
    print()


def _rows(entries: dict[str, nnx.CheckpointEntry], depth: int | None) -> list[tuple[str, ...]]:
    if depth is None:
        return [
            (name, e.type or e.kind, str(list(e.shape)), e.dtype or "text", bytes_text(_bytes(e)))
            for name, e in entries.items()
        ]
    groups: dict[str, list[nnx.CheckpointEntry]] = {}
    for name, entry in entries.items():
        separator = "/" if "/" in name else "."  # published tensors have the names of PyTorch
        groups.setdefault(separator.join(name.split(separator)[:depth]), []).append(entry)
    return [
        (
            name,
            ", ".join(sorted({e.type or e.kind for e in group})),
            f"{sum(map(_elements, group)):,} in {len(group)}",
            ", ".join(sorted({e.dtype or "text" for e in group})),
            bytes_text(sum(map(_bytes, group))),
        )
        for name, group in groups.items()
    ]


COMMAND = Command(
    help="show what a checkpoint, a safetensors file or a published model holds, without reading its arrays",
    examples={
        "inspect checkpoints/1000": "every entry, with shape, dtype and bytes",
        "inspect model.safetensors --depth 2": "one row per block",
    },
    add_arguments=_add_arguments,
    run=_run,
)
