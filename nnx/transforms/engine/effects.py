"""The one engine: runs a function of Modules and Contexts as a pure function of flat values, and puts the changes back.

Nouns. *Entering* a call (see call, entered) rebuilds its Modules inside a trace; *leaving* finds what happened to them.
The result is an `Outcome`: the values that changed and the function's output, as a pytree. Its static part, the
`Effects`, says which cells changed and how the structure did. *Committing* an Outcome writes it into the caller's
Modules in one step; *discarding* it (`stateful=False`) leaves them alone and builds Modules in the output from copies.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import setitem
from typing import Any

import jax

from nnx.core.errors import MUTATE_AT_OTHER_LEVEL, TraceContextError
from nnx.core.module.info import info_of
from nnx.core.state.paths import join
from nnx.core.state.updates import check_level, note_mutable_trees
from nnx.core.structure.flat import Flat
from nnx.core.structure.structure import GraphKey
from nnx.core.trace import current_level, same_level
from nnx.core.variables.ties import is_news, orders_of
from nnx.core.variables.trees import KeyOrder, in_order, leaf_types
from nnx.transforms.control.shared_traces import run_in_scope
from nnx.transforms.engine.call import Call, Signature, is_context, is_module
from nnx.transforms.engine.entered import Entered, enter
from nnx.transforms.engine.observed import has_records, keep_records
from nnx.transforms.engine.rewrite import Rewrite, find_rewrite
from nnx.transforms.engine.view_rules import check_views

CONTEXT_RETURNED = """A Context in the result of {name}: its keys belong to the transform that has just ended. Return \
the keys you need (ctx.make_rng(...)), or use the caller's Context: it has advanced."""

ATTACHED_FROM_OUTSIDE = """Cannot write back a Module from a different trace level: {owner} at {path!r} was made \
outside the function that {name} runs (a closure, perhaps) and was attached to a Module, or returned, inside it.
Pass it to the function as an argument: then it is one and the same Module inside and outside."""


# Paths


def cell_paths(key: GraphKey | None) -> list[str]:
    """Returns the path of every cell, with the number of its Module in front if the call has several."""
    if key is None:
        return []
    if len(key.roots) == 1:
        return [path for _, path in key.cell_roots()]
    return [join(f"(Module {key.roots.index(root)})", path) for root, path in key.cell_roots()]


# Entering and leaving


class Effects:
    """Everything static about what a function did to its Modules.

    Attributes:
        changed: the cells with new values, if the structure is unchanged; otherwise empty, and the Rewrite lists them.
        rewrite: the structural change, if there is one.
        sown: the attributes recorded with `sow`, per Module.
        returns_modules: whether there are Modules in the output.
        aliases: groups of cells that hold one container after the function.
        regrouped: cells, numbered before the function, that came to share a container or no longer do.
        trees: the values that come out as mutable trees, by position. A flat form has to know of these.
        orders: the order of the dicts in a cell after the function, unless they are sorted; those of released Refs
            have the numbers -1, -2, ...
        simple: whether values changed and nothing else did, so that a repeated call can be made from a plan.
    """

    __slots__ = (
        "changed", "rewrite", "sown", "returns_modules", "aliases", "regrouped", "trees", "orders", "simple",
        "_positions",
    )  # fmt: skip

    def __init__(
        self,
        changed: tuple[int, ...],
        rewrite: Rewrite | None,
        sown: Any,
        returns_modules: bool,
        aliases: tuple[tuple[int, ...], ...] = (),
        regrouped: tuple[int, ...] = (),
        trees: tuple[int, ...] = (),
        orders: tuple[tuple[int, KeyOrder], ...] = (),
    ):
        self.changed: tuple[int, ...] = changed
        self.rewrite: Rewrite | None = rewrite
        self.sown: Any = sown
        self.returns_modules: bool = returns_modules
        self.aliases = aliases
        self.regrouped: tuple[int, ...] = regrouped
        self.trees: tuple[int, ...] = trees
        self.orders = orders
        self._positions: tuple[list[tuple[int, KeyOrder]], list[tuple[int, int]]] | None = None  # see `tie`
        self.simple: bool = rewrite is None and not sown and not returns_modules and not aliases

    def replace(self, **parts: Any) -> "Effects":
        """Returns the same effects with some parts replaced."""
        names = ("changed", "rewrite", "sown", "returns_modules", "aliases", "regrouped", "trees", "orders")
        return Effects(**{name: parts[name] if name in parts else getattr(self, name) for name in names})

    @property
    def survives_discard(self) -> bool:
        """Whether values have to come out even if all changes are discarded: returned Modules, captured outputs."""
        return self.returns_modules or has_records(self.rewrite)

    def outputs(self) -> Sequence[int]:
        """Returns the cells whose values come out, numbered after the function if its structure changed."""
        return self.changed if self.rewrite is None else self.rewrite.outputs()

    def tie(self, values: Sequence[Any]) -> Sequence[Any]:
        """Returns the values that came out, with dicts in order and one container for all cells that shared one."""
        if not self.aliases and not self.orders:
            return values
        if self._positions is None:
            self._positions = self._find_positions()
        orders, aliases = self._positions
        values = list(values)
        for position, order in orders:
            values[position] = in_order(values[position], order)
        for first, other in aliases:
            values[other] = values[first]
        return values

    def _find_positions(self) -> tuple[list[tuple[int, KeyOrder]], list[tuple[int, int]]]:
        """Returns `orders` and `aliases`, the latter in pairs, with the positions of values in place of cells."""
        places = {cell: position for position, cell in enumerate(self.outputs())}
        released = () if self.rewrite is None else self.rewrite.released
        places.update({-1 - number: len(places) + number for number in range(len(released))})
        orders = [(places[cell], order) for cell, order in self.orders if cell in places]
        pairs = [(first, other) for first, *others in self.aliases for other in others]
        return orders, [(places[one], places[other]) for one, other in pairs if one in places and other in places]

    def _parts(self) -> Any:
        return self.changed, self.rewrite, self.sown, self.returns_modules, self.aliases, self.trees, self.orders

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Effects) and self._parts() == other._parts())

    def __hash__(self) -> int:
        return hash(self.changed)


