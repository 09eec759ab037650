"""Structural changes inside a transform, recorded so that they can be replayed on the caller's Modules.

A `Rewrite` is the structure after the function. Its first Modules are those that were there before, in order; the
others are new. For each cell it records whether the value came out of the function or is unchanged, and which Ref the
cell is on. Writing through a Ref, rebinding an attribute to another Ref, and untying it are three different events: the
first leaves the cell on its Ref, the second moves the attribute to the cell of another one, the third leaves it on a
cell without a Ref. A Ref that was written to and then *released* by its last attribute in the graph may have owners
outside the call, so its value comes out, too.

A `Replay` is prepared in full and then executed in one C call, so that an interrupt cannot leave half of it.
"""

import dataclasses
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import call
from typing import Any, NamedTuple

from nnx.core.module.info import arrange, class_of, info_of, new_module, revised, values_of
from nnx.core.module.kinds import SUBMODULE, Absent, absent, is_cell
from nnx.core.module.views import view_class
from nnx.core.state.updates import check_levels
from nnx.core.statics.statics import Statics
from nnx.core.statics.watches import watched_unchanged
from nnx.core.structure.structure import AbsentAttribute, ChildAttribute, DataAttribute, GraphKey, StaticAttribute
from nnx.core.structure.versions import forget_flat_forms
from nnx.core.structure.walk import Traversal, traverse
from nnx.core.trace import current_level
from nnx.core.variables.refs import Ref
from nnx.core.variables.ties import is_mutable_tree, orders_of
from nnx.core.variables.trees import KeyOrder, can_change
from nnx.transforms.engine.enter import Entered

UNTIED, NEW_REF = -1, -2  # in `Rewrite.refs`: a cell without a Ref, and one whose Ref the function made


@dataclasses.dataclass(slots=True, repr=False)
class Rewrite:
    """A structure to give to Modules, with the origin of every cell's value."""

    key: GraphKey  # the structure after the function
    statics: Statics = dataclasses.field(compare=False)
    mutables: tuple[tuple[int, bool], ...]  # per mutable static value, its number before (or -1), and if it was changed
    sources: tuple[int, ...]  # per cell, the cell before whose value it still has, or -1 if a new value came out
    tied: tuple[int, ...]  # the cells before that were Refs
    refs: tuple[int, ...]  # per cell, the cell before whose Ref it is on, or `UNTIED` or `NEW_REF`
    released: tuple[int, ...]  # cells before whose Refs left the graph with a new value; these values come out last
    old_count: int  # the number of Modules before

    def __hash__(self) -> int:
        return hash((self.key.hash, self.sources))

    def outputs(self) -> list[int]:
        """Returns the cells whose values come out of the function, in order; those of released Refs follow."""
        return [i for i, source in enumerate(self.sources) if source < 0]

    def replaced(self, count: int) -> set[int]:
        """Returns the cells, of `count` before, whose values nothing holds any more.

        A value that a Ref still holds is not among them, even if the Ref has left the graph: a Module outside may read
        it.
        """
        gone = set(range(count)) - {source for source in self.sources if source >= 0}
        changed = {ref for ref, source in zip(self.refs, self.sources) if source < 0} | set(self.released)
        return gone - (set(self.tied) - changed)

    def apply(
        self,
        old_modules: Sequence[Any],
        before: GraphKey | None,
        values: Sequence[Any],
        mutables: Sequence[Any],
        taking: Mapping[int, Any] | None = None,
    ) -> list[Any]:
        """Gives the structure to the Modules, making new ones where needed, and returns all of them by number.

        Args:
            old_modules: the Modules before, by number.
            before: their structure.
            values: what came out of the function.
            mutables: the mutable static values before, by number; they keep their identity.
            taking: Modules, by number, that take the place of new ones.

        Raises:
            TraceContextError: one of the Modules belongs to another trace level. Nothing is changed in that case.
        """
        taking = taking or {}
        check_levels([*old_modules, *taking.values()], "a structural change")
        replay = Replay(self, old_modules, before, values, mutables, taking)
        for index in range(len(replay.modules)):
            replay.plan_module(index)
        replay.plan_cells()
        for index in range(len(replay.modules)):
            replay.plan_order(index)
        replay.plan_revisions()
        # A deque of length 0 exhausts the iterator in C, and every step is a call of a C function. Python delivers
        # signals only between bytecodes, so an interrupt arrives before the first step or after the last one.
        deque(map(call, replay.steps), maxlen=0)
        if replay.marked:  # otherwise only plain variables were added or removed, so no submodule has left
            forget_flat_forms()
        return replay.modules


