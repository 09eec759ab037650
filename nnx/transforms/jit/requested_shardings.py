"""What `in_shardings` and `out_shardings` of `nnx.jit` mean.

For a Module they are one sharding for all its state, one per filter, or a State with one per path, as
`logical_to_mesh_sharding(model, mesh, rules)` returns it. For other pytrees they are a prefix, as in JAX.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nnx.core.context import Context
from nnx.core.module.info import ModuleBase
from nnx.core.module.kinds import box
from nnx.core.state.filters import to_predicate
from nnx.core.state.paths import join, listing
from nnx.core.state.state import State
from nnx.core.structure.structure import ChildAttribute, DataAttribute, GraphKey
from nnx.transforms.engine.call import Call, is_data
from nnx.transforms.engine.outcome import Effects, Outcome, Returned
from nnx.transforms.engine.selected_arguments import WRONG_COUNT, StaticArgument

NOT_A_PREFIX = "in_shardings {sharding!r} is not a prefix of the argument, {structure}."

NOT_A_PREFIX_OF_OUTPUT = "out_shardings {sharding!r} is not a prefix of the output, {structure}."

UNKNOWN_PATHS = """{option} has shardings for {paths}, and the Module has no such path. Make them from the same \
Module: nnx.logical_to_mesh_sharding(model, mesh, rules)."""


class InputShardings(NamedTuple):
    """The `in_shardings` of one signature: an entry per cell and per data leaf, or None where there is none."""

    cells: list[Any]
    data: tuple[Any, ...]


def input_shardings(shardings: Any, call: Call, args: tuple[Any, ...], bound: int) -> InputShardings:
    """Returns one sharding per cell and per data leaf, from one per argument.

    Static arguments, and the Module a method is bound to, have no entry, as in `jax.jit`.
    """
    dynamic = [argument for argument in args[bound:] if not isinstance(argument, StaticArgument)]
    per_argument = shardings if type(shardings) in (tuple, list) else (shardings,) * len(dynamic)
    if len(per_argument) != len(dynamic):
        raise ValueError(WRONG_COUNT.format(option="in_shardings", given=len(per_argument), count=len(dynamic)))
    cells: list[Any] = [None] * len(call.cells())
    data: list[Any] = []
    for argument, sharding in zip(dynamic, per_argument):
        _spread(sharding, argument, call, cells, data)
    return InputShardings(cells, (*data, *[None] * (len(call.data) - len(data))))


def _spread(sharding: Any, argument: Any, call: Call, cells: list[Any], data: list[Any]) -> None:
    """Notes the sharding of every cell and data leaf of an argument, from shardings for a prefix of it."""
    if isinstance(argument, ModuleBase):
        _spread_over_cells(sharding, call, argument, cells)
    elif isinstance(argument, Context):
        return
    elif sharding is None or isinstance(sharding, (jax.sharding.Sharding, jax.sharding.PartitionSpec)):
        for leaf in jax.tree.leaves(argument):
            if is_data(leaf):
                data.append(sharding)
            else:
                _spread(sharding, leaf, call, cells, data)
    else:
        children, parts = _children(argument), _children(sharding)
        if [key for key, _ in children] != [key for key, _ in parts]:
            raise ValueError(NOT_A_PREFIX.format(sharding=sharding, structure=jax.tree.structure(argument)))
        for (_, part), (_, child) in zip(parts, children):
            _spread(part, child, call, cells, data)


def _children(tree: Any) -> list[tuple[Any, Any]]:
    """Returns the direct children of a pytree node with their keys; None counts as a child."""
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]


def _spread_over_cells(sharding: Any, call: Call, module: Any, cells: list[Any]) -> None:
    key = call.signature.key
    assert key is not None
    number = next(i for i, root in enumerate(call.roots) if root is module)
    for i, chosen in enumerate(_cell_shardings(sharding, call, key.roots[number])):
        if chosen is not None:
            cells[i] = chosen


def _cell_shardings(sharding: Any, call: Call, root: int) -> list[Any]:
    key = call.signature.key
    assert key is not None and call.flat is not None
    choose = _chooser(sharding)
    if isinstance(sharding, State):
        _check_paths("in_shardings", sharding, key, root)
    return [
        choose(path, leaf) if at == root else None for (at, path), leaf in zip(key.cell_roots(), call.flat.leaves())
    ]


def _chooser(sharding: Any) -> Callable[[str, Any], Any]:
    """Returns a function that chooses the sharding of a Variable by its path and container."""
    if isinstance(sharding, State):
        by_path = dict(sharding)
        return lambda path, leaf: by_path.get(path)
    if not isinstance(sharding, Mapping):
        return lambda path, leaf: sharding
    cases = [(to_predicate(filter), value) for filter, value in sharding.items()]
    return lambda path, leaf: next((s for matches, s in cases if matches(path, leaf)), None)


def _check_paths(option: str, shardings: State, key: GraphKey, module: int) -> None:
    known = {path for _, path in _cells_under(key, module)}
    unknown = [path for path in shardings if path not in known]
    if unknown:
        raise ValueError(UNKNOWN_PATHS.format(option=option, paths=listing(unknown)))


def constrain_outcome(
    cell_shardings: Any, out_shardings: Any, key: GraphKey | None, outcome: Outcome, cells: Sequence[Any]
) -> Outcome:
    """Returns the outcome with the requested shardings, of the output and of the state written back."""
    if cell_shardings is None and out_shardings is None:
        return outcome
    values, out, effects = list(outcome.values), outcome.out, outcome.effects
    if cell_shardings is not None and effects.rewrite is None:
        shardings = [cell_shardings[i] for i in effects.changed]
        values = [
            x if s is None or _shapes(x) != _shapes(cells[i]) else _constrain(x, s)
            for x, s, i in zip(values, shardings, effects.changed)
        ]
    if out_shardings is not None:
        modules: dict[int, Any] = {}
        out = _constrain_output(out_shardings, out, modules)
        for index, sharding in modules.items():
            values, effects = _constrain_module(index, sharding, values, effects, key, cells)
    return Outcome(values, out, effects)


def _constrain(x: Any, sharding: Any) -> Any:
    # A constraint does not move a value to another memory.
    if getattr(sharding, "memory_kind", None) in (None, "device"):
        return jax.lax.with_sharding_constraint(x, sharding)
    return jax.device_put(x, sharding)


def _shapes(value: Any) -> list[tuple[int, ...]]:
    return [jnp.shape(leaf) for leaf in jax.tree.leaves(value)]


def _constrain_output(sharding: Any, out: Any, modules: dict[int, Any]) -> Any:
    """Applies a sharding, or a tree of shardings that is a prefix of the output; notes those meant for Modules."""
    if sharding is None:
        return out
    if isinstance(out, Returned):
        modules[out.index] = sharding
        return out
    if isinstance(sharding, (jax.sharding.Sharding, jax.sharding.PartitionSpec)):

        def constrain(leaf: Any) -> Any:
            if isinstance(leaf, Returned):
                modules[leaf.index] = sharding
                return leaf
            return jax.lax.with_sharding_constraint(leaf, sharding)

        return jax.tree.map(constrain, out, is_leaf=lambda x: isinstance(x, Returned))
    children, treedef = jax.tree.flatten(out, is_leaf=lambda x: x is not out)
    parts = jax.tree.leaves(sharding, is_leaf=lambda x: x is not sharding)
    if len(parts) != len(children):
        raise ValueError(NOT_A_PREFIX_OF_OUTPUT.format(sharding=sharding, structure=jax.tree.structure(out)))
    return jax.tree.unflatten(treedef, [_constrain_output(s, child, modules) for s, child in zip(parts, children)])


def _constrain_module(
    index: int, sharding: Any, values: list[Any], effects: Effects, before: GraphKey | None, cells: Sequence[Any]
) -> tuple[list[Any], Effects]:
    """Applies a sharding, or one per filter, to the state of a returned Module, which makes it an output."""
    choose = _chooser(sharding)
    rewrite = effects.rewrite
    key = rewrite.key if rewrite is not None else before
    assert key is not None
    if isinstance(sharding, State):
        _check_paths("out_shardings", sharding, key, index)
    sources = rewrite.sources if rewrite is not None else tuple(range(len(key.cells)))
    outputs = rewrite.outputs() if rewrite is not None else effects.changed
    current = {i: cells[source] for i, source in enumerate(sources) if source >= 0}
    current.update(zip(outputs, values))
    wanted = set(outputs)
    for cell, path in _cells_under(key, index):
        kind = key.kinds[cell]
        leaf = box(kind, current[cell])
        chosen = choose(path, leaf)
        if chosen is not None:
            current[cell] = jax.lax.with_sharding_constraint(current[cell], chosen)
            wanted.add(cell)
    if rewrite is not None:
        sources = tuple(-1 if i in wanted else source for i, source in enumerate(sources))
        rewrite = replace(rewrite, sources=sources)
    changed = () if rewrite is not None else tuple(sorted(wanted))
    released = values[len(outputs) :]
    return [*(current[i] for i in sorted(wanted)), *released], replace(effects, changed=changed, rewrite=rewrite)


def _cells_under(key: GraphKey, index: int) -> list[tuple[int, str]]:
    """Returns the cells reached from a Module, with their paths from there."""
    found: dict[int, str] = {}
    stack, seen = [(index, "")], set()
    while stack:
        module, prefix = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        for attribute in key.attributes(module):
            path = join(prefix, attribute.name)
            if type(attribute) is DataAttribute:
                found.setdefault(attribute.cell, path)
            elif type(attribute) is ChildAttribute:
                stack.append((attribute.module, path))
    return list(found.items())
