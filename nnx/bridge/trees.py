"""Pytrees with their arrays taken out: a *frame* is such a tree, with a *slot* in the place of each array.

A frame is a static value. It is compared by content like any other, so frames with equal lambdas in them are equal.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PATH_TWICE = "Two arrays of the {what} have the path {path!r}. Give one of them another name."
NO_STATE_FOR = "The model has no {path!r}, which it needs: was it removed, or given no state?"
OTHER_STRUCTURE = """The function returned a state of another structure than it was given:
{new}
instead of
{old}"""


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of an array in a frame, with the path of the variable that it is."""

    path: str


def is_array(value: Any) -> bool:
    """Whether a value is an array, or stands for one."""
    return isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


def is_data(value: Any) -> bool:
    """Whether a value is an array or a number."""
    return is_array(value) or isinstance(value, (int, float, complex, np.generic))


def own(value: Any) -> Any:
    """Returns a value nobody else can change: a copy, if it is in NumPy's memory."""
    return jnp.array(value) if isinstance(value, (np.ndarray, np.generic)) else value


def path_of(key_path: tuple[Any, ...]) -> str:
    """Returns the path of a leaf of a pytree: the names and numbers on the way to it."""
    return "/".join(str(next(getattr(key, a) for a in ("name", "key", "idx") if hasattr(key, a))) for key in key_path)


def take_out(
    tree: Any, what: str, is_variable: Callable[[Any], bool], under: str = "value", taken: Mapping[str, Any] = {}
) -> tuple[Any, dict[str, Any]]:
    """Returns the frame of a pytree, and what was in its slots by path.

    Args:
        tree: the pytree.
        what: what it is, for an error.
        is_variable: the leaves to take out.
        under: the path if the tree is a single leaf.
        taken: paths that belong to others; a leaf with one of these gets a path that ends with `.{under}`.

    Raises:
        ValueError: two leaves have the same path.
    """
    found: dict[str, Any] = {}

    def take(key_path: tuple[Any, ...], leaf: Any) -> Any:
        if not is_variable(leaf):
            return leaf
        path = path_of(key_path) or under
        path = f"{path}.{under}" if path in taken else path
        if path in found:
            raise ValueError(PATH_TWICE.format(what=what, path=path))
        found[path] = own(leaf)
        return Slot(path)

    return jax.tree_util.tree_map_with_path(take, tree), found


def put_back(frame: Any, variables: Mapping[str, Any]) -> Any:
    """Returns the pytree of a frame, with the values of variables in its slots."""

    return jax.tree.map(lambda leaf: value_at(variables, leaf.path) if type(leaf) is Slot else leaf, frame)


def value_at(variables: Mapping[str, Any], path: str) -> Any:
    """Returns the value of the variable at a path.

    Raises:
        ValueError: there is none.
    """
    if path not in variables:
        raise ValueError(NO_STATE_FOR.format(path=path))
    return variables[path].value


def read_off(frame: Any, tree: Any) -> dict[str, Any]:
    """Returns the values that a pytree has where a frame has slots, by path.

    Raises:
        ValueError: the tree has another structure.
    """
    slots, structure = jax.tree.flatten(frame)
    leaves, found = jax.tree.flatten(tree)
    if found != structure:
        raise ValueError(OTHER_STRUCTURE.format(new=found, old=structure))
    return {slot.path: leaf for slot, leaf in zip(slots, leaves, strict=True) if type(slot) is Slot}
