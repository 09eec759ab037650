"""Trees of Variables: a Module that holds one Variable per leaf, nested by path.

The optimizer state and the averages of a model are such trees: each array is its own cell, with a readable path, and a
compiled step handles it like any other Variable.
"""

from collections.abc import Iterable
from typing import Any

import jax

from nnx.core.module.dict_sequence import Dict
from nnx.core.state.state import State


def variable_tree(leaves: Iterable[tuple[str, Any]]) -> Dict:
    """Returns a Module that holds containers at the given paths."""
    return Dict(State(leaves).to_nested())


def key_segments(keys: Iterable[Any]) -> list[str]:
    """Returns the keys of a pytree path as segments of text."""
    return [str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name))) for key in keys]


def leaf_paths(tree: Any, is_leaf: Any = None) -> list[tuple[str, Any]]:
    """Returns the leaves of a pytree with their paths."""
    return [
        ("/".join(key_segments(keys)), leaf)
        for keys, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    ]
