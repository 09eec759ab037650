"""`nnx.jit`: `jax.jit` for functions that take Modules.

Compiled functions are kept per *signature*: where Modules and Contexts stand in the call and what their structure is.
An `Entry` is what is compiled for one signature. In the steady state a call checks the trace level and one stamp, gathers
the values from the cells, calls the compiled function with one flat list, and writes back what changed.
"""

import functools
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

import jax

from nnx.core.filters import to_predicate
from nnx.core.graph import GraphKey
from nnx.core.info import STRUCTURE, ModuleBase, join
from nnx.core.moduledef import ModuleDef
from nnx.transforms.arguments import Selection, leaf_flags, make_static, unwrap_static
from nnx.transforms.lift import (
    CONTEXT,
    MODULE,
    Call,
    Effects,
    Outcome,
    Signature,
    cell_paths,
    commit,
    discard,
    leaf_sorts,
    run,
    target_of,
    write,
)

F = TypeVar("F", bound=Callable[..., Any])

RETRACES_BEFORE_WARNING = 10

STATIC_RETRACES = """{name} has been traced {count} times because the static attribute {path!r} changed ({before} -> \
{after} this time). A static value is part of the compiled function. If it is a counter or another number that changes \
from step to step, keep it in a Variable: nnx.Variable(0)."""

CLOSES_OVER = """{name}, given to nnx.jit, closes over a Module: {what}. Its weights are constants of the compiled \
function: later changes are not seen, and it cannot be changed inside. Pass it as an argument."""

NOT_POPPED = """{name} was called with sown values that have not been popped: {paths}. Every further sow() appends to \
them, so they grow, and the function is compiled anew each time. Take them out after each call: \
model.pop_state(nnx.Intermediate)."""


class OtherChangeSet(Exception):
    """While tracing a donated function for other shapes, other cells changed than before."""


class Entry:
    """The compiled function of one signature."""

    def __init__(self, owner: "Jit", call: Call, args: Any, kwargs: Any):
        self.owner = owner
        self.signature = call.signature
        self.statics = call.statics
        self.shapes: Any = None
        self.donation = Donation(self, call, args, kwargs) if owner.donated else None
        shardings = _in_shardings(owner.in_shardings, call, args) if owner.in_shardings is not None else None
        self.cell_shardings = shardings[0] if shardings is not None else None
        options = dict(owner.options) if shardings is None else {**owner.options, "in_shardings": (*shardings, None)}
        self.jitted = jax.jit(self.traced, **options)

    def traced(self, cells: Any, data: Any, forks: Any) -> Outcome:
        owner = self.owner
        owner.trace_count += 1
        owner.explain_shapes(self, cells, data)
        outcome = run(owner.body, self.signature, self.statics, cells, data, forks, f"nnx.jit({owner.__name__})")
        return _constrain(owner, self, outcome)

    def execute(self, call: Call) -> Outcome:
        if self.donation is not None:
            return self.donation.execute(call)
        return self.jitted(call.cells(), tuple(call.data), tuple(call.forks()))


