"""Donation: letting XLA reuse exactly the buffers that a lifted function replaces, unless somebody else holds them.

Which buffers a function replaces is known only after tracing. So it is traced first, and then compiled inside another
function that donates them; JAX caches the trace, so the user's function still runs once.

Of an array that somebody else holds (see `holders`), a copy is donated. Two Array objects can share one buffer
(`jax.device_put` returns such aliases), and counts do not show that. Inside one call XLA refuses to donate such a
buffer, before it takes any; only then are pointers compared, because asking for 300 of them costs as much as a small
step.

A donated step is whole or has not happened. When XLA takes the buffers, the values of the Modules are gone until the
new ones are written, so the result must not get lost in between:

- The call is `done.extend(map(jitted, ...))`, one C call, which ends with the result in a list that the caller has.
  Ctrl-C during the call is raised right after it, and the handler of the exception finds the result and writes it.
- Where a call runs Python, it is not one C call. Such functions (see `callbacks`), and all calls that do not come from
  a plan, run with the signals held back (see `interrupts`). Whatever may take long and takes nothing away, tracing and
  lowering, happens before.
"""

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import jax

from nnx.core.structure.flat import Flat
from nnx.core.structure.structure import GraphKey
from nnx.core.trace import current_level, forget_failed_dispatch, is_eager, looks_for_nans
from nnx.core.variables.trees import is_leaf, leaf_types
from nnx.transforms.engine.call import Call
from nnx.transforms.engine.selected_arguments import leaf_flags
from nnx.transforms.engine.shared_traces import in_lifted_function
from nnx.transforms.jit.aliases import aliases, is_key, with_copies
from nnx.transforms.jit.argument_names import ArgumentNames
from nnx.transforms.jit.callbacks import runs_python
from nnx.transforms.jit.copies import Copies
from nnx.transforms.jit.holders import ALONE, TreeHolders, getrefcount, held_elsewhere
from nnx.transforms.jit.interrupts import uninterrupted
from nnx.transforms.jit.tracer_errors import standing_for

KEEPS_COPYING = """{name} has copied {paths} ({size}) in three calls in a row: these arrays are donated, but something \
besides the Module holds them, and would have lost them. Each call makes new ones, so it takes hold of them between \
the calls: a clone, a State (get_state, filter, partition), an average, a list of past values, a variable of the loop, \
or a CheckpointManager that is still writing what was saved before the call. Let go of it before the next call, save \
less often, or do not donate the argument: the copies take the memory that donation saves."""

NO_COUNTS = """{name} donates nothing: the reference counts of this Python ({version}) do not tell whether somebody \
else holds an array. Standard CPython has such counts."""

LOST = """{name} failed after its arguments had been donated, as in jax.jit, and their buffers are gone: {paths}. Load \
a checkpoint, or build the Module again. To keep the values through an error, do not donate the argument."""


class NeedsGeneralPath(Exception):
    """Raised where the fast path cannot make a call, for instance because the function has to be traced."""


class OtherChangeSet(Exception):
    """Raised while a donated function is traced for other shapes, if it changes other cells than before."""


