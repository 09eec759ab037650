"""The one engine: a call with Modules and Contexts anywhere in it, as a pure function of flat values, and back.

Nouns. *Splitting* a call finds its Modules and Contexts and gives the rest as data; its `Signature` is what is static
about it. *Entering* rebuilds the Modules inside a trace; *leaving* finds what happened to them. The result is an
`Outcome`: the values that changed and the function's output, as a pytree, with the `Effects`, all that is static about
the change, as its structure. *Committing* an Outcome writes it into the caller's Modules, at once.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import setitem
from typing import Any, NamedTuple

import jax

from nnx.core.caches import outlives_caches
from nnx.core.context import Context, ContextDef
from nnx.core.errors import MUTATE_AT_OTHER_LEVEL, TraceContextError
from nnx.core.flat import Flat, joint_flat_of
from nnx.core.module_info import ModuleBase, info_of
from nnx.core.paths import join
from nnx.core.repr import short
from nnx.core.statics import NO_STATICS, Statics
from nnx.core.structure import GraphKey
from nnx.core.ties import NO_TIES, Ties
from nnx.core.trace import current_level, same_level
from nnx.core.updates import check_level, note_mutable_trees
from nnx.core.walk import refuse_pytree
from nnx.transforms.entered import Entered, enter
from nnx.transforms.rewrite import Rewrite, find_rewrite

CONTEXT_RETURNED = """A Context in the result of {name}: its keys belong to the transform that has just ended. Return \
the keys you need (ctx.make_rng(...)), or use the caller's Context: it has advanced."""

ATTACHED_FROM_OUTSIDE = """Cannot write back a Module from a different trace level: {owner} at {path!r} was made \
outside \
the function that {name} runs (a closure, perhaps) and was attached to a Module, or returned, inside it.
Pass it to the function as an argument: then it is one and the same Module inside and outside."""


# Sorts of leaf in a call

DATA, MODULE, CONTEXT = 0, 1, 2
data_types: set[type] = set()
"""Types whose values have been leaves of a call, and data. Only classes that live as long as the process."""


def sort_of(leaf: Any) -> int:
    """Whether a leaf of a call is data, a Module or a Context."""
    if isinstance(leaf, ModuleBase):
        return MODULE
    return CONTEXT if isinstance(leaf, Context) else DATA


# Splitting


class Signature(NamedTuple):
    """What is static about a call: the place of every leaf, the structure of its Modules, the flags of its Contexts."""

    treedef: Any
    marks: tuple[int, ...]  # per leaf: -1 for data, n >= 0 for the n-th Module, -2-n for the n-th Context
    key: GraphKey | None
    contexts: tuple[ContextDef, ...]
    ties: Ties = NO_TIES  # which cells are one object with each other, or with something outside the call

    def fill(self, roots: Sequence[Any], contexts: Sequence[Context], data: Sequence[Any]) -> Any:
        """The call's `(args, kwargs)` with these Modules, Contexts and data."""
        rest = iter(data)
        leaves = [next(rest) if m == -1 else roots[m] if m >= 0 else contexts[-2 - m] for m in self.marks]
        return jax.tree.unflatten(self.treedef, leaves)


_places: dict[tuple[type, ...], Any] = {}  # where Modules, Contexts and data stand among leaves of these types


def _find_places(leaves: Sequence[Any]) -> tuple[list[int], list[int], list[int], tuple[int, ...]]:
    """The places of Modules, Contexts and data among leaves, and their marks if no Module or Context stands twice."""
    places: tuple[list[int], list[int], list[int]] = ([], [], [])
    marks = []
    for i, leaf in enumerate(leaves):
        sort = sort_of(leaf)
        found = places[(2, 0, 1)[sort]]
        marks.append(-1 if sort == DATA else len(found) if sort == MODULE else -2 - len(found))
        found.append(i)
        if sort == DATA and outlives_caches(type(leaf)):
            data_types.add(type(leaf))
    return (*places, tuple(marks))


def unique(values: Sequence[Any]) -> list[Any]:
    """The distinct objects among values, in order."""
    return list({id(value): value for value in values}.values())


def _marks_of_repeated(leaves: Sequence[Any], roots: Sequence[Any], contexts: Sequence[Any]) -> tuple[int, ...]:
    numbers = {id(root): n for n, root in enumerate(roots)} | {id(ctx): -2 - n for n, ctx in enumerate(contexts)}
    return tuple([numbers[id(leaf)] if sort_of(leaf) != DATA else -1 for leaf in leaves])


