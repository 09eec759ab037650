"""Constraints: telling the partitioner where an array is to be split, by axis names.

On mesh axes of the automatic type a constraint is `jax.lax.with_sharding_constraint`, on explicit ones
`jax.sharding.reshard`; axes that are manual (inside a shard_map) are left out, as the array there is one part already.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nnx.core.variables import with_metadata
from nnx.sharding.axes import aligned_names, axis_names
from nnx.sharding.rules import Rules, RulesFallback, as_rules, resolve


def with_logical_constraint(
    x: Any,
    names: Any,
    rules: Any = None,
    mesh: Any = None,
    fallback: RulesFallback = RulesFallback.AXIS_IS_UNSHARDED,
) -> Any:
    """The same array, split as the rules say for these axis names; without a mesh or without rules simply `x`.

    Args:
      x: an array, or a pytree of arrays that all have these axes.
      names: one entry per axis: a name, a tuple of names, or None.
      rules: by default those of `logical_axis_rules`.
      mesh: by default that of `jax.set_mesh`.
      fallback: what to do when a name gets no mesh axis from any rule.

    Raises:
      ValueError: a name appears twice, there are more names than axes, a rule names an axis the mesh does not have, an
        axis does not divide; or a name has no mesh axis and the fallback is `RulesFallback.RAISE_ERROR`.

    >>> nnx.with_logical_constraint(jnp.ones((4, 8)), ("batch", "embed")).shape
    (4, 8)
    """
    rules = as_rules(rules)
    mesh = current_mesh(mesh)
    if names is None or mesh is None or not rules:
        return x
    return jax.tree.map(lambda leaf: _constrain(leaf, names, rules, mesh, fallback), x)


def with_logical_partitioning(
    initializer: Callable[..., Any], sharding: Any, mesh: Any = None, rules: Any = None
) -> Callable[..., Any]:
    """Wraps an initializer so that the Variable made from its result has axis names and keeps to them.

    Under a mesh, the Variable is constrained whenever it is assigned and whenever its Module is rebuilt inside a
    transform, as by `with_logical_constraint`. Without a mesh or without rules that does nothing.

    Args:
      initializer: as in `jax.nn.initializers`.
      sharding: one axis name per dimension.
      mesh: by default that of `jax.set_mesh` when the constraint is applied.
      rules: by default those of `logical_axis_rules` then.

    >>> init = nnx.with_logical_partitioning(jax.nn.initializers.ones, ("embed", "mlp"))
    >>> nnx.Param(init(jax.random.key(0), (2, 4))).sharding
    ('embed', 'mlp')
    """
    rules = None if rules is None else as_rules(rules)
    hook = Constraint(mesh, rules)
    if isinstance(sharding, list):
        sharding = tuple(sharding)
    axis_names(sharding)
    return with_metadata(initializer, sharding=sharding, on_set=hook)


@dataclasses.dataclass(frozen=True)
class Constraint:
    """The `on_set` hook of Variables made by `with_logical_partitioning`: constrains what is stored in them."""

    mesh: Any
    rules: Rules | None

    def __call__(self, value: Any, metadata: Mapping[str, Any]) -> Any:
        names = metadata.get("sharding")
        rules = as_rules(self.rules)
        mesh = current_mesh(self.mesh)
        if names is None or mesh is None or not rules:
            return value

        def constrain(leaf: Any) -> Any:
            if not isinstance(leaf, (jax.Array, np.ndarray)):  # shapes, specs and other stand-ins
                return leaf
            return _constrain(leaf, names, rules, mesh, RulesFallback.AXIS_IS_UNSHARDED)

        return jax.tree.map(constrain, value)


def current_mesh(mesh: Any = None) -> Any:
    """The mesh a constraint means: the one given, as the surroundings see it; else that of `jax.set_mesh`, or None."""
    around = jax.sharding.get_abstract_mesh()
    if mesh is None:
        return None if around.empty else around
    # inside a shard_map the surroundings know which axes are manual
    return around if not around.empty and dict(around.shape) == dict(mesh.shape) else mesh


def _constrain(x: Any, names: Any, rules: Rules, mesh: Any, fallback: RulesFallback) -> Any:
    names = aligned_names(names, x.ndim)
    resolution = resolve(names, rules, x.shape, mesh.shape)
    resolution.check(f"Constraint {names} on an array of shape {x.shape}")
    if resolution.without_rule and fallback is not RulesFallback.AXIS_IS_UNSHARDED:
        if fallback is RulesFallback.NO_CONSTRAINT:
            return x
        reasons = " ".join(resolution.notes)
        raise ValueError(
            WITHOUT_RULE.format(name=resolution.without_rule[0], names=names, rules=rules, reasons=reasons)
        )
    return _place(x, resolution.spec, mesh)


WITHOUT_RULE = """No rule has a mesh axis for the axis name {name!r} of {names}. {reasons}
The rules are {rules}. Add one for it, (name, None) if it is not to be split, or choose another fallback."""


def _place(x: Any, spec: PartitionSpec, mesh: Any) -> Any:
    devices = None if isinstance(x, Tracer) else _with_devices(mesh)
    if devices is not None:
        return jax.device_put(x, NamedSharding(devices, spec))
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    kinds = set(types.values())
    if AxisType.Explicit in kinds:
        x = jax.sharding.reshard(x, NamedSharding(mesh, _only(spec, types, AxisType.Explicit)))
    if AxisType.Auto in kinds:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, _only(spec, types, AxisType.Auto)))
    return x


def _only(spec: PartitionSpec, types: Mapping[str, AxisType], kind: AxisType) -> PartitionSpec:
    """The part of a spec on mesh axes of one type."""

    def part(entry: Any) -> Any:
        if entry is None or entry is PartitionSpec.UNCONSTRAINED:
            return entry
        axes = tuple(axis for axis in (entry if isinstance(entry, tuple) else (entry,)) if types[axis] is kind)
        return None if not axes else axes[0] if len(axes) == 1 else axes

    return PartitionSpec(*(part(entry) for entry in spec))


def _with_devices(mesh: Any) -> Any:
    """The mesh with its devices, or None inside a transform, where they do not matter."""
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh
    try:
        return jax.sharding.get_mesh()
    except ValueError:
        return None
