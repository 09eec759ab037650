"""Pytrees in one attribute: telling leaves from trees, copying trees, and finding Modules that hide in them.

JAX sorts the items of a dict by key. A `KeyOrder` remembers the order in which the dicts of a tree had their items, so
that a tree that is copied here, or passed through JAX by a transform, gets it back.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple

import jax
import numpy as np

from nnx.core.caches import outlives_caches

leaf_types: dict[type, bool] = {dict: False, list: False, tuple: False}
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
        # A class of dicts that JAX does not know is a leaf to it. None is remembered, so that each is looked at.
        if outlives_caches(cls) and not (found and issubclass(cls, dict)):
            leaf_types[cls] = found
    return found


def fresh(value: Any) -> Any:
    """Returns the value with new lists, dicts and other nodes around the same leaves."""
    cls = type(value)
    if leaf_types.get(cls) or is_leaf(value):
        return value
    if cls is tuple and all(map(leaf_types.get, map(type, value))):
        return value  # nothing in it can be shared by accident; what `sow` records is nearly always such a tuple
    return mapped(lambda leaf: leaf, value)


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

    return own_leaf(value) if is_leaf(value) else mapped(own_leaf, value)


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


# The order of the items of dicts


class KeyOrder(NamedTuple):
    """The order of the items in one node of a tree, and in the nodes below it."""

    keys: tuple[Any, ...] | None  # of a dict, unless they are sorted
    children: tuple[tuple[Any, "KeyOrder"], ...]  # by key or position, those that are not sorted throughout


_DICTS: frozenset[Any] = frozenset({dict, defaultdict, OrderedDict})  # those that JAX takes apart by itself


def holds_dicts(value: Any) -> bool:
    """Whether there is a dict in a tree, or a list, which may come to hold one in place."""
    cls = type(value)
    if leaf_types.get(cls) or is_leaf(value):
        return False
    if cls is tuple:  # what `sow` records is nearly always a tuple of leaves, which the first test settles in C
        return not all(map(leaf_types.get, map(type, value))) and any(map(holds_dicts, value))
    return any(map(_is_dict_or_list, jax.tree.leaves(value, is_leaf=_is_dict_or_list)))


def _is_dict_or_list(value: Any) -> bool:
    return isinstance(value, (dict, list))


def key_order(value: Any, complete: bool = False) -> KeyOrder | None:
    """Returns the order of the dicts in a tree, or None if all of them are sorted, as JAX leaves them.

    Args:
        value: the tree.
        complete: whether to include dicts that are sorted.
    """
    cls = type(value)
    known = leaf_types.get(cls)
    if known or (known is None and is_leaf(value)):
        return None
    keys, names, items = None, None, value
    if cls in _DICTS:
        names, items = [*value], value.values()
        if complete or names != _sorted(names):
            keys = tuple(names)
    elif cls is not list and not issubclass(cls, tuple):
        if not holds_dicts(value):
            return None
        items = _children(value)[0]
    below: tuple[Any, ...] = ()
    if not all(map(leaf_types.get, map(type, items))):
        orders = [key_order(item, complete) for item in items]
        places = range(len(orders)) if names is None else names
        below = tuple([(at, order) for at, order in zip(places, orders) if order is not None])
    return None if keys is None and not below else KeyOrder(keys, below)


def in_order(value: Any, order: KeyOrder | None) -> Any:
    """Returns a tree with its dicts in this order, with new nodes where that changes something.

    A dict that the order leaves out, or whose keys have changed, stays as it is.
    """
    cls = type(value)
    if order is None or leaf_types.get(cls) or is_leaf(value):
        return value
    below = dict(order.children)
    if cls in _DICTS:
        keys = [*value] if order.keys is None or {*order.keys} != value.keys() else order.keys
        items = {key: in_order(value[key], below.get(key)) for key in keys}
        if [*items] == [*value] and all(map(is_, items.values(), value.values())):
            return value
        return defaultdict(value.default_factory, items) if cls is defaultdict else cls(items)
    children, rebuild = _children(value)
    ordered = [in_order(child, below.get(at)) for at, child in enumerate(children)]
    return value if all(map(is_, ordered, children)) else rebuild(ordered)


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns `jax.tree.map(function, tree)` with the dicts in the order of the tree."""
    return in_order(jax.tree.map(function, tree), key_order(tree))


def _sorted(keys: list[Any]) -> list[Any]:
    try:
        return sorted(keys)
    except TypeError:  # an OrderedDict can have keys that cannot be sorted
        return keys


def _children(node: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """Returns the children of a node of a tree, and a function that makes a node of others."""
    children, treedef = jax.tree.flatten(node, is_leaf=lambda value: value is not node)
    return children, treedef.unflatten
