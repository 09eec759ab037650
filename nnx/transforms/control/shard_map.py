"""`shard_map`: a function that runs on each device with its piece of the Modules."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import jax
from jax.sharding import PartitionSpec

from nnx.core.module.info import ModuleBase
from nnx.core.state.filters import to_predicate
from nnx.core.trace import varying_axes
from nnx.core.variables.variables import Spec
from nnx.sharding.meshes import current_mesh
from nnx.sharding.unmatched import note_mesh_axes
from nnx.transforms.engine.annotations import Decorator, P, R
from nnx.transforms.engine.call import Call, callee_of, cell_paths, is_data
from nnx.transforms.engine.commit import finish
from nnx.transforms.engine.decorators import decorator
from nnx.transforms.engine.enter import enter_call
from nnx.transforms.engine.leave import leave
from nnx.transforms.engine.observed import RUNS_PER_DEVICE, refuse_observations
from nnx.transforms.engine.outcome import Effects, Outcome
from nnx.transforms.engine.selected_arguments import WRONG_COUNT
from nnx.transforms.engine.shared_traces import run_body

POSITIONAL_ONLY = "nnx.shard_map takes positional arguments, one per entry of in_specs; got {names}."

TWO_SPECS = """nnx.shard_map: one container is the value of {path!r} ({spec}) and of {other!r} ({other_spec}). It has \
one value, so it has one spec: make the filters of in_specs agree on it, or give each attribute its own container."""

DIVERGES = """{name}: {what} differs from device to device along the mesh axis {axes}, and its spec {spec} says that \
all of them hold the same value. Combine what the devices have computed (`jax.lax.pmean(x, {axes})`, psum, all_gather) \
or give it a spec with the axis {place}."""


@overload
def shard_map(
    fun: Callable[P, R],
    *,
    mesh: Any = None,
    in_specs: Any,
    out_specs: Any,
    check_vma: bool = True,
    axis_names: Any = None,
    stateful: bool = True,
) -> Callable[P, R]: ...
@overload
def shard_map(
    *,
    mesh: Any = None,
    in_specs: Any,
    out_specs: Any,
    check_vma: bool = True,
    axis_names: Any = None,
    stateful: bool = True,
) -> Decorator: ...
@decorator
def shard_map(
    fun: Any,
    *,
    mesh: Any = None,
    in_specs: Any,
    out_specs: Any,
    check_vma: bool = True,
    axis_names: Any = None,
    stateful: bool = True,
) -> Callable[..., Any]:
    """`jax.shard_map` for functions that take Modules.

    Args:
        fun: the function, a Module, or a bound method of one.
        mesh: the mesh; by default that of `jax.set_mesh` or of a `with mesh:` block.
        check_vma, axis_names: as in `jax.shard_map`.
        in_specs: one per argument; for a Module, a `PartitionSpec` for all its state or a mapping from filter to
            `PartitionSpec`. State that changes comes out with the spec it went in with.
        out_specs: as in `jax.shard_map`, for the output.
        stateful: whether changes to Modules are written back.

    >>> from jax.sharding import AxisType, PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    >>> layer = nnx.Linear(2, 3, ctx=nnx.context(0))
    >>> forward = nnx.shard_map(
    ...     lambda layer, x: layer(x), mesh=mesh, in_specs=({nnx.Param: P()}, P("data")), out_specs=P("data"))
    >>> forward(layer, jnp.ones((4, 2))).shape
    (4, 3)
    """
    callee = callee_of(fun, "nnx.shard_map")
    name = f"nnx.shard_map({callee.name})"

    def lifted(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise TypeError(POSITIONAL_ONLY.format(names=sorted(kwargs)))
        args = (*callee.bound, *args)
        given = {"mesh": current_mesh() if mesh is None else mesh, "axis_names": axis_names}
        options = {option: value for option, value in given.items() if value is not None}
        specs = _specs_of_arguments(in_specs, len(args))
        call = Call(args, {})
        cell_specs, data_specs = _split_specs(call, args, specs)
        # This trace only shows what changes. The checks are made in the next one, by errors that name the Variable.
        effects, outputs = _look_ahead(call, callee.fun, cell_specs, data_specs, {**options, "check_vma": False})
        value_specs = _specs_of_values(effects, outputs, cell_specs, args, specs)

        def body(cells: Any, data: Any, keys: Any) -> Any:
            note_mesh_axes(current_mesh().manual_axes)
            outcome = _inside(call, callee.fun, cells, data, keys)
            if check_vma:
                _check_written(name, call, effects, outputs, outcome.values, value_specs)
                _check_returned(name, outcome.out, out_specs)
            return outcome.values, outcome.out

        in_and_out = {"in_specs": (cell_specs, data_specs, PartitionSpec()), "out_specs": (value_specs, out_specs)}
        mapped = jax.shard_map(body, **in_and_out, check_vma=check_vma, **options)
        values, out = mapped(call.cells(), list(call.data), [ctx.partition().keys for ctx in call.contexts])
        return finish(call, Outcome(values, out, effects), stateful)

    return lifted


def _specs_of_arguments(in_specs: Any, count: int) -> Sequence[Any]:
    """Returns one entry of `in_specs` per argument."""
    if not isinstance(in_specs, (tuple, list)) or isinstance(in_specs, PartitionSpec):
        return (in_specs,) * count
    if len(in_specs) != count:
        raise ValueError(WRONG_COUNT.format(option="nnx.shard_map: in_specs", given=len(in_specs), count=count))
    return in_specs


def _inside(call: Call, fun: Callable[..., Any], cells: Any, data: Any, keys: Any) -> Outcome:
    contexts = [d.merge(k) for d, k in zip(call.signature.contexts, keys)]
    entered, args, kwargs = enter_call(call.signature, call.statics, cells, data, contexts)
    out = run_body(fun, args, kwargs)
    refuse_observations(entered, "nnx.shard_map", RUNS_PER_DEVICE)
    return leave(entered, out, "nnx.shard_map")


def _look_ahead(call: Call, fun: Any, cell_specs: Any, data_specs: Any, options: Any) -> tuple[Effects, Any]:
    """Traces once to see what changes: JAX wants the specs of the output beforehand."""
    found: list[Effects] = []

    def body(cells: Any, data: Any, keys: Any) -> Any:
        found[:] = [_inside(call, fun, cells, data, keys).effects]
        return ()

    mapped = jax.shard_map(body, in_specs=(cell_specs, data_specs, PartitionSpec()), out_specs=(), **options)
    keys = [{name: jax.random.key(0) for name in definition.streams} for definition in call.signature.contexts]
    jax.eval_shape(mapped, call.cells(), list(call.data), keys)
    effects = found[0]
    return effects, effects.outputs()


def _specs_of_values(
    effects: Effects, outputs: Sequence[int], cell_specs: Sequence[Any], args: Sequence[Any], specs: Sequence[Any]
) -> list[Any]:
    """Returns one spec per value that comes out of the function, those of released Refs last."""
    of_modules = [spec for argument, spec in zip(args, specs) if isinstance(argument, ModuleBase)]
    released = () if effects.rewrite is None else effects.rewrite.released
    of_outputs = [_spec_of_output(effects, cell_specs, of_modules, cell) for cell in outputs]
    return [*of_outputs, *(cell_specs[cell] for cell in released)]


def _spec_of_output(effects: Effects, cell_specs: Sequence[Any], given: Sequence[Any], cell: int) -> Any:
    """Returns the spec of an output value: the one it went in with, or for a new variable the Module's own specs."""
    rewrite = effects.rewrite
    if rewrite is None:
        return cell_specs[cell]
    kind, path = rewrite.key.kinds[cell], rewrite.key.cell_roots()[cell].path
    leaf = kind.box(None) if type(kind) is Spec else kind
    for spec in given:
        cases = spec.items() if isinstance(spec, Mapping) else [(..., spec)]
        chosen = next((s for filter, s in cases if to_predicate(filter)(path, leaf)), None)
        if chosen is not None:
            return chosen
    return PartitionSpec()


