"""Placement: putting a Module onto a mesh, or building it there from the start."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from nnx.core.absent import check_is_here
from nnx.core.context import Context, streams_of
from nnx.core.module.module import Module
from nnx.core.repr import short
from nnx.core.state.pure import Pure
from nnx.sharding.defaults import name_axes
from nnx.sharding.findings import left_whole, names_of
from nnx.sharding.meshes import mesh_with_devices
from nnx.sharding.report import sharding_report
from nnx.sharding.rules import RulesLike, as_rules, logical_axis_rules
from nnx.sharding.specs import logical_to_mesh_sharding
from nnx.sharding.unmatched import first_time, missing_mesh_axes, probable_typos, settle_later

T = TypeVar("T")


def shard(model: T, mesh: Mesh | None = None, rules: RulesLike = None) -> T:
    """Places a Module on a mesh, in place: every array is split as the rules say for its axis names.

    Variables without names get the default names of their layer (`nnx.name_axes`). Arrays that have no name at all are
    replicated on every device; if they are large, a warning lists them.

    An abstract model (`nnx.eval_shape`) gets shardings instead of places. The devices of the mesh then need not be
    here: they can come from `jax.experimental.topologies`, to compile programs for them.

    Args:
        model: a Module, which is changed in place; or a State, TrainState or other pytree, which is copied.
        mesh: the mesh to place it on; by default that of `jax.set_mesh` or of a `with mesh:` block. Without a mesh,
            this has no effect.
        rules: the rules to use; by default those of `logical_axis_rules`.

    Returns:
        The same Module, or a placed copy of the pytree.

    Raises:
        ValueError: a rule names an axis the mesh does not have, a mesh axis does not divide a dimension, a name appears
            twice in one array, or there are more names than axes. The message has the path and the rule, and nothing
            has been placed. Or the devices of the mesh are not here, and the model has arrays.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> model = nnx.shard(nnx.Dict(w=nnx.Param(jnp.ones((4, 2)), ("embed", None))), mesh, [("embed", "data")])
    >>> model.w.sharding.spec
    P('data', None)
    """
    mesh = _concrete(mesh)
    if mesh is None:
        return model
    shardings = logical_to_mesh_sharding(model, mesh, rules)
    _warn_of_findings(model, mesh, rules)
    state = Module.get_state(model) if isinstance(model, Module) else model
    if any(isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) for leaf in jax.tree.leaves(state)):
        check_is_here("nnx.shard", mesh)
    placed = _put(state, shardings)
    if not isinstance(model, Module):
        return placed
    Module.update_state(model, placed)
    name_axes(model)
    return model


def init_sharded(build: Callable[[Context], T], mesh: Mesh | None, rules: RulesLike, ctx: Context) -> T:
    """Builds a Module that is split over a mesh from the start: none of its arrays is ever whole on one device.

    The constructor is traced for its shapes first, and then compiled with the shardings that follow from them. The
    values are those of `build(ctx)`, bit for bit, and the Context has drawn the same keys afterward. At its peak, a CPU
    device holds three times its part of the largest array in addition to the parts it keeps, for the random bits; the
    one GPU that was measured needed no more.
    An optimizer or average built along with the model is split like the parameters it belongs to.

    Args:
        build: a function of a Context that returns the Module, or a TrainState or other pytree. It is traced twice.
        mesh: the mesh to build on, or None for that of `jax.set_mesh` or of a `with mesh:` block. If there is none,
            `build` is simply called.
        rules: the rules to use, also inside `build`; None for those of `logical_axis_rules`.
        ctx: the Context to build with.

    Returns:
        The result of `build`, placed on the mesh.

    Raises:
        ValueError: the result does not fit the rules and the mesh, as in `nnx.shard`; nothing has been allocated.
        TypeError: `build` returned several Modules, or `ctx` is not a Context.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> build = lambda ctx: nnx.Dict(w=nnx.Param(jax.random.normal(ctx.make_rng("params"), (4, 2)), ("embed", None)))
    >>> nnx.init_sharded(build, mesh, [("embed", "data")], nnx.context(0)).w.sharding.spec
    P('data', None)
    """
    if not isinstance(ctx, Context):
        raise TypeError(NOT_A_CONTEXT.format(got=short(ctx)))
    if isinstance(build, Module):
        raise TypeError(ALREADY_BUILT.format(got=type(build).__name__))
    rules = as_rules(rules)
    mesh = _concrete(mesh)
    if mesh is None:
        with logical_axis_rules(rules):
            return build(ctx)
    check_is_here("nnx.init_sharded", mesh)
    ctx.check_level("...")
    streams, building = streams_of(ctx), _Building(build, ctx)
    # With explicit axes every value would be computed whole before it is split, so the partitioner decides here.
    automatic = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    keys = {name: _onto(automatic, stream.key) for name, stream in streams.items()}
    with jax.set_mesh(automatic), logical_axis_rules(rules):
        guess = {name: stream.count for name, stream in streams.items()}
        maker = functools.partial(building.make, guess)
        abstract = jax.eval_shape(maker, keys)
        # By now it is known how many keys are drawn. They are taken at once, so that no other thread draws them.
        starts = {name: stream.take(building.drawn[name]) for name, stream in streams.items()}
        if starts != guess:
            maker = functools.partial(building.make, starts)
        shardings = logical_to_mesh_sharding(abstract, automatic, rules)
        _warn_of_findings(abstract, automatic, rules)
        options = ONE_ARRAY_AFTER_ANOTHER.get(automatic.devices.flat[0].platform)
        built = jax.jit(maker, out_shardings=shardings, compiler_options=options)(keys)
    built = _put(built, logical_to_mesh_sharding(abstract, mesh, rules))
    return built.merge() if isinstance(built, Pure) else built


class _Building:
    """A constructor as a function of keys, which counts the keys that it draws.

    Attributes:
        drawn: the number of keys drawn from each stream by the last call of `make`.
    """

    def __init__(self, build: Callable[[Context], Any], ctx: Context):
        self._build, self._definition = build, ctx.definition()
        self.drawn: dict[str, int] = {}

    def make(self, starts: dict[str, int], keys: Any) -> Any:
        """Builds the Module, partitioned, with a Context whose streams have these keys and start at these counts."""
        inner = self._definition.merge(keys)
        for name, stream in streams_of(inner).items():
            stream.count = starts[name]
        built = self._build(inner)
        self.drawn = {name: stream.count - starts[name] for name, stream in streams_of(inner).items()}
        if isinstance(built, Module):
            return Module.partition(name_axes(built))
        if any(isinstance(leaf, Module) for leaf in jax.tree.leaves(built)):
            raise TypeError(SEVERAL_MODULES.format(got=short(built)))
        return built


def _warn_of_findings(model: Any, mesh: Mesh, rules: RulesLike) -> None:
    """Warns once of everything that is probably not what the rules were meant to do, as far as it is known by now."""
    if mesh.size == 1:
        return
    report = sharding_report(model, mesh, rules)
    names = names_of(report.rows)
    large = left_whole(report.rows, report.mesh_shape, report.rules)
    certain = [*probable_typos(names, report.rules), *missing_mesh_axes(names, report.mesh_shape, report.rules)]
    told = report.findings if large else tuple(certain)  # with large arrays, any of them may be the reason
    settle_later(names, report.mesh_shape, report.rules, told)
    if told and first_time((report.rules, told)):
        lines = "\n".join(f"- {finding}" for finding in told)
        warnings.warn(LOOK_AT_THE_REPORT.format(findings=lines), UserWarning, stacklevel=3)


LOOK_AT_THE_REPORT = """The rules are probably not what you meant for this model:
{findings}
See nnx.sharding_report(model, mesh, rules). To leave an axis whole on purpose, add the rule (name, None)."""

ONE_ARRAY_AFTER_ANOTHER = {"cpu": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}}
"""Compiler options by platform. By default a CPU draws all arrays at once and needs scratch space for all of them."""

NOT_A_CONTEXT = "nnx.init_sharded takes a Context as its last argument, e.g. nnx.context(0); got {got}."

ALREADY_BUILT = """nnx.init_sharded takes a function of a Context that builds the Module, e.g. lambda ctx: \
{got}(..., ctx=ctx); got a Module. To place one that exists, use nnx.shard(model, mesh, rules)."""

NOT_A_MESH = """A mesh with devices is needed, e.g. jax.make_mesh((4, 2), ('data', 'model')); got {got!r}.{hint}"""

PLAN_INSTEAD = " To plan for devices that do not exist, use nnx.sharding_report(model, mesh, rules)."

SEVERAL_MODULES = """nnx.init_sharded builds one Module, but the function returned {got}. Put several into one, e.g. \
nnx.Dict(model=model, optimizer=optimizer)."""


def _concrete(mesh: Mesh | None) -> Mesh | None:
    if mesh is None:
        return mesh_with_devices()
    if not isinstance(mesh, Mesh):
        hint = PLAN_INSTEAD if isinstance(mesh, AbstractMesh) else ""
        raise TypeError(NOT_A_MESH.format(got=mesh, hint=hint))
    return None if mesh.empty else mesh


def _onto(mesh: Mesh, key: jax.Array) -> jax.Array:
    """Returns a key on every device of a mesh, if it was made under some other mesh."""
    return jax.device_put(key, NamedSharding(mesh, PartitionSpec())) if isinstance(key.sharding, NamedSharding) else key


def _put(tree: Any, shardings: Any) -> Any:
    # The shardings are a prefix of the tree, with one sharding for a whole Variable.
    return jax.tree.map(lambda s, part: jax.tree.map(lambda x: put_array(x, s), part), shardings, tree)


def put_array(x: Any, sharding: NamedSharding) -> Any:
    """Places an array with a sharding; a `jax.ShapeDtypeStruct` is returned with that sharding attached."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.sharding == sharding:
        return x
    if sharding.is_fully_addressable or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(x, sharding)
    whole = np.asarray(x)  # several processes, all with the same value: each takes its own part
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def whole_beside(x: Any, tree: Any) -> Any:
    """Returns an array whole on every device of the mesh that a tree is on; `x` itself if that is not one mesh.

    A counter made next to a sharded model would otherwise be on one device before the first step and on all of them
    after it, and the second step would be compiled again.
    """
    shardings = [
        None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)
    ]
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding) and s.num_devices > 1}
    if len(meshes) != 1 or isinstance(x, Tracer):
        return x
    return put_array(x, NamedSharding(meshes.pop(), PartitionSpec()))