class Donation:
    """How an entry donates: exactly the buffers that the function replaces, found by tracing first."""

    def __init__(self, entry: Entry, call: Call, args: Any, kwargs: Any):
        self.entry = entry
        flags = leaf_flags(entry.owner.donated, args, kwargs)
        marks = entry.signature.marks
        self.data = [flag for flag, mark in zip(flags, marks) if mark == -1]
        donated = {mark for flag, mark in zip(flags, marks) if flag and mark >= 0}
        kept = {mark for flag, mark in zip(flags, marks) if not flag and mark >= 0}
        self.donatable = _cells_of_only(entry.signature.key, donated - kept) if entry.owner.stateful else set()
        self.by_avals = False
        self.compiled: dict[Any, tuple[frozenset[int], Any]] = {}

    def execute(self, call: Call) -> Outcome:
        cells, data, forks = call.cells(), tuple(call.data), tuple(call.forks())
        try:
            return self._run(cells, data, forks)
        except OtherChangeSet:
            self.by_avals = True  # shapes decide what changes: from now on one variant per set of shapes
            self.compiled.clear()
            return self._run(cells, data, forks)

    def _run(self, cells: list[Any], data: tuple[Any, ...], forks: Any) -> Outcome:
        replaced, jitted = self.variant(cells, data, forks)
        return jitted(*self.arrange(replaced, cells, data, copy=True), forks)

    def variant(self, cells: list[Any], data: Any, forks: Any) -> tuple[frozenset[int], Any]:
        """The cells that may be donated for these arguments, and the function compiled with them."""
        key = _avals((cells, data)) if self.by_avals else None
        found = self.compiled.get(key)
        if found is None:
            outcome = jax.eval_shape(self.entry.traced, cells, data, forks)
            replaced = frozenset(_replaced(outcome.effects, len(cells)) & self.donatable)
            options = self.entry.owner.options
            found = replaced, jax.jit(functools.partial(self.traced, replaced), donate_argnums=(0, 2), **options)
            self.compiled[key] = found
            self.entry.owner.trace_count -= 1  # the look ahead and the compilation are one trace to the user
        return found

    def traced(self, replaced: frozenset[int], given: Any, kept: Any, given_data: Any, kept_data: Any, forks: Any) -> Outcome:
        given, kept = iter(given), iter(kept)
        given_data, kept_data = iter(given_data), iter(kept_data)
        count = len(self.entry.signature.key.cells) if self.entry.signature.key is not None else 0
        cells = [next(given) if i in replaced else next(kept) for i in range(count)]
        data = tuple([next(given_data) if flag else next(kept_data) for flag in self.data])
        outcome = self.entry.traced(cells, data, forks)
        if _replaced(outcome.effects, count) & self.donatable != replaced:
            raise OtherChangeSet
        return outcome

    def arrange(self, replaced: frozenset[int], cells: list[Any], data: tuple[Any, ...], copy: bool = False) -> Any:
        """The values as `(donated cells, kept cells, donated data, kept data)`; a buffer in two places is copied."""
        given = [cell for i, cell in enumerate(cells) if i in replaced]
        kept = [cell for i, cell in enumerate(cells) if i not in replaced]
        given_data = [x for x, flag in zip(data, self.data) if flag]
        kept_data = [x for x, flag in zip(data, self.data) if not flag]
        if copy:
            given, given_data = _without_aliases((given, given_data), (kept, kept_data))
        return given, kept, given_data, kept_data


