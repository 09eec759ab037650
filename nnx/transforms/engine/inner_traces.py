"""The traces that JAX keeps of what runs inside a traced function: never used again with old weights in them.

JAX keeps the trace of a `jax.jit`, and of the body of a `jax.lax.scan`, `cond` or `checkpoint`, by the identity of the
function, and the arrays that it captured are constants of that trace. Found again after a step, it shows the program
around it old weights, which no Module holds anymore, so nothing tells that they ever were weights.

So this package traces users' functions in a context that is part of the keys of JAX's caches. The number in it grows
when a program turns out to have captured weights, so no later program finds a trace from inside an earlier one.
Programs that capture nothing leave it alone and share the traces of JAX's own functions.
"""

from typing import Any

import jax

_context: Any = jax.make_user_context()
_generation = 0


def with_fresh_traces() -> Any:
    """Returns a context manager in which JAX finds no trace that may hold earlier values of captured weights."""
    return _context(_generation)


def outdate_traces() -> None:
    """Notes that weights have been captured: the traces that JAX has kept so far may hold them as constants."""
    global _generation
    _generation += 1
