"""`nnx.jit`: `jax.jit` for functions that take Modules.

Compiled functions are kept per *signature*: where Modules and Contexts stand in the call and what their structure is.
An `Entry` is what is compiled for one signature. In the steady state (see entrance) a call checks the trace level and
one stamp, gathers the values from the cells, calls the compiled function with one flat list, and writes back what
changed.
"""

import dis
import functools
import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack, overload

import jax

from nnx.core.captures import find_captured_module
from nnx.core.module_info import ModuleBase, info_of
from nnx.core.moduledef import ModuleDef
from nnx.core.paths import join
from nnx.core.trace import current_level
from nnx.sharding.rules import get_logical_axis_rules
from nnx.transforms.annotations import JitDecorator, JitOptions, JitWrapped, P, R
from nnx.transforms.arguments import Selection, make_static, unwrap_static
from nnx.transforms.donation import Donation
from nnx.transforms.entrance import Memory, NeedsCaller, entrance
from nnx.transforms.jit_shardings import constrain_outcome, input_shardings
from nnx.transforms.lift import (
    Call,
    Effects,
    Outcome,
    Signature,
    cell_paths,
    commit,
    discard,
    run,
    target_of,
)
from nnx.transforms.wrapper import dress

RETRACES_BEFORE_WARNING = 10
MAX_ENTRIES = 256  # compiled signatures of one function; a program that needs more has a value that never repeats

STATIC_RETRACES = """{name} has been traced {count} times because the static attribute {path!r} changed ({before} -> \
{after} this time). A static value is part of the compiled function. If it is a counter or another number that changes \
from step to step, keep it in a Variable: nnx.Variable(0)."""

TOO_MANY_ENTRIES = """{name} has been compiled for {count} different structures, and forgets the oldest from now on. \
The last call differed from the one before in: {reasons}. Keep what changes from call to call in a Variable, or pass \
it as an array."""

CLOSES_OVER = """{name}, given to nnx.jit, closes over a Module: {what}. Its weights are constants of the compiled \
function: later changes are not seen, and it cannot be changed inside. Pass it as an argument."""

NOT_POPPED = """{name} was called with sown values that have not been popped: {paths}. Every further sow() appends to \
them, so they grow, and the function is compiled anew each time. Take them out after each call: \
model.pop_state(nnx.Intermediate)."""


class Entry:
    """The compiled function of one signature.

    It may serve many models of that structure. Whenever JAX traces it, the static values are those of the Modules in
    that very call: keys say that two models are alike, but the objects behind them are each model's own.

    Its result is a plain tuple, which JAX handles fastest: `(values, out)`, and one None more for every set of effects
    it has had before (shapes may decide what changes), so that the length says which effects belong to it.
    """

    def __init__(self, owner: "Jit", call: Call, args: Any, kwargs: Any):
        self.owner = owner
        self.signature: Signature = call.signature
        self.statics = call.statics
        self.effects: list[Effects] = []
        self.shapes: list[str] | None = None
        self.donation: Donation | None = Donation(self, call, args, kwargs) if owner.donated else None
        options = dict(owner.options)
        self.cell_shardings: list[Any] | None = None
        if owner.in_shardings is not None:
            self.cell_shardings, data_shardings = input_shardings(owner.in_shardings, call, args, len(owner.bound))
            options["in_shardings"] = (self.cell_shardings, data_shardings, *([None] if call.contexts else []))
        self.jitted = jax.jit(self.traced, **options)

    def traced(self, cells: Any, data: Any, forks: Any = ()) -> tuple[Any, ...]:
        owner = self.owner
        call = owner.caller.call
        if call is None:
            raise NeedsCaller
        owner.count_trace(1)
        owner.explain_shapes(self, cells, data)
        name = f"nnx.jit({owner.name})"
        # Calls that the body makes are other calls, also of this very function.
        outcome = owner.caller.run(None, run, owner.body, call.signature, call.statics, cells, data, forks, name)
        outcome = constrain_outcome(self.cell_shardings, owner.out_shardings, self.signature.key, outcome, cells)
        if outcome.effects not in self.effects:
            self.effects.append(outcome.effects)
        return (outcome.values, outcome.out, *[None] * self.effects.index(outcome.effects))

    def effects_of(self, result: tuple[Any, ...]) -> Effects:
        return self.effects[len(result) - 2]

    def execute(self, call: Call) -> Any:
        return self.owner.caller.run(call, self._execute, call)

    def _execute(self, call: Call) -> Any:
        if self.donation is not None and (call.flat is None or call.flat.level is current_level()):
            return self.donation.run(call.cells(), tuple(call.data), tuple(call.forks()))
        # also where a Module belongs to another level: what cannot be written back must not be given away
        if call.contexts:
            return self.jitted(call.cells(), tuple(call.data), tuple(call.forks()))
        return self.jitted(call.cells(), tuple(call.data))

    def finish(self, call: Call, result: tuple[Any, ...]) -> Any:
        """Writes a result into the caller's Modules, or not, and gives the output."""
        outcome = Outcome(result[0], result[1], self.effects_of(result))
        return commit(call, outcome) if self.owner.stateful else discard(call, outcome)