class Change(NamedTuple):
    """A change of a plain variable; None if there is no such variable."""

    name: str
    before: Any
    after: Any


class Replay:
    """The plan for applying a Rewrite: a list of steps, each a call of a C function."""

    def __init__(
        self,
        rewrite: Rewrite,
        old_modules: Sequence[Any],
        before: GraphKey | None,
        values: Sequence[Any],
        mutables: Sequence[Any],
        taking: Mapping[int, Any],
    ):
        self.level: Any = current_level()
        self.rewrite, self.before = rewrite, before
        key = rewrite.key
        self.modules: list[Any] = list(old_modules)
        for index in range(rewrite.old_count, key.module_count):
            self.modules.append(taking[index] if index in taking else self._new_module(index))
        self.values: dict[int, Any] = dict(zip(rewrite.outputs(), values))
        self.released: dict[int, Any] = dict(zip(rewrite.released, values[len(self.values) :]))
        self.places: list[list[tuple[int, str]]] = [[] for _ in rewrite.key.cells]  # per cell, its attributes
        for place, cell in key.cell_numbers.items():
            self.places[cell].append(place)
        self.owners: dict[int, tuple[Ref, list[Any]]] = {}  # the future owners of the Refs whose owners change, by id
        self.marked: set[int] = set()  # by id, the ModuleInfos with a change that starts a new series; see versions
        # By id, the ModuleInfos of the others, with the changes of their plain variables.
        self.changes: dict[int, tuple[Any, list[Change]]] = {}
        existing = {number: mutables[old] for number, (old, _) in enumerate(rewrite.mutables) if old >= 0}
        changed = [number for number in existing if rewrite.mutables[number][1]]
        self.statics, self.steps = rewrite.statics.attach_onto(self.modules, existing, changed)

    def _new_module(self, index: int) -> Any:
        """Makes a Module with places for its attributes, in order."""
        blueprint = self.rewrite.key.blueprints[index]
        return new_module(blueprint.cls, dict.fromkeys(blueprint.kinds), self.level, values=dict(blueprint.slots))

    # Attributes that hold no data

    def plan_module(self, index: int) -> None:
        module = self.modules[index]
        info, held = info_of(module), values_of(module)
        before = {}
        if self.before is not None and index < self.rewrite.old_count:
            before = {attribute.name: attribute for attribute in self.before.attributes(index)}
        cls, attributes = self.rewrite.key.class_of(index), self.rewrite.key.attributes(index)
        if class_of(module) is not cls:
            self._become(module, cls)
        for attribute in attributes:
            if type(attribute) is DataAttribute:
                continue  # planned by `plan_cells`
            name = attribute.name
            if type(attribute) is StaticAttribute:
                value, old = self.statics[attribute.number], before.get(name)
                is_own = self.rewrite.statics.is_own(attribute.number)
                is_same = False
                if type(old) is StaticAttribute and old.kind is attribute.kind:
                    is_same = held.get(name) is value if is_own else old.key == attribute.key
                if not is_same:
                    self._bind(module, name, attribute.kind, value)
            elif type(attribute) is ChildAttribute:
                child = self.modules[attribute.module]
                if info.kinds.get(name) is not SUBMODULE or held.get(name) is not child:
                    self._bind(module, name, SUBMODULE, child)
            elif type(attribute) is AbsentAttribute:
                current = info.kinds.get(name)
                if type(current) is not Absent or current.spec is not attribute.spec:
                    self._untie(module, name)
                    self.steps.append(partial(dict.pop, module.__dict__, name, None))
                    self._set(info.kinds, name, absent(type(module), attribute.spec))
                    self._mark(info)
        present = {attribute.name for attribute in attributes}
        for name in before:
            if name not in present:
                self._remove(module, name)

    def plan_order(self, index: int) -> None:
        """Plans to put the attributes of a Module in order, after the steps that set and remove them."""
        module, names = self.modules[index], self.rewrite.key.insertion_order(index)
        info: Any = info_of(module)
        while info.is_view:
            info = info_of(info.source)
        kinds, held, present = info.kinds, module.__dict__, self.rewrite.key.blueprints[index].slots
        # A dict keeps its order when values are set, and puts new names last. So there is nothing to do if the names
        # that stay are in order already and at most one is new. The first test settles what `sow` does.
        if tuple(kinds) == names[: len(kinds)] and len(names) <= len(kinds) + 1:
            if present.keys() - held.keys() <= {*names[len(kinds) :]}:
                return
        wanted = {*names}
        stay = [name for name in kinds if name in wanted]
        added = {name: place for place, name in enumerate(names) if name not in kinds}
        if id(info) in self.changes:
            self.changes[id(info)][1].sort(key=lambda change: added.get(change.name, -1))
        is_moved = stay != [*names[: len(stay)]]
        if is_moved:
            self._mark(info)
        if is_moved or len(added) > 1 or any([name not in held and name not in added for name in present]):
            self.steps += [*arrange(kinds, names), *arrange(held, present)]

    # Attributes that hold data

    def plan_cells(self) -> None:
        """Plans to tie or untie every attribute that holds data, and to write the values that came out."""
        written: list[tuple[Ref, Any]] = []
        for cell, (spec, status, places) in enumerate(zip(self.rewrite.key.kinds, self.rewrite.refs, self.places)):
            is_output = cell in self.values
            if not is_output and status == UNTIED and self._have_kind(places, spec):
                continue  # nothing happened to this cell, as to nearly all of them
            value = self.values[cell] if is_output else self._old_value(self.rewrite.sources[cell])
            kind = spec
            if status != UNTIED:
                kind = Ref.rebuilt(spec, value, self.level) if status == NEW_REF else self._old_ref(status) or spec
            for index, name in places:
                module = self.modules[index]
                if info_of(module).kinds.get(name) is not kind:
                    self._bind(module, name, kind, value)
                elif is_output:
                    self._set(module.__dict__, name, value)
            if is_output and type(kind) is Ref:
                written.append((kind, value))
        for cell, value in self.released.items():
            ref = self._old_ref(cell)
            assert ref is not None, "twins do not change their structure, so they release nothing"
            written.append((ref, value))
        for ref, value in written:
            self._set(ref.__dict__, "value", value)
            owners = self.owners[id(ref)][1] if id(ref) in self.owners else ref.weak_owners()
            for owner, name in owners:
                owner = owner()
                if owner is not None:
                    self._set(owner.__dict__, name, value)
        for ref, owners in self.owners.values():
            self._assign(ref.owner_steps(owners))

    def _have_kind(self, places: Sequence[tuple[int, str]], kind: Any) -> bool:
        return all([info_of(self.modules[index]).kinds.get(name) is kind for index, name in places])

    def _old_value(self, cell: int) -> Any:
        at, name, _ = self._cell_before(cell)
        return self.modules[at].__dict__[name]

    def _old_ref(self, cell: int) -> Ref | None:
        """Returns the Ref that a cell was on; None if it was shared without one, by a Module and its view."""
        at, name, _ = self._cell_before(cell)
        kind = info_of(self.modules[at]).kinds[name]
        return kind if type(kind) is Ref else None

    def _cell_before(self, cell: int) -> tuple[int, str, Any]:
        assert self.before is not None, "only a graph that was there before has cells to stay the same"
        return self.before.cells[cell]

    # Single steps

    def _bind(self, module: Any, name: str, kind: Any, value: Any) -> None:
        """Plans to give an attribute another kind and value."""
        info: Any = info_of(module)
        if info.is_view:
            if info.owns(name):
                self._set(info.own, name, value)
            else:
                self._bind(info.source, name, kind, info.stored(value))
            self._mark(info)
            return
        before = info.kinds.get(name)
        self.steps += [
            partial(dict.__setitem__, info.kinds, name, kind),
            partial(dict.__setitem__, module.__dict__, name, value),
        ]
        if is_cell(kind) and (before is None or is_cell(before)) and not is_mutable_tree(value):
            self._revise(info, name, before, revised(kind, value))
            return
        self._untie(module, name)
        if type(kind) is Ref:
            self._owners(kind).append((weakref.ref(module), name))
        self._mark(info)

    def _become(self, module: Any, cls: type) -> None:
        """Plans to give a Module another class."""
        info: Any = info_of(module)
        if info.is_view:
            self._become(info.source, cls)
            cls = view_class(cls)
        self.steps.append(partial(object.__setattr__, module, "__class__", cls))
        self._mark(info)

    def _remove(self, module: Any, name: str) -> None:
        info: Any = info_of(module)
        if info.is_view:
            self._remove(info.source, name)
            self._mark(info)
            return
        before = info.kinds.get(name)
        self.steps.append(partial(dict.pop, info.kinds, name, None))
        self.steps.append(partial(dict.pop, module.__dict__, name, None))
        if is_cell(before):
            self._revise(info, name, before, None)
            return
        self._untie(module, name)
        self._mark(info)

    def _untie(self, module: Any, name: str) -> None:
        ref = info_of(module).kinds.get(name)
        if type(ref) is Ref:
            owners = self._owners(ref)
            owners[:] = [(owner, n) for owner, n in owners if not (owner() is module and n == name)]

    def _owners(self, ref: Ref) -> list[Any]:
        """Returns the list of owners that a Ref will have, for the caller to change."""
        if id(ref) not in self.owners:
            self.owners[id(ref)] = (ref, ref.weak_owners())
        return self.owners[id(ref)][1]

    def _set(self, values: dict[str, Any], name: str, value: Any) -> None:
        self.steps.append(partial(dict.__setitem__, values, name, value))

    def _revise(self, info: Any, name: str, before: Any, after: Any) -> None:
        """Plans to note that a plain variable was added, removed or changed; None if there is no such variable."""
        self.changes.setdefault(id(info), (info, []))[1].append(Change(name, before, after))

    def plan_revisions(self) -> None:
        """Plans to note all changes of plain variables, unless the Module starts a new series anyway."""
        for info, changes in self.changes.values():
            if id(info) not in self.marked:
                revision = info.watch().revision
                for change in changes:
                    revision = revision.after(*change)
                self._assign([(info, "restructured", True), *info.watch().change_steps(revision)])

    def _mark(self, info: Any) -> None:
        """Plans what `info.changed()` does, as single steps; once per Module."""
        if id(info) in self.marked:
            return
        self.marked.add(id(info))
        self._assign(info.change_steps())

    def _assign(self, assignments: Iterable[tuple[Any, str, Any]]) -> None:
        for target, name, value in assignments:
            self.steps.append(partial(object.__setattr__, target, name, value))


