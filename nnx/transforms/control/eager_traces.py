"""Traces that are kept outside `jit`, for the transforms whose bodies JAX stages anyway.

A scan, a loop, a branch or a remat called from plain Python is compiled on its first call. `jax.lax.scan` finds its
earlier trace by the identity of the body, but ours is a new function for each call, because it closes over the Modules
of that call. So the work of a call runs as a jitted function that is kept for the same functions of the user, while
their names mean the same (`function_keys`), and for equal options and signatures. A body made for one call is traced in
that call, as in JAX. A kept trace holds no Module and ends with the functions it was made for.

Tracing under `jit` hides values that a body could read without it, such as a broadcast array converted by `float`. A
call that fails with such a tracer error is made again without `jit`: it either works, or raises the error that explains
it. Any other error is the user's, and the body does not run again.
"""

import functools
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import jax

from nnx.core.statics.keys import ById
from nnx.core.trace import forget_failed_dispatch, is_eager
from nnx.sharding.rules import current_rules
from nnx.transforms.engine.call import Call, CallAt
from nnx.transforms.engine.captured import Captured
from nnx.transforms.engine.function_keys import CanChange, function_key, options_key, stable_key
from nnx.transforms.engine.internal_names import TRACER_ERRORS
from nnx.transforms.engine.programs import evaluate, trace_program

MAX_TRACES = 256


class _Current(threading.local):
    """The program that this thread is about to compile."""

    program: Any = None


_current = _Current()


class _Trace:
    """A jitted function that does the work of the call that this thread is making.

    New shapes are traced in two steps. The first traces the work itself, which shows the weights that it captures. The
    second evaluates that program with those weights as arguments, and is what gets compiled.
    """

    __slots__ = ("key", "captured", "guards", "needs_values", "_jitted")

    def __init__(self, key: Any, when_gone: Callable[[], Any]):
        self.key = key  # of the functions
        self.captured = captured = Captured(when_gone)
        self.guards: list[Any] = []  # weak references to the functions; the trace ends with the first of them
        self.needs_values: bool = False  # whether it only works without jit

        def traced(hidden: Any, operands: Any) -> Any:
            if _current.program is None:
                raise _NotStaged
            return evaluate(_current.program, captured.inputs(hidden), operands)

        self._jitted = jax.jit(traced)

    def run(self, work: Any, functions: Sequence[Any], operands: tuple[Any, ...]) -> Any:
        try:
            return self._jitted(self.captured.values(), operands)
        except _NotStaged:
            pass  # made below, outside the handler: errors must not be chained to this one
        program = trace_program(work, *operands)
        self.captured.add(functions, program.jaxpr)
        forget_failed_dispatch(self._jitted)
        outer, _current.program = _current.program, program
        try:
            return self._jitted(self.captured.values(), operands)
        finally:
            _current.program = outer


class _NotStaged(Exception):
    """Raised where JAX traces a function for shapes whose program has yet to be made."""


_traces: OrderedDict[Any, _Trace] = OrderedDict()
_lock = threading.Lock()


def kept_trace(
    work: Callable[..., Any],
    operands: tuple[Any, ...],
    *,
    functions: Sequence[Callable[..., Any]],
    options: Any,
    signature: Any,
) -> Any:
    """Returns `work(*operands)`; called from plain Python, with the trace of an earlier call if there is one.

    Args:
        work: the work. It depends on `functions`, `options` and `signature` alone, and on the structure of the
            operands.
        operands: the arrays of the call.
        functions: the user's functions that it runs.
        options: the transform and its options.
        signature: what is static about the call.
    """
    if not is_eager() or jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        return work(*operands)
    trace = _find(functions, options, signature)
    if trace is None or trace.needs_values:
        return work(*operands)
    try:
        return trace.run(work, functions, operands)
    except (TypeError, IndexError) as error:
        if not any(isinstance(e, TRACER_ERRORS) for e in (error, error.__cause__)):
            raise
    # Outside the handler: an error must not be chained to this one.
    result = work(*operands)
    trace.needs_values = True
    return result


def functions_run(fun: Callable[..., Any], call: Call) -> tuple[Callable[..., Any], ...]:
    """Returns the functions that a lifted function runs: itself, and the method that it only calls."""
    method = fun.function(call.roots[0]) if isinstance(fun, CallAt) else None
    return (fun,) if method is None else (fun, method)


def _find(functions: Sequence[Callable[..., Any]], options: Any, signature: Any) -> _Trace | None:
    """Returns the trace for such a call, a new one if there is none; `None` if it cannot be kept."""
    try:
        key = tuple(map(function_key, functions))
        # One trace at a time for a function whose names change their meaning: old ones may hold arrays.
        place = (tuple(map(_anchor, functions)), options_key(options), signature, current_rules())
        with _lock:
            trace = _traces.get(place)
            if trace is not None and trace.key == key and trace.captured.is_current(functions):
                _traces.move_to_end(place)
                return trace
        trace = _Trace(key, functools.partial(_traces.pop, place, None))
        partials = [function for function in functions if isinstance(function, functools.partial)]
        guarded = [*filter(None, map(_function_under, functions)), *partials]
        trace.guards = [weakref.ref(function, lambda _: _traces.pop(place, None)) for function in guarded]
    except (CanChange, TypeError):  # a TypeError: a part cannot be hashed
        return None
    with _lock:
        _traces[place] = trace
        if len(_traces) > MAX_TRACES:
            _traces.popitem(last=False)
    return trace


def _anchor(fun: Any) -> Any:
    """Returns the part of a function's key that never changes."""
    function = _function_under(fun)
    return stable_key(fun) if function is None else ById(function)


def _function_under(fun: Any) -> types.FunctionType | None:
    """Returns the function object that a callable runs, under partials and bound methods; None if there is none."""
    while isinstance(fun, (functools.partial, types.MethodType)):
        fun = fun.func if isinstance(fun, functools.partial) else fun.__func__
    return fun if isinstance(fun, types.FunctionType) else None


def kept_traces() -> int:
    """Returns how many traces are kept now."""
    return len(_traces)


def clear_traces() -> None:
    """Forgets every trace."""
    with _lock:
        _traces.clear()
