"""The repr of a Module: an indented tree of its attributes."""

import inspect
from typing import Any

import numpy as np

from nnx.core.kinds import STATIC, SUBMODULE, Absent
from nnx.core.module_info import info_of, values_of
from nnx.core.paths import segment_of
from nnx.core.refs import Ref
from nnx.core.repr import short
from nnx.core.variables import Spec


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
        info = info_of(item)
        known = defaults.get(type(item))
        if known is None:
            known = defaults[type(item)] = _constructor_defaults(type(item))
        shown = [
            attribute
            for attribute in info.sorted_names()
            if not (info.kinds[attribute] is STATIC and _is_option_left_alone(known, attribute, item))
        ]
        if not shown:
            lines.append(f"{indent}{label}{name}()")
            continue
        lines.append(f"{indent}{label}{name}(")
        stack.append((depth, "", ")"))
        for attribute in reversed(shown):
            kind, value = info.kinds[attribute], values_of(item).get(attribute)
            text = value if kind is SUBMODULE else _attribute_text(kind, value)
            stack.append((depth + 1, f"{segment_of(attribute)}: ", text))
    return "\n".join(lines)


def _constructor_defaults(cls: type) -> dict[str, Any]:
    try:
        parameters = inspect.signature(cls.__init__).parameters
    except (TypeError, ValueError):  # a constructor without a signature
        return {}
    return {name: p.default for name, p in parameters.items() if p.default is not p.empty}


def _is_option_left_alone(defaults: dict[str, Any], name: str, module: Any) -> bool:
    """Whether a flag, function, dtype or None is the default that the constructor has for that name."""
    if name not in defaults:
        return False
    value, default = values_of(module)[name], defaults[name]
    if isinstance(value, np.dtype):
        return default is not None and value == default
    return value is default and (value is None or isinstance(value, bool) or callable(value))


def _attribute_text(kind: Any, value: Any) -> str:
    if type(kind) is Absent:
        return f"{kind.spec} without state"
    if type(kind) is Ref:
        return repr(kind)
    return repr(kind.box(value)) if type(kind) is Spec else short(value)
