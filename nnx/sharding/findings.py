"""Findings: what deserves a look before a model is split over a mesh.

A *finding* is a sentence about something somebody wrote that has no effect (a rule, a mesh axis, the name in a
constraint), about a large array that every device holds as a whole, or about layers that communicate more than
necessary. An array that a rule leaves whole on purpose, `(name, None)`, is not a finding.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from nnx.sharding.rules import Rules, axis_rules, names_in
from nnx.sharding.spelling import did_you_mean
from nnx.sharding.unmatched import BUILT_IN_NAMES, idle_mesh_axes, missing_mesh_axes, unmatched_rules

LARGE = 16 << 20
"""The size in bytes from which an array that is left whole is reported as a finding."""

UNKNOWN_IN_CONSTRAINT = "no rule has the axis name {name!r}, which a constraint uses, so that axis is not split.{hint}"
LEFT_WHOLE = "{path}: {size} whole on each of {devices} devices: {reason}."
NO_NAMES = "it has no axis names"
NO_RULE = "no rule decides {names}"
NO_FIT = "no rule fits its sizes {shape}"
SPLIT_PAIR = """{first} and {second} are split by their outputs, so the features between them are gathered on every \
device. If the second layer follows the first, let the class that holds them name the hidden axis, as nnx.MLP does: \
logical_axes = {{"{up}/kernel": ("embed", "mlp"), "{up}/bias": ("mlp",), "{down}/kernel": ("mlp", "embed")}}."""


class ArrayRow(Protocol):
    """What findings need to know about one array; see `ShardingRow`."""

    @property
    def path(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def logical_axes(self) -> tuple[Any, ...]: ...
    @property
    def mesh_axes(self) -> Any: ...
    @property
    def bytes(self) -> int: ...
    @property
    def errors(self) -> tuple[str, ...]: ...
    @property
    def notes(self) -> tuple[str, ...]: ...


def find(
    rows: Sequence[ArrayRow], mesh_shape: Mapping[str, int], rules: Rules, constrained: Iterable[str]
) -> list[str]:
    """Returns the findings about a model on a mesh; none without a mesh, or if it has one device.

    Args:
        rows: the arrays of the model.
        mesh_shape: the size of every mesh axis.
        rules: the rules.
        constrained: the names that constraints have used under these rules.
    """
    if math.prod(mesh_shape.values()) == 1:
        return []
    used = names_of(rows)
    decided = {name for name, _ in axis_rules(rules)}
    unknown = sorted(set(constrained) - decided - BUILT_IN_NAMES)
    known = decided | BUILT_IN_NAMES
    return [
        *unmatched_rules(used, rules).values(),
        *missing_mesh_axes(used, mesh_shape, rules),
        *idle_mesh_axes(mesh_shape, rules),
        *(UNKNOWN_IN_CONSTRAINT.format(name=name, hint=did_you_mean(name, known)) for name in unknown),
        *left_whole(rows, mesh_shape, rules),
        *_split_pairs(rows),
    ]


def names_of(rows: Sequence[ArrayRow]) -> set[str]:
    """Returns the axis names of the arrays in a model."""
    return {name for row in rows for name in names_in(row.logical_axes)}


def left_whole(rows: Sequence[ArrayRow], mesh_shape: Mapping[str, int], rules: Rules) -> list[str]:
    """Returns the findings about large arrays that are not split, unless rules leave them whole on purpose."""
    decided, found = {name for name, _ in axis_rules(rules)}, []
    devices = math.prod(mesh_shape.values())
    for row in rows:
        if row.bytes < LARGE or row.errors or any(row.mesh_axes):
            continue
        names = names_in(row.logical_axes)
        undecided = [name for name in names if name not in decided]
        if names and not undecided and not row.notes:
            continue
        no_rule = NO_RULE.format(names=", ".join(map(repr, undecided)))
        reason = NO_NAMES if not names else no_rule if undecided else NO_FIT.format(shape=row.shape)
        found.append(LEFT_WHOLE.format(path=row.path, size=size_text(row.bytes), devices=devices, reason=reason))
    return found


def _split_pairs(rows: Sequence[ArrayRow]) -> list[str]:
    """Returns a finding for every two layers of a Module that widen and narrow again, both split by their outputs."""
    by_parent: dict[str, list[ArrayRow]] = {}
    for row in rows:
        layer, _, name = row.path.rpartition("/")
        if name == "kernel" and row.logical_axes[-2:] == ("in", "out") and any(row.mesh_axes[-1:]):
            by_parent.setdefault(layer.rpartition("/")[0], []).append(row)
    found = []
    for layers in by_parent.values():
        for up in layers:
            wide, narrow = up.shape[-1], up.shape[-2]
            down = next((row for row in layers if row.shape[-2:] == (wide, narrow) and wide > narrow), None)
            if down is not None and down.mesh_axes[-1] == up.mesh_axes[-1]:
                first, second = (row.path.rpartition("/")[0] for row in (up, down))
                names = {"up": first.rpartition("/")[2], "down": second.rpartition("/")[2]}
                found.append(SPLIT_PAIR.format(first=first, second=second, **names))
    return found


def size_text(count: float) -> str:
    """Returns a number of bytes as text, in a unit that fits."""
    if count < 1024:
        return f"{count} B"
    for unit in ("KiB", "MiB"):
        count = count / 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} GiB"
