"""Trace levels: which JAX trace is running now, as a token that is cheap to compare.

The *level* of an object is the trace it was made in. A Module or Context of one level must not be changed at another,
or tracers would leak out of (or stale values into) a transformed function. This file is the only one that looks into
JAX's private modules; if they change, it falls back to the public, slower call.
"""

from typing import Any

import jax
import jax.extend

try:
    from jax._src.core import trace_state as _trace_state  # a thread-local setting that holds a weakref to the trace

    _trace_state.value  # noqa: B018  (the attribute must exist)
except (ImportError, AttributeError):  # pragma: no cover - only on a JAX that moved it
    _trace_state = None


if _trace_state is not None:

    def current_level(_state: Any = _trace_state) -> Any:
        """The running trace as a token; the same trace gives the same object."""
        return _state.value

else:  # pragma: no cover

    def current_level() -> Any:
        """The running trace as a token; the same trace gives equal objects."""
        return jax.extend.core.get_opaque_trace_state(convention="nnx")


def same_level(level: Any) -> bool:
    """Whether `level` is the running one."""
    current = current_level()
    return level is current or level == current


def is_tracer(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)
