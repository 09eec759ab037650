"""Bodies that are traced once for all calls of equal structure: what keeps tracing 64 rematerialized blocks cheap.

JAX caches the trace of a checkpointed function by the identity of the function it is given. A lifted function is given
other Modules in each call, so it has to be a new function object each time, unless two calls are known to run the same
body on the same structure. Then the second call can pass JAX the object of the first, and its trace is a cache hit.

Two calls *share* a trace if both are made within one run of an enclosing lifted function (the *scope*), at one trace
level, with equal signatures, an equal body key (`body_key`), and the same values of all context variables. A body
without a key is traced again for each call. Nothing outlives the scope, so no later call sees an old trace.
"""

import contextvars
import functools
import threading
from collections.abc import Callable
from typing import Any

from nnx.core.trace import current_level
from nnx.transforms.body_key import CanChange, body_key
from nnx.transforms.call import Call


class _Scope(threading.local):
    """The bodies that the function now running in this thread has passed to JAX; None outside lifted functions."""

    bodies: dict[Any, "_Shared"] | None = None


class _Shared:
    """A function for JAX to trace, and the call to trace it with if it has to be traced for new shapes."""

    __slots__ = ("function", "call", "kept")

    def __init__(self, trace: Callable[..., Any], kept: list[Any]):
        self.kept = kept  # what the key knows by identity: an object that is gone could give its id to another

        def function(*args: Any) -> Any:
            return trace(self.call, *args)

        self.function = function


_scope = _Scope()


def run_in_scope(fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls the function of a lifted call, as a scope for the traces of the bodies it runs in turn."""
    outer, _scope.bodies = _scope.bodies, {}
    try:
        return fun(*args, **kwargs)
    finally:
        _scope.bodies = outer


def shared_body(fun: Any, call: Call, trace: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function to pass to JAX for a call.

    Args:
        fun: the user's function.
        call: the call, split.
        trace: what to do when JAX traces the result: `trace(call, *args)`.
    """
    bodies = _scope.bodies
    kept: list[Any] = []
    try:
        key = None if bodies is None else (call.signature, current_level(), _context_key(kept), body_key(fun, kept))
        shared = None if bodies is None else bodies.get(key)
    except (CanChange, TypeError):  # a TypeError: something in the signature has no hash
        return functools.partial(trace, call)
    if bodies is None:
        return functools.partial(trace, call)
    if shared is None:
        shared = bodies[key] = _Shared(trace, kept)
    shared.call = call
    return shared.function


def _context_key(kept: list[Any]) -> Any:
    """Returns a key of all context variables, by identity: logical axis rules, and what users keep in theirs."""
    items = list(contextvars.copy_context().items())
    kept.extend(items)
    return tuple([(id(variable), id(value)) for variable, value in items])
