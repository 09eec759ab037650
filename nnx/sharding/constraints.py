"""Constraints: telling the partitioner by axis names how to split an array.

On automatic mesh axes a constraint is a `jax.lax.with_sharding_constraint`, on explicit ones a `jax.sharding.reshard`.
Manual axes (inside a shard_map) are left out, because the array there already is one part.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nnx.core.old_names import old_names
from nnx.core.variables.variables import with_metadata
from nnx.sharding.axes import aligned_names, axis_names
from nnx.sharding.meshes import current_mesh, mesh_with_devices
from nnx.sharding.rules import AnyMesh, Rules, RulesFallback, RulesLike, as_rules, axis_rules, names_in, resolve
from nnx.sharding.spelling import did_you_mean
from nnx.sharding.unmatched import BUILT_IN_NAMES, first_time, note_names


@old_names(logical_axis_resources="names")
def with_logical_constraint(
    x: Any,
    names: Any,
    rules: RulesLike = None,
    mesh: AnyMesh | None = None,
    fallback: RulesFallback = RulesFallback.AXIS_IS_UNSHARDED,
) -> Any:
    """Returns the same array, split as the rules say for these axis names.

    Without a mesh or without rules, returns `x` itself. A name that no rule has is a warning, once.

    Args:
        x: an array, or a pytree of arrays that all have these axes.
        names: the axis names, one entry per axis: a name, a tuple of names, or None.
        rules: the rules to use; by default those of `logical_axis_rules`.
        mesh: the mesh to split over; by default that of `jax.set_mesh` or of a `with mesh:` block.
        fallback: the response to a name for which no rule has a mesh axis.

    Raises:
        ValueError: a name appears twice, there are more names than axes, a rule names an axis the mesh does not have,
            or a mesh axis does not divide a dimension; with `RulesFallback.RAISE_ERROR`, also if a name has no mesh
            axis.

    >>> nnx.with_logical_constraint(jnp.ones((4, 8)), ("batch", "embed")).shape
    (4, 8)
    """
    rules = as_rules(rules)
    mesh = current_mesh(mesh)
    if names is None:
        return x
    flat = names_in(axis_names(names))
    note_names(flat)
    if mesh is None or not rules:
        return x
    constrained = jax.tree.map(lambda leaf: _constrain(leaf, names, rules, mesh, fallback), x)
    _note_under_rules(flat, rules)
    if fallback is RulesFallback.AXIS_IS_UNSHARDED and mesh.size > 1:
        _warn_of_unknown_names(flat, rules)
    return constrained


_MAX_RULE_SETS = 64
_constrained: dict[Rules, set[str]] = {}  # by the rules in force; a set per program, in practice


def constrained_names(rules: Rules) -> frozenset[str]:
    """Returns the axis names that `with_logical_constraint` was called with under these rules, in this process."""
    return frozenset(_constrained.get(rules, ()))


def _note_under_rules(names: tuple[str, ...], rules: Rules) -> None:
    """Notes the names of a constraint for `sharding_report`."""
    if rules not in _constrained:
        if len(_constrained) >= _MAX_RULE_SETS:
            _constrained.pop(next(iter(_constrained)), None)
        _constrained[rules] = set()
    _constrained[rules].update(names)


def _warn_of_unknown_names(names: tuple[str, ...], rules: Rules) -> None:
    """Warns, once for each name, of names that no rule has; not of one that a layer uses and the rules leave alone."""
    decided = {name for name, _ in axis_rules(rules)}
    unknown = [name for name in names if name not in decided]
    if decided.intersection(names):
        unknown = [name for name in unknown if name not in BUILT_IN_NAMES]
    new = [name for name in unknown if first_time((rules, name))]
    if new:
        hints = "".join(did_you_mean(name, decided | BUILT_IN_NAMES) for name in new)
        shown = ", ".join(map(repr, new))
        warnings.warn(
            MATCHES_NOTHING.format(unknown=shown, names=names, rules=rules, hints=hints), UserWarning, stacklevel=4
        )


MATCHES_NOTHING = """with_logical_constraint: no rule has the axis name {unknown} of {names}, so that axis is whole on \
every device.{hints} The rules are {rules}. Add a rule for the name, (name, None) if this is intended, or pass \
fallback=nnx.RulesFallback.NO_CONSTRAINT to leave the array to the compiler."""


def with_logical_partitioning(
    initializer: Callable[..., Any], sharding: Any, mesh: AnyMesh | None = None, rules: RulesLike = None
) -> Callable[..., Any]:
    """Wraps an initializer so that the Variable made from its result has axis names and stays split accordingly.

    Under a mesh, the Variable is constrained as by `with_logical_constraint` whenever it is assigned and whenever its
    Module is rebuilt inside a transform. Without a mesh or without rules, this has no effect.

    Args:
        initializer: an initializer as in `jax.nn.initializers`.
        sharding: the axis names, one per dimension.
        mesh: the mesh to split over; by default the one in force when the constraint is applied.
        rules: the rules to use; by default those of `logical_axis_rules` at that time.

    >>> init = nnx.with_logical_partitioning(jax.nn.initializers.ones, ("embed", "mlp"))
    >>> nnx.Param(init(jax.random.key(0), (2, 4))).sharding
    ('embed', 'mlp')
    """
    rules = None if rules is None else as_rules(rules)
    hook = Constraint(mesh, rules)
    if isinstance(sharding, list):
        sharding = tuple(sharding)
    axis_names(sharding)  # raises here rather than at the first use
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
            if not isinstance(leaf, (jax.Array, np.ndarray)):  # a shape, a spec or some other placeholder
                return leaf
            return _constrain(leaf, names, rules, mesh, RulesFallback.AXIS_IS_UNSHARDED)

        return jax.tree.map(constrain, value)


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
The rules are {rules}. Add a rule for it, (name, None) to leave it whole, or choose another fallback."""


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
    """Returns the part of a spec on mesh axes of one type."""

    def part(entry: Any) -> Any:
        if entry is None or entry is PartitionSpec.UNCONSTRAINED:
            return entry
        axes = tuple(axis for axis in (entry if isinstance(entry, tuple) else (entry,)) if types[axis] is kind)
        return None if not axes else axes[0] if len(axes) == 1 else axes

    return PartitionSpec(*(part(entry) for entry in spec))


def _with_devices(mesh: Any) -> Any:
    """Returns the mesh with its devices; None inside a transform, where they do not matter."""
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh
    try:
        return mesh_with_devices()
    except ValueError:
        return None
