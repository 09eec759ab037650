"""Flat State kept as Variables of a Module, one per leaf, nested by path.

The optimizer state and averages of a model live in such trees: each array is its own cell, with a readable path,
and a compiled step takes it like any other Variable.
"""

from collections.abc import Iterable
from typing import Any

import jax

from nnx.core.containers import Dict
from nnx.core.state import State


def variable_tree(leaves: Iterable[tuple[str, Any]]) -> Dict:
    """A Module that holds containers at the given paths."""
    return Dict(State(leaves).to_nested())


def key_segments(keys: Iterable[Any]) -> list[str]:
    """The segments of a path for the keys of a pytree."""
    return [str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name))) for key in keys]


def leaf_paths(tree: Any, is_leaf: Any = None) -> list[tuple[str, Any]]:
    """The leaves of a pytree with their paths."""
    return [
        ("/".join(key_segments(keys)), leaf)
        for keys, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    ]
