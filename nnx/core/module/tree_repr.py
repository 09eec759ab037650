"""The repr of a Module: an indented tree of its attributes."""

import inspect
from typing import Any

import numpy as np

from nnx.core.module.info import info_of, values_of
from nnx.core.module.kinds import STATIC, SUBMODULE, Absent
from nnx.core.repr import short
from nnx.core.state.paths import segment_of
from nnx.core.variables.refs import Ref
from nnx.core.variables.variables import Spec


def module_repr(root: Any) -> str:
    """Returns a Module as an indented tree.

    A Module that was printed before appears as `Name(...)`. Options that have their default value are omitted.
    """
    lines: list[str] = []
    seen: set[int] = set()
    defaults: dict[type, dict[str, Any]] = {}
    stack: list[tuple[int, str, Any]] = [(0, "", root)]  # (depth, label, a Module or a finished line)
    while stack:
        depth, label, item = stack.pop()
        indent = "  " * depth
        if isinstance(item, str):
            lines.append(f"{indent}{label}{item}")
            continue
        name = type(item).__name__
        if id(item) in seen:
            lines.append(f"{indent}{label}{name}(...)")
            continue
        seen.add(id(item))
        info, values = info_of(item), values_of(item)
        known = defaults.get(type(item))
        if known is None:
            known = defaults[type(item)] = constructor_defaults(type(item))
        shown = [
            attribute
            for attribute in info.printed_names()
            if not (info.kinds[attribute] is STATIC and is_option_left_alone(known, attribute, values[attribute]))
        ]
        if not shown:
            lines.append(f"{indent}{label}{name}()")
            continue
        lines.append(f"{indent}{label}{name}(")
        stack.append((depth, "", ")"))
        for attribute in reversed(shown):
            kind, value = info.kinds[attribute], values.get(attribute)
            text = value if kind is SUBMODULE else attribute_text(kind, value)
            stack.append((depth + 1, f"{segment_of(attribute)}: ", text))
    return "\n".join(lines)


def constructor_defaults(cls: type) -> dict[str, Any]:
    """Returns the default values in the signature of a class's constructor, by name."""
    try:
        parameters = inspect.signature(cls.__init__).parameters
    except (TypeError, ValueError):  # a constructor without a signature
        return {}
    return {name: p.default for name, p in parameters.items() if p.default is not p.empty}


def is_option_left_alone(defaults: dict[str, Any], name: str, value: Any) -> bool:
    """Whether a flag, function, dtype or None is the default that the constructor has for that name."""
    if name not in defaults:
        return False
    default = defaults[name]
    if isinstance(value, np.dtype):
        return default is not None and value == default
    return value is default and (value is None or isinstance(value, bool) or callable(value))


def attribute_text(kind: Any, value: Any) -> str:
    """Returns an attribute that is not a submodule as text."""
    if type(kind) is Absent:
        return f"{kind.spec} without state"
    if type(kind) is Ref:
        return repr(kind)
    return repr(kind.box(value)) if type(kind) is Spec else short(value)
