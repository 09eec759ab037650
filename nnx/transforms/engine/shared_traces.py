"""Bodies that are traced once for all calls of equal structure: what keeps tracing 64 rematerialized blocks cheap.

JAX caches the trace of a checkpointed function by the identity of the function it is given. A lifted function is given
other Modules in each call, so it has to be a new function object each time, unless two calls are known to run the same
body on the same structure. Then the second call can pass JAX the object of the first, and its trace is a cache hit.

Two calls *share* a trace if both are made within one run of the body of a lifted function, at one trace level, with
equal signatures and the same values of all context variables, if their functions are the same object whose names mean
the same (`function_keys`), and if all weights that the trace captured are still the same arrays. Nothing is shared
beyond that run, so no later call sees an old trace.
"""

import contextvars
import functools
import threading
from collections.abc import Callable
from operator import is_
from typing import Any

import jax

from nnx.core.trace import current_level
from nnx.transforms.engine.call import Call
from nnx.transforms.engine.captured import Captured
from nnx.transforms.engine.function_keys import CanChange, function_key
from nnx.transforms.engine.programs import evaluate, trace_program


class _Sharing(threading.local):
    """The bodies that the function now running in this thread has passed to JAX; None outside lifted functions."""

    bodies: dict[Any, "_Shared"] | None = None


class _Shared:
    """A function for JAX to trace, and the call to trace it with if it has to be traced for new shapes."""

    def __init__(self, fun: Any, trace: Callable[..., Any], contexts: Any):
        self.call: Any = None
        self._fun = fun
        self._contexts = contexts  # keeps alive what the key knows by identity
        self._captured = Captured(lambda: None)
        self._weights: list[Any] = []  # what the captured cells held

        def function(*args: Any) -> Any:
            # Traced by itself first, because only a whole program shows what it captured.
            program = trace_program(functools.partial(trace, self.call), *args)
            self._captured.add((fun,), program.jaxpr)
            self._weights = jax.tree.leaves(self._captured.values())
            return evaluate(program, {}, args)

        self.function = function

    def is_current(self) -> bool:
        """Whether the body would read the same weights again."""
        if not self._captured.is_current((self._fun,)):
            return False
        weights = jax.tree.leaves(self._captured.values())
        return len(weights) == len(self._weights) and all(map(is_, weights, self._weights))


_sharing = _Sharing()


def run_body(fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls the user's function. Until it returns, the bodies it runs in turn can share their traces."""
    outer, _sharing.bodies = _sharing.bodies, {}
    try:
        return fun(*args, **kwargs)
    finally:
        _sharing.bodies = outer


def in_lifted_function() -> bool:
    """Whether a lifted function runs in this thread: its Modules may be copies of the caller's."""
    return _sharing.bodies is not None


def shared_body(fun: Any, call: Call, trace: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function to pass to JAX for a call.

    Args:
        fun: the user's function.
        call: the call, split.
        trace: what to do when JAX traces the result: `trace(call, *args)`.
    """
    bodies = _sharing.bodies
    if bodies is None:
        return functools.partial(trace, call)
    contexts = tuple(contextvars.copy_context().items())  # logical axis rules, and what users keep in theirs
    try:
        # By identity, because values of context variables need not have a hash. `_Shared` keeps them alive.
        by_identity = tuple([(id(variable), id(value)) for variable, value in contexts])
        key = (call.signature, current_level(), by_identity, function_key(fun))
        shared = bodies.get(key)
    except (CanChange, TypeError):  # a TypeError: something in the signature has no hash
        return functools.partial(trace, call)
    if shared is None or not shared.is_current():
        shared = bodies[key] = _Shared(fun, trace, contexts)
    shared.call = call
    return shared.function