class Found(NamedTuple):
    """What a function did to the structure of its Modules, and the values that come out of it."""

    walk: Traversal  # over the Modules before, the returned ones, and all they have come to hold
    rewrite: Rewrite | None = None  # None: the structure is what it was
    values: Sequence[Any] = ()
    aliases: tuple[tuple[int, ...], ...] = ()  # see Effects
    regrouped: tuple[int, ...] = ()
    orders: tuple[tuple[int, KeyOrder], ...] = ()


def find_rewrite(entered: Entered, returned: Sequence[Any], repeated: bool) -> Found:
    """Finds the Rewrite from the structure a graph was entered with to the one it has now, if they differ.

    Without `repeated`, they also differ if a mutable static value was replaced by an equal one, or changed and back.
    """
    old_modules = entered.graph.modules
    # The Modules that were there come first, so they keep their numbers, and every other one is new.
    walk = traverse([*old_modules, *returned], entered.functions)
    current = [walk.modules[at].__dict__[name] for at, name, _ in walk.key.cells]
    numbers = {id(ref): cell for cell, ref in entered.refs.items()}
    statuses = [UNTIED if ref is None else numbers.get(id(ref), NEW_REF) for ref in walk.refs]
    cells = list(map(partial(_trace_back, entered), walk.key.cells, statuses, current))
    refs = tuple([cell.ref for cell in cells])
    mutables = _origins_of_mutables(entered, walk)
    keeps_mutables = mutables == tuple([(number, False) for number in range(len(entered.graph.mutables))])
    if (keeps_mutables or repeated) and _is_as_before(entered, walk, refs):
        return Found(walk)
    origins = [cell.origin for cell in cells]
    aliases, others = entered.regrouped(origins, current)
    in_other_group = set(others)
    sources = [-1 if i in in_other_group else cell.source for i, cell in enumerate(cells)]
    released = _released(entered, refs)
    released_values = [entered.refs[cell].__dict__["value"] for cell in released]
    orders = orders_of([*enumerate(current), *((-1 - i, value) for i, value in enumerate(released_values))])
    rewrite = Rewrite(
        key=walk.key,
        statics=walk.detached(),
        mutables=mutables,
        sources=tuple(sources),
        tied=tuple(entered.refs),
        refs=refs,
        released=released,
        old_count=len(old_modules),
    )
    values = [*(value for value, source in zip(current, sources) if source < 0), *released_values]
    regrouped = tuple([origins[i] for i in others if origins[i] >= 0])
    return Found(walk, rewrite, values, aliases, regrouped, orders)