class Jit:
    """A function compiled by `nnx.jit`. Call it like the function; `lower`, `trace` and the rest are as in `jax.jit`."""

    def __init__(self, fun: Any, stateful: bool, explain: bool, in_shardings: Any, out_shardings: Any, **options: Any):
        target = target_of(fun, "nnx.jit")
        functools.update_wrapper(self, fun if not isinstance(fun, ModuleBase) else target.fun)
        self.__name__ = target.name
        self.__wrapped__ = fun
        self.trace_count = 0
        self.stateful = stateful
        self.explain = explain
        self.in_shardings, self.out_shardings = in_shardings, out_shardings
        offset = len(target.bound)
        static = (options.pop("static_argnums"), options.pop("static_argnames"))
        donate = (options.pop("donate_argnums"), options.pop("donate_argnames"))
        self.static = Selection(target.fun, *static, offset)
        self.donated = Selection(target.fun, *donate, offset)
        self.options = {k: v for k, v in options.items() if v is not None}
        self.bound = target.bound
        self.body = unwrap_static(target.fun) if self.static else target.fun
        self._entries: dict[Signature, Entry] = {}
        self._fast: dict[tuple[int, ...], dict[GraphKey, Entry]] = {}
        self._simple = not (self.static or self.donated or self.bound or not stateful)
        self._last: Entry | None = None
        self._static_retraces: dict[str, int] = {}
        self._warned: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._simple and not kwargs:
            # a Module and arrays, all at the top level: no need to look any further
            sorts = tuple([leaf_sorts.get(type(arg)) for arg in args])
            entries = self._fast.get(sorts)
            if entries is not None:
                at = sorts.index(MODULE)
                flat = args[at]._nnx_info.flat
                if (
                    flat is not None
                    and ((flat._stamp is STRUCTURE.stamp and not flat._watch) or flat.is_valid())
                    and flat.key in entries
                    and not flat.sown
                ):
                    outcome = entries[flat.key].jitted(flat.values(), args[:at] + args[at + 1 :], ())
                    effects = outcome.effects
                    if not effects.simple:
                        return commit(Call(args, kwargs), outcome)
                    if effects.changed:
                        write(flat, effects, outcome.values)
                    return outcome.out
        call, entry = self._prepare(args, kwargs)
        if call.flat is not None and call.flat.sown:
            self._warn_of_sown(call)
        outcome = entry.execute(call)
        return commit(call, outcome) if self.stateful else discard(call, outcome)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Entry]:
        """The call, split, and the entry for its signature."""
        args = (*self.bound, *args)
        if self.static:
            args, kwargs = make_static(self.static, args, kwargs, self.__name__)
        call = Call(args, kwargs)
        entry = self._entries.get(call.signature)
        if entry is None:
            self._warn_of_closure()
            self._explain_structure(call)
            entry = self._entries[call.signature] = Entry(self, call, args, kwargs)
            self._remember_fast(entry, args, kwargs)
        self._last = entry
        return call, entry

    def _remember_fast(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sorts = tuple([leaf_sorts.get(type(arg)) for arg in args])
        plain = not kwargs and None not in sorts and CONTEXT not in sorts and sorts.count(MODULE) == 1
        if self._simple and plain and entry.signature.key is not None:
            self._fast.setdefault(sorts, {})[entry.signature.key] = entry  # type: ignore[index]

    # As in jax.jit

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The lowered function for these arguments, as `jax.jit(f).lower(...)`."""
        return self._stage("lower", args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The traced function for these arguments, as `jax.jit(f).trace(...)`."""
        return self._stage("trace", args, kwargs)

    def _stage(self, stage: str, args: Any, kwargs: Any) -> Any:
        call, entry = self._prepare(args, kwargs)
        cells, data, forks = call.cells(), tuple(call.data), tuple(call.forks())
        if entry.donation is None:
            return getattr(entry.jitted, stage)(cells, data, forks)
        replaced, jitted = entry.donation.variant(cells, data, forks)
        return getattr(jitted, stage)(*entry.donation.arrange(replaced, cells, data), forks)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The output's shapes and dtypes; nothing is computed and no Module changes."""
        call, entry = self._prepare(args, kwargs)
        outcome = jax.eval_shape(entry.jitted, call.cells(), tuple(call.data), tuple(call.forks()))
        return discard(call, outcome)

    def clear_cache(self) -> None:
        """Forgets everything compiled."""
        for entry in self._entries.values():
            entry.jitted.clear_cache()
        self._entries.clear()
        self._fast.clear()
        self._last = None

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<nnx.jit of {self.__name__}>"

    # Warnings

    def _warn(self, text: str, once: str) -> None:
        if once not in self._warned:
            self._warned.add(once)
            warnings.warn(text, UserWarning, stacklevel=4)

    def _warn_of_closure(self) -> None:
        if "closure" not in self._warned:
            what = _captured_modules(self.body if not self.static else self.body.__wrapped__)  # type: ignore[attr-defined]
            if what:
                self._warn(CLOSES_OVER.format(name=self.__name__, what=", ".join(what)), "closure")

    def _warn_of_sown(self, call: Call) -> None:
        if "sown" not in self._warned:
            paths = [
                join(path, name)
                for root in call.roots
                for path, module in root.named_modules()
                for name in sorted(module._nnx_info.sown or ())
            ]
            self._warn(NOT_POPPED.format(name=self.__name__, paths=", ".join(paths)), "sown")

    def _explain_structure(self, call: Call) -> None:
        """Says why a call needs a compilation of its own, where asked, and warns of static values that keep changing."""
        last = self._last
        if last is None:
            return
        old, new = last.signature, call.signature
        reasons = []
        if old.key is not None and new.key is not None and old.key is not new.key:
            labels = [f"(Module {i})" for i in range(max(len(call.roots), 9))] if len(call.roots) > 1 else [""]
            if len(old.key.table[0]) == len(new.key.table[0]):
                before, after = ModuleDef(old.key, last.statics), ModuleDef(new.key, call.statics)
                differences = before.diff(after, labels)
                reasons = [str(difference) for difference in differences]
                self._count_static_retraces(differences)
        if old.contexts != new.contexts:
            reasons.append(f"the Contexts: {old.contexts} -> {new.contexts}")
        if (old.treedef, old.marks) != (new.treedef, new.marks):
            reasons.append(f"the arguments: {old.treedef} -> {new.treedef}")
        if self.explain and reasons:
            warnings.warn(f"{self.__name__} is compiled again: {'; '.join(reasons)}", UserWarning, stacklevel=4)

    def _count_static_retraces(self, differences: Sequence[Any]) -> None:
        for path, before, after in differences:
            if before.startswith("static") and after.startswith("static"):
                count = self._static_retraces[path] = self._static_retraces.get(path, 0) + 1
                if count == RETRACES_BEFORE_WARNING:
                    text = STATIC_RETRACES.format(name=self.__name__, count=count, path=path, before=before, after=after)
                    self._warn(text, f"static {path}")

    def explain_shapes(self, entry: Entry, cells: Any, data: Any) -> None:
        """Says, where asked, which shape changed when a known signature is traced again."""
        if not self.explain:
            return
        paths = cell_paths(entry.signature.key)
        labels = [*(repr(path) for path in paths), *(f"argument leaf {i}" for i in range(len(data)))]
        now = [str(jax.tree.map(jax.typeof, value)) for value in (*cells, *data)]
        if entry.shapes is not None and entry.shapes != now:
            changes = [f"{label}: {a} -> {b}" for label, a, b in zip(labels, entry.shapes, now) if a != b]
            warnings.warn(f"{self.__name__} is compiled again: {'; '.join(changes)}", UserWarning, stacklevel=4)
        entry.shapes = now


def _captured_modules(fun: Any) -> list[str]:
    """The Modules a function reaches through its closure or by a global name, each with its name there."""
    if not isinstance(fun, types.FunctionType):
        return []
    found = []
    for name, cell in zip(fun.__code__.co_freevars, fun.__closure__ or ()):
        try:
            value = cell.cell_contents
        except ValueError:
            continue
        if isinstance(value, ModuleBase):
            found.append(f"{name!r} ({type(value).__name__}) in its closure")
    codes = [fun.__code__]
    while codes:
        code = codes.pop()
        codes.extend(const for const in code.co_consts if isinstance(const, types.CodeType))
        for name in code.co_names:
            value = fun.__globals__.get(name)
            if isinstance(value, ModuleBase) and f"the global {name!r} ({type(value).__name__})" not in found:
                found.append(f"the global {name!r} ({type(value).__name__})")
    return found


# Donation


def _replaced(effects: Effects, count: int) -> set[int]:
    """The cells whose values the function replaced or removed."""
    if effects.rewrite is None:
        return set(effects.changed)
    return set(range(count)) - {source for source in effects.rewrite.sources if source >= 0}


def _cells_of_only(key: GraphKey | None, roots: set[int]) -> set[int]:
    """The cells that can be reached from these roots of a call and from no other."""
    if key is None:
        return set()
    starts = list(dict.fromkeys(key.table[0]))
    children = [[at for _, at in plan.children] for plan in key.plans]
    shared = {cell: number for number, cell in enumerate(key.table[2])}

    def reach(numbers: Any) -> set[int]:
        seen, stack = set(), [starts[n] for n in numbers]
        while stack:
            at = stack.pop()
            if at not in seen:
                seen.add(at)
                stack.extend(children[at])
        return seen

    inside, outside = reach(roots), reach(set(range(len(starts))) - roots)
    tied_outside = {number for at in outside for _, number in key.plans[at].shared}
    return {
        i
        for i, (at, _, _) in enumerate(key.cells)
        if at in inside and at not in outside and shared.get(i) not in tied_outside
    }


def _without_aliases(given: Any, kept: Any) -> Any:
    """The donated values with a copy in place of every array that also stands elsewhere in the call."""
    leaves, treedef = jax.tree.flatten(given)
    ids = [id(leaf) for leaf in leaves]
    seen = {id(leaf) for leaf in jax.tree.leaves(kept)}
    if len(set(ids)) == len(ids) and seen.isdisjoint(ids):
        return given
    for i, leaf in enumerate(leaves):
        if id(leaf) in seen and isinstance(leaf, jax.Array):
            leaves[i] = leaf.copy()
        seen.add(id(leaf))
    return jax.tree.unflatten(treedef, leaves)


def _avals(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple([str(jax.typeof(leaf)) for leaf in leaves])


# Shardings


def _in_shardings(shardings: Any, call: Call, args: tuple[Any, ...]) -> tuple[list[Any], tuple[Any, ...]]:
    """One sharding per cell and per data leaf, from one per argument (for a Module: one, or one per filter)."""
    per_argument = shardings if isinstance(shardings, (tuple, list)) else (shardings,) * len(args)
    if len(per_argument) != len(args):
        raise ValueError(f"in_shardings has {len(per_argument)} entries for a call with {len(args)} arguments.")
    cells: list[Any] = [None] * len(call.cells())
    data: list[Any] = []
    roots = list(dict.fromkeys(call.signature.key.table[0])) if call.signature.key is not None else []
    for argument, sharding in zip(args, per_argument):
        if isinstance(argument, ModuleBase):
            number = next(i for i, root in enumerate(call.roots) if root is argument)
            chosen = _cell_shardings(sharding, call, roots[number])
            cells = [mine if mine is not None else other for mine, other in zip(chosen, cells)]
        else:
            broadcast = jax.tree.map(
                lambda s, sub: jax.tree.map(lambda _: _Leaf(s), sub), sharding, argument, is_leaf=lambda s: s is None
            )
            data.extend(leaf.value for leaf in jax.tree.leaves(broadcast) if isinstance(leaf, _Leaf))
    data.extend([None] * (len(call.data) - len(data)))
    return cells, tuple(data)


class _Leaf:
    def __init__(self, value: Any):
        self.value = value


def _cell_shardings(sharding: Any, call: Call, root: int) -> list[Any]:
    key = call.signature.key
    assert key is not None and call.flat is not None
    if not isinstance(sharding, Mapping):
        return [sharding if at == root else None for at, _ in key.cell_roots()]
    cases = [(to_predicate(filter), value) for filter, value in sharding.items()]
    return [
        next((s for matches, s in cases if matches(path, leaf)), None) if at == root else None
        for (at, path), leaf in zip(key.cell_roots(), call.flat.leaves())
    ]


def _constrain(owner: Jit, entry: Entry, outcome: Outcome) -> Outcome:
    """The outcome with the shardings asked for: of the output, and of the state that goes back into the Modules."""
    values, out, effects = outcome.values, outcome.out, outcome.effects
    if entry.cell_shardings is not None and effects.rewrite is None:
        shardings = [entry.cell_shardings[i] for i in effects.changed]
        values = [x if s is None else jax.lax.with_sharding_constraint(x, s) for x, s in zip(values, shardings)]
    if owner.out_shardings is not None:
        out = jax.tree.map(
            lambda s, sub: sub if s is None else jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, s), sub),
            owner.out_shardings,
            out,
            is_leaf=lambda s: s is None,
        )
    return Outcome(values, out, effects)


