"""What `nnx.jit` compiles for one signature, and the call it is compiled for.

A `Compiled` serves every model of its structure. It is traced with the static values of the model in the call at hand,
the *current call*: keys say that two models are alike, but the objects behind the keys belong to each model.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax

from nnx.core.trace import forget_failed_dispatch, is_eager
from nnx.core.variables.untied import inputs_traced_as
from nnx.transforms.engine.call import Call, Signature
from nnx.transforms.engine.captured import Captured
from nnx.transforms.engine.commit import finish
from nnx.transforms.engine.inner_traces import with_fresh_traces
from nnx.transforms.engine.internal_names import TRACER_ERRORS
from nnx.transforms.engine.leave import run
from nnx.transforms.engine.outcome import Effects, Outcome
from nnx.transforms.engine.programs import evaluate, trace_program
from nnx.transforms.engine.routes import classes_of
from nnx.transforms.engine.selected_arguments import StaticArgument, static_arguments
from nnx.transforms.jit.donation import Donation, NeedsGeneralPath, arguments_of
from nnx.transforms.jit.kept_shardings import ShardedFunction, output_shardings, shardings_to_keep
from nnx.transforms.jit.requested_shardings import InputShardings, constrain_outcome, input_shardings
from nnx.transforms.jit.tracer_errors import explain, standing_for


class NeedsStaging(Exception):
    """Raised where JAX traces a function whose captured weights have yet to be found."""


class CurrentCall(threading.local):
    """The call that this thread is making, with which a function is traced if it has to be.

    Attributes:
        call: the call.
        is_staging: whether the function is being traced to find out what it captures.
        program: the function as just traced, if it captures weights.
    """

    call: Call | None = None
    is_staging: bool = False
    program: Any = None

    def run(self, call: Call | None, fun: Callable[..., Any], *args: Any) -> Any:
        """Calls a function while `call` is the one being made."""
        outer, self.call = self.call, call
        try:
            return fun(*args)
        finally:
            self.call = outer


class Compiled:
    """The compiled function of one signature.

    Its result is a plain tuple, because JAX unflattens those in C: `(values, out)`, followed by n times None for the
    n-th set of effects it has shown. Shapes may decide what a function changes, so one signature can have several sets
    of effects. None has no leaves, so the length of the result distinguishes them at no cost to the device.

    New shapes are traced in two steps, so that weights which the function captures do not become constants. *Staging*
    traces the function. If its program captures nothing, that trace is compiled; otherwise the program is evaluated
    with the captured cells as arguments, which follow the cells of the call in one list.

    Args:
        owner: the `Jit` it belongs to.
        call: the first call of this signature.
        args, kwargs: its arguments.
    """

    def __init__(self, owner: Any, call: Call, args: Any, kwargs: Any):
        self.owner = owner
        self.signature: Signature = call.signature
        self.statics = call.statics
        self.static_arguments: list[StaticArgument] = static_arguments(args, kwargs)
        # What the function is, for finding captured weights: a static argument may hold Modules as well, and a method
        # of an argument may read a Module by a global.
        values = [argument.value for argument in self.static_arguments]
        self.functions: list[Any] = [owner.fun, *values, *classes_of(call.flat)]
        self.captured: Captured = Captured(functools.partial(_forget, weakref.ref(self)))
        self.outdated: list[str] = []  # what changed inside the function that this one replaces
        self.cell_count: int = 0 if call.signature.key is None else len(call.signature.key.cells)
        self.effects: list[Effects | None] = []  # None in place of the first set if others have shown before it
        self.shapes: list[str] | None = None
        self.in_shardings: InputShardings | None = None
        if owner.in_shardings is not None:
            self.in_shardings = input_shardings(owner.in_shardings, call, args, len(owner.bound))
        self.is_sharded: bool = False  # whether it was ever traced for cells on several devices
        self.donation: Donation | None = Donation(self, call, args, kwargs) if owner.donates else None
        self.jitted: Any = self._make()

    def _make(self) -> Any:
        """Returns a jitted function with its own cache of traces."""
        options = dict(self.owner.options)
        if self.in_shardings is not None:
            cells, data = self.in_shardings
            cells = [*cells, *[None] * len(self.captured.names)]
            options["in_shardings"] = (cells, data, *([None] if self.signature.contexts else []))
        return jax.jit(self.function(), **options)

    def function(self) -> Any:
        """Returns a new function for JAX to trace. JAX shares traces between jitted functions of one function."""
        return standing_for(self.traced, self.owner.fun, self.owner.name)

    def traced(self, cells: Any, data: Any, forks: Any = ()) -> tuple[Any, ...]:
        """The function JAX traces."""
        current = self.owner.current
        call = current.call
        if call is None:
            raise NeedsGeneralPath
        own = cells[: self.cell_count]
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            return self._body(call, own, data, forks)
        if current.program is not None:
            self._kept(call)  # the program has its constraints; this notes the shardings it was traced for
            inputs = self.captured.inputs(cells[self.cell_count :])
            return evaluate(current.program, inputs, arguments_of(own, data, forks))
        if not current.is_staging:
            raise NeedsStaging
        return self._body(call, own, data, forks)

    def _body(self, call: Call, cells: Any, data: Any, forks: Any = ()) -> tuple[Any, ...]:
        """Runs the user's function on traced values."""
        owner = self.owner
        owner.count_trace(1)
        owner.explain_shapes(self, cells, data)
        name = f"nnx.jit({owner.name})"
        # The current call is None while the body runs: calls that the body makes are different calls, even if they are
        # calls of this function.
        try:
            with inputs_traced_as(call.cells(), cells), with_fresh_traces():
                outcome = owner.current.run(
                    None, run, owner.body, call.signature, call.statics, cells, data, forks, name
                )
        except TRACER_ERRORS as error:
            explain(error, owner.fun, call.signature)
            raise
        outcome = constrain_outcome(self._kept(call), owner.out_shardings, self.signature.key, outcome, cells)
        if not owner.stateful and not outcome.effects.survives_discard:
            outcome.values = ()  # the changes will be discarded, so XLA need not compute them
        return (outcome.values, outcome.out, *[None] * self._number(outcome.effects))

    def _number(self, effects: Effects) -> int:
        """Returns the number of a set of effects, which is a new one if it has not been shown before."""
        if effects not in self.effects:
            if not self.effects and not self._is_first(effects):
                self.effects.append(None)
            self.effects.append(effects)
        return self.effects.index(effects)

    def _is_first(self, effects: Effects) -> bool:
        """Whether these effects can be the first set, that of results of length 2.

        The fast path ends such a call by writing values, or by nothing if changes are discarded, without asking what
        the effects are. If others come first, the first set stays empty.
        """
        return effects.simple if self.owner.stateful else not effects.survives_discard

    def _kept(self, call: Call) -> list[Any] | None:
        """Returns the sharding of what is written back to each cell: that of `in_shardings`, or else the old one."""
        given = None if self.in_shardings is None else self.in_shardings.cells
        kept = shardings_to_keep([*call.cells(), *self.captured.values()])
        if not any(kept):
            return given
        if not self.is_sharded:
            self.jitted = ShardedFunction(self._make, kept, self.jitted)
            if self.donation is not None:
                self.donation.inner = ShardedFunction(self.donation.make_inner, kept, self.donation.inner)
                self.donation.usual = None
            self.is_sharded = True
        assert self.signature.key is not None
        return output_shardings(given, kept[: self.cell_count], self.signature.key.hooks)

    def effects_of(self, result: tuple[Any, ...]) -> Effects:
        effects = self.effects[len(result) - 2]
        assert effects is not None, "no result has the length of an empty set of effects"
        return effects

    def outcome_of(self, result: tuple[Any, ...]) -> Outcome:
        """Returns the Outcome that a result of the compiled function stands for."""
        return Outcome(result[0], result[1], self.effects_of(result))

    def call(self, call: Call) -> tuple[Any, Any]:
        """Makes a call and writes what changed into the caller's Modules; returns its result and its output."""
        if self.donation is not None and self.donation.applies_to(call):
            return self.donation.call(call)
        result = self.run(call, self._execute)
        return result, self.finish(call, result)

    def _execute(self, cells: list[Any], data: tuple[Any, ...], forks: tuple[Any, ...]) -> Any:
        return self.jitted(*arguments_of(cells, data, forks))

    def eval_shape(self, cells: list[Any], data: tuple[Any, ...], forks: tuple[Any, ...]) -> Any:
        """Returns the shapes and dtypes of a result."""
        return jax.eval_shape(self.jitted, *arguments_of(cells, data, forks))

    def cells_of(self, call: Call) -> list[Any]:
        """Returns the values of all cells that the function takes: those of the call, then the captured ones."""
        return [*call.cells(), *self.captured.values()]

    def run(self, call: Call, use: Callable[[list[Any], tuple[Any, ...], tuple[Any, ...]], Any]) -> Any:
        """Returns `use(cells, data, forks)` for the values of a call; JAX may trace the function in it."""
        data, forks = tuple(call.data), tuple(call.forks())
        current = self.owner.current
        try:
            return current.run(call, use, self.cells_of(call), data, forks)
        except NeedsStaging:
            pass  # done below, outside the handler: errors must not be chained to this one
        # Saved and restored, because the body that is traced may call this very function.
        outer = current.is_staging, current.program
        current.is_staging, current.program = True, None
        try:
            current.program = current.run(call, self._stage, call, arguments_of(call.cells(), data, forks))
            forget_failed_dispatch(self.jitted.at(self.cells_of(call)) if self.is_sharded else self.jitted)
            return current.run(call, use, self.cells_of(call), data, forks)
        finally:
            current.is_staging, current.program = outer

    def _stage(self, call: Call, arguments: tuple[Any, ...]) -> Any:
        """Traces the function and finds what it captures.

        Returns:
            The program to compile; None if JAX is to compile the trace that it already has.
        """
        had, is_outermost = len(self.captured.names), is_eager()
        if had or not is_outermost:  # inside a trace, only a program shows the tracers that it captures
            body = functools.partial(self._body, call)
            program: Any = trace_program(standing_for(body, self.owner.fun, self.owner.name), *arguments)
        else:
            donates = self.donation is not None and self.donation.applies_to(call)
            program = (self.donation.inner if donates else self.jitted).trace(*arguments)  # type: ignore[union-attr]
        self.captured.add(self.functions, program.jaxpr)
        if len(self.captured.names) > had:
            self.is_sharded = False
            self.jitted = self._make()
            if self.donation is not None:
                self.donation.reset()
            self.owner.plans.clear()
        return program if self.captured.names or not is_outermost else None

    def finish(self, call: Call, result: tuple[Any, ...]) -> Any:
        """Writes a result into the caller's Modules, unless `stateful=False`; returns the output."""
        return finish(call, self.outcome_of(result), self.owner.stateful)


def _forget(weak: "weakref.ref[Compiled]") -> None:
    """Forgets a function whose captured Module is gone, and with it the instance dicts it refers to."""
    compiled = weak()
    if compiled is not None:
        compiled.owner.forget(compiled)