class Outcome:
    """What a lifted function returns to JAX: the values that changed, its output, and the Effects; a pytree."""

    __slots__ = ("values", "out", "effects")

    def __init__(self, values: Any, out: Any, effects: Effects):
        self.values: Any = values
        self.out: Any = out
        self.effects: Effects = effects


# The Effects are the aux data: what changed is known only once a function has been traced, and JAX keeps the structure
# of a trace's output with the trace. So whichever trace a call hits, it finds the effects of that very trace.
jax.tree_util.register_pytree_node(
    Outcome,
    lambda outcome: ((outcome.values, outcome.out), outcome.effects),
    lambda effects, children: Outcome(children[0], children[1], effects),
)


class Returned:
    """A Module in the output of a lifted function, as its number: a pytree without leaves.

    A Context that is handed on has a negative number. The class is for messages only.
    """

    __slots__ = ("index", "of")

    def __init__(self, index: int, of: type):
        self.index: int = index
        self.of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Returned) and self.index == other.index

    def __hash__(self) -> int:
        return hash((Returned, self.index))

    def __repr__(self) -> str:
        return f"<Module {self.index}: {self.of.__name__}>" if self.index >= 0 else f"<Context {-2 - self.index}>"


jax.tree_util.register_static(Returned)


class _Leaf:
    def __repr__(self) -> str:
        return "*"


def structure_text(structure: Any) -> str:
    """Returns the structure of an output as its author would write it: `(<Module 0: Linear>, {'loss': *})`."""
    try:
        return repr(jax.tree.unflatten(structure, [_Leaf()] * structure.num_leaves))
    except Exception:  # a user's class that cannot hold anything
        return str(structure)


def returned_modules(structure: Any) -> list[Returned]:
    """Returns the Modules and Contexts in the structure of an output."""
    is_returned = lambda x: isinstance(x, Returned)  # noqa: E731
    tree = jax.tree.unflatten(structure, [None] * structure.num_leaves)
    return list(filter(is_returned, jax.tree.leaves(tree, is_leaf=is_returned)))


def leave(entered: Entered, out: Any, name: str) -> Outcome:
    """Finds what happened to the Modules since they were entered.

    Raises:
        TypeError: there is a Context in the output.
        TraceContextError: a Module of another trace level was attached or returned.
    """
    leaves, treedef = jax.tree.flatten(out)
    if any(map(is_context, leaves)):
        raise TypeError(CONTEXT_RETURNED.format(name=name))
    returned = [leaf for leaf in leaves if is_module(leaf)]
    modules = entered.graph.modules
    known = {id(module): i for i, module in enumerate(modules)}
    sown = tuple(
        (i, tuple(names))
        for i, module in enumerate(modules)
        if info_of(module).sown and (names := info_of(module).sown_names(module.__dict__))
    )
    found = None
    if entered.is_restructured() or any(id(module) not in known for module in returned):
        found = find_rewrite(entered, returned)
        _check_levels(found.walk, name)
        check_views(entered, found.walk, name)
    if found is not None and found.rewrite is not None:
        known = {id(module): i for i, module in enumerate(found.walk.modules)}
        values = found.values
        parts = {"aliases": found.aliases, "regrouped": found.regrouped}
        effects = Effects((), found.rewrite, sown, bool(returned), **parts, trees=_trees(values), orders=found.orders)
    else:
        current = [entered.value(i) for i in range(len(entered.before))]
        aliases, regrouped = entered.regrouped(range(len(current)), current)
        others = set(regrouped)
        changed = tuple([i for i, value in enumerate(current) if i in others or entered.is_changed(i, value)])
        values = [current[i] for i in changed]
        parts = {"aliases": aliases, "regrouped": tuple(regrouped)}
        orders = orders_of(enumerate(current))
        effects = Effects(changed, None, sown, bool(returned), **parts, trees=_trees(values), orders=orders)
    if returned:
        out = jax.tree.unflatten(treedef, [Returned(known[id(x)], type(x)) if is_module(x) else x for x in leaves])
    return Outcome(values, out, effects)


