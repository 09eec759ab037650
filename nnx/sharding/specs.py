"""Specs of whole trees: State, Pure, TrainState, optimizer state, or a Module.

A tree of specs has the structure of the tree it describes, with a bare spec in place of each Variable:
`State({"w": P("embed")})`. To JAX that is a prefix of the tree, so it can be used wherever JAX takes shardings for the
tree: `jax.device_put`, `in_shardings`, `out_shardings`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from nnx.core.module.module import Module
from nnx.core.state.moduledef import ModuleDef
from nnx.core.state.state import State
from nnx.core.variables.variables import Node
from nnx.sharding.axes import DefaultAxes, aligned_names, axis_names, matching_axes, taken_over
from nnx.sharding.defaults import current_names, default_axes
from nnx.sharding.rules import AnyMesh, Resolution, Rules, RulesLike, as_rules, memory_kind_of, resolve


def get_partition_spec(tree: Any) -> Any:
    """Returns the logical axis names of every array in a tree, as bare `PartitionSpec`s in the same structure.

    An array without names has the spec `PartitionSpec()`.

    Args:
        tree: a Module (for its State), or any pytree: State, Pure, TrainState, optimizer state.

    Raises:
        ValueError: a Variable has more names than its array has axes.

    >>> state = nnx.State({"w": nnx.Param(jnp.ones((2, 3)), ("embed", "mlp")), "n": jnp.zeros(())})
    >>> nnx.get_partition_spec(state)["w"]
    P('embed', 'mlp')
    >>> nnx.get_partition_spec(state)["n"]
    P()
    """

    def spec(path: str, names: tuple[Any, ...], leaf: Any, _: Any) -> PartitionSpec:
        shape = getattr(leaf, "shape", None)
        if shape is not None and len(names) > len(shape):
            resolve(names, (), shape).check(path)
        return PartitionSpec(*names)

    return map_named(spec, tree)


def logical_to_mesh(tree: Any, rules: RulesLike = None) -> Any:
    """Returns the mesh axes of every array in a tree, as bare `PartitionSpec`s in the same structure.

    Args:
        tree: the logical specs that `get_partition_spec` returns, or a tree that it takes.
        rules: the rules to use; by default those of `logical_axis_rules`.

    Raises:
        ValueError: a name appears twice in one spec; the message has the path.
    """
    rules = as_rules(rules)
    return map_named(lambda path, names, leaf, _: _resolved(path, names, leaf, rules, None).spec, tree)


def logical_to_mesh_sharding(tree: Any, mesh: AnyMesh, rules: RulesLike = None) -> Any:
    """Returns the `NamedSharding` of every array in a tree, in the same structure.

    Args:
        tree: the logical specs that `get_partition_spec` returns, or a tree that it takes. In the latter case shapes
            and types are known: axes that do not divide are found here, and `nnx.on_host` can select by type.
        mesh: the mesh to split over.
        rules: the rules to use; by default those of `logical_axis_rules`.

    Raises:
        ValueError: a rule names an axis the mesh does not have, a mesh axis does not divide a dimension, a name appears
            twice in one array, or there are more names than axes; the message has the path and the rule.
    """
    rules = as_rules(rules)

    def sharding(path: str, names: tuple[Any, ...], leaf: Any, container: Any) -> NamedSharding:
        spec = _resolved(path, names, leaf, rules, mesh).spec
        return NamedSharding(mesh, spec, memory_kind=memory_kind_of(path, leaf, container, rules))

    return map_named(sharding, tree)


def _resolved(path: str, names: Any, leaf: Any, rules: Rules, mesh: Any) -> Resolution:
    resolution = resolve(names, rules, getattr(leaf, "shape", None), None if mesh is None else mesh.shape)
    resolution.check(path)
    return resolution


def map_named(fn: Callable[[str, tuple[Any, ...], Any, Any], Any], tree: Any) -> Any:
    """Maps `fn(path, names, array, container)` over the arrays (or `PartitionSpec`s) of a tree.

    The results replace the Variables. The container of a bare array is the array itself. Of a Module, the State is
    mapped. Optimizer state that is part of a `TrainState` takes the names of its parameters.
    """
    named = _Named(fn, functools.cache(getattr(tree, "moment_axes", dict)))  # TrainState has them
    if isinstance(tree, Module):
        named.defaults, tree = default_axes(tree), Module.get_state(tree)
    elif isinstance(moduledef := getattr(tree, "moduledef", None), ModuleDef):  # Pure and TrainState have one
        named.defaults = default_axes(moduledef)
        named.shapes = _shapes(getattr(tree, "params", None))
    return named.map(tree, ())


class _Named:
    """Applies a function to the arrays of a tree, with the names of their axes.

    Attributes:
        defaults: the default names of the model's Variables, by path.
        shapes: the shapes of the parameters, by path, where arrays made from them (moments) are in the tree as well.
    """

    def __init__(self, fn: Callable[[str, tuple[Any, ...], Any, Any], Any], moment_axes: Callable[[], Any]):
        self._fn, self._moment_axes = fn, moment_axes
        self.defaults: Mapping[str, DefaultAxes] = {}
        self.shapes: Mapping[str, tuple[int, ...]] = {}

    def map(self, tree: Any, prefix: tuple[Any, ...]) -> Any:
        """Maps the function over a tree that is at `prefix`, a key path, in the whole one."""
        return jax.tree_util.tree_map_with_path(
            lambda keys, node: self._visit((*prefix, *keys), node), tree, is_leaf=lambda node: isinstance(node, Node)
        )

    def _visit(self, keys: tuple[Any, ...], node: Any) -> Any:
        path = _path(keys)
        if not isinstance(node, Node):
            return self._fn(path, _names(None, node, path), node, node)
        if "sharding" not in node.metadata:  # plain data in its box: a bare Node, or the field of a Pytree
            return self.map(node.value, keys)
        in_state = bool(keys) and isinstance(keys[-1], jax.tree_util.DictKey)
        variable = keys[-1].key if in_state else ""  # its path in the model
        sharding = current_names(node.metadata["sharding"], self.defaults.get(variable))
        is_derived = not _is_model_path(keys)

        def visit_array(inner: tuple[Any, ...], leaf: Any) -> Any:
            names, whole_path = _names(sharding, leaf, path), _path((*keys, *inner))
            if is_derived and hasattr(leaf, "shape"):
                of = self.shapes.get(variable)
                names = _derived_names(sharding, names, leaf.shape, of, self._axes_kept(whole_path, leaf.shape, of))
            return self._fn(whole_path, names, leaf, node)

        return jax.tree_util.tree_map_with_path(visit_array, node.value)

    def _axes_kept(
        self, path: str, shape: tuple[int, ...], of: tuple[int, ...] | None
    ) -> tuple[int | None, ...] | None:
        """Returns the axis of a parameter of shape `of` for each axis of an array that was made from it."""
        axes = None if of is None else matching_axes(shape, of)
        # Sizes alone do not tell which axes of equal size a factored moment has kept; the transformation does.
        if of is not None and axes is not None and None in axes and len(axes) < len(of):
            return self._moment_axes().get(path.removeprefix("opt_state/"), axes)
        return axes


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    if not isinstance(params, State):
        return {}
    return {path: leaf.value.shape for path, leaf in params.items() if hasattr(getattr(leaf, "value", None), "shape")}


def _derived_names(
    sharding: Any, names: Any, shape: tuple[int, ...], of: tuple[int, ...] | None, axes: tuple[int | None, ...] | None
) -> tuple[Any, ...]:
    """Returns the names of an array made from a parameter, e.g. a moment, whose shape may be different.

    Args:
        sharding: the metadata of the parameter.
        names: the names of the parameter, if the array has all its axes.
        shape: the shape of the array.
        of: the shape of the parameter; None if only its names are known.
        axes: the axis of the parameter for each axis of the array (`matching_axes`).
    """
    if of is None:
        return () if len(axis_names(sharding)) > len(shape) else names
    if of == shape:
        return names
    whole = aligned_names(sharding, len(of))
    return () if axes is None else taken_over(whole + (None,) * (len(of) - len(whole)), axes)


def _names(sharding: Any, leaf: Any, path: str) -> tuple[Any, ...]:
    if isinstance(leaf, PartitionSpec):  # the tree already consists of specs
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
    """Returns a key path as text, without the `.value` of containers and the `.states` of a Pure."""
    attribute = jax.tree_util.GetAttrKey
    shown = [key for key in keys if not (isinstance(key, attribute) and key.name in ("value", "states"))]
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in shown)
