"""`nnx.jit`: `jax.jit` for functions that take Modules.

Compiled functions are kept per *signature*: where Modules and Contexts appear in the call, and what their structure is
(see call). In the steady state (see fast_path) a call checks the trace level and one stamp, gathers the values from the
cells, calls the compiled function with one flat list, and writes back what changed.
"""

import contextlib
import functools
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack, overload

import jax

from nnx.core.module.info import info_of
from nnx.core.state.moduledef import ModuleDef
from nnx.core.state.paths import join
from nnx.core.structure.walk import named_modules
from nnx.core.trace import is_eager
from nnx.core.user_warnings import warn_user
from nnx.sharding.rules import get_logical_axis_rules
from nnx.sharding.unmatched import UNSETTLED, note_shardings, settle
from nnx.transforms.engine.annotations import JitDecorator, JitOptions, JitWrapped, P, R
from nnx.transforms.engine.bad_arguments import explain_data
from nnx.transforms.engine.call import Call, Signature, callee_of
from nnx.transforms.engine.commit import discard
from nnx.transforms.engine.decorators import named_after
from nnx.transforms.engine.observed import OBSERVERS
from nnx.transforms.engine.selected_arguments import Selection, make_static, unwrap_static
from nnx.transforms.jit.argument_names import ArgumentNames
from nnx.transforms.jit.call_plans import PlanCache
from nnx.transforms.jit.compiled import Compiled, CurrentCall
from nnx.transforms.jit.donation import NO_COUNTS
from nnx.transforms.jit.fast_path import make_function
from nnx.transforms.jit.holders import counts_tell
from nnx.transforms.jit.interrupts import uninterrupted
from nnx.transforms.jit.staged import Staged

RETRACES_BEFORE_WARNING = 10
MAX_COMPILED = 256  # signatures per function; a program that needs more has a value that never repeats

STATIC_RETRACES = """{name} has been traced {count} times because the static attribute {path} changed ({before} -> \
{after} this time). A static value is part of the compiled function. If it is a counter or another number that changes \
from step to step, keep it in a Variable: nnx.Variable(0). If it is an object that reading changes, such as one that \
counts its reads, write `__hash__ = object.__hash__` in its class: then it is compared by identity."""

TOO_MANY_COMPILED = """{name} has been compiled for {count} different structures, and forgets the oldest from now on. \
The last call differed from the one before in: {reasons}. Keep what changes from call to call in a Variable, or pass \
it as an array."""

CONSTANT_WEIGHT = """{name} was compiled again, in {seconds:.1f} s: {path} has changed, and its array is a constant of \
the compiled function, which reads it in a way that nnx.jit cannot follow (jax.jit in the body of a loop or branch, or \
a Module that no name leads to). Use nnx.jit there, or pass the Module as an argument."""

NOT_POPPED = """{name} was called with sown values that have not been popped: {paths}. Every further sow() appends to \
them, so they grow and the function is recompiled each time. Take them out after each call: \
model.pop_state(nnx.Intermediate)."""

COMPILED_AGAIN = "{name} is compiled again: {reasons}"


