"""Whether a compiled function runs Python when it is called."""

from typing import Any

import jax
import jax.numpy as jnp

_MADE_IN_C = (tuple, list, dict, type(None))  # containers that JAX puts together without running Python


def runs_python(traced: Any) -> bool:
    """Whether calling a traced function runs Python: its callbacks, JAX's own dispatch, or constructors of results.

    JAX calls functions with effects (`jax.debug.print`, `io_callback`) from Python, and most others from C. A
    `pure_callback` has no effect, so it has to be looked for. Containers in the result other than Python's own are
    made by Python code, even a namedtuple, and so are typed random keys.

    Args:
        traced: what `jax.jit(f).trace(...)` returns.
    """
    jaxpr, result = traced.jaxpr, traced.out_info
    nodes: list[Any] = []
    # JAX asks `is_leaf` about every node. `append` returns None, so it collects the nodes and says no.
    leaves = jax.tree.leaves(result, is_leaf=nodes.append)  # type: ignore[arg-type]
    is_leaf = {id(leaf) for leaf in leaves}.__contains__
    if any(type(node) not in _MADE_IN_C for node in nodes if not is_leaf(id(node))):
        return True
    if any(jnp.issubdtype(leaf.dtype, jax.dtypes.extended) for leaf in leaves):
        return True
    return bool(jaxpr.effects) or _calls_back(jaxpr.jaxpr, set())


def _calls_back(jaxpr: Any, seen: set[int]) -> bool:
    """Whether a jaxpr, or one inside it, calls a Python function of the user's."""
    seen.add(id(jaxpr))
    for equation in jaxpr.eqns:
        if "callback" in equation.primitive.name:
            return True
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns") and id(inner) not in seen and _calls_back(inner, seen):
                    return True
    return False
