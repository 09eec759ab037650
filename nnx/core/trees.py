"""Pytrees inside one attribute: leaves told from containers, containers made anew, Modules found that hide in them."""

from typing import Any

import jax
import numpy as np

from nnx.core.caches import outlives_caches

leaf_types: dict[type, bool] = {}
"""Whether values of a type are leaves, and data; types are entered as they are met."""

constant_types: dict[type, bool] = {}
"""Whether values of a type are leaves that cannot change in place; types are entered as they are met."""


def is_pytree_leaf(value: Any) -> bool:
    """Whether JAX takes the value as one leaf, and not as a tree of others."""
    leaves = jax.tree.leaves(value)
    return len(leaves) == 1 and leaves[0] is value


def is_leaf(value: Any) -> bool:
    """Whether values of this type are data without containers: `is_pytree_leaf`, decided once per type."""
    cls = type(value)
    found = leaf_types.get(cls)
    if found is None:
        found = (value is None or is_pytree_leaf(value)) and not holds_state(value)
        if outlives_caches(cls):
            leaf_types[cls] = found
    return found


def fresh(value: Any) -> Any:
    """The value with every container in it made anew; leaves stay."""
    if leaf_types.get(type(value)) or is_leaf(value):
        return value
    return jax.tree.map(lambda leaf: leaf, value)


def can_change(value: Any) -> bool:
    """Whether a value can change in place: a container, or a numpy array."""
    cls = type(value)
    constant = constant_types.get(cls)
    if constant is None:
        constant = is_leaf(value) and not isinstance(value, np.ndarray)
        if outlives_caches(cls):
            constant_types[cls] = constant
    return not constant


def own(value: Any, copies: dict[int, Any], buffers: bool = False) -> Any:
    """Returns a copy of everything in a value that can change in place: containers and numpy arrays.

    Args:
      value: the value; leaves of other types stay as they are.
      copies: the copies of numpy arrays made so far, by the id of the original: what was one array stays one.
      buffers: whether to copy JAX arrays as well.
    """

    def own_leaf(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            copy = copies.get(id(leaf))
            if copy is None:
                copy = copies[id(leaf)] = leaf.copy(order="K")
                copy.flags.writeable = leaf.flags.writeable
            return copy
        return leaf.copy() if buffers and isinstance(leaf, jax.Array) else leaf

    return own_leaf(value) if is_leaf(value) else jax.tree.map(own_leaf, value)


def holds_state(value: Any) -> bool:
    """Whether a value is a Module, Ref or container: something that must not hide in another value."""
    return getattr(type(value), "_nnx_holds_state", False)


def find_module(tree: Any) -> Any:
    """The first Module or Ref that is a leaf of a pytree, or None."""
    if isinstance(tree, (list, dict, tuple)) and contains_itself(tree):
        return None
    return next(filter(holds_state, jax.tree.leaves(tree)), None)


def contains_itself(value: Any) -> bool:
    """Whether a container is inside itself. JAX must not see one: it overflows the stack and does not recover."""
    active, stack = {id(value)}, [(value, iter(items_of(value)))]
    while stack:
        container, items = stack[-1]
        for item in items:
            if isinstance(item, (list, dict, tuple)):
                if id(item) in active:
                    return True
                active.add(id(item))
                stack.append((item, iter(items_of(item))))
                break
        else:
            stack.pop()
            active.discard(id(container))
    return False


def items_of(container: Any) -> Any:
    """The values of a dict, the items of a list or tuple."""
    return list(container.values()) if isinstance(container, dict) else container
