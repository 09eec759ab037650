"""Donation: letting XLA reuse exactly the buffers that a lifted function replaces.

Which buffers these are is known only after tracing. So the function is traced first, and then compiled inside another
function that donates them; JAX caches the trace, so the user's function still runs once.
"""

import functools
import weakref
from collections.abc import Callable
from operator import call, is_, itemgetter
from typing import Any

import jax
from jax.core import Tracer

from nnx.core.structure import GraphKey
from nnx.core.trees import leaf_types
from nnx.transforms.arguments import leaf_flags
from nnx.transforms.call import Call
from nnx.transforms.effects import Effects
from nnx.transforms.jit.tracer_errors import standing_for


class OtherChangeSet(Exception):
    """Raised while a donated function is traced for other shapes, if it changes other cells than before."""


class Variant:
    """A function compiled with some of its values (the cells, then the data) donated.

    No donated buffer may be reachable from another value of the call. Two Array objects can share one buffer
    (`jax.device_put` returns such aliases), so only their pointers tell, and asking for 300 pointers costs as much as a
    small step. But the outputs of a call are fresh buffers, and values that took part in it were compared then. So a
    Variant remembers, weakly, the cells and data that its last call left behind, and compares pointers only when
    something else arrives.
    """

    __slots__ = ("jitted", "given", "kept", "given_cells", "kept_cell_count", "compares_data", "types", "known")

    def __init__(self, jitted: Any, is_given: list[bool], cell_count: int, types: set[Any]):
        self.jitted: Any = jitted
        self.given = _picker([i for i, given in enumerate(is_given) if given])
        self.kept = _picker([i for i, given in enumerate(is_given) if not given])
        self.given_cells: tuple[int, ...] = tuple([i for i, given in enumerate(is_given[:cell_count]) if given])
        self.kept_cell_count: int = cell_count - len(self.given_cells)
        self.compares_data: bool = any(is_given[cell_count:])
        self.types: set[Any] = types  # of all cells, before and after any call
        self.known: tuple[list[Any], list[Any]] | None = None  # weak references: what will be donated, what is kept

    def arrange(self, cells: list[Any], data: tuple[Any, ...], forks: Any) -> tuple[Any, ...]:
        """Returns the arguments of the function: what is donated, what is kept, and forks of any Contexts."""
        values = [*cells, *data]
        given, kept = self.given(values), self.kept(values)
        given = _without_aliases(given, kept)
        return _arguments(given, kept, forks)

    def run(self, cells: list[Any], data: tuple[Any, ...], forks: Any, effects_of: Callable[[Any], Effects]) -> Any:
        """Calls the function and remembers the values it leaves behind."""
        values = [*cells, *data]
        given, kept = self.given(values), self.kept(values)
        kept_refs = self._known_apart(given, kept)
        if kept_refs is None:
            given = _without_aliases(given, kept)
        result = self.jitted(given, kept, forks) if forks else self.jitted(given, kept)  # one call less per step
        self.known = None
        if effects_of(result).changed == self.given_cells and not self.compares_data:
            if kept_refs is None and all(map(leaf_types.get, set(map(type, values)))):
                kept_refs = [*map(_weak, kept)]
            if kept_refs is not None:
                try:
                    self.known = [*map(weakref.ref, result[0])], kept_refs
                except TypeError:  # a cell has become a tuple, dict or list: pytrees are compared every time
                    pass
        return result

    def _known_apart(self, given: Any, kept: Any) -> list[Any] | None:
        """Weak references to what is kept, if it is known without pointers that no donated value shares a buffer."""
        known = self.known
        # `call` runs the weak references in C. Each returns its target, or None: no array is kept alive.
        if known is None or not all(map(is_, map(call, known[0]), given)):
            return None
        refs = known[1]
        if all(map(is_, map(call, refs), kept)):
            return refs
        refs = [*refs]
        for i, (ref, value) in enumerate(zip(refs, kept)):
            if ref() is not value:
                # Data that took no part in the last call (the next batch) alias a cell only if they have its type.
                if i < self.kept_cell_count or _type_of(value) in self.types:
                    return None
                refs[i] = _weak(value)
        return refs


