"""Whether a compiled function runs Python when it is called."""

from typing import Any

import jax
import jax.numpy as jnp

from nnx.transforms.engine.programs import equations

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
    # JAX calls `is_leaf` for every node. `append` returns None, which is false, so it collects them all.
    leaves = jax.tree.leaves(result, is_leaf=nodes.append)  # type: ignore[arg-type]
    is_leaf = {id(leaf) for leaf in leaves}.__contains__
    if any(type(node) not in _MADE_IN_C for node in nodes if not is_leaf(id(node))):
        return True
    if any(jnp.issubdtype(leaf.dtype, jax.dtypes.extended) for leaf in leaves):
        return True
    return bool(jaxpr.effects) or any("callback" in eqn.primitive.name for eqn in equations(jaxpr))