class Call:
    """One call, split."""

    __slots__ = ("signature", "flat", "roots", "contexts", "data")

    def __init__(self, args: Any, kwargs: Any):
        leaves, treedef = jax.tree.flatten((args, kwargs))
        types = tuple(map(type, leaves))
        places = _places.get(types)
        if places is None:
            places = _find_places(leaves)
            if all(map(outlives_caches, types)):
                _places[types] = places
        module_places, context_places, data_places, marks = places
        if len(module_places) < len(args):  # else every argument is a Module
            for arg in args:
                if isinstance(arg, ModuleBase):
                    refuse_pytree(arg)
        roots = [leaves[i] for i in module_places]
        contexts = [leaves[i] for i in context_places]
        if len(set(map(id, roots))) < len(roots) or len(set(map(id, contexts))) < len(contexts):
            roots, contexts = unique(roots), unique(contexts)
            marks = _marks_of_repeated(leaves, roots, contexts)
        self.roots, self.contexts = roots, contexts
        self.data: list[Any] = [leaves[i] for i in data_places]
        self.flat: Flat | None = joint_flat_of(roots) if roots else None
        key, ties = (self.flat.key, self.flat.ties) if self.flat is not None else (None, NO_TIES)
        self.signature: Signature = Signature(treedef, marks, key, tuple([ctx.definition() for ctx in contexts]), ties)

    @property
    def statics(self) -> Statics:
        return self.flat.statics if self.flat is not None else NO_STATICS

    def cells(self) -> list[Any]:
        return self.flat.values() if self.flat is not None else []

    def forks(self) -> list[list[tuple[Any, Any]]]:
        """Every Context forked, as data; each has then advanced by one."""
        return [ctx.fork_data() for ctx in self.contexts]

    def cell_paths(self) -> list[str]:
        return cell_paths(self.signature.key)


def cell_paths(key: GraphKey | None) -> list[str]:
    """The path of every cell; with several Modules in the call, after the number of the Module."""
    if key is None:
        return []
    if len(key.roots) == 1:
        return [path for _, path in key.cell_roots()]
    return [join(f"(Module {key.roots.index(root)})", path) for root, path in key.cell_roots()]


# Entering and leaving


class Effects:
    """All that is static about what a function did to its Modules."""

    __slots__ = ("changed", "rewrite", "sown", "returns_modules", "aliases", "regrouped", "simple")

    def __init__(
        self,
        changed: tuple[int, ...],
        rewrite: Rewrite | None,
        sown: Any,
        returns_modules: bool,
        aliases: tuple[tuple[int, ...], ...] = (),
        regrouped: tuple[int, ...] = (),
    ):
        self.changed: tuple[int, ...] = changed  # cells with new values; where there is a Rewrite, it says so instead
        self.rewrite: Rewrite | None = rewrite
        self.sown: Any = sown
        self.returns_modules: bool = returns_modules
        self.aliases = aliases  # groups of cells, after the function, that hold one container
        self.regrouped: tuple[int, ...] = (
            regrouped  # cells, before the function, that came to share a container, or no longer do
        )
        # new values and nothing else
        self.simple: bool = rewrite is None and not sown and not returns_modules and not aliases

    def replace(self, **parts: Any) -> "Effects":
        """The same effects but for some parts."""
        names = ("changed", "rewrite", "sown", "returns_modules", "aliases", "regrouped")
        return Effects(**{name: parts[name] if name in parts else getattr(self, name) for name in names})

    def outputs(self) -> Sequence[int]:
        """The cells whose new values come out: of the graph after the function, if its structure changed."""
        return self.changed if self.rewrite is None else self.rewrite.outputs()

    def tie(self, values: Sequence[Any]) -> Sequence[Any]:
        """The values that came out, with one container for all cells that held one."""
        if not self.aliases:
            return values
        values, places = list(values), {cell: i for i, cell in enumerate(self.outputs())}
        for first, *others in self.aliases:
            for cell in others:
                if first in places and cell in places:
                    values[places[cell]] = values[places[first]]
        return values

    def _parts(self) -> Any:
        return self.changed, self.rewrite, self.sown, self.returns_modules, self.aliases

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Effects) and self._parts() == other._parts())

    def __hash__(self) -> int:
        return hash(self.changed)


