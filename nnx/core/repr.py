"""How values read in reprs and error texts: arrays as dtype and shape, everything else short."""

import inspect
from typing import Any

import jax
import jax.core
import numpy as np

from nnx.core.info import MODULE, STATIC, Absent, segment_of
from nnx.core.trees import contains_itself, items_of

MAX_WIDTH = 80


def short(value: Any) -> str:
    """One line for any value; arrays never print their numbers."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"ShapeDtypeStruct({_array(value)})"
    if isinstance(value, (jax.Array, np.ndarray)):
        kind = "np." if isinstance(value, np.ndarray) else ("traced " if isinstance(value, jax.core.Tracer) else "")
        return f"{kind}{_array(value)}"
    if isinstance(value, (list, tuple)) and _holds_arrays(value):
        return _sequence(value, short)
    if isinstance(value, dict) and _holds_arrays(value):
        return "{" + ", ".join(f"{k!r}: {short(v)}" for k, v in value.items()) + "}"
    if callable(value) and hasattr(value, "__qualname__"):
        home = getattr(value, "__module__", None) or "?"
        return value.__qualname__ if "._" in home else f"{home}.{value.__qualname__}"  # private homes say little
    text = repr(value)
    return text if len(text) <= MAX_WIDTH else f"{text[: MAX_WIDTH - 3]}..."


def _array(value: Any) -> str:
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def _holds_arrays(container: Any) -> bool:
    if contains_itself(container):
        return False
    try:
        return any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(list(items_of(container))))
    except (TypeError, ValueError):  # a dict whose keys cannot be sorted is not a pytree
        return False


def _sequence(value: Any, item: Any) -> str:
    inner = ", ".join(item(x) for x in value)
    if isinstance(value, list):
        return f"[{inner}]"
    if hasattr(value, "_fields"):
        fields = ", ".join(f"{name}={item(x)}" for name, x in zip(value._fields, value, strict=True))
        return f"{type(value).__name__}({fields})"
    return f"({inner},)" if len(value) == 1 else f"({inner})"


def typename(value: Any) -> str:
    """The name of a value's class."""
    return type(value).__name__


def article(word: str) -> str:
    """The word after "a" or "an"."""
    return f"an {word}" if word[:1].lower() in "aeiou" else f"a {word}"


def module_repr(root: Any) -> str:
    """A Module as an indented tree; what has been printed before is `Name(...)`, options left alone are left out."""
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
        info = item._nnx_info
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
            kind, value = info.kinds[attribute], item.__dict__.get(attribute)
            text = value if kind is MODULE else _attribute_text(kind, value)
            stack.append((depth + 1, f"{segment_of(attribute)}: ", text))
    return "\n".join(lines)


def _constructor_defaults(cls: type) -> dict[str, Any]:
    try:
        parameters = inspect.signature(cls.__init__).parameters
    except (TypeError, ValueError):  # a constructor without a signature
        return {}
    return {name: p.default for name, p in parameters.items() if p.default is not p.empty}


def _is_option_left_alone(defaults: dict[str, Any], name: str, module: Any) -> bool:
    """Whether a flag, function, dtype or None is what the constructor has as the default of that name."""
    if name not in defaults:
        return False
    value, default = module.__dict__[name], defaults[name]
    if isinstance(value, np.dtype):
        return default is not None and value == default
    return value is default and (value is None or isinstance(value, bool) or callable(value))


def _attribute_text(kind: Any, value: Any) -> str:
    if type(kind) is Absent:
        return f"{kind.spec} without state"
    spec = getattr(kind, "_spec", kind)  # a Ref has the spec of what it shares
    if hasattr(spec, "box"):
        text = repr(spec.box(value))
        return text if spec is kind else f"Ref({text})"
    return short(value)
