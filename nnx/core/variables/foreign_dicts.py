"""Dicts that JAX does not take apart: those whose keys cannot be sorted, and subclasses of dict that it does not know.

They are refused where they are assigned, with advice, if there are arrays in them.
"""

from typing import Any

import jax
import numpy as np

from nnx.core.repr import short
from nnx.core.variables.trees import contains_itself, items_of, leaf_types

FOREIGN_DICT = """{owner} cannot hold the {type} {dict}: its values are data, and JAX cannot take it apart, because \
{reason}. {advice}"""

UNSORTABLE = ("its keys cannot be sorted", "Use keys of one type, such as strings, or an nnx.Dict.")
UNKNOWN_CLASS = (
    "it does not know the class",
    "Convert it to a plain dict, `dict(...)`, or register the class with jax.tree_util.register_pytree_node.",
)


def refuse_foreign_dicts(value: Any, owner: str, with_arrays: bool) -> None:
    """Raises ValueError if there is a dict in a value that JAX cannot take apart.

    Args:
        value: lists, tuples and dicts, at any depth.
        owner: what the value is for, as the error calls it.
        with_arrays: whether only dicts with arrays in them are refused; any others are static values.
    """
    if leaf_types.get(type(value)) or not isinstance(value, (dict, list, tuple)) or contains_itself(value):
        return
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            found = _reason(item)
            if found is not None and (not with_arrays or _holds_array(item)):
                reason, advice = found
                text = {"type": type(item).__name__, "dict": short(item), "reason": reason, "advice": advice}
                raise ValueError(FOREIGN_DICT.format(owner=owner, **text))
        if isinstance(item, (dict, list, tuple)):
            stack.extend(items_of(item))


def _reason(value: dict[Any, Any]) -> tuple[str, str] | None:
    try:
        children = jax.tree.leaves(value, is_leaf=lambda node: node is not value)
    except (TypeError, ValueError):
        return UNSORTABLE
    return UNKNOWN_CLASS if len(children) == 1 and children[0] is value else None


def _holds_array(value: Any) -> bool:
    if isinstance(value, (dict, list, tuple)):
        return any(map(_holds_array, items_of(value)))
    return isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
