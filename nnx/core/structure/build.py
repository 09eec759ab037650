"""Building the Modules of a graph from its structure: the way back from a key, static values and the data."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from nnx.core.module.info import info_of, new_module
from nnx.core.module.kinds import absent
from nnx.core.statics.statics import Statics
from nnx.core.structure.structure import GraphKey
from nnx.core.trace import current_level
from nnx.core.variables.refs import Ref

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>", "__slots__": ()})()


class Graph(NamedTuple):
    """A graph that was just built."""

    modules: list[Any]  # by number
    dicts: list[dict[str, Any]]  # per cell, the instance dict that holds its value
    refs: dict[int, Ref]  # by cell, for cells that several attributes share
    mutables: list[Any]  # its mutable static values, by number


def build(key: GraphKey, statics: Statics, values: Sequence[Any]) -> Graph:
    """Builds new Modules of a structure around the given values, one per cell; `MISSING` makes a variable absent."""
    level = current_level()
    blueprints = key.blueprints
    modules = [new_module(b.cls, b.kinds.copy(), level, False, b.slots.copy()) for b in blueprints]
    instance_dicts = [module.__dict__ for module in modules]
    static_values, mutables = statics.attach(modules)
    for held, blueprint in zip(instance_dicts, blueprints, strict=True):
        for name, number in blueprint.statics:
            held[name] = static_values[number]
        for name, child in blueprint.children:
            held[name] = modules[child]
    if key.hooks:
        values = list(values)
        for cell in key.hooks:
            if values[cell] is not MISSING:
                spec = key.kinds[cell]
                values[cell] = spec.on_set(values[cell], spec.metadata)
    dicts = [instance_dicts[module] for module in key.owners]
    for held, name, module, value in zip(dicts, key.names, key.owners, values, strict=True):
        if value is MISSING:
            kinds = info_of(modules[module]).kinds
            kinds[name] = absent(type(modules[module]), kinds[name])
            del held[name]
        else:
            held[name] = value
    refs = _build_refs(key, modules, values, level) if key.shared else {}
    return Graph(modules, dicts, refs, mutables)


def _build_refs(key: GraphKey, modules: list[Any], values: Sequence[Any], level: Any) -> dict[int, Ref]:
    """Makes a Ref for every shared cell that has a value, and ties its attributes to it."""
    refs = {
        cell: Ref.rebuilt(key.kinds[cell], values[cell], level) for cell in key.shared if values[cell] is not MISSING
    }
    for module, blueprint in zip(modules, key.blueprints, strict=True):
        for name, cell in blueprint.shared:
            if cell in refs:
                refs[cell].adopt(module, name)
            else:
                info_of(module).kinds[name] = absent(type(module), key.kinds[cell])
                module.__dict__.pop(name, None)  # `build` has already removed the first of them
    return refs