class Caller(threading.local):
    """The call that this thread is making, for the function to be traced with."""

    call: Call | None = None

    def run(self, call: Call | None, fun: Callable[..., Any], *args: Any) -> Any:
        """Calls a function while `call` is the one being made."""
        outer, self.call = self.call, call
        try:
            return fun(*args)
        finally:
            self.call = outer


class Jit:
    """All that belongs to one use of `nnx.jit`; the user holds `function`."""

    def __init__(self, fun: Any, stateful: bool, explain: bool, in_shardings: Any, out_shardings: Any, **options: Any):
        target = target_of(fun, "nnx.jit")
        self.name: str = target.name
        self.stateful, self.explain = stateful, explain
        self.in_shardings, self.out_shardings = in_shardings, out_shardings
        offset = len(target.bound)
        static = (options.pop("static_argnums"), options.pop("static_argnames"))
        donate = (options.pop("donate_argnums"), options.pop("donate_argnames"))
        self.static: Selection = Selection(target.fun, *static, offset)
        self.donated: Selection = Selection(target.fun, *donate, offset)
        self.options: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
        self.bound: tuple[Any, ...] = target.bound
        self.target: Callable[..., Any] = target.fun
        self.body: Callable[..., Any] = unwrap_static(target.fun) if self.static else target.fun
        self.entries: dict[tuple[Signature, Any], Entry] = {}  # by signature, and the logical axis rules that hold
        self.repeats: bool = stateful and not self.static  # whether a call like an earlier one is made from a plan
        self.memory: Memory = Memory(knows_first=self.repeats and not self.bound)
        self.caller: Caller = Caller()
        # The entry used last with its key, as one tuple that is read once: another thread may replace it at any time.
        self._last: tuple[Any, Entry] | None = None
        self._static_retraces: dict[str, int] = {}
        self._warned: set[str] = set()
        self.function: Callable[..., Any] = dress(entrance(self), fun)
        self.function.trace_count = 0
        for method in (self.lower, self.trace, self.eval_shape, self.clear_cache):
            setattr(self.function, method.__name__, method)

    def count_trace(self, by: int) -> None:
        self.function.trace_count += by

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any call, however its Modules stand."""
        call, entry = self.prepare(args, kwargs)
        if call.flat is not None and call.flat.sown:
            self._warn_of_sown(call)
        result = entry.execute(call)
        out = entry.finish(call, result)
        if self.repeats:
            self.memory.keep(call, entry, result, (*self.bound, *args), kwargs)
        return out

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Entry]:
        """The call, split, and the entry for its signature."""
        args = (*self.bound, *args)
        if self.static:
            args, kwargs = make_static(self.static, args, kwargs, self.name)
        call = Call(args, kwargs)
        key = (call.signature, get_logical_axis_rules())
        last = self._last
        if last is not None and key == last[0]:  # cheaper than a hash, and nearly always true
            return call, last[1]
        entry = self.entries.get(key)
        if entry is None:
            self._warn_of_closure()
            reasons = self._explain_structure(call)
            entry = self.entries[key] = Entry(self, call, args, kwargs)
            if len(self.entries) > MAX_ENTRIES:
                self._drop_oldest(reasons)
        self._last = (key, entry)
        return call, entry

    def finish(self, entry: Entry, result: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The end of a call that was made from a plan and turned out to be another than planned."""
        return entry.finish(self.prepare(args, kwargs)[0], result)

    # As in jax.jit

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The lowered function for these arguments, as `jax.jit(f).lower(...)`."""
        return self._stage("lower", args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """The traced function for these arguments, as `jax.jit(f).trace(...)`."""
        return self._stage("trace", args, kwargs)

    def _stage(self, stage: str, args: Any, kwargs: Any) -> Any:
        call, entry = self.prepare(args, kwargs)
        return self.caller.run(call, self._stage_entry, stage, call, entry)

    def _stage_entry(self, stage: str, call: Call, entry: Entry) -> Any:
        cells, data, forks = call.cells(), tuple(call.data), tuple(call.forks())
        if entry.donation is None:

            def plain(cells: Any, data: Any, forks: Any) -> Any:
                return (cells, data, forks) if forks else (cells, data)

            return Staged(self, entry, plain, getattr(entry.jitted, stage)(*plain(cells, data, forks)))
        variant = entry.donation.variant(cells, data, forks)
        inner = getattr(variant.jitted, stage)(*variant.arrange(cells, data, forks))
        return Staged(self, entry, variant.arrange, inner)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The output's shapes and dtypes; nothing is computed and no Module changes."""
        call, entry = self.prepare(args, kwargs)
        forks = [tuple(call.forks())] if call.contexts else []
        result = self.caller.run(call, jax.eval_shape, entry.jitted, call.cells(), tuple(call.data), *forks)
        return discard(call, Outcome(result[0], result[1], entry.effects_of(result)))

    def clear_cache(self) -> None:
        """Forgets everything compiled."""
        for entry in self.entries.values():
            entry.jitted.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
        self.entries.clear()
        self.memory.clear()
        self._last = None

    # Warnings

    def _warn(self, text: str, once: str) -> None:
        if once not in self._warned:
            self._warned.add(once)
            warnings.warn(text, UserWarning, stacklevel=4)

    def _warn_of_closure(self) -> None:
        if "closure" not in self._warned:
            what = captured_modules(self.target)
            if what:
                self._warn(CLOSES_OVER.format(name=self.name, what=", ".join(what)), "closure")

    def _warn_of_sown(self, call: Call) -> None:
        if "sown" not in self._warned:
            paths = [
                join(path, name)
                for root in call.roots
                for path, module in root.named_modules()
                for name in sorted(info_of(module).sown or ())
            ]
            self._warn(NOT_POPPED.format(name=self.name, paths=", ".join(paths)), "sown")

    def _drop_oldest(self, reasons: str) -> None:
        """Forgets the signature that was compiled first, and warns once that there are too many."""
        self.entries.pop(next(iter(self.entries)), None)
        self._warn(TOO_MANY_ENTRIES.format(name=self.name, count=MAX_ENTRIES, reasons=reasons), "entries")

    def _explain_structure(self, call: Call) -> str:
        """Returns how a call differs from the one before; warns of it if asked, and of values that keep changing."""
        if self._last is None:
            return ""
        last = self._last[1]
        old, new = last.signature, call.signature
        reasons = []
        if old.key is not None and new.key is not None and old.key is not new.key:
            labels = [f"(Module {i})" for i in range(max(len(call.roots), 9))] if len(call.roots) > 1 else [""]
            if len(old.key.roots) == len(new.key.roots):
                before, after = ModuleDef(old.key, last.statics), ModuleDef(new.key, call.statics)
                differences = before.diff(after, labels)
                reasons = [str(difference) for difference in differences]
                self._count_static_retraces(differences)
        if old.contexts != new.contexts:
            reasons.append(f"the Contexts: {old.contexts} -> {new.contexts}")
        if (old.treedef, old.marks) != (new.treedef, new.marks):
            reasons.append(f"the arguments: {old.treedef} -> {new.treedef}")
        if old.ties != new.ties:
            reasons.append("the attributes that share a Ref or hold one container")
        text = "; ".join(reasons)
        if self.explain and reasons:
            warnings.warn(f"{self.name} is compiled again: {text}", UserWarning, stacklevel=4)
        return text

    def _count_static_retraces(self, differences: Sequence[Any]) -> None:
        for path, before, after in differences:
            if before.startswith("static") and after.startswith("static"):
                count = self._static_retraces[path] = self._static_retraces.get(path, 0) + 1
                if count == RETRACES_BEFORE_WARNING:
                    text = STATIC_RETRACES.format(name=self.name, count=count, path=path, before=before, after=after)
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
            warnings.warn(f"{self.name} is compiled again: {'; '.join(changes)}", UserWarning, stacklevel=4)
        entry.shapes = now