class Donation:
    """How a compiled function donates: exactly the buffers that it replaces, found by tracing first.

    Args:
        compiled: the `Compiled` it belongs to.
        call: the first call of its signature.
        args, kwargs: its arguments.
    """

    def __init__(self, compiled: Any, call: Call, args: Any, kwargs: Any):
        self.compiled = compiled
        flags = leaf_flags(compiled.owner.donated, args, kwargs)
        marks = compiled.signature.marks
        self.data: list[bool] = [flag for flag, mark in zip(flags, marks) if mark == -1]
        donated = {mark for flag, mark in zip(flags, marks) if flag and mark >= 0}
        kept = {mark for flag, mark in zip(flags, marks) if not flag and mark >= 0}
        self.donatable = _cells_of_only(compiled.signature.key, donated - kept) if compiled.owner.stateful else set()
        self.inner: Any = self.make_inner()  # a PlacedFunction once the cells are on several devices
        self.by_avals = False
        self.variants: dict[Any, Variant] = {}
        self.usual: Variant | None = None  # the only one, as long as neither shapes nor placements decide
        self.types: set[Any] = set()  # of all cells that were ever traced, before and after

    def run(self, cells: list[Any], data: tuple[Any, ...], forks: Any) -> Any:
        """Runs the function on Modules of the running trace level, whose changes can be written back."""
        variant = self.usual
        try:
            if variant is None:
                variant = self.variant(cells, data, forks)
            return variant.run(cells, data, forks, self.compiled.effects_of)
        except OtherChangeSet:
            self.by_avals = True  # shapes decide what changes: from now on, one variant per set of shapes
            self.usual = None
            self.variants.clear()
        # Outside the handler: an error must not be chained to this one.
        return self.variant(cells, data, forks).run(cells, data, forks, self.compiled.effects_of)

    def variant(self, cells: list[Any], data: Any, forks: Any) -> Variant:
        """Returns the function compiled with everything donated that can be for these arguments."""
        inner = self.inner.at(cells) if self.compiled.placed else self.inner
        key = (inner, _avals((cells, data))) if self.by_avals else inner
        found = self.variants.get(key)
        if found is None:
            result = inner.trace(*_arguments(cells, data, forks)).out_info
            replaced = frozenset(self._replaced(result, self.compiled.cell_count) & self.donatable)
            is_given = [*(i in replaced for i in range(len(cells))), *self.data]
            owner = self.compiled.owner
            traced = functools.partial(self.traced, inner, replaced, len(cells))
            traced = standing_for(traced, owner.target, owner.name)
            jitted = jax.jit(traced, donate_argnums=0, **self.compiled.owner.options, **self._in_shardings(is_given))
            found = self.variants[key] = Variant(jitted, is_given, len(cells), self.types)
        if not self.by_avals and not self.compiled.placed:
            self.usual = found
        return found

    def reset(self) -> None:
        """Starts over, for a function that takes other cells than before."""
        self.inner = self.make_inner()
        self.variants.clear()
        self.usual = None

    def make_inner(self) -> Any:
        """Returns the function as one that is jitted separately, inside the donating function.

        JAX caches the trace of a jitted function, and the trace does not depend on donation. So looking ahead traces
        the user's function, and the donating function that calls it does not trace it again.
        """
        # JAX takes compiler options for outermost functions only.
        options = {k: v for k, v in self.compiled.owner.options.items() if k != "compiler_options"}
        return jax.jit(self.compiled.function(), **options)

    def _in_shardings(self, is_given: list[bool]) -> dict[str, Any]:
        """Returns `in_shardings` in the order of the donating function's arguments: what is donated, then the rest."""
        if self.compiled.in_shardings is None:
            return {}
        hidden = [None] * len(self.compiled.captured.names)
        shardings = [*self.compiled.in_shardings.cells, *hidden, *self.compiled.in_shardings.data]
        parts = [tuple([s for s, given in zip(shardings, is_given) if given is part]) for part in (True, False)]
        return {"in_shardings": (*parts, *([None] if self.compiled.signature.contexts else []))}

    def traced(self, inner: Any, replaced: frozenset[int], count: int, given: Any, kept: Any, forks: Any = ()) -> Any:
        """The donating function: takes what is donated and what is kept, and puts them back in order."""
        given, kept = iter(given), iter(kept)
        cells = [next(given) if i in replaced else next(kept) for i in range(count)]
        data = tuple([next(given) if flag else next(kept) for flag in self.data])
        result = inner(*_arguments(cells, data, forks))
        self.types.update(map(_type_of, jax.tree.leaves((cells, result[0]))))
        if self._replaced(result, self.compiled.cell_count) & self.donatable != replaced:
            raise OtherChangeSet
        return result

    def _replaced(self, result: Any, count: int) -> set[int]:
        """Returns the cells whose values the function replaced or removed."""
        effects = self.compiled.effects_of(result)
        return set(effects.changed) if effects.rewrite is None else effects.rewrite.replaced(count)