def _check_written(
    name: str, call: Call, effects: Effects, outputs: Sequence[int], values: Sequence[Any], specs: Sequence[Any]
) -> None:
    """Raises ValueError if a Variable is given different values on devices that should hold the same."""
    rewrite = effects.rewrite
    paths = cell_paths(call.signature.key if rewrite is None else rewrite.key)
    for cell, value, spec in zip(outputs, values, specs):
        _check_agrees(name, f"the value written to {paths[cell]!r}", value, spec, "in in_specs")


def _check_returned(name: str, out: Any, specs: Any) -> None:
    """Raises ValueError if a result differs between devices that should return the same."""
    spread: list[Any] = []  # one spec per leaf
    try:
        jax.tree.map(lambda s, part: spread.extend([s] * len(jax.tree.leaves(part))), specs, out, is_leaf=_is_spec)
    except ValueError:  # not a prefix of the output, which JAX explains
        return
    for (path, value), spec in zip(jax.tree_util.tree_leaves_with_path(out), spread, strict=True):
        _check_agrees(name, f"the result{jax.tree_util.keystr(path)}", value, spec, "in out_specs")


def _is_spec(value: Any) -> bool:
    return value is None or isinstance(value, PartitionSpec)


def _check_agrees(name: str, what: str, value: Any, spec: Any, place: str) -> None:
    spec = PartitionSpec() if spec is None else spec
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    split = {axis for entry in entries for axis in entry}
    for leaf in jax.tree.leaves(value):
        varying = sorted(varying_axes(leaf) - split)
        if varying:
            axes = repr(varying[0]) if len(varying) == 1 else repr(tuple(varying))
            raise ValueError(DIVERGES.format(name=name, what=what, axes=axes, spec=spec, place=place))


def _split_specs(call: Call, args: Any, specs: Any) -> tuple[list[Any], list[Any]]:
    """Returns one spec per cell and one per data leaf."""
    key = call.signature.key
    cells: list[Any] = [PartitionSpec()] * len(call.cells())
    data: list[Any] = []
    roots = key.roots if key is not None else ()
    for argument, spec in zip(args, specs):
        if isinstance(argument, ModuleBase):
            number = next(i for i, root in enumerate(call.roots) if root is argument)
            cases = spec.items() if isinstance(spec, Mapping) else [(..., spec)]
            tests = [(to_predicate(f), s) for f, s in cases]
            assert key is not None and call.flat is not None
            for i, ((at, path), leaf) in enumerate(zip(key.cell_roots(), call.flat.leaves())):
                if at == roots[number]:
                    cells[i] = next((s for matches, s in tests if matches(path, leaf)), PartitionSpec())
        else:
            is_spec = lambda s: s is None or isinstance(s, PartitionSpec)  # noqa: E731
            spread = jax.tree.map(
                lambda s, sub: [s for leaf in jax.tree.leaves(sub) if is_data(leaf)],
                spec,
                argument,
                is_leaf=is_spec,
            )
            data.extend(jax.tree.leaves(spread, is_leaf=is_spec))
    for first, *others in call.signature.ties.aliases:
        for other in others:
            if cells[other] != cells[first]:
                paths = cell_paths(key)
                places = {"path": paths[first], "other": paths[other]}
                raise ValueError(TWO_SPECS.format(**places, spec=cells[first], other_spec=cells[other]))
    return cells, [PartitionSpec() if s is None else s for s in data]
