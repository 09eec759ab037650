"""The hints and the tables of the guide say the same: docs/migrating.md and docs/cheat-sheet.md, row by row."""

import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

import nnx
from nnx.core.hints import table

DOCS = pathlib.Path(__file__).parents[2] / "docs"
LIBRARIES = ("PyTorch", "Flax NNX", "Equinox")
# How the tables write what a name belongs to: the place it is written in, and the hints for that place.
OWNERS = {
    "nn": ("package", table.PACKAGE),
    "nnx": ("package", table.PACKAGE),
    "eqx": ("package", table.PACKAGE),
    "eqx.nn": ("package", table.PACKAGE),
    "model": ("model", table.MODULE),
    "m": ("model", table.MODULE),
    "self": ("model", table.MODULE),
    "optimizer": ("optimizer", table.OPTIMIZER),
}
CLASSES = {"package": nnx, "model": nnx.Module, "optimizer": nnx.Optimizer}
NAME = re.compile(rf"({'|'.join(sorted(map(re.escape, OWNERS), key=len, reverse=True))})\.(\w+)")
# What cannot be an error, because nothing looks the name up: the migration table starts with these rows.
NOT_CAUGHT = {("optimizer", "step")}
ATTRIBUTES = {"weight", "kernel", "out", "head"}  # of the models in the tables


class Row(NamedTuple):
    page: str
    theirs: str
    here: str


def rows() -> Iterator[Row]:
    for page in ("migrating.md", "cheat-sheet.md"):
        header: list[str] = []
        for line in (DOCS / page).read_text().splitlines():
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if not cells:
                header = []
            elif not header:
                header = cells
            elif header[-1] == "NNX" and not set(line) <= set("|- "):
                for title, cell in zip(header, cells):
                    if title in LIBRARIES:
                        yield Row(page, cell, cells[-1])


ROWS = [*rows()]


def names_of(cell: str) -> list[tuple[str, str]]:
    """The owners and names that the pieces of code in a cell begin with."""
    starts = [NAME.match(code) for code in re.findall(r"`([^`]+)`", cell)]
    return [(start[1], start[2]) for start in starts if start is not None]


def named(text: str) -> set[str]:
    """What a cell or a hint tells the reader to write."""
    found = {f"nnx.{name}" for name in re.findall(r"(?<![.\w])nnx\.(?:models\.)?(\w+)", text)}
    found |= {f".{name}" for name in re.findall(r"(?:model|m|moduledef|optimizer|state|layer|ctx)\.(\w+)", text)}
    words = ("nothing", "optax", "list", "dict", "twice", "flat", "reshape", "rearrange", "jnp.abs")
    return found | {word for word in words if word in text}


def hint_for(hints: table.Hints, name: str) -> str | None:
    return next((names[name] for names in hints.values() if name in names), None)


def test_the_tables_are_found():
    assert len(ROWS) > 150 and {row.page for row in ROWS} == {"migrating.md", "cheat-sheet.md"}


def cells_by_name() -> dict[tuple[str, str], list[str]]:
    """What the tables say to write instead of each name, by its owner; a name can be in the rows of several tasks."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in ROWS:
        for name in names_of(row.theirs):
            found.setdefault(name, []).append(row.here)
    return found


@pytest.mark.parametrize(("owner", "name"), cells_by_name(), ids=".".join)
def test_the_rows_of_a_name_and_its_hint_agree(owner, name):
    place, hints = OWNERS[owner]
    if hasattr(CLASSES[place], name) or (place, name) in NOT_CAUGHT or name in ATTRIBUTES:
        return
    hint = hint_for(hints, name) or (hint_for(table.MODULE, name) if place == "optimizer" else None)
    assert hint is not None, "has a row and no hint"
    here = " ".join(cells_by_name()[owner, name])
    assert named(hint) & named(here), f"the hint says {hint!r}, the rows say {here!r}"


def test_names_that_cannot_be_caught_are_the_first_rows():
    page = (DOCS / "migrating.md").read_text()
    first = page[page.index("## From PyTorch") :].split("\n|---|---|\n")[1].splitlines()[:3]
    assert ["`optimizer.step()`" in first[0], "`p.requires_grad = False`" in first[1]] == [True, True]
    flax = page[page.index("## From Flax NNX") :].split("\n|---|---|\n")[1].splitlines()[0]
    assert "`layer.kernel.value = x`" in flax


@pytest.mark.parametrize("origin", ["PyTorch", "Equinox"])
def test_every_hint_of_the_package_has_a_row(origin):
    page = (DOCS / "migrating.md").read_text() + (DOCS / "cheat-sheet.md").read_text()
    missing = [name for name in table.PACKAGE[origin] if not re.search(rf"(?<!\w){name}(?!\w)", page)]
    assert missing == []
