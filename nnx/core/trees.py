"""Pytrees inside one attribute: leaves told from containers, containers made anew, Modules found that hide in them."""

from typing import Any

import jax

from nnx.core.info import outlives_caches

leaf_types: dict[type, bool] = {}
"""Whether values of a type are leaves, and data; types are entered as they are met."""


def is_pytree_leaf(value: Any) -> bool:
    """Whether JAX takes the value as one leaf, and not as a tree of others."""
    leaves = jax.tree.leaves(value)
    return len(leaves) == 1 and leaves[0] is value


def fresh(value: Any) -> Any:
    """The value with every container in it made anew; leaves stay."""
    cls = type(value)
    is_leaf = leaf_types.get(cls)
    if is_leaf is None:
        is_leaf = (value is None or is_pytree_leaf(value)) and not holds_state(value)
        if outlives_caches(cls):
            leaf_types[cls] = is_leaf
    return value if is_leaf else jax.tree.map(lambda leaf: leaf, value)


def holds_state(value: Any) -> bool:
    """Whether a value is a Module, Ref or container: something that must not hide in another value."""
    return getattr(type(value), "_nnx_holds_state", False)


def find_module(tree: Any) -> Any:
    """The first Module or Ref that is a leaf of a pytree, or None."""
    return next(filter(holds_state, jax.tree.leaves(tree)), None)