class Jit:
    """Everything that belongs to one use of `nnx.jit`; the user holds `function`."""

    def __init__(self, fun: Any, *, stateful: bool, in_shardings: Any, out_shardings: Any, **options: Any):
        callee = callee_of(fun, "nnx.jit")
        self.name: str = callee.name
        self.stateful, self.explain = stateful, options.pop("explain_recompiles")
        self.in_shardings, self.out_shardings = in_shardings, out_shardings
        offset = len(callee.bound)
        static = (options.pop("static_argnums"), options.pop("static_argnames"))
        donate = (options.pop("donate_argnums"), options.pop("donate_argnames"))
        self.static: Selection = Selection(callee.fun, *static, offset)
        self.donated: Selection = Selection(callee.fun, *donate, offset)
        self.donates: bool = bool(self.donated) and counts_tell()
        # Only what was given: JAX refuses some options together, and has deprecated others.
        self.options: dict[str, Any] = {name: value for name, value in options.items() if value not in (None, False)}
        self.bound: tuple[Any, ...] = callee.bound
        self.fun: Callable[..., Any] = callee.fun
        self.body: Callable[..., Any] = unwrap_static(callee.fun) if self.static else callee.fun
        self.compiled: dict[tuple[Signature, Any], Compiled] = {}  # by signature and the logical axis rules in force
        self.plans: PlanCache = PlanCache(self.static, stateful, leads_with_module=not self.static and not self.bound)
        self.current: CurrentCall = CurrentCall()
        # What was used last, with its key: one tuple, read once, because another thread may replace it at any time.
        self._last: tuple[Any, Compiled] | None = None
        self._static_retraces: dict[str, int] = {}
        self._warned: set[str] = set()
        self.function: Callable[..., Any] = named_after(make_function(self), fun)
        self.function.trace_count = 0
        for method in (self.lower, self.trace, self.eval_shape, self.clear_cache):
            setattr(self.function, method.__name__, method)
        if self.donated and not self.donates:
            self.warn(NO_COUNTS.format(name=self.name, version=platform.python_version()), "counts")

    def count_trace(self, by: int) -> None:
        self.function.trace_count += by

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], drawn: Any = None) -> Any:
        """The general path: any mix of arguments; `drawn` are the forks of its Contexts, if they were made already."""
        call, compiled = self.prepare(args, kwargs)
        call.drawn = drawn
        if call.flat is not None and call.flat.sown:
            self._warn_of_sown(call)
        start = time.perf_counter()
        result, out = compiled.call(call)
        if compiled.outdated:
            path = next((path for path in compiled.captured.watched() if path in compiled.outdated), None)
            if path is not None:  # otherwise the array was in that cell by coincidence
                text = {"path": path, "seconds": time.perf_counter() - start}
                self.warn(CONSTANT_WEIGHT.format(name=self.name, **text), "constant")
            compiled.outdated = []
        self.plans.remember(call, compiled, result, (*self.bound, *args), kwargs)
        if UNSETTLED:
            _warn_of_rules(call)
        return out

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Compiled]:
        """Splits the call; returns it with what is compiled for its signature."""
        args = (*self.bound, *args)
        if self.static:
            args, kwargs = make_static(self.static, args, kwargs, self.name)
        call = Call(args, kwargs)
        if call.flat is not None:
            call.flat.settle_functions()
        key = (call.signature, get_logical_axis_rules())
        last, outdated = self._last, []
        # Comparing with the last key is cheaper than a hash, and nearly always enough.
        compiled = last[1] if last is not None and key == last[0] else self.compiled.get(key)
        if compiled is not None and not compiled.captured.is_current(compiled.functions):
            outdated = compiled.captured.changed()
            self.forget(compiled)
            compiled = None
        if compiled is None:
            reasons = self._explain_structure(call)
            compiled = self.compiled[key] = Compiled(self, call, args, kwargs)
            compiled.outdated = outdated
            if len(self.compiled) > MAX_COMPILED:
                self._drop_oldest(reasons)
        self._last = (key, compiled)
        return call, compiled

    def explain_error(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Rewrites the message of an error that a call raised because an argument is neither a Module nor data."""
        if type(error) is not TypeError:
            return
        given = args = (*self.bound, *args)
        with contextlib.suppress(Exception):  # the arguments may be what is wrong; the first error counts
            if self.static:
                args, kwargs = make_static(self.static, args, kwargs, self.name)
            call = Call(args, kwargs)
            names = ArgumentNames(self.fun, call.signature).data
            explain_data(error, self.fun, self.name, given, names, call.data)

    def finish_unplanned(
        self, compiled: Compiled, done: list[tuple[Any, ...]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Ends a call that was made from a plan, but whose result, the one in `done`, did not match the plan.

        The result leaves the list when nothing can interrupt the call anymore. If it is still there, it is not written.
        """

        def finish() -> Any:
            return compiled.finish(self.prepare(args, kwargs)[0], done.pop())

        return finish() if compiled.donation is None else uninterrupted(finish)

    def forget(self, compiled: Compiled) -> None:
        """Forgets what is compiled for one signature."""
        for key in [key for key, found in list(self.compiled.items()) if found is compiled]:
            self.compiled.pop(key, None)
        self.plans.clear()
        self._last = None

    # As in jax.jit

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the function for these arguments, as `jax.jit(f).lower(...)`."""
        return self._stage("lower", args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Traces the function for these arguments, as `jax.jit(f).trace(...)`."""
        return self._stage("trace", args, kwargs)

    def _stage(self, stage: str, args: Any, kwargs: Any) -> Any:
        call, compiled = self.prepare(args, kwargs)
        try:
            staged = compiled.run(call, functools.partial(Staged.of, self, compiled, stage))
        except TypeError as error:
            self.explain_error(error, args, kwargs)
            raise
        if UNSETTLED:
            _warn_of_rules(call)
        return staged

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output's shapes and dtypes; nothing is computed and no Module changes."""
        call, compiled = self.prepare(args, kwargs)
        result = compiled.run(call, compiled.eval_shape)
        return discard(call, compiled.outcome_of(result))

    def clear_cache(self) -> None:
        """Forgets everything compiled."""
        for compiled in list(self.compiled.values()):  # a copy, since another thread may be compiling
            compiled.jitted.clear_cache()
        self.compiled.clear()
        self.plans.clear()
        self._last = None

    # Warnings

    def warn(self, text: str, once: str) -> None:
        """Warns, the first time for each value of `once`."""
        if once not in self._warned:
            self._warned.add(once)
            warn_user(text)

    def _warn_of_sown(self, call: Call) -> None:
        if "sown" not in self._warned:
            paths = [
                join(path, name)
                for root in call.roots
                for path, module in named_modules(root)
                for name in info_of(module).sown_names(module.__dict__)
            ]
            if paths:
                self.warn(NOT_POPPED.format(name=self.name, paths=", ".join(paths)), "sown")

    def _drop_oldest(self, reasons: str) -> None:
        """Forgets the signature that was compiled first, and warns once that there are too many."""
        self.compiled.pop(next(iter(self.compiled)), None)
        self.warn(TOO_MANY_COMPILED.format(name=self.name, count=MAX_COMPILED, reasons=reasons), "compiled")

    def _explain_structure(self, call: Call) -> str:
        """Returns how a call differs from the one before; warns about it if asked, and if a value keeps changing."""
        if self._last is None:
            return ""
        last = self._last[1]
        old, new = last.signature, call.signature
        reasons = []
        names, names_before = ArgumentNames(self.fun, new), ArgumentNames(self.fun, old)
        if old.key is not None and new.key is not None and old.key is not new.key:
            if len(old.key.roots) == len(new.key.roots):
                before, after = ModuleDef(old.key, last.statics), ModuleDef(new.key, call.statics)
                # Differences are reported by path, so each root's path starts with its argument name.
                differences = _of_users(before.diff(after, names.modules))
                reasons = [_told(difference, names.modules) for difference in differences]
                self._count_static_retraces(differences, names.modules)
        if old.contexts != new.contexts:
            reasons.append(f"the Contexts: {old.contexts} -> {new.contexts}")
        if (old.treedef, old.marks) != (new.treedef, new.marks):
            reasons += names_before.differences(names) or ["which arguments are one Module"]
        if old.ties._replace(orders=()) != new.ties._replace(orders=()):
            reasons.append("the attributes that share a Ref or hold one container")
        if old.key is new.key and old.ties.orders != new.ties.orders:
            cells = {cell for cell, _ in {*old.ties.orders} ^ {*new.ties.orders}}
            paths = [path for cell, path in enumerate(names.cells()) if cell in cells]
            reasons.append(f"the order of the items in {', '.join(paths)}")
        text = "; ".join(reasons)
        if self.explain and reasons:
            warn_user(COMPILED_AGAIN.format(name=self.name, reasons=text))
        return text

    def _count_static_retraces(self, differences: Sequence[Any], modules: Sequence[str]) -> None:
        for path, before, after in differences:
            if before.startswith("static") and after.startswith("static"):
                count = self._static_retraces[path] = self._static_retraces.get(path, 0) + 1
                if count == RETRACES_BEFORE_WARNING:
                    where, (before, after) = _place(path, modules), _stripped(before, after)
                    text = STATIC_RETRACES.format(name=self.name, count=count, path=where, before=before, after=after)
                    self.warn(text, f"static {path}")

    def explain_shapes(self, compiled: Compiled, cells: Any, data: Any) -> None:
        """Warns, if asked, which shape changed when a known signature is traced again."""
        if not self.explain:
            return
        names = ArgumentNames(self.fun, compiled.signature)
        labels = [*names.cells(), *names.data]
        shapes = [str(jax.tree.map(jax.typeof, value)) for value in (*cells, *data)]
        if compiled.shapes is not None and compiled.shapes != shapes:
            pairs = zip(labels, compiled.shapes, shapes)
            text = "; ".join(f"{label}: {before} -> {after}" for label, before, after in pairs if before != after)
            warn_user(COMPILED_AGAIN.format(name=self.name, reasons=text))
        compiled.shapes = shapes


def _warn_of_rules(call: Call) -> None:
    """Warns of logical axis rules that nothing has used, now that a function has been traced."""
    if is_eager():  # else the function may be a part of one that is still being traced
        note_shardings((call.cells(), call.data))
        for text in settle(get_logical_axis_rules()):
            warn_user(text)


def _of_users(differences: Sequence[Any]) -> list[Any]:
    """Returns the differences without the observers that `nnx.capture` and `nnx.summary` add."""
    observed = {path.rpartition("/")[0] for path, _, _ in differences if path.endswith(OBSERVERS)}
    return [one for one in differences if not one.path.endswith(OBSERVERS) and one.path not in observed]


def _told(difference: Any, modules: Sequence[str]) -> str:
    """Returns a difference between two structures in the user's words."""
    path, before, after = difference
    return f"{_place(path, modules)}: {' -> '.join(_stripped(before, after))}"


def _place(path: str, modules: Sequence[str]) -> str:
    """Returns a path that starts with the name of an argument as a phrase: `'layers/0/rate' of model`."""
    argument = max([name for name in modules if path == name or path.startswith(f"{name}/")], key=len, default="")
    inner = path[len(argument) + 1 :]
    return f"{inner!r} of {argument}" if inner else argument


def _stripped(before: str, after: str) -> tuple[str, str]:
    """Returns two texts without the word "static", if both start with it."""
    is_static = before.startswith("static ") and after.startswith("static ")
    return (before[7:], after[7:]) if is_static else (before, after)


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
    device: Any = None,
    backend: str | None = None,
    stateful: bool = True,
    explain_recompiles: bool = False,
) -> Any:
    """Compiles a function with Modules and Contexts anywhere in its arguments, and updates the Modules in place.

    Args:
        fun: a function, a Module, or a bound method of one. Without it, a decorator is returned.
        static_argnums, static_argnames: arguments that are part of the compiled function, as in `jax.jit`.
        donate_argnums, donate_argnames: arguments whose buffers may be reused. Of a Module, exactly the buffers that
            the function replaces are donated, and the Module stays usable.
        in_shardings: one sharding per argument; for a Module, one for all its state, a mapping from filter to
            sharding, or a State of them, as `nnx.logical_to_mesh_sharding(model, mesh, rules)` returns it.
        out_shardings: a sharding, or a tree of them, for the output; for a Module in it, as in `in_shardings`.
        keep_unused, inline, compiler_options: as in `jax.jit`.
        device, backend: as in `jax.jit`, which has deprecated them; a JAX version without them raises its own error.
        stateful: whether changes to Modules are written back.
        explain_recompiles: whether to warn when the function is recompiled, naming the path or argument that changed.

    State that is split over several devices keeps its sharding: on automatic mesh axes, what the function writes back
    is split like what it replaces. To move a model, use `nnx.shard`.

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
    options = {name: value for name, value in locals().items() if name != "fun"}
    return Jit(fun, **options).function if fun is not None else lambda fun: Jit(fun, **options).function
