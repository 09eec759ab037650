"""Names that match nothing: when a rule, a mesh axis or the name in a constraint is worth a warning.

Rules are written before a model runs, and the names of its activations are known only when its constraints are traced.
So a rule whose name no array has is judged at one of two times. If it looks like a typo of a known name that nothing
else splits, placing the model warns at once. Any other one is *unsettled* until `nnx.jit` has run a Module: by then the
constraints of the model have been seen. The same holds for a mesh axis that no rule uses, since the data or a
`nnx.shard_map` may be split over it. Names of the built-in layers are always known, so the ready-made rule sets are
silent.

Every warning appears once per process.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from nnx.core.module.scopes import count_calls
from nnx.sharding.rules import Rule, Rules, axis_rules, mesh_axes_of
from nnx.sharding.rulesets import PARAMETER_NAMES
from nnx.sharding.spelling import closest, did_you_mean

BUILT_IN_NAMES = frozenset((*PARAMETER_NAMES, "batch", "length", "layers"))
"""Names of the built-in layers and rule sets. A rule for one of them is not a typo, even if this model lacks it."""

MAX_WARNINGS = 1024
MAX_UNSETTLED = 64

UNMATCHED_RULE = "no array has the axis name of the rule {rule}, and no constraint so far has used it.{hint}"
IDLE_MESH_AXIS = "no rule uses the mesh axis {axis!r} of size {size}, so its devices all do the same work."
MISSING_MESH_AXIS = "the mesh has no axis {axis!r}, which {rules} asked for; its axes are {known}.{hint}"
SETTLED = """The rules leave something unused:
{findings}
See nnx.sharding_report(model, mesh, rules)."""


class Unsettled(NamedTuple):
    """A placement whose rules have not been judged yet.

    Attributes:
        names: the axis names in the model.
        mesh_shape: the size of every mesh axis.
        rules: the rules.
        told: the sentences that were part of a warning when it was placed.
        calls: how many calls of Modules had been traced when it was placed.
    """

    names: frozenset[str]
    mesh_shape: Mapping[str, int]
    rules: Rules
    told: tuple[str, ...]
    calls: int

    def findings(self) -> list[str]:
        """Returns the findings that no warning has mentioned yet."""
        found = [*unmatched_rules(self.names, self.rules).values(), *idle_mesh_axes(self.mesh_shape, self.rules)]
        return [sentence for sentence in found if sentence not in self.told]


UNSETTLED: list[Unsettled] = []
"""The placements that are still to be judged."""
_seen_names: set[str] = set()
_seen_axes: set[Any] = set()
_warned: dict[object, None] = {}  # a dict, because it keeps the order in which entries are forgotten


def note_names(names: Iterable[str]) -> None:
    """Notes the names in a constraint, under any rules."""
    _seen_names.update(names)


def note_mesh_axes(axes: Iterable[Any]) -> None:
    """Notes mesh axes that are used without a rule, as by a `shard_map`."""
    _seen_axes.update(axes)


def note_shardings(tree: Any) -> None:
    """Notes the mesh axes that the arrays of a tree are split over."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            for entry in sharding.spec:
                note_mesh_axes(entry if isinstance(entry, tuple) else (entry,))


def first_time(key: object) -> bool:
    """Whether this is the first time that a warning is about to be given; notes that it was."""
    if key in _warned:
        return False
    if len(_warned) >= MAX_WARNINGS:
        _warned.pop(next(iter(_warned)), None)
    _warned[key] = None
    return True


def unmatched_rules(names: Iterable[str], rules: Rules) -> dict[Rule, str]:
    """Returns the rules that split a name which nothing has, each with a sentence about it.

    Args:
        names: the axis names in the model.
        rules: the rules.
    """
    known = {*names, *_seen_names, *BUILT_IN_NAMES}
    return {
        rule: UNMATCHED_RULE.format(rule=rule, hint=did_you_mean(rule[0], known))
        for rule in axis_rules(rules)
        if rule[1] and rule[0] not in known
    }


def probable_typos(names: Iterable[str], rules: Rules) -> list[str]:
    """Returns the sentences about unmatched rules whose name is close to one in the model that no rule splits."""
    names = set(names)
    split = {name for name, axes in axis_rules(rules) if axes}
    return [text for (name, _), text in unmatched_rules(names, rules).items() if closest(name, names - split)]


def missing_mesh_axes(names: Iterable[str], mesh_shape: Mapping[str, int], rules: Rules) -> list[str]:
    """Returns a sentence for every axis that rules name and the mesh does not have.

    Rules for names in the model are left out: for them, it is an error.
    """
    names = set(names)
    wanting: dict[str, list[Rule]] = {}
    for rule in axis_rules(rules):
        for axis in mesh_axes_of(rule[1]):
            if axis not in mesh_shape and rule[0] not in names:
                wanting.setdefault(axis, []).append(rule)
    known = tuple(mesh_shape)
    return [
        MISSING_MESH_AXIS.format(axis=axis, rules=_listed(found), known=known, hint=did_you_mean(axis, known))
        for axis, found in wanting.items()
    ]


def idle_mesh_axes(mesh_shape: Mapping[str, int], rules: Rules) -> list[str]:
    """Returns a sentence for every mesh axis of several devices that nothing is known to use."""
    used = {axis for _, axes in axis_rules(rules) for axis in mesh_axes_of(axes)} | _seen_axes
    return [IDLE_MESH_AXIS.format(axis=a, size=n) for a, n in mesh_shape.items() if n > 1 and a not in used]


def settle_later(names: Iterable[str], mesh_shape: Mapping[str, int], rules: Rules, told: tuple[str, ...] = ()) -> None:
    """Notes a placement, to judge its rules when a model has run."""
    entry = Unsettled(frozenset(names), dict(mesh_shape), rules, told, count_calls())
    if entry.findings():
        UNSETTLED.append(entry)
        del UNSETTLED[:-MAX_UNSETTLED]


def settle(rules: Rules) -> list[str]:
    """Judges the placements made so far, after a function has been run; returns the warnings, each of which is new.

    Args:
        rules: the rules the function ran under. Placements under others are judged when a function runs under those,
            or under none: then any function could be theirs.
    """
    warnings, waiting = [], []
    for entry in UNSETTLED:
        if entry.calls == count_calls() or rules not in ((), entry.rules):
            waiting.append(entry)
            continue
        found = entry.findings()
        text = SETTLED.format(findings="\n".join(f"- {sentence}" for sentence in found))
        if found and first_time((entry.rules, text)):
            warnings.append(text)
    UNSETTLED[:] = waiting
    return warnings


def _listed(rules: Iterable[Rule]) -> str:
    shown = [str(rule) for rule in rules]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
