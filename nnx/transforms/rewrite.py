"""Structural changes inside a transform, written down so that they can be replayed on the caller's Modules.

A `Rewrite` is the structure after the function: the first Modules of its table are those that were there before, in
their order, the others are new. For each cell it says whether the value came out of the function or stayed as it was.
Replaying is prepared in full and then done in one call of C functions, so that an interrupt cannot leave half of it.
"""

import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from operator import call
from typing import Any

from nnx.core.graph import ABSENT, SHARED, GraphKey, is_static, traverse
from nnx.core.info import MODULE, NODE, STRUCTURE, TREE, absent, forget_flat_forms, new_module
from nnx.core.refs import Ref
from nnx.core.statics import Statics, watched_unchanged
from nnx.core.trace import current_level
from nnx.core.updates import check_levels
from nnx.core.variables import Spec


class Rewrite:
    """A structure to be given to Modules, with the origin of every cell's value."""

    __slots__ = ("key", "statics", "mutables", "sources", "old_count")

    def __init__(
        self,
        key: GraphKey,
        statics: Statics,
        mutables: tuple[tuple[int, bool], ...],
        sources: tuple[int, ...],
        old_count: int,
    ):
        self.key = key
        self.statics = statics
        self.mutables = mutables  # per mutable static value: its number before or -1, and whether it was changed
        self.sources = sources  # per cell: the cell it is unchanged from, or -1 if the value came out
        self.old_count = old_count

    def replace(self, **parts: Any) -> "Rewrite":
        """A copy with other parts."""
        return Rewrite(**{name: parts.get(name, getattr(self, name)) for name in Rewrite.__slots__})

    def _parts(self) -> Any:
        return self.mutables, self.sources, self.old_count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rewrite) and self.key is other.key and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash((self.key.hash, self.sources))

    def outputs(self) -> list[int]:
        """The cells whose values come out of the function, in order."""
        return [i for i, source in enumerate(self.sources) if source < 0]

    def apply(
        self, old_modules: Sequence[Any], before: GraphKey | None, values: Sequence[Any], mutables: Sequence[Any]
    ) -> list[Any]:
        """Gives the structure to the Modules, making new ones where needed; returns all of them by number.

        Args:
          old_modules: the Modules that were there before, by number.
          before: their structure.
          values: the values that came out of the function.
          mutables: the mutable static values that were there before, by number. They keep their identity.

        Raises:
          TraceContextError: one of the Modules belongs to another trace level; nothing is changed then.
        """
        check_levels(old_modules, "a structural change")
        steps = Steps(self, old_modules, before, values, mutables)
        for index in range(len(steps.modules)):
            steps.plan_module(index)
        steps.plan_shared()
        deque(map(call, steps.steps), maxlen=0)
        forget_flat_forms()
        return steps.modules


