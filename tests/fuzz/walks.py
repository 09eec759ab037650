"""Looking at Modules from outside, through public means only: which Modules there are, their cells, what is tied."""

import copy
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

import nnx

Cell = tuple[Any, str]  # a Module and an attribute

_PROBE = jnp.zeros((), jnp.float32)


def attributes(module: Any) -> list[tuple[str, Any]]:
    """The attributes of a Module, by name."""
    return sorted(vars(module).items())


def modules_of(roots: Iterable[Any]) -> list[Any]:
    """Every Module reachable from the roots, each once, in an order that depends on the graph alone."""
    found: dict[int, Any] = {}
    stack = list(roots)[::-1]
    while stack:
        module = stack.pop()
        if id(module) not in found:
            found[id(module)] = module
            stack += [value for _, value in reversed(attributes(module)) if isinstance(value, nnx.Module)]
    return list(found.values())


def items_of(value: Any) -> Any:
    """The keys of a data value in order, at every level."""
    if isinstance(value, dict):
        return {key: items_of(item) for key, item in value.items()}
    return [items_of(item) for item in value] if isinstance(value, (list, tuple)) else None


def arrange_items(value: Any, order: Any) -> None:
    if isinstance(value, dict) and isinstance(order, dict):
        if value.keys() == order.keys():
            put_in_order(value, list(order))
        for key in value.keys() & order.keys():
            arrange_items(value[key], order[key])
    elif isinstance(value, list) and isinstance(order, list):
        for item, inner in zip(value, order):
            arrange_items(item, inner)


def put_in_order(held: dict[str, Any], names: list[str]) -> None:
    items = {name: held[name] for name in names if name in held} | held
    held.clear()
    held.update(items)


def mapped_in_order(function: Any, tree: Any, *others: Any) -> Any:
    """`jax.tree.map`, but dicts keep the order of their items."""
    new = jax.tree.map(function, tree, *others)
    arrange_items(new, items_of(tree))
    return new


def variable_of(module: Any, name: str) -> Any:
    """The container behind an attribute; None for static values and submodules."""
    if isinstance(vars(module)[name], nnx.Module):
        return None
    try:
        return module.variable(name)
    except ValueError:
        return None


def cells_of(modules: Iterable[Any], kind: type = nnx.Node) -> list[Cell]:
    """The cells of some Modules that hold a Variable of a type."""
    return [
        (module, name)
        for module in modules
        for name, _ in attributes(module)
        if isinstance(variable_of(module, name), kind)
    ]


def tied(variables: Iterable[Cell]) -> list[list[Cell]]:
    """The cells of Variables in groups: those of one group change when one of them is written. Found by writing."""
    rest = list(variables)
    groups = []
    while rest:
        module, name = rest[0]
        before = vars(module)[name]
        setattr(module, name, _PROBE)
        group = [cell for cell in rest if vars(cell[0])[cell[1]] is _PROBE]
        setattr(module, name, before)
        if rest[0] not in group:  # the write has not reached the attribute itself: say so in a way no sound Module can
            group = [rest[0], rest[0]]
        groups.append(group)
        rest = rest[1:] if len(group) == 1 else [cell for cell in rest if cell not in group]
    return groups


def snapshot(cells: Iterable[Cell]) -> list[tuple[Any, str, Any]]:
    """The values of cells, without their dicts and numpy arrays being the Modules' own."""
    memo: dict[int, Any] = {}
    return [(module, name, _copied(vars(module)[name], memo)) for module, name in cells]


def restore(values: Iterable[tuple[Any, str, Any]]) -> None:
    """Writes a snapshot back; it can be written again later."""
    memo: dict[int, Any] = {}
    for module, name, value in values:
        setattr(module, name, _copied(value, memo))


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, jax.Array):
        return value
    return copy.deepcopy(value, memo)
