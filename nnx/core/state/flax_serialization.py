"""Serialization with `flax.serialization`, for programs that use it.

Flax turns values into *state dicts*, nested dicts with string keys, with one pair of functions per type. This file has
those for Pytrees (one entry per data field), States (one entry per path, without the containers) and ModuleDefs (which
are structure, and have no entries). Flax is not imported here: types are registered once the program itself has
imported it.
"""

import sys
from collections.abc import Callable
from typing import Any

from nnx.core.state.moduledef import ModuleDef
from nnx.core.state.state import State
from nnx.core.variables.variables import Container, raw_value

MISSING_FIELD = "Missing field {name!r} in the state dict of {owner}; its fields are: {given}."
UNKNOWN_FIELD = "Unknown field {name!r} in the state dict of {owner}, which has the fields {fields}."

_registered: set[type] = set()


def register_with_flax(record_type: type, base: type, data_fields: Callable[[Any], list[str]]) -> None:
    """Makes a Pytree class known to `flax.serialization`, if the program has imported it.

    The first call after that import also registers States, ModuleDefs and all Pytree classes made before it.

    Args:
        record_type: the class.
        base: the class Pytree itself.
        data_fields: a function that returns the names of the data fields of a record.
    """
    serialization = sys.modules.get("flax.serialization")
    # The function is missing while flax is still being imported.
    register = getattr(serialization, "register_serialization_state", None)
    if register is None or record_type in _registered:
        return
    types = [record_type]
    if State not in _registered:
        _registered.add(State)
        register(State, _state_to_dict, _state_from_dict, override=True)
        register(ModuleDef, lambda moduledef: {}, lambda moduledef, saved: moduledef, override=True)
        types = _all_subclasses(base)

    def to_state_dict(record: Any) -> dict[str, Any]:
        return {name: _to_dict(vars(record)[name]) for name in data_fields(record)}

    def from_state_dict(record: Any, saved: dict[str, Any]) -> Any:
        names = data_fields(record)
        _check_names(names, saved, type(record).__name__)
        return record.replace(**{name: _from_dict(vars(record)[name], saved[name], name) for name in names})

    for cls in types:
        _registered.add(cls)
        register(cls, to_state_dict, from_state_dict, override=True)


def _all_subclasses(base: type) -> list[type]:
    return [base, *(cls for child in base.__subclasses__() for cls in _all_subclasses(child))]


def _to_dict(value: Any) -> Any:
    return sys.modules["flax.serialization"].to_state_dict(value)


def _from_dict(value: Any, saved: Any, name: str) -> Any:
    return sys.modules["flax.serialization"].from_state_dict(value, saved, name=name)


def _state_to_dict(state: State) -> dict[str, Any]:
    return {path: _to_dict(raw_value(leaf)) for path, leaf in state.items()}


def _state_from_dict(state: State, saved: dict[str, Any]) -> State:
    _check_names(list(state), saved, "a State")

    def restore(path: str, leaf: Any) -> Any:
        value = _from_dict(raw_value(leaf), saved[path], path)
        return leaf.replace(value=value) if isinstance(leaf, Container) else value

    return state.map(restore)


def _check_names(names: list[str], saved: dict[str, Any], owner: str) -> None:
    for name in names:
        if name not in saved:
            raise ValueError(MISSING_FIELD.format(name=name, owner=owner, given=", ".join(sorted(saved)) or "none"))
    for name in saved:
        if name not in names:
            raise ValueError(UNKNOWN_FIELD.format(name=name, owner=owner, fields=", ".join(names) or "none"))