class Outcome:
    """What a lifted function gives: the values that changed, its output, and the Effects; a pytree."""

    __slots__ = ("values", "out", "effects")

    def __init__(self, values: Any, out: Any, effects: Effects):
        self.values: Any = values
        self.out: Any = out
        self.effects: Effects = effects


jax.tree_util.register_pytree_node(
    Outcome,
    lambda outcome: ((outcome.values, outcome.out), outcome.effects),
    lambda effects, children: Outcome(children[0], children[1], effects),
)


class Returned:
    """A Module in the output of a lifted function, by its number."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index: int = index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Returned) and self.index == other.index

    def __hash__(self) -> int:
        return hash((Returned, self.index))


jax.tree_util.register_static(Returned)


def leave(entered: Entered, out: Any, name: str) -> Outcome:
    """Finds what happened to the Modules since they were entered."""
    leaves, treedef = jax.tree.flatten(out)
    returned = []
    for leaf in leaves:
        if sort_of(leaf) == CONTEXT:
            raise TypeError(CONTEXT_RETURNED.format(name=name))
        if sort_of(leaf) == MODULE:
            returned.append(leaf)
    modules = entered.graph.modules
    known = {id(module): i for i, module in enumerate(modules)}
    sown = tuple((i, tuple(sorted(names))) for i, module in enumerate(modules) if (names := info_of(module).sown))
    found = None
    if entered.is_restructured() or any(id(module) not in known for module in returned):
        found = find_rewrite(entered, returned)
        _check_levels(found.walk, name)
    if found is not None and found.rewrite is not None:
        known = {id(module): i for i, module in enumerate(found.walk.modules)}
        values = found.values
        effects = Effects((), found.rewrite, sown, bool(returned), found.aliases, found.regrouped)
    else:
        current = [entered.value(i) for i in range(len(entered.before))]
        aliases, regrouped = entered.regrouped(range(len(current)), current)
        others = set(regrouped)
        changed = tuple([i for i, value in enumerate(current) if i in others or entered.is_changed(i, value)])
        values = [current[i] for i in changed]
        effects = Effects(changed, None, sown, bool(returned), aliases, tuple(regrouped))
    if returned:
        out = jax.tree.unflatten(treedef, [Returned(known[id(x)]) if sort_of(x) == MODULE else x for x in leaves])
    return Outcome(values, out, effects)


def _check_levels(walk: Any, name: str) -> None:
    for i, module in enumerate(walk.modules):
        if not same_level(info_of(module).level):
            text = ATTACHED_FROM_OUTSIDE.format(owner=type(module).__name__, path=walk.path(i), name=name)
            raise TraceContextError(text)


def run(
    fun: Callable[..., Any], signature: Signature, statics: Any, cells: Any, data: Any, forks: Any, name: str
) -> Outcome:
    """Runs a function on the Modules, Contexts and data of a split call, inside the current trace."""
    contexts = [definition.from_fork(fork) for definition, fork in zip(signature.contexts, forks)]
    entered, args, kwargs = enter_call(signature, statics, cells, data, contexts)
    return leave(entered, fun(*args, **kwargs), name)


def enter_call(signature: Signature, statics: Any, cells: Any, data: Any, contexts: Any) -> tuple[Entered, Any, Any]:
    """The Modules of a split call, rebuilt, and its arguments with them."""
    entered = enter(signature.key, statics, cells, signature.ties)
    args, kwargs = signature.fill(entered.roots, contexts, data)
    return entered, args, kwargs


# Committing


def commit(call: Call, outcome: Outcome, taking: Mapping[int, Any] | None = None) -> Any:
    """Writes what changed into the caller's Modules and returns the output, with their Modules in it.

    Args:
      call: the call.
      outcome: what it led to.
      taking: Modules, by number, that take the place of new ones; see `Rewrite.apply`.

    Raises:
      TraceContextError: a Module that changed belongs to another trace level; nothing is written then.
    """
    effects = outcome.effects
    if call.flat is None and effects.rewrite is None:
        return outcome.out
    modules: list[Any] = []
    if effects.rewrite is not None:
        mutables = call.flat.mutables if call.flat is not None else []
        values = effects.tie(outcome.values)
        modules = effects.rewrite.apply(_modules(call), call.signature.key, values, mutables, taking)
    elif effects.changed:
        write(call.flat, effects, effects.tie(outcome.values))  # type: ignore[arg-type]
    if effects.sown:
        _mark_sown(modules or _modules(call), effects.sown)
    if effects.returns_modules:
        return fill_returned(outcome.out, modules or _modules(call))
    return outcome.out


def write(flat: Flat, effects: Effects, values: Sequence[Any]) -> None:
    """Writes changed values into their cells in one step, which an interrupt cannot tear."""
    if flat.level is not current_level():
        check_writable(flat, effects.changed)
    note_mutable_trees(flat, effects.changed, values)
    if flat.refs and not flat.refs.keys().isdisjoint(effects.changed):
        _write_with_refs(flat, effects.changed, values)
        return
    writer = flat.writers.get(effects.changed)
    if writer is None:
        writer = flat.writers[effects.changed] = _writer(flat, effects.changed)
    # setitem returns None, so any() exhausts the iterator, all inside one C call: Python delivers signals only between
    # bytecodes, so an interrupt arrives before all writes or after all of them.
    any(map(setitem, *writer, values))


def _writer(flat: Flat, changed: Sequence[int]) -> tuple[list[Any], list[str]]:
    return [flat.dicts[i] for i in changed], [flat.names[i] for i in changed]


def _write_with_refs(flat: Flat, changed: Sequence[int], values: Sequence[Any]) -> None:
    """Writes values to all owners of their cells. Nothing here is kept: owners outside the graph may come and go."""
    dicts, names, repeated = [], [], []
    for i, value in zip(changed, values):
        ref = flat.refs.get(i)
        for held, name in [(flat.dicts[i], flat.names[i])] if ref is None else ref.targets():
            dicts.append(held)
            names.append(name)
            repeated.append(value)
    any(map(setitem, dicts, names, repeated))


def check_writable(flat: Flat, cells: Sequence[int]) -> None:
    """Raises TraceContextError if one of the cells belongs to a Module of another trace level."""
    for i in cells:
        at, name, _ = flat.key.cells[i]
        module = flat.modules[at]()
        if module is not None:
            check_level(module, f"writing {cell_paths(flat.key)[i]!r} back")


def _modules(call: Call) -> list[Any]:
    if call.flat is None:
        return []
    modules = [weak() for weak in call.flat.modules]
    if any(module is None for module in modules):
        raise TraceContextError(MUTATE_AT_OTHER_LEVEL.format(action="writing back", owner="a Module that is gone"))
    return modules


def _mark_sown(modules: Sequence[Any], sown: Any) -> None:
    for index, names in sown:
        info_of(modules[index]).mark_sown(*names)


def fill_returned(out: Any, modules: Sequence[Any]) -> Any:
    """The output with the Modules it names in their places."""
    return jax.tree.map(
        lambda x: modules[x.index] if isinstance(x, Returned) else x, out, is_leaf=lambda x: isinstance(x, Returned)
    )


def discard(call: Call, outcome: Outcome) -> Any:
    """The output without any effect on the caller's Modules (`stateful=False`); Modules in it are new ones.

    They share nothing with the caller's but what cannot change: they are built as the body's own were.
    """
    effects = outcome.effects
    if not effects.returns_modules:
        return outcome.out
    signature, values = call.signature, effects.tie(outcome.values)
    copies = enter(signature.key, call.statics, call.cells(), signature.ties)
    modules = copies.graph.modules
    if effects.rewrite is not None:
        modules = effects.rewrite.apply(modules, signature.key, values, copies.graph.mutables)
    else:
        for cell, value in zip(effects.changed, values):
            copies.write(cell, value)
    return fill_returned(outcome.out, modules)


# The function that is lifted


class Target(NamedTuple):
    """A function to lift: a Module or a bound method of one lifts the Module as its first argument."""

    fun: Callable[..., Any]
    bound: tuple[Any, ...]  # the Module, if the function came with one
    name: str


def target_of(fun: Any, transform: str) -> Target:
    """What to call, with which Module before the arguments.

    Raises:
      TypeError: it is not callable.
    """
    if isinstance(fun, ModuleBase):
        if not callable(fun):
            raise TypeError(f"{transform} was given a {type(fun).__name__}, a Module without `__call__`.")
        return Target(type(fun).__call__, (fun,), type(fun).__name__)
    owner = getattr(fun, "__self__", None)
    if isinstance(owner, ModuleBase) and hasattr(fun, "__func__"):
        return Target(fun.__func__, (owner,), getattr(fun, "__name__", "method"))
    if not callable(fun):
        raise TypeError(f"{transform} takes a function, a Module or a method; got {short(fun)}.")
    return Target(fun, (), getattr(fun, "__name__", type(fun).__name__))