class Variant:
    """A function compiled with some of its values donated: `jitted(given, kept, data)`, plus any forks.

    `given` are the donated cells and the donated data, `kept` the other cells.

    Args:
        given_cells: the numbers of the donated cells.
        cell_count: the number of all cells.
        donated_data: for each of the data, whether it is donated.
    """

    __slots__ = ("jitted", "given_cells", "given", "kept", "donated_data", "compares", "alone", "trees", "copies")

    def __init__(self, given_cells: Sequence[int], cell_count: int, donated_data: list[bool]):
        self.jitted: Any = None
        self.given_cells: tuple[int, ...] = tuple(given_cells)
        self.given = _picker(given_cells)
        self.kept = _picker([i for i in range(cell_count) if i not in set(given_cells)])
        self.donated_data = donated_data if any(donated_data) else None
        self.compares: bool = True  # whether the next call compares pointers: the first one does
        self.alone: list[int] = [ALONE or 0] * len(given_cells)  # the counts of donated cells that nobody else holds
        self.trees = TreeHolders()
        self.copies = Copies()

    def split(self, given: Any, cells: Any, data: tuple[Any, ...], forks: Any) -> tuple[Any, ...]:
        """Returns the arguments of the function, from the cells to be donated and all values of a call."""
        kept = self.kept(cells)
        if self.donated_data is not None:
            given = [*given, *(value for value, donated in zip(data, self.donated_data) if donated)]
            data = tuple([value for value, donated in zip(data, self.donated_data) if not donated])
        return (given, kept, data, forks) if forks else (given, kept, data)

    def arguments(
        self, cells: list[Any], data: tuple[Any, ...], forks: Any, flat: Flat | None
    ) -> tuple[tuple[Any, ...], list[int]]:
        """Returns the arguments of the function, with copies of arrays that are needed elsewhere, and the cells held.

        The caller holds the cells in this one list and nowhere else, as the fast path does: holders are counted.
        """
        given = self.given(cells)
        counts = [*map(getrefcount, given)]
        held = held_elsewhere(given, counts, self.counts_alone(flat))
        if not all(map(leaf_types.get, set(map(type, given)))):
            found = set(held)
            trees = [i for i, value in enumerate(given) if i not in found and not is_leaf(value)]
            held += [i for i in trees if self.trees.are_inside(given[i])]
        arguments = self.split(with_copies(given, held), cells, data, forks)
        if self.compares:
            self.compares = False
            given, *others = arguments
            arguments = (with_copies(given, aliases(given, others)), *others)
        return arguments, [self.given_cells[i] for i in held]

    def counts_alone(self, flat: Flat | None) -> list[int]:
        """Returns the counts that the donated cells of a model have if nobody else holds them.

        A cell on a Ref is held by the Ref and by each of its owners, inside the call or outside.
        """
        if flat is None or not flat.refs:
            return self.alone
        refs = [flat.refs.get(i) for i in self.given_cells]
        return [count if ref is None else count + len(ref.targets()) - 1 for count, ref in zip(self.alone, refs)]

    def run(self, cells: list[Any], data: tuple[Any, ...], forks: Any, flat: Flat | None, done: list[Any]) -> None:
        """Calls the function and leaves its result in `done`."""
        arguments, copied = self.arguments(cells, data, forks, flat)
        try:
            done.extend(map(self.jitted, *zip(arguments)))
        except NeedsGeneralPath:
            raise
        except Exception:
            if not self.was_refused(cells, data):
                raise
        if not done:  # outside the handler: an error must not be chained to this one
            del arguments  # which would count as a holder
            arguments, copied = self.arguments(cells, data, forks, flat)
            done.extend(map(self.jitted, *zip(arguments)))
        if copied:
            self.copies.note(copied, cells, done[0][0])

    def was_refused(self, cells: list[Any], data: tuple[Any, ...]) -> bool:
        """Whether a call that failed did so because two of its arrays share a buffer; the next one compares pointers.

        XLA refuses to donate such a buffer, before it takes any.
        """
        given, *others = self.split(self.given(cells), cells, data, ())
        self.compares = bool(aliases(given, others))
        return self.compares


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
        self.inner: Any = self.make_inner()  # a ShardedFunction once the cells are on several devices
        self.by_avals: bool = False  # whether shapes decide which cells are replaced
        self.runs_python: bool = False  # whether a call does: then it is made with the signals held back
        self.is_plain: bool = not any(self.data)  # whether all that is donated is cells with one array each
        self.variants: dict[Any, Variant] = {}
        self.usual: Variant | None = None  # the only one, if it is plain and neither shapes nor shardings decide

    # Calls

    def applies_to(self, call: Call) -> bool:
        """Whether a call donates.

        Not if it is a part of another trace, if its changes cannot be written back, if nothing is compiled, or if JAX
        looks for NaNs: it drops the result that has some, and needs the arguments to find out where they come from.
        """
        at_level = call.flat is None or call.flat.level is current_level()
        without_jit = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
        return at_level and is_eager() and not without_jit and not looks_for_nans()

    def call(self, call: Call) -> tuple[Any, Any]:
        """Makes a call on the general path; returns its result and its output."""
        current = self.compiled.owner.current
        call.drawn = call.forks()  # every attempt draws the same keys
        try:
            # Without a current call, a function that has to be traced raises NeedsGeneralPath.
            return current.run(None, uninterrupted, self._call, call)
        except NeedsGeneralPath:
            pass  # made below, outside the handler: errors must not be chained to this one
        # The signals are not held back meanwhile: tracing runs the user's code, and both can take minutes.
        self.compiled.run(call, self._trace_and_lower)
        return current.run(call, uninterrupted, self._call, call)

    def _call(self, call: Call) -> tuple[Any, Any]:
        cells, done = self.compiled.cells_of(call), []
        try:
            variant = self._run(cells, tuple(call.data), tuple(call.forks()), call.flat, done)
        except Exception as error:
            self.note_loss(error, cells)
            raise
        out = self.compiled.finish(call, done[0])
        self._warn_of_copies(variant)  # last, because a warning can be an exception
        return done[0], out

    def repeat(self, cells: list[Any], data: tuple[Any, ...], forks: Any, flat: Flat, done: list[Any]) -> None:
        """Makes a call from a plan, and leaves its result in `done`."""
        if self.runs_python:
            raise NeedsGeneralPath
        self._warn_of_copies(self._run(cells, data, forks, flat, done))

    def _run(self, cells: list[Any], data: tuple[Any, ...], forks: Any, flat: Flat | None, done: list[Any]) -> Variant:
        variant = self.usual or self.variants.get(self._key(cells, data))
        if variant is None:
            raise NeedsGeneralPath
        variant.run(cells, data, forks, flat, done)
        return variant

    def _warn_of_copies(self, variant: Variant) -> None:
        lasting = variant.copies.lasting()
        # Inside a lifted function, the caller's Modules hold the arrays as well, and nobody could let go of them.
        if lasting and not in_lifted_function():
            owner, sizes = self.compiled.owner, variant.copies.sizes
            size = f"{sum(sizes[i] for i in lasting):,} bytes"
            owner.warn(KEEPS_COPYING.format(name=owner.name, paths=self._names(lasting), size=size), "copies")

    def note_loss(self, error: BaseException, cells: Sequence[Any]) -> None:
        """Adds to an error which cells it has cost, if any."""
        lost = [i for i, value in enumerate(cells) if any(map(_is_deleted, jax.tree.leaves(value)))]
        if lost:
            error.add_note(LOST.format(name=self.compiled.owner.name, paths=self._names(lost)))

    def _names(self, cells: Sequence[int], limit: int = 6) -> str:
        names = ArgumentNames(self.compiled.owner.fun, self.compiled.signature).cells()
        more = f" and {len(cells) - limit} more" if len(cells) > limit else ""
        return ", ".join([names[i] for i in cells[:limit]]) + more

    # Compiling

    def _trace_and_lower(self, cells: list[Any], data: tuple[Any, ...], forks: Any) -> None:
        """Traces and lowers the function for the values of a call."""
        try:
            self._lower(cells, data, forks)
        except OtherChangeSet:
            self.by_avals = True  # shapes decide what changes: from now on, one variant per set of shapes
            self.usual = None
            self.variants.clear()
        else:
            return
        self._lower(cells, data, forks)  # outside the handler: an error must not be chained to this one

    def _lower(self, cells: list[Any], data: tuple[Any, ...], forks: Any) -> None:
        variant, _ = self.stage("lower", cells, data, forks)
        forget_failed_dispatch(variant.jitted)

    def stage(self, name: str, cells: list[Any], data: Any, forks: Any) -> tuple[Variant, Any]:
        """Traces or lowers (`name` says which) the function for these arguments; returns JAX's object as well."""
        variant = self._variant(cells, data, forks)
        return variant, getattr(variant.jitted, name)(*variant.split(variant.given(cells), cells, data, forks))

    def _key(self, cells: list[Any], data: Any) -> Any:
        """Returns what the variant for these arguments is stored under."""
        inner = self.inner.at(cells) if self.compiled.is_sharded else self.inner
        return (inner, _avals((cells, data))) if self.by_avals else (inner, None)

    def _variant(self, cells: list[Any], data: Any, forks: Any) -> Variant:
        """Returns the function compiled with everything donated that can be for these arguments."""
        key = self._key(cells, data)
        found = self.variants.get(key)
        if found is None:
            inner, owner = key[0], self.compiled.owner
            result = inner.trace(*arguments_of(cells, data, forks)).out_info
            replaced = frozenset(self._replaced(result, cells))
            found = Variant(sorted(replaced), len(cells), self.data)
            traced = functools.partial(self.traced, inner, replaced, len(cells))
            traced = standing_for(traced, owner.fun, owner.name)
            found.jitted = jax.jit(traced, donate_argnums=0, **owner.options, **self._in_shardings(found))
            self.variants[key] = found
        if self.is_plain and not (self.by_avals or self.compiled.is_sharded or self.runs_python):
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

    def _in_shardings(self, variant: Variant) -> dict[str, Any]:
        """Returns `in_shardings` in the order of the donating function's arguments."""
        if self.compiled.in_shardings is None:
            return {}
        cells, data = map(list, self.compiled.in_shardings)
        cells += [None] * len(self.compiled.captured.names)
        parts = variant.split(variant.given(cells), cells, tuple(data), ())
        return {"in_shardings": (*parts, *([None] if self.compiled.signature.contexts else []))}

    def traced(
        self, inner: Any, replaced: frozenset[int], count: int, given: Any, kept: Any, data: Any, forks: Any = ()
    ) -> Any:
        """The donating function: takes what is donated and what is kept, and puts them back in order."""
        if self.compiled.owner.current.call is None:
            raise NeedsGeneralPath
        # `given` has the donated cells and then the donated data, so the two lines below take from it in turn.
        given, kept, data = iter(given), iter(kept), iter(data)
        cells = [next(given) if i in replaced else next(kept) for i in range(count)]
        values = tuple([next(given) if donated else next(data) for donated in self.data])
        arguments = arguments_of(cells, values, forks)
        self.runs_python = self.runs_python or runs_python(inner.trace(*arguments))
        self.is_plain = self.is_plain and all([is_leaf(cells[i]) for i in replaced])
        if self.runs_python or not self.is_plain:
            self.usual = None
        result = inner(*arguments)
        if self._replaced(result, cells) != replaced:
            raise OtherChangeSet
        return result

    def _replaced(self, result: Any, cells: Sequence[Any]) -> set[int]:
        """Returns the cells to donate: those whose values the function replaced or removed.

        Not typed random keys, which are small: `jax.random.key_data` returns the array inside one, not a new one.
        """
        effects = self.compiled.effects_of(result)
        replaced = (
            set(effects.changed) if effects.rewrite is None else effects.rewrite.replaced(self.compiled.cell_count)
        )
        return {i for i in replaced & self.donatable if not any(map(is_key, jax.tree.leaves(cells[i])))}


def arguments_of(cells: Any, data: Any, forks: Any) -> tuple[Any, ...]:
    """Returns the arguments of a traced function: those of a call without Contexts have no forks."""
    return (cells, data, forks) if forks else (cells, data)


def _picker(places: Sequence[int]) -> Callable[[Any], Any]:
    """Returns a function, run in C, that picks these values from a list."""
    # A slice wherever possible: it copies a block of pointers, and it returns a list for one value or none, where an
    # itemgetter of one index would return the bare value.
    first, last = (places[0], places[-1] + 1) if places else (0, 0)
    return itemgetter(slice(first, last)) if last - first == len(places) else itemgetter(*places)


def _is_deleted(value: Any) -> bool:
    return isinstance(value, jax.Array) and value.is_deleted()


def _avals(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple([str(jax.typeof(leaf)) for leaf in leaves])


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