class CellOrigin(NamedTuple):
    """Where a cell comes from, as numbers of cells before the function."""

    ref: int  # as in `Rewrite.refs`
    origin: int  # the cell that it is a continuation of, or -1
    source: int  # the cell whose value it still has, or -1


def _trace_back(entered: Entered, cell: tuple[int, str, Any], status: int, value: Any) -> CellOrigin:
    """Returns where a cell of the graph after the function comes from, given its status in `Rewrite.refs` and value."""
    at, name, _ = cell
    place = -1
    if entered.key is not None and at < len(entered.graph.modules):
        place = entered.key.cell_numbers.get((at, name), -1)
    keeps = status >= 0 or place not in entered.refs  # whether the cell is the one that was there before
    origin = status if status >= 0 else place
    # A value that can change in place must not be shared with the Ref that the attribute has left.
    stays = origin >= 0 and (keeps or not can_change(value)) and not entered.is_changed(origin, value)
    return CellOrigin(status, origin if keeps else -1, origin if stays else -1)


def _released(entered: Entered, refs: Sequence[int]) -> tuple[int, ...]:
    """Returns the cells whose Refs were written to and are on no attribute anymore; `refs` are those still held."""
    held = set(refs)
    gone = [(cell, ref.__dict__["value"]) for cell, ref in entered.refs.items() if cell not in held]
    return tuple([cell for cell, value in gone if entered.is_changed(cell, value)])