def captured_modules(fun: Any) -> list[str]:
    """The Modules a function reaches through what it captured or by a global name, each with its place."""
    if not isinstance(fun, types.FunctionType):
        captured = find_captured_module(fun) if isinstance(fun, (functools.partial, types.MethodType)) else None
        return [f"{type(captured[0]).__name__} ({captured[1]})"] if captured is not None else []
    found = []
    for name, cell in zip(fun.__code__.co_freevars, fun.__closure__ or ()):
        try:
            captured = find_captured_module(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
        if captured is not None:
            found.append(f"{name!r} ({type(captured[0]).__name__}) in its closure")
    codes = [fun.__code__]
    while codes:
        code = codes.pop()
        codes.extend(const for const in code.co_consts if isinstance(const, types.CodeType))
        for name in dict.fromkeys(op.argval for op in dis.get_instructions(code) if op.opname == "LOAD_GLOBAL"):
            value = fun.__globals__.get(name)
            if isinstance(value, ModuleBase) and f"the global {name!r} ({type(value).__name__})" not in found:
                found.append(f"the global {name!r} ({type(value).__name__})")
    return found


class Staged:
    """A step of `nnx.jit(f).lower(...)` or `.trace(...)`: JAX's own object, whose `compile()` takes Modules again."""

    def __init__(self, owner: Jit, entry: Entry, arrange: Any, inner: Any):
        self._owner, self._entry, self._arrange, self._inner = owner, entry, arrange, inner

    def lower(self, *args: Any, **kwargs: Any) -> "Staged":
        """The next step, as in JAX."""
        return Staged(self._owner, self._entry, self._arrange, self._inner.lower(*args, **kwargs))

    def compile(self, *args: Any, **kwargs: Any) -> "Staged":
        """The compiled function; call it with arguments of the same structure and shapes."""
        return Staged(self._owner, self._entry, self._arrange, self._inner.compile(*args, **kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call, entry = self._owner.prepare(args, kwargs)
        if entry is not self._entry:
            raise TypeError(f"{self._owner.name} was compiled for arguments of another structure than these.")
        return entry.finish(call, self._inner(*self._arrange(call.cells(), tuple(call.data), tuple(call.forks()))))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@overload
def jit(fun: Callable[P, R], /, **options: Unpack[JitOptions]) -> JitWrapped[P, R]: ...
@overload
def jit(fun: None = None, /, **options: Unpack[JitOptions]) -> JitDecorator: ...
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
    lifted = Jit(
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
    return lifted.function
