"""`eval_shape` and `shard_map`: Modules without values, and Modules in pieces."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import jax
import numpy as np
from jax.sharding import PartitionSpec

from nnx.core.filters import to_predicate
from nnx.core.module_info import ModuleBase
from nnx.core.variables import Spec
from nnx.transforms.annotations import Decorator, M, P, R
from nnx.transforms.lift import (
    Call,
    Effects,
    Outcome,
    cell_paths,
    commit,
    discard,
    enter_call,
    leave,
    run,
    sort_of,
    target_of,
)
from nnx.transforms.wrapper import decorator

TWO_SPECS = """nnx.shard_map: one container is the value of {path!r} ({spec}) and of {other!r} ({other_spec}). It has \
one value, so it has one spec: make the filters of in_specs agree on it, or give each attribute its own container."""


@overload
def eval_shape(fun: Callable[..., M], *args: Any, **kwargs: Any) -> M: ...
@overload
def eval_shape(fun: Callable[..., jax.Array], *args: Any, **kwargs: Any) -> jax.ShapeDtypeStruct: ...
@overload
def eval_shape(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...
def eval_shape(fun: Any, *args: Any, **kwargs: Any) -> Any:
    """The output of a call as shapes and dtypes; nothing is computed, and no Module changes.

    Args:
      fun: a function, a Module, or a Module class.
      *args, **kwargs: its arguments. Arrays (and `ShapeDtypeStruct`s) are only looked at for shape and dtype.

    Returns:
      The output with a `jax.ShapeDtypeStruct` for every array; a Module in it is a new one, of such leaves.

    >>> model = nnx.eval_shape(nnx.Linear, 3, 2, ctx=nnx.context(0))
    >>> model.kernel
    ShapeDtypeStruct(shape=(3, 2), dtype=float32)
    """
    target = target_of(fun, "nnx.eval_shape")
    call = Call((*target.bound, *args), kwargs)
    traced = [i for i, leaf in enumerate(call.data) if isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))]

    def pure(cells: Any, arrays: Any, forks: Any) -> Outcome:
        data = list(call.data)
        for i, value in zip(traced, arrays):
            data[i] = value
        return run(target.fun, call.signature, call.statics, cells, data, forks, "nnx.eval_shape")

    outcome = jax.eval_shape(pure, call.cells(), [call.data[i] for i in traced], call.forks())
    return discard(call, outcome)


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
      mesh, check_vma, axis_names: as in `jax.shard_map`.
      in_specs: one per argument; for a Module a `PartitionSpec` for all its state, or a mapping from filter to
        `PartitionSpec`. State that changes comes out as it went in.
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
    target = target_of(fun, "nnx.shard_map")
    options = {k: v for k, v in {"mesh": mesh, "axis_names": axis_names}.items() if v is not None}

    def lifted(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise TypeError(
                f"nnx.shard_map takes positional arguments, one per entry of in_specs; got {sorted(kwargs)}."
            )
        args = (*target.bound, *args)
        specs = in_specs if isinstance(in_specs, (tuple, list)) and not isinstance(in_specs, PartitionSpec) else None
        specs = (in_specs,) * len(args) if specs is None else specs
        if len(specs) != len(args):
            raise ValueError(f"nnx.shard_map: in_specs has {len(specs)} entries for a call with {len(args)} arguments.")
        call = Call(args, {})
        cell_specs, data_specs = _split_specs(call, args, specs)
        effects, outputs = _look_ahead(call, target.fun, cell_specs, data_specs, {**options, "check_vma": False})
        single = [spec for argument, spec in zip(args, specs) if isinstance(argument, ModuleBase)]
        value_specs = [_spec_of_output(effects, cell_specs, single, i) for i in outputs]
        value_specs += [cell_specs[i] for i in (effects.rewrite.released if effects.rewrite is not None else ())]

        def body(cells: Any, data: Any, keys: Any) -> Any:
            outcome = _inside(call, target.fun, cells, data, keys)
            return outcome.values, outcome.out

        mapped = jax.shard_map(
            body,
            in_specs=(cell_specs, data_specs, PartitionSpec()),
            out_specs=(value_specs, out_specs),
            check_vma=check_vma,
            **options,
        )
        keys = [ctx.partition().keys for ctx in call.contexts]
        values, out = mapped(call.cells(), list(call.data), keys)
        outcome = Outcome(values, out, effects)
        return commit(call, outcome) if stateful else discard(call, outcome)

    return lifted


def _inside(call: Call, fun: Callable[..., Any], cells: Any, data: Any, keys: Any) -> Outcome:
    contexts = [d.merge(k) for d, k in zip(call.signature.contexts, keys)]
    entered, args, kwargs = enter_call(call.signature, call.statics, cells, data, contexts)
    return leave(entered, fun(*args, **kwargs), "nnx.shard_map")


def _look_ahead(call: Call, fun: Any, cell_specs: Any, data_specs: Any, options: Any) -> tuple[Effects, Any]:
    """Traces once to see what changes: the specs of the output must be known before."""
    found: list[Effects] = []

    def body(cells: Any, data: Any, keys: Any) -> Any:
        found[:] = [_inside(call, fun, cells, data, keys).effects]
        return ()

    mapped = jax.shard_map(body, in_specs=(cell_specs, data_specs, PartitionSpec()), out_specs=(), **options)
    keys = [{name: jax.random.key(0) for name in definition.streams} for definition in call.signature.contexts]
    jax.eval_shape(mapped, call.cells(), list(call.data), keys)
    effects = found[0]
    return effects, effects.changed if effects.rewrite is None else effects.rewrite.outputs()


def _spec_of_output(effects: Effects, cell_specs: Sequence[Any], given: Sequence[Any], cell: int) -> Any:
    """The spec of a value that comes out: as it went in; for a new variable what the Module's specs say of it."""
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


def _split_specs(call: Call, args: Any, specs: Any) -> tuple[list[Any], list[Any]]:
    """One spec per cell and per data leaf."""
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
                lambda s, sub: [s for leaf in jax.tree.leaves(sub) if sort_of(leaf) == 0],
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