def _trees(values: Sequence[Any]) -> tuple[int, ...]:
    """Returns the positions of the values that flat forms have to know of."""
    if all(map(leaf_types.get, set(map(type, values)))):
        return ()
    return tuple([i for i, value in enumerate(values) if is_news(value, None)])


def _check_levels(walk: Any, name: str) -> None:
    for i, module in enumerate(walk.modules):
        if not same_level(info_of(module).level):
            text = ATTACHED_FROM_OUTSIDE.format(owner=type(module).__name__, path=walk.path(i), name=name)
            raise TraceContextError(text)


def run(
    fun: Callable[..., Any], signature: Signature, statics: Any, cells: Any, data: Any, forks: Any, name: str
) -> Outcome:
    """Runs a function on the Modules, Contexts and data of a split call, inside the current trace."""
    entered, args, kwargs = enter_call(signature, statics, cells, data, signature.contexts_from(forks))
    return leave(entered, run_in_scope(fun, args, kwargs), name)


def enter_call(signature: Signature, statics: Any, cells: Any, data: Any, contexts: Any) -> tuple[Entered, Any, Any]:
    """Rebuilds the Modules of a split call; returns them, and its arguments with them in place."""
    entered = enter(signature.key, statics, cells, signature.ties)
    if signature.key is not None:
        for module, path in zip(entered.graph.modules, signature.key.module_paths()):
            info_of(module).path = path
    args, kwargs = signature.fill(entered.roots, contexts, data)
    return entered, args, kwargs


# Committing


def finish(call: Call, outcome: Outcome, stateful: bool) -> Any:
    """Ends a call as the option `stateful` says: commits the outcome, or discards it; returns the output."""
    return commit(call, outcome) if stateful else discard(call, outcome)


def commit(call: Call, outcome: Outcome, taking: Mapping[int, Any] | None = None) -> Any:
    """Writes what changed into the caller's Modules and returns the output, with their Modules in it.

    Args:
        call: the split call.
        outcome: the result of running it.
        taking: Modules, by number, that take the place of new ones; see `Rewrite.apply`.

    Raises:
        TraceContextError: a Module that changed belongs to another trace level. Nothing is written in that case.
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
    """Writes changed values into their cells in one step, which an interrupt cannot split."""
    if flat.level is not current_level():
        check_writable(flat, effects.changed)
    note_mutable_trees(flat, effects.changed, values)
    if flat.refs and not flat.refs.keys().isdisjoint(effects.changed):
        _write_with_refs(flat, effects.changed, values)
        return
    writer = flat.writers.get(effects.changed)
    if writer is None:
        writer = flat.writers[effects.changed] = _writer(flat, effects.changed)
    # `setitem` returns None, so `any` exhausts the iterator, all inside one C call. Python delivers signals only
    # between bytecodes, so Ctrl-C arrives either before every write or after every write, never in between.
    any(map(setitem, *writer, values))


def _writer(flat: Flat, changed: Sequence[int]) -> tuple[list[Any], list[str]]:
    return [flat.dicts[i] for i in changed], [flat.names[i] for i in changed]


def _write_with_refs(flat: Flat, changed: Sequence[int], values: Sequence[Any]) -> None:
    """Writes values to all owners of their cells; nothing is cached, since owners outside the graph come and go."""
    dicts, names, repeated = [], [], []
    for i, value in zip(changed, values):
        ref = flat.refs.get(i)
        for values_of, name in [(flat.dicts[i], flat.names[i])] if ref is None else ref.targets():
            dicts.append(values_of)
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
    """Returns the output with Modules in place of their numbers."""
    return jax.tree.map(
        lambda x: modules[x.index] if isinstance(x, Returned) else x, out, is_leaf=lambda x: isinstance(x, Returned)
    )


def discard(call: Call, outcome: Outcome) -> Any:
    """Returns the output without any effect on the caller's Modules (`stateful=False`); Modules in it are new.

    They are built the way the body's own were, so they share only immutable values with the caller's.
    """
    effects = outcome.effects
    if not effects.survives_discard:
        return outcome.out
    signature, values = call.signature, effects.tie(outcome.values)
    keep_records(lambda: _modules(call), effects.rewrite, values)
    if not effects.returns_modules:
        return outcome.out
    copies = enter(signature.key, call.statics, call.cells(), signature.ties)
    modules = copies.graph.modules
    if effects.rewrite is not None:
        modules = effects.rewrite.apply(modules, signature.key, values, copies.graph.mutables)
    else:
        for cell, value in zip(effects.changed, values):
            copies.write(cell, value)
    return fill_returned(outcome.out, modules)
