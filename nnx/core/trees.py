"""Pytrees in one attribute: telling leaves from trees, copying trees, and finding Modules that hide in them."""

from typing import Any

import jax
import numpy as np

from nnx.core.caches import outlives_caches

leaf_types: dict[type, bool] = {}
"""Whether values of a type are leaves that hold data; types are entered as they are met."""

constant_types: dict[type, bool] = {}
"""Whether values of a type are leaves that cannot change in place; types are entered as they are met."""


def is_pytree_leaf(value: Any) -> bool:
    """Whether JAX treats the value as one leaf, not as a tree of others."""
    leaves = jax.tree.leaves(value)
    return len(leaves) == 1 and leaves[0] is value


def is_leaf(value: Any) -> bool:
    """Whether a value is a leaf that holds data, not a tree: `is_pytree_leaf`, decided once per type."""
    cls = type(value)
    found = leaf_types.get(cls)
    if found is None:
        found = (value is None or is_pytree_leaf(value)) and not holds_state(value)
        if outlives_caches(cls):
            leaf_types[cls] = found
    return found


def fresh(value: Any) -> Any:
    """Returns the value with new lists, dicts and other nodes around the same leaves."""
    cls = type(value)
    if leaf_types.get(cls) or is_leaf(value):
        return value
    if cls is tuple and all(map(leaf_types.get, map(type, value))):
        return value  # nothing in it can be shared by accident; what `sow` records is nearly always such a tuple
    return jax.tree.map(lambda leaf: leaf, value)


def can_change(value: Any) -> bool:
    """Whether a value can change in place: a tree or a numpy array."""
    cls = type(value)
    constant = constant_types.get(cls)
    if constant is None:
        constant = is_leaf(value) and not isinstance(value, np.ndarray)
        if outlives_caches(cls):
            constant_types[cls] = constant
    return not constant


def own(value: Any, copies: dict[int, Any], buffers: bool = False) -> Any:
    """Returns a value with copies of everything in it that can change in place: trees and numpy arrays.

    Args:
        value: the value; leaves of other types are not copied.
        copies: the copies of numpy arrays made so far, by the id of the original, so that one array has one copy.
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
    """Whether a value is a Module, Ref, nnx container or `jax.Ref`: something that must not hide in another value."""
    return getattr(type(value), "_nnx_holds_state", False) or isinstance(value, jax.Ref)


def find_module(tree: Any) -> Any:
    """Returns the first Module, Ref or `jax.Ref` that is a leaf of a pytree, or None."""
    if isinstance(tree, (list, dict, tuple)) and contains_itself(tree):
        return None
    try:
        return next(filter(holds_state, jax.tree.leaves(tree)), None)
    except (TypeError, ValueError):  # a dict whose keys cannot be sorted is not a pytree
        return None


def contains_itself(value: Any) -> bool:
    """Whether a list, dict or tuple contains itself. JAX must not see one: it overflows the C stack."""
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
    """Returns the values of a dict, or the items of a list or tuple."""
    return list(container.values()) if isinstance(container, dict) else container
