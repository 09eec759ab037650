"""ModuleDef: the static half of a Module, and how a Module is built from it and a State."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax

from nnx.core.graph import ABSENT, MISSING, SHARED, TREE_SPEC, GraphKey, build, is_static
from nnx.core.info import MODULE, STATIC, TREE, join
from nnx.core.proxies import Access
from nnx.core.pure import Pure
from nnx.core.refs import Ref
from nnx.core.repr import short
from nnx.core.state import State
from nnx.core.statics import Freezer, Statics
from nnx.core.trees import can_change, own
from nnx.core.updates import update
from nnx.core.variables import Container, Spec

M = TypeVar("M")


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

    def merge(self, *states: Any) -> M:
        """A new Module from this structure and the States; values from later States win.

        Variables the States have and the structure has not become attributes; those no State has are absent.
        """
        key = self._key
        if len(states) == 1 and type(states[0]) is State and states[0]._layout is key.layout:
            leaves: Sequence[Any] = states[0]._leaves
            extra: dict[str, Any] = {}
        else:
            leaves, extra = _assemble(key, _as_states(states))
        values, changed = _unbox(key, leaves)
        graph = build(key, self._statics, values)
        root = graph.modules[key.table[0][0]]
        for i, spec in changed:
            at, name, _ = key.cells[i]
            info = graph.modules[at]._nnx_info
            if type(info.kinds[name]) is Ref:
                info.kinds[name]._spec = spec
            else:
                info.kinds[name] = spec
        if extra:
            update(root, State(extra))
        return root

    def canonical(self, state: State) -> State:
        """The State with every path that leads to a shared cell replaced by the canonical one."""
        layout = self._key.layout
        if all(path in layout.index for path in state):
            return state
        cells = map(self._key.find, state)
        pairs = zip(cells, state.items(), strict=True)
        return State({path if cell is None else layout.paths[cell]: leaf for cell, (path, leaf) in pairs})

    def apply(self, *states: Any) -> Access:
        """A proxy of the Module these States make: any chain of `.attr` and `[key]`, then a call.

        The call gives `(out, Pure)`, with one State.

        >>> state, moduledef = nnx.Sequence([jnp.sin, jnp.cos]).partition()
        >>> out, pure = moduledef.apply(state)(0.0)
        """

        def run(find: Any, args: Any, kwargs: Any) -> Any:
            module: Any = self.merge(*states)
            out = find(module)(*args, **kwargs)
            return out, Pure(module.get_state(), module.get_module_def())

        return Access(run)

    def diff(self, other: "ModuleDef[Any]", prefixes: Sequence[str] = ("",)) -> list[Difference]:
        """The paths that differ, and how; empty when the two are equal."""
        if self == other:
            return []
        ours, theirs = self.describe(prefixes), other.describe(prefixes)
        nothing = (None, "nothing")
        paths = [*ours, *(path for path in theirs if path not in ours)]
        differences = []
        for path in paths:
            (key, before), (other_key, after) = ours.get(path, nothing), theirs.get(path, nothing)
            if key != other_key:
                if before == after:
                    before, after = _told_apart(before, key, other_key)
                differences.append(Difference(path, before, after))
        return differences

    def describe(self, prefixes: Sequence[str] = ("",)) -> dict[str, tuple[Any, str]]:
        """For every path of the structure something to compare and a text."""
        roots, table, ref_cells = self._key.table
        parents = self._key.parents()
        paths = [""] * len(table)
        for number, root in enumerate(dict.fromkeys(roots)):
            paths[root] = prefixes[number]
        lines: dict[str, tuple[Any, str]] = {}
        mutables = set(map(id, self._statics.mutables))
        homes: dict[int, str] = {}  # the first path to a mutable value, by its id
        for at, (cls, attrs) in enumerate(table):
            parent, parent_name = parents[at]
            if parent >= 0:
                paths[at] = join(paths[parent], parent_name)
            lines[paths[at]] = (cls, cls.__name__)
            for name, kind, *rest in attrs:
                path = join(paths[at], name)
                if is_static(kind):
                    value = self._statics.values[rest[1]]
                    home = homes.setdefault(id(value), path) if id(value) in mutables else path
                    again = f", the same value as {home!r}" if home != path else ""
                    lines[path] = ((STATIC, rest[0]), f"static {short(value)}{again}")
                elif kind is MODULE:
                    if parents[rest[0]] != (at, name):
                        lines[path] = ((MODULE, rest[0]), f"the same Module as {paths[rest[0]] or 'the root'!r}")
                elif kind is SHARED:
                    home, home_name, _ = self._key.cells[ref_cells[rest[1]]]
                    lines[path] = ((SHARED, *rest), f"{rest[0]}, shared as {join(paths[home], home_name)!r}")
                elif kind is ABSENT:
                    lines[path] = ((ABSENT, rest[0]), f"{rest[0]} without state")
                else:
                    lines[path] = (kind, repr(kind))
        return lines

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModuleDef) and self._key is other._key

    def __hash__(self) -> int:
        return self._key.hash

    def __repr__(self) -> str:
        lines = [f"  {path or '(root)'}: {text}" for path, (_, text) in self.describe().items()]
        return "\n".join(["ModuleDef(", *lines, ")"])

    def __reduce__(self) -> Any:
        return (_unpickle_def, (_strip_keys(self._key.table), self._statics))


def _told_apart(text: str, key: Any, other: Any) -> tuple[str, str]:
    """Texts for two static values that print alike: where their keys part."""
    while type(key) is tuple and type(other) is tuple and len(key) == len(other):
        pair = next(((a, b) for a, b in zip(key, other) if a != b), None)
        if pair is None:
            break
        key, other = pair
    if repr(key) == repr(other):
        return text, f"another object that prints as {text}"
    return f"{text} with {short(key)}", f"{text} with {short(other)}"


def _strip_keys(table: tuple[Any, ...]) -> tuple[Any, ...]:
    roots, modules, ref_cells = table
    stripped = tuple(
        (cls, tuple((entry[0], entry[1], None, entry[3]) if is_static(entry[1]) else entry for entry in attrs))
        for cls, attrs in modules
    )
    return roots, stripped, ref_cells


def _unpickle_def(table: tuple[Any, ...], statics: Statics) -> ModuleDef[Any]:
    roots, modules, ref_cells = table
    freezer = Freezer(lambda module: None, arrays_inside=True)  # what they hold was checked when they were frozen
    keys = [freezer.key(value) for value in statics.values]  # in the order of the walk: mutable values are numbered

    def restore(entry: Any) -> Any:
        return (entry[0], entry[1], keys[entry[3]], entry[3]) if is_static(entry[1]) else entry

    restored = tuple((cls, tuple(restore(entry) for entry in attrs)) for cls, attrs in modules)
    return ModuleDef(GraphKey.of((roots, restored, ref_cells)), statics)


jax.tree_util.register_static(ModuleDef)


def _assemble(key: GraphKey, states: Iterable[State]) -> tuple[list[Any], dict[str, Any]]:
    """The leaf of every cell, later States first; and the leaves at paths the structure does not know."""
    index = key.layout.index
    leaves = [MISSING] * len(index)
    extra: dict[str, Any] = {}
    for state in states:
        for path, leaf in zip(state._layout.paths, state._leaves, strict=True):
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
    """The raw values of State leaves, copied if they can change, and the cells whose container has another spec."""
    values, changed, copies = [], [], {}
    for i, (kind, leaf) in enumerate(zip(key.kinds, leaves, strict=True)):
        if isinstance(leaf, Container):
            spec, leaf = leaf._spec, leaf.value
            if spec is not kind and not (kind is TREE and spec is TREE_SPEC):
                changed.append((i, spec))
        values.append(own(leaf, copies) if can_change(leaf) else leaf)
    return values, changed
