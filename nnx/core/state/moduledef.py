"""ModuleDef: the static half of a Module, and how it and a State are merged into a Module."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import jax

from nnx.core.module.attributes import set_spec
from nnx.core.module.call_chains import Access
from nnx.core.module.kinds import STATIC
from nnx.core.repr import short
from nnx.core.state.paths import join, segment_of
from nnx.core.state.pure import Pure
from nnx.core.state.state import State, parts_of
from nnx.core.state.updates import update
from nnx.core.statics.keys import KeyMaker, in_no_graph
from nnx.core.statics.statics import Statics
from nnx.core.structure.build import MISSING, build
from nnx.core.structure.flat import flat_of
from nnx.core.structure.structure import (
    AbsentAttribute,
    Attribute,
    ChildAttribute,
    DataAttribute,
    GraphKey,
    GraphStructure,
    StaticAttribute,
)
from nnx.core.variables.trees import can_change, own
from nnx.core.variables.variables import Container, Spec

M = TypeVar("M")


FORMER_ATTRIBUTES = {
    "index": "Modules have paths instead of numbers: `dict(moduledef.merge().named_modules())`.",
    "submodules": "A ModuleDef describes all Modules at once: `dict(moduledef.merge().named_modules())`.",
    "static_fields": "Read static attributes from the Module without its state: `moduledef.merge().name`.",
}
"""What to write instead of `moduledef.<name>`."""


class Difference(NamedTuple):
    """One path at which two ModuleDefs differ."""

    path: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path or '(root)'}: {self.before} -> {self.after}"


class ModuleDef(Generic[M]):
    """The static half of a Module: classes, static values, sharing, and the paths and types of its variables.

    Hashable, comparable, and a pytree without leaves. Two Modules built by the same code have equal ModuleDefs.

    >>> state, moduledef = nnx.Linear(2, 3, ctx=nnx.context(0)).partition()
    >>> moduledef == nnx.Linear(2, 3, ctx=nnx.context(1)).get_module_def()
    True
    >>> moduledef.merge(state).kernel.shape
    (2, 3)
    """

    __slots__ = ("_key", "_statics", "__weakref__")

    def __init__(self, key: GraphKey, statics: Statics):
        self._key = key
        self._statics = statics

    @property
    def type(self) -> type[M]:
        """The class of the Module."""
        cls: Any = self._key.class_of(self._key.roots[0])
        return cls

    def __getattr__(self, name: str) -> Any:
        hint = FORMER_ATTRIBUTES.get(name)
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(text if hint is None else f"{text}, as it had in 0.0.8. {hint}", name=name, obj=self)

    def merge(self, *states: Any) -> M:
        """Builds a Module from this structure and the States; values from later States win.

        Variables that are not part of the structure become attributes. Variables that no State has are absent.
        """
        key = self._key
        if len(states) == 1 and type(states[0]) is State and states[0]._layout is key.layout:
            leaves: Sequence[Any] = states[0]._leaves
            extra: dict[str, Any] = {}
        else:
            leaves, extra = _assemble(key, _as_states(states))
        values, changed = _unbox(key, leaves)
        graph = build(key, self._statics, values)
        root = graph.modules[key.roots[0]]
        for cell, spec in changed:
            module, name, _ = key.cells[cell]
            set_spec(graph.modules[module], name, spec)
        if extra:
            update(root, State(extra))
        return root

    def canonical(self, state: State) -> State:
        """Returns the State with every path that leads to a shared cell replaced by the canonical one."""
        layout = self._key.layout
        if all(path in layout.index for path in state):
            return state
        cells = map(self._key.find, state)
        pairs = zip(cells, state.items(), strict=True)
        return State({path if cell is None else layout.paths[cell]: leaf for cell, (path, leaf) in pairs})

    def apply(self, *states: Any) -> Access:
        """Returns a proxy of the Module that these States make: any chain of `.attr` and `[key]`, then a call.

        The call returns `(out, Pure)`, with one State.

        >>> state, moduledef = nnx.Sequence([jnp.sin, jnp.cos]).partition()
        >>> out, pure = moduledef.apply(state)(0.0)
        """

        def run(find: Any, args: Any, kwargs: Any) -> Any:
            module: Any = self.merge(*states)
            out = find(module)(*args, **kwargs)
            flat = flat_of(module)
            return out, Pure(flat.state(), ModuleDef(flat.key, flat.statics))

        return Access(run)

    def diff(self, other: "ModuleDef[Any]", prefixes: Sequence[str] = ("",)) -> list[Difference]:
        """Returns the paths that differ, and how; an empty list if the two are equal."""
        if self == other:
            return []
        ours, theirs = self.describe(prefixes), other.describe(prefixes)
        nothing = (None, "nothing")
        paths = [*ours, *(path for path in theirs if path not in ours)]
        differences = []
        for path in paths:
            (key, before), (other_key, after) = ours.get(path, nothing), theirs.get(path, nothing)
            if key != other_key:
                if _ADDRESS.sub("", before) == _ADDRESS.sub("", after):
                    before, after = _told_apart(_ADDRESS.sub("", before), key, other_key)
                differences.append(Difference(path, before, after))
        return [*differences, *self._order_differences(other, prefixes)]

    def _order_differences(self, other: "ModuleDef[Any]", prefixes: Sequence[str]) -> Iterator[Difference]:
        """Yields the Modules whose common attributes are in another order."""
        theirs = dict(zip(other._key.module_paths(prefixes), range(other._key.module_count)))
        for module, path in enumerate(self._key.module_paths(prefixes)):
            if path in theirs and self._key.has_order and other._key.has_order:
                before, after = self._key.insertion_order(module), other._key.insertion_order(theirs[path])
                before, after = [n for n in before if n in after], [n for n in after if n in before]
                if before != after:
                    texts = [", ".join(map(segment_of, names)) for names in (before, after)]
                    yield Difference(path, *[f"attributes in the order {text}" for text in texts])

    def describe(self, prefixes: Sequence[str] = ("",)) -> dict[str, tuple[Any, str]]:
        """Returns for every path of the structure something to compare and a text; there is one prefix per root."""
        key, parents, paths = self._key, self._key.parents(), self._key.module_paths(prefixes)
        lines: dict[str, tuple[Any, str]] = {}
        mutables = set(map(id, self._statics.mutables))
        homes: dict[int, str] = {}  # the first path to a mutable value, by its id
        for module, module_path in enumerate(paths):
            cls = key.class_of(module)
            lines[module_path] = (cls, cls.__name__)
            for attribute in key.attributes(module):
                path = join(module_path, attribute.name)
                if type(attribute) is StaticAttribute:
                    value = self._statics.values[attribute.number]
                    home = homes.setdefault(id(value), path) if id(value) in mutables else path
                    again = f", the same value as {home!r}" if home != path else ""
                    lines[path] = ((STATIC, attribute.key), f"static {short(value)}{again}")
                elif type(attribute) is ChildAttribute:
                    if parents[attribute.module] != (module, attribute.name):
                        home = paths[attribute.module]
                        lines[path] = ((attribute.kind, home), f"the same Module as {home or 'the root'!r}")
                elif type(attribute) is DataAttribute:
                    kind = attribute.kind
                    lines[path] = (kind, repr(kind))
                    if attribute.cell in key.shared:
                        cell = key.cells[attribute.cell]
                        home = join(paths[cell.module], cell.name)
                        lines[path] = ((kind, home), f"{kind}, shared as {home!r}")
                elif type(attribute) is AbsentAttribute:
                    lines[path] = (attribute, f"{attribute.spec} without state")
        return lines

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModuleDef) and self._key.agrees_with(other._key)

    def __hash__(self) -> int:
        return self._key.hash

    def __repr__(self) -> str:
        lines = [f"  {path or '(root)'}: {text}" for path, (_, text) in self.describe().items()]
        return "\n".join(["ModuleDef(", *lines, ")"])

    def __reduce__(self) -> Any:
        # The keys of static values hold identities of this process, so they are computed again on the other side.
        return (_unpickle_def, (_with_static_keys(self._key.structure, {}), self._statics))


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # where an object is says nothing about what differs


def _told_apart(text: str, key: Any, other: Any) -> tuple[str, str]:
    """Returns texts for two static values that print alike: the first part in which their keys differ."""
    name = ""
    while type(key) is tuple and type(other) is tuple and len(key) == len(other):
        pair = next(((a, b) for a, b in zip(key, other) if a != b), None)
        if pair is None:
            break
        if len(key) == 2 and type(key[0]) is str and key[0] == other[0]:  # the key of an attribute
            name = f"{key[0]} = "
        key, other = pair
    if repr(key) == repr(other):
        return text, f"another object that prints as {text}"
    return f"{text} with {name}{short(key)}", f"{text} with {name}{short(other)}"


def _with_static_keys(structure: GraphStructure, keys: Mapping[int, Any]) -> GraphStructure:
    """Returns the structure with these keys for its static values, by number; None for the others."""

    def change(attribute: Attribute) -> Attribute:
        return attribute._replace(key=keys.get(attribute.number)) if type(attribute) is StaticAttribute else attribute

    return structure.mapped(change)


def _unpickle_def(structure: GraphStructure, statics: Statics) -> ModuleDef[Any]:
    maker = KeyMaker(in_no_graph, arrays_inside=True)  # arrays were checked when the keys were first made
    # In the order of their numbers: the maker numbers the mutable values as it meets them.
    keys = {number: maker.key(value) for number, value in enumerate(statics.values)}
    return ModuleDef(GraphKey.of(_with_static_keys(structure, keys)), statics)


key_of: Callable[[Any], GraphKey] = attrgetter("_key")
"""Returns the GraphKey of a ModuleDef."""

jax.tree_util.register_static(ModuleDef)


def _assemble(key: GraphKey, states: Iterable[State]) -> tuple[list[Any], dict[str, Any]]:
    """Returns the leaf of every cell, where later States win, and the leaves at paths that are not in the structure."""
    index = key.layout.index
    leaves = [MISSING] * len(index)
    extra: dict[str, Any] = {}
    for state in states:
        layout, given = parts_of(state)
        for path, leaf in zip(layout.paths, given, strict=True):
            cell = index.get(path)
            if cell is None:
                cell = key.find(path)
            if cell is None:
                extra[path] = leaf
            else:
                leaves[cell] = leaf
    return leaves, extra


def _as_states(states: Iterable[Any]) -> Iterator[State]:
    for state in states:
        if isinstance(state, State):
            yield state
        elif isinstance(state, (tuple, list)):
            yield from _as_states(state)
        else:
            raise TypeError(f"merge takes States, got {short(state)} of type {type(state).__name__}.")


def _unbox(key: GraphKey, leaves: Sequence[Any]) -> tuple[list[Any], list[tuple[int, Spec]]]:
    """Returns the raw values of State leaves, copied if they can change, and the cells whose spec is different."""
    values, changed, copies = [], [], {}
    for i, (expected, leaf) in enumerate(zip(key.specs, leaves, strict=True)):
        if isinstance(leaf, Container):
            spec, leaf = leaf._spec, leaf.value
            if spec is not expected:
                changed.append((i, spec))
        values.append(own(leaf, copies) if can_change(leaf) else leaf)
    return values, changed
