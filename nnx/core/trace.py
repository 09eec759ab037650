"""Everything that uses private parts of JAX: a cheap token for the running trace, the mesh of a `with mesh:` block, the
store shared by processes, transfer guards, and the dispatch of jitted functions.

The *level* of an object is the trace it was made in. A Module or Context of one level must not be changed at another,
or tracers would leak out of a transformed function, or stale values into it. This is the only file that imports JAX's
private modules; if they change, it falls back to the public, slower function.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
from jax.sharding import Mesh

try:
    from jax._src.core import EvalTrace as _EvalTrace
    from jax._src.core import trace_state as _trace_state  # a thread-local setting that holds a weakref to the trace

    _trace_state.value  # noqa: B018  (the attribute must exist)
except (ImportError, AttributeError):  # pragma: no cover - only on a JAX that moved it
    _trace_state = None
    _EvalTrace = None

try:
    from jax._src.mesh import thread_resources as _mesh_blocks
except ImportError:  # pragma: no cover - only on a JAX without such blocks
    _mesh_blocks = None


def _level_by_equality() -> Any:
    import jax.extend.core  # here, because it takes as long to import as a quarter of this library

    return jax.extend.core.get_opaque_trace_state(convention="nnx")


try:
    from jax._src.config import transfer_guard_host_to_device as _transfer_guard

    _transfer_guard.value  # noqa: B018  (the attribute must exist)
except (ImportError, AttributeError):  # pragma: no cover - only on a JAX that moved it
    _transfer_guard = None


def _public_transfer_guard() -> Any:
    return getattr(jax.config, "jax_transfer_guard_host_to_device", None)


transfer_guard: Callable[[], Any] = (
    _public_transfer_guard if _transfer_guard is None else functools.partial(getattr, _transfer_guard, "value")
)
"""Returns what `jax.transfer_guard` says about transfers to the device; every fork of a Context asks."""
NO_GUARD = (None, "allow")

current_level: Callable[[], Any] = (
    _level_by_equality if _trace_state is None else functools.partial(getattr, _trace_state, "value")
)
"""Returns a token for the running trace: the same object for the same trace (with the fallback, an equal one)."""


def same_level(level: Any) -> bool:
    """Whether `level` is that of the running trace."""
    current = current_level()
    return level is current or level == current


def is_eager() -> bool:
    """Whether the caller is plain Python, with nothing being traced. Returns False if JAX does not expose the trace."""
    level = current_level()
    return _EvalTrace is not None and type(level()) is _EvalTrace


def looks_for_nans() -> bool:
    """Whether JAX checks every result for NaN or infinity (`jax_debug_nans`, `jax_debug_infs`)."""
    return jax.debug_nans.value or jax.debug_infs.value


def forget_failed_dispatch(jitted: Any) -> None:
    """Lets calls of a jitted function go through JAX's C++ dispatch again after one raised while it was traced.

    JAX keeps one dispatch entry per signature, and marks the entry of a call that raised for good: every later call
    then runs some 340 Python frames instead of none. The public `clear_cache` would also forget the traces.
    """
    clear = getattr(jitted, "_clear_cache", None)
    if clear is not None:  # else calls are as slow, and as right
        clear()


def is_of_this_trace(value: Any) -> bool:
    """Whether a value belongs to the running trace; under a vmap, whether it differs between members."""
    level = current_level()
    trace = level() if callable(level) else None
    return isinstance(value, jax.core.Tracer) and (trace is None or value._trace is trace)


def is_tracer(value: Any) -> bool:
    """Whether a value is a tracer: a placeholder for a value that a running transform computes."""
    return isinstance(value, jax.core.Tracer)


def block_mesh() -> Mesh | None:
    """Returns the mesh of the innermost `with mesh:` block; None if there is none, or if JAX no longer has such blocks.

    The public functions know only the mesh of `jax.set_mesh`.
    """
    mesh = getattr(getattr(_mesh_blocks, "env", None), "physical_mesh", None)
    return None if mesh is None or mesh.empty else mesh


def varying_axes(value: Any) -> frozenset[Any]:
    """Returns the mesh axes along which a value inside shard_map differs; none if JAX does not expose them."""
    aval = jax.typeof(value)  # its attribute has had two names: `mat.varying` today, `vma` before
    return getattr(getattr(aval, "mat", None), "varying", None) or getattr(aval, "vma", None) or frozenset()


def distributed_client() -> Any:
    """Returns the client of the key-value store that `jax.distributed` set up, or None if it was not initialized.

    The public alternative, `jax.experimental.multihost_utils`, communicates through the devices: from a thread that
    completes a save, its collectives would interleave with those of the training step, and hang.
    """
    try:
        from jax._src.distributed import global_state
    except ImportError:  # pragma: no cover - only on a JAX that moved it
        return None
    return getattr(global_state, "client", None)
