"""Holding what the caller of a function may hold: a donated call must leave it alive, with the values it had."""

import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import nnx

KINDS: list[Callable[[Any, random.Random], Any]] = [
    lambda module, rng: None,  # nobody holds anything, so everything is really donated
    lambda module, rng: module.clone(),
    lambda module, rng: module.get_state(),
    lambda module, rng: nnx.Dict(other=module.clone()),
    lambda module, rng: [leaf for leaf in jax.tree.leaves(module.get_state()) if rng.random() < 0.3],
    lambda module, rng: [leaf.value for leaf in module.get_state().values() if isinstance(leaf, nnx.Node)],
]


class Holders:
    """Something that holds arrays of a few Modules, and what they were when it took hold of them."""

    def __init__(self, rng: random.Random, modules: list[Any]):
        self.held = [rng.choice(KINDS)(module, rng) for module in modules]
        self.before = [np.array(leaf) for leaf in self._arrays()]

    def _arrays(self) -> list[Any]:
        trees = [held.get_state() if isinstance(held, nnx.Module) else held for held in self.held]
        return [leaf for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array)]

    def complaint(self) -> str:
        """Returns what has happened to an array that must not change, or an empty string."""
        for leaf, before in zip(self._arrays(), self.before, strict=True):
            if leaf.is_deleted():
                return f"an array that was {before!r} has been deleted"
            if not np.array_equal(np.asarray(leaf), before, equal_nan=before.dtype.kind == "f"):
                return f"an array that was {before!r} is {leaf!r}"
        return ""
