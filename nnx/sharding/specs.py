"""Specs of whole trees: State, Pure, TrainState, optimizer state, or a Module.

A tree of specs has the structure of the tree it speaks of, Variables included: `State({"w": Param(P("embed"))})`. It
can therefore go wherever JAX takes shardings for that tree: `jax.device_put`, `in_shardings`, `out_shardings`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from nnx.core.module import Module
from nnx.core.moduledef import ModuleDef
from nnx.core.variables import Container
from nnx.sharding.axes import DefaultAxes, aligned_names, axis_names
from nnx.sharding.defaults import default_axes
from nnx.sharding.rules import Resolution, Rules, as_rules, resolve


def get_partition_spec(tree: Any) -> Any:
    """The logical axis names of every array in a tree, as `PartitionSpec`s in the same structure.

    Args:
      tree: a Module (whose State is meant), or any pytree: State, Pure, TrainState, optimizer state. An array without
        names has `PartitionSpec()`.

    Raises:
      ValueError: a Variable has more names than its array has axes.

    >>> state = nnx.State({"w": nnx.Param(jnp.ones((2, 3)), ("embed", "mlp")), "n": jnp.zeros(())})
    >>> nnx.get_partition_spec(state)["w"].value
    P('embed', 'mlp')
    >>> nnx.get_partition_spec(state)["n"]
    P()
    """

    def spec(path: str, names: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        shape = getattr(leaf, "shape", None)
        if shape is not None and len(names) > len(shape):
            resolve(names, (), shape).check(path)
        return PartitionSpec(*names)

    return map_named(spec, tree)


def logical_to_mesh(tree: Any, rules: Any = None) -> Any:
    """The mesh axes of every array in a tree, as `PartitionSpec`s in the same structure.

    Args:
      tree: of logical specs, as `get_partition_spec` gives it, or one that function takes.
      rules: by default those of `logical_axis_rules`.

    Raises:
      ValueError: a name stands twice in one spec; the message says at which path.
    """
    rules = as_rules(rules)
    return map_named(lambda path, names, leaf: _resolved(path, names, leaf, rules, None).spec, tree)


def logical_to_mesh_sharding(tree: Any, mesh: Any, rules: Any = None) -> Any:
    """The `NamedSharding` of every array in a tree, in the same structure.

    Args:
      tree: of logical specs, as `get_partition_spec` gives it, or one that function takes: then shapes are known, and
        axes that do not divide are found here.
      mesh: a `jax.sharding.Mesh`.
      rules: by default those of `logical_axis_rules`.

    Raises:
      ValueError: a rule names an axis that the mesh has not, an axis does not divide, a name stands twice in one array,
        or there are more names than axes; the message says at which path and by which rule.
    """
    rules = as_rules(rules)
    return map_named(
        lambda path, names, leaf: NamedSharding(mesh, _resolved(path, names, leaf, rules, mesh).spec), tree
    )


def _resolved(path: str, names: Any, leaf: Any, rules: Rules, mesh: Any) -> Resolution:
    resolution = resolve(names, rules, getattr(leaf, "shape", None), None if mesh is None else mesh.shape)
    resolution.check(path)
    return resolution


def map_named(fn: Callable[[str, tuple[Any, ...], Any], Any], tree: Any) -> Any:
    """`fn(path, names, array)` in the place of every array (or `PartitionSpec`) of a tree; a Module gives a State."""
    defaults: Mapping[str, DefaultAxes] = {}
    if isinstance(tree, Module):
        defaults, tree = default_axes(tree), tree.get_state()
    elif isinstance(moduledef := getattr(tree, "moduledef", None), ModuleDef):  # Pure and TrainState have one
        defaults = default_axes(moduledef)

    def visit(keys: tuple[Any, ...], node: Any) -> Any:
        path = _path(keys)
        if not _has_names(node):
            return fn(path, _names(None, node, path), node)
        sharding = node.metadata["sharding"]
        if sharding is None and keys and isinstance(keys[-1], jax.tree_util.DictKey):
            sharding = defaults.get(keys[-1].key)
        derived = not _is_model_path(keys)

        def visit_array(inner: tuple[Any, ...], leaf: Any) -> Any:
            names = _names(sharding, leaf, path)
            if derived and hasattr(leaf, "shape") and len(axis_names(sharding)) > len(leaf.shape):
                names = ()  # a summary of the parameter, such as a factored moment, has fewer axes
            return fn(_path((*keys, *inner)), names, leaf)

        return node._spec.box(jax.tree_util.tree_map_with_path(visit_array, node.value))

    return jax.tree_util.tree_map_with_path(visit, tree, is_leaf=_has_names)


def _has_names(node: Any) -> bool:
    return isinstance(node, Container) and "sharding" in node.metadata


def _names(sharding: Any, leaf: Any, path: str) -> tuple[Any, ...]:
    if isinstance(leaf, PartitionSpec):  # it was a spec already
        return tuple(leaf)
    try:
        names = axis_names(sharding)
    except TypeError as error:
        raise TypeError(f"{path}: {error}") from None
    return aligned_names(sharding, len(getattr(leaf, "shape", names)))


def _is_model_path(keys: tuple[Any, ...]) -> bool:
    """Whether a key path leads through a State alone, or the States of a Pure: to a Variable of a Module itself."""
    *outer, last = keys or (None,)
    return isinstance(last, jax.tree_util.DictKey) and all(
        isinstance(key, jax.tree_util.SequenceKey) or getattr(key, "name", None) == "states" for key in outer
    )


def _path(keys: tuple[Any, ...]) -> str:
    """A key path as a text, without the `.value` of containers and the `.states` of a Pure."""
    attribute = jax.tree_util.GetAttrKey
    shown = [key for key in keys if not (isinstance(key, attribute) and key.name in ("value", "states"))]
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in shown)