@overload
def jit(fun: F, /) -> F: ...
@overload
def jit(fun: Any = ..., /, **options: Any) -> Any: ...
def jit(
    fun: Any = None,
    /,
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    stateful: bool = True,
    explain_recompiles: bool = False,
) -> Any:
    """Compiles a function that may take Modules and Contexts anywhere, and updates the Modules in place.

    Args:
      fun: a function, a Module, or a bound method of one. Without it, a decorator is returned.
      static_argnums, static_argnames: arguments that are part of the compiled function, as in `jax.jit`.
      donate_argnums, donate_argnames: arguments whose buffers may be reused. Of a Module exactly the buffers that the
        function replaces are donated, and the Module stays usable.
      in_shardings: one sharding per argument; for a Module one for all its state, or a mapping from filter to
        sharding. State that changes keeps it.
      out_shardings: a sharding, or a tree of them, for the output.
      keep_unused, inline, compiler_options: as in `jax.jit`.
      stateful: whether changes to Modules are written back.
      explain_recompiles: warn, with the path or argument that changed, whenever the function is compiled again.

    >>> class Counter(nnx.Module):
    ...     def __init__(self):
    ...         self.count = nnx.Variable(jnp.array(0))
    >>> @nnx.jit
    ... def step(counter):
    ...     counter.count += 1
    >>> counter = Counter()
    >>> step(counter); step(counter)
    >>> int(counter.count), step.trace_count
    (2, 1)
    """
    if fun is None:
        options = {k: v for k, v in locals().items() if k != "fun"}
        return lambda fun: jit(fun, **options)
    return Jit(
        fun,
        stateful,
        explain_recompiles,
        in_shardings,
        out_shardings,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        keep_unused=keep_unused or None,
        inline=inline or None,
        compiler_options=compiler_options,
    )
