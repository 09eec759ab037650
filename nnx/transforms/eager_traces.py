"""Traces that are kept outside `jit`, for the transforms whose bodies JAX stages anyway.

A scan, a loop, a branch or a remat called from plain Python is compiled on its first call. `jax.lax.scan` finds its
earlier trace by the identity of the body, but ours is a new function for each call, because it closes over the Modules
of that call. So the work of a call runs as a jitted function that is kept under everything the trace depends on: the
transform and its options, the signature of the call, and the keys of the user's functions (`body_key`). A function
without a key is traced on every call.

A kept trace holds no Module. If a function reaches an array, its trace goes with it, and it has only one at a time. At
most `MAX_TRACES` are kept.

Tracing under `jit` hides values that a body could read without it, such as a broadcast array converted by `float`. So
when a call fails this way it is made again without `jit`: it either works, or raises the error that explains it.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import jax

from nnx.core.trace import is_eager
from nnx.sharding.rules import current_rules
from nnx.transforms.body_key import CanChange, body_key, content_key
from nnx.transforms.call import Call, CallAt

MAX_TRACES = 256


class _Trace:
    """The work of a call, jitted. Whenever JAX traces it, it is that of the call being made."""

    __slots__ = ("jitted", "keys", "kept", "guards", "needs_values")

    def __init__(self, keys: Any, kept: list[Any]):
        self.keys = keys  # of the functions
        self.kept = kept  # what the keys know by identity
        self.guards: list[Any] = []  # weak references to functions; it goes with the first of them
        self.needs_values: bool = False  # whether it only works without jit

        def traced(*operands: Any) -> Any:
            return _current.work(*operands)

        self.jitted = jax.jit(traced)


class _Current(threading.local):
    """The work that this thread is doing, for a trace to be made with."""

    work: Any = None


_current = _Current()
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
    outer, _current.work = _current.work, work
    try:
        return trace.jitted(*operands)
    except Exception:  # noqa: S110  (the call below works, or raises the error as it should be)
        pass
    finally:
        _current.work = outer
    result = work(*operands)
    trace.needs_values = True
    return result


def functions_run(fun: Callable[..., Any], call: Call) -> tuple[Callable[..., Any], ...]:
    """Returns the functions that a lifted function runs: itself, and the method that it only calls."""
    method = fun.function(call.roots[0]) if isinstance(fun, CallAt) else None
    return (fun,) if method is None else (fun, method)


def _find(functions: Sequence[Callable[..., Any]], options: Any, signature: Any) -> _Trace | None:
    """Returns the trace for such a call, a new one if there is none; `None` if it cannot be kept."""
    keys, kept, passing = [], [], []
    try:
        for function in functions:
            reached: list[Any] = []
            keys.append(body_key(function, reached))
            kept += reached
            if any(isinstance(value, jax.Array) for value in reached):
                passing.append(function)  # the trace goes with it, so it must be this very function
        # Such a function has one trace at a time: a cell that holds another array at every call must not pile them up.
        by_function: Any = tuple(map(id, passing)) or tuple(keys)
        key = (by_function, content_key(options, kept), signature, current_rules())
        with _lock:
            trace = _traces.get(key)
            if trace is not None and trace.keys == keys:
                _traces.move_to_end(key)
                return trace
        trace = _Trace(keys, kept)
        trace.guards = [weakref.ref(function, lambda _: _traces.pop(key, None)) for function in passing]
    except (CanChange, TypeError):  # a TypeError: a part cannot be hashed, or referred to weakly
        return None
    with _lock:
        _traces[key] = trace
        if len(_traces) > MAX_TRACES:
            _traces.popitem(last=False)
    return trace


def kept_traces() -> int:
    """Returns how many traces are kept now."""
    return len(_traces)


def clear_traces() -> None:
    """Forgets every trace."""
    with _lock:
        _traces.clear()