def _arguments(first: Any, second: Any, forks: Any) -> tuple[Any, ...]:
    """Returns the arguments of a traced function: those of a call without Contexts have no forks."""
    return (first, second, forks) if forks else (first, second)


def _picker(places: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple([values[i] for i in places])


def _weak(value: Any) -> Callable[[], Any]:
    """Returns a weak reference, or a function that returns the value if it is a number, which cannot have one."""
    try:
        return weakref.ref(value)
    except TypeError:
        return functools.partial(_itself, value)


def _itself(value: Any) -> Any:
    return value


def _type_of(value: Any) -> Any:
    """Returns what two arrays that share a buffer have in common; None for anything but an array."""
    if not isinstance(value, jax.Array):
        return None
    # With several devices, one of them may be a shard of the other.
    return (value.shape if jax.device_count() == 1 else value.ndim, value.dtype)


def _cells_of_only(key: GraphKey | None, roots: set[int]) -> set[int]:
    """Returns the cells that can be reached from these roots of a call and from no other root."""
    if key is None:
        return set()

    def reach(numbers: Any) -> set[int]:
        seen, stack = set(), [key.roots[n] for n in numbers]
        while stack:
            at = stack.pop()
            if at not in seen:
                seen.add(at)
                stack.extend(key.children(at))
        return seen

    inside, outside = reach(roots), reach(set(range(len(key.roots))) - roots)
    # By attribute, not by Module: a Ref can tie an attribute inside to one outside.
    inner, outer = (
        {cell for (module, _), cell in key.cell_numbers.items() if module in reached} for reached in (inside, outside)
    )
    return inner - outer


def _without_aliases(given: Any, kept: Any) -> Any:
    """Returns the donated values, with copies of arrays whose buffer also appears elsewhere in the call."""
    leaves, treedef = jax.tree.flatten(given)
    seen = {buffer for leaf in jax.tree.leaves(kept) for buffer in _buffers(leaf)}
    copied = False
    for i, leaf in enumerate(leaves):
        buffers = _buffers(leaf)
        if not seen.isdisjoint(buffers):
            leaves[i], copied = leaf.copy(), True
        seen.update(buffers)
    return jax.tree.unflatten(treedef, leaves) if copied else given


def _buffers(value: Any) -> list[Any]:
    """Returns a key per buffer behind a value, device and address; none for anything but an array."""
    if not isinstance(value, jax.Array):
        return []
    if isinstance(value, Tracer) or value.is_deleted():
        return [id(value)]
    if len(value.sharding.device_set) == 1:
        return [(*value.sharding.device_set, value.unsafe_buffer_pointer())]
    return [(shard.device, shard.data.unsafe_buffer_pointer()) for shard in value.addressable_shards]


def _avals(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple([str(jax.typeof(leaf)) for leaf in leaves])
