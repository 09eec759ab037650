"""Optimizer state in the memory of the host: on the device for an update, and back afterward.

Moments are needed once per step, so they can wait in the memory of the host (`nnx.on_host`). JAX does not compute with
arrays in different memories, so an update first *fetches* the state, and its result is put back where the old state
was. For state on the device, nothing happens.
"""

from typing import Any

import jax


def fetch(tree: Any) -> Any:
    """Returns a tree with all its arrays in the memory of the device; the tree itself if they are there."""
    if not any(map(is_on_host, jax.tree.leaves(tree))):
        return tree
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x, tree)


def put_back(new: Any, old: Any, fetched: Any) -> Any:
    """Returns the new values, each in the same memory space as the value it replaces.

    Args:
        new: a tree of new values.
        old: the tree that was fetched.
        fetched: what `fetch` returned for it.
    """
    # A transformation may change the structure of its state. Then it is unknown which value replaces which.
    if fetched is old or jax.tree.structure(new) != jax.tree.structure(old):
        return new
    return jax.tree.map(lambda x, was: jax.device_put(x, jax.memory.Space.Host) if is_on_host(was) else x, new, old)


def is_on_host(x: Any) -> bool:
    """Whether an array, traced or not, is in the memory of the host."""
    return isinstance(x, jax.Array) and getattr(jax.typeof(x), "memory_space", None) is jax.memory.Space.Host