def _origins_of_mutables(entered: Entered, walk: Any) -> tuple[tuple[int, bool], ...]:
    """Returns, per mutable static value, its number on entry (or -1) and whether it has changed since."""
    numbers = {id(value): number for number, value in enumerate(entered.graph.mutables)}
    changed = set()
    if entered.baseline is not None:
        watched = zip(entered.baseline.mutables, entered.baseline.watches)
        changed = {id(value) for value, watches in watched if not watched_unchanged(watches)}
    return tuple([(numbers.get(id(value), -1), id(value) in changed) for value in walk.mutables])


def _is_as_before(entered: Entered, walk: Any, refs: Sequence[int]) -> bool:
    """Whether the structure is the one that was entered: an attribute may have been deleted and set again."""
    if entered.key is None or len(walk.modules) > len(entered.graph.modules):
        return False
    if entered.key.structure.orders != walk.key.structure.orders:
        return False
    outlines = zip(entered.key.structure.outlines, walk.key.structure.outlines, strict=True)
    if not all(before.agrees_with(after) for before, after in outlines):
        return False
    for at, attribute in walk.key.structure.data_attributes():
        was = entered.key.cell_numbers[at, attribute.name]
        if refs[attribute.cell] != (was if was in entered.refs else UNTIED):
            return False
    return True