class Steps:
    """The single steps of a replay, each a call of a C function."""

    def __init__(
        self,
        rewrite: Rewrite,
        old_modules: Sequence[Any],
        before: GraphKey | None,
        values: Sequence[Any],
        mutables: Sequence[Any],
    ):
        level = current_level()
        table = rewrite.key.table[1]
        new = [new_module(cls, {}, level) for cls, _ in table[rewrite.old_count :]]
        self.modules = [*old_modules, *new]
        self.rewrite = rewrite
        self.before = [dict((e[0], e) for e in attrs) for _, attrs in before.table[1]] if before is not None else []
        self.values = dict(zip(rewrite.outputs(), values))
        existing = {number: mutables[old] for number, (old, _) in enumerate(rewrite.mutables) if old >= 0}
        changed = [number for number in existing if rewrite.mutables[number][1]]
        self.statics, self.steps = rewrite.statics.attach_onto(self.modules, existing, changed)
        self.shared: dict[int, list[tuple[int, str]]] = {}
        self.level = level

    def plan_module(self, index: int) -> None:
        module = self.modules[index]
        info, held = module._nnx_info, module.__dict__
        before = self.before[index] if index < self.rewrite.old_count else {}
        entries = self.rewrite.key.table[1][index][1]
        restructured = False
        for name, kind, *rest in entries:
            old = before.get(name)
            if kind is SHARED:
                self.shared.setdefault(rest[1], []).append((index, name))
            elif is_static(kind):
                value = self.statics[rest[1]]
                is_own = self.rewrite.statics.is_own(rest[1])
                is_other = held.get(name) is not value if is_own else old is None or old[2] != rest[0]
                if is_other or old is None or old[1] is not kind:
                    self._set(info.kinds, name, kind)
                    self._set(held, name, value)
                    restructured = True
            elif kind is MODULE:
                child = self.modules[rest[0]]
                if info.kinds.get(name) is not MODULE or held.get(name) is not child:
                    self._set(info.kinds, name, MODULE)
                    self._set(held, name, child)
                    restructured = True
            elif kind is ABSENT:
                if old is None or old[1] is not ABSENT:
                    self._set(info.kinds, name, absent(type(module), rest[0]))
                    self.steps.append(partial(dict.pop, held, name, None))
                    restructured = True
            else:
                restructured |= self._plan_cell(index, name, kind, rest[0], old)
        present = {entry[0] for entry in entries}
        for name in before:
            if name not in present:
                self._remove(module, name)
                restructured = True
        if restructured:
            self._mark(info)

    def _plan_cell(self, index: int, name: str, kind: Any, cell: int, old: Any) -> bool:
        module = self.modules[index]
        info, held = module._nnx_info, module.__dict__
        current = info.kinds.get(name)
        tied_outside = type(current) is Ref and old is not None and old[1] is not SHARED and current._spec is kind
        if cell in self.values:
            targets = current.targets() if tied_outside else [(held, name)]
            for values, target in targets:
                self._set(values, target, self.values[cell])
        if tied_outside or (old is not None and old[1] is kind):
            return False
        if type(current) is Ref:
            self._detach(current, module, name)
        self._set(info.kinds, name, kind)
        return True

    def plan_shared(self) -> None:
        """Ties the attributes that share one cell, keeping the Ref they share already, if there is one."""
        for number, places in self.shared.items():
            cell = self.rewrite.key.table[2][number]
            spec = self.rewrite.key.kinds[cell]
            current = [self.modules[i]._nnx_info.kinds.get(name) for i, name in places]
            ref = next((kind for kind in current if type(kind) is Ref and kind._spec is spec), None)
            if cell in self.values:
                value = self.values[cell]
            else:
                index, name = places[0] if ref is None else (0, "")
                value = ref.__dict__["value"] if ref is not None else self.modules[index].__dict__[name]
            if ref is None:
                ref = Ref.rebuilt(spec, value, self.level)
            owners = list(ref._owners)
            for (index, name), kind in zip(places, current):
                if kind is not ref:
                    module = self.modules[index]
                    if type(kind) is Ref:
                        self._detach(kind, module, name)
                    self._set(module._nnx_info.kinds, name, ref)
                    self._set(module.__dict__, name, value)
                    owners.append((weakref.ref(module), name))
                    self._mark(module._nnx_info)
            for values, name in ref.targets():
                self._set(values, name, value)
            self.steps.append(partial(object.__setattr__, ref, "_owners", owners))
            self._bump(ref.version)

    def _remove(self, module: Any, name: str) -> None:
        kind = module._nnx_info.kinds.get(name)
        if type(kind) is Ref:
            self._detach(kind, module, name)
        self.steps.append(partial(dict.pop, module._nnx_info.kinds, name, None))
        self.steps.append(partial(dict.pop, module.__dict__, name, None))

    def _detach(self, ref: Ref, module: Any, name: str) -> None:
        owners = [(o, n) for o, n in ref._owners if not (o() is module and n == name)]
        self.steps.append(partial(object.__setattr__, ref, "_owners", owners))
        self._bump(ref.version)

    def _set(self, values: dict[str, Any], name: str, value: Any) -> None:
        self.steps.append(partial(dict.__setitem__, values, name, value))

    def _mark(self, info: Any) -> None:
        """What `info.changed()` does, as single steps."""
        for slot in ("flat", "joint", "order"):
            self.steps.append(partial(setattr, info, slot, None))
        self.steps.append(partial(setattr, info, "restructured", True))
        self._bump(info.watch())

    def _bump(self, version: Any) -> None:
        self.steps.append(partial(setattr, version, "count", version.count + 1))
        self.steps.append(partial(setattr, STRUCTURE, "stamp", object()))


def find_rewrite(entered: Any, returned: Sequence[Any]) -> tuple[Rewrite, list[Any], Any]:
    """The Rewrite from the structure a graph was entered with to the one it has now, and the values that came out."""
    old_modules = entered.graph.modules
    walk = traverse([*old_modules, *returned])
    cells_before = _occurrences(entered.key) if entered.key is not None else {}
    sources, values = [], []
    for at, name, _ in walk.cells:
        value = walk.modules[at].__dict__[name]
        cell = cells_before.get((at, name)) if at < len(old_modules) else None
        if cell is not None and not entered.is_changed(cell, value):
            sources.append(cell)
        else:
            sources.append(-1)
            values.append(value)
    mutables = _origins_of_mutables(entered, walk)
    rewrite = Rewrite(GraphKey.of(walk.table), walk.detached(), mutables, tuple(sources), len(old_modules))
    return rewrite, values, walk


def _origins_of_mutables(entered: Any, walk: Any) -> tuple[tuple[int, bool], ...]:
    """For every mutable static value its number when the graph was entered, or -1, and whether it has changed since."""
    numbers = {id(value): number for number, value in enumerate(entered.graph.mutables)}
    changed = set()
    if entered.baseline is not None:
        watched = zip(entered.baseline.mutables, entered.baseline.watches)
        changed = {id(value) for value, watches in watched if not watched_unchanged(watches)}
    return tuple([(numbers.get(id(value), -1), id(value) in changed) for value in walk.mutables])


def _occurrences(key: GraphKey) -> dict[tuple[int, str], int]:
    """The cell behind every attribute of a graph that holds data, aliases included."""
    found = {}
    for at, (_, attrs) in enumerate(key.table[1]):
        for name, kind, *rest in attrs:
            if kind is SHARED:
                found[at, name] = key.table[2][rest[1]]
            elif kind is NODE or kind is TREE or (type(kind) is Spec and not is_static(kind)):
                found[at, name] = rest[0]
    return found
