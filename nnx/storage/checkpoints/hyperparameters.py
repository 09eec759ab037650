"""Hyperparameters: the static attributes of Modules as text, stored in a checkpoint so that changes can be reported.

Static attributes come from the code that builds the target, and are never loaded. But users want to know when a Dropout
rate or a clipping threshold differs from that of the saved run. A *line* describes one attribute: `rate=0.1`, or, for
the functions in an optimizer, `tx: clip_by_global_norm(max_norm=1.0)`.
"""

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from nnx.core.module.info import info_of, values_of
from nnx.core.module.kinds import is_static
from nnx.core.module.modes import MODES

_MOST_ITEMS = 8  # longer tuples are data or names, not settings
_MOST_TEXT = 120
_MOST_FUNCTIONS = 100


def hyperparameters_of(module: Any) -> list[str]:
    """Returns the lines of the static attributes of a Module itself, in order; modes (train, eval) are left out."""
    lines: list[str] = []
    values = values_of(module)
    for name, kind in info_of(module).kinds.items():
        if is_static(kind) and name not in MODES:
            value = values.get(name)
            text = _plain(value)
            if text is not None:
                lines.append(f"{name}={text}")
            else:
                lines += dict.fromkeys(f"{name}: {function}" for function in _functions(value, set()))
    return sorted(lines)


def changes(saved: Mapping[str, list[str]], wanted: Mapping[str, list[str]]) -> dict[str, tuple[str, str]]:
    """Returns the differences by `module.attribute`: the text in the checkpoint and that in the target."""
    found: dict[str, tuple[str, str]] = {}
    for path in saved:
        if path not in wanted or saved[path] == wanted[path]:
            continue
        old, new = Counter(saved[path]), Counter(wanted[path])
        before, after = _by_name(old - new), _by_name(new - old)
        for name in dict.fromkeys([*before, *after]):
            where = ".".join(filter(None, (path, name)))
            found[where] = (before.get(name, "nothing"), after.get(name, "nothing"))
    return found


def _by_name(lines: Counter[str]) -> dict[str, str]:
    texts: dict[str, list[str]] = {}
    for line in lines:
        name, separator, text = line.partition("=")
        if ":" in name or not separator:
            name, _, text = line.partition(": ")
        texts.setdefault(name, []).append(text)
    return {name: ", ".join(found) for name, found in texts.items()}


def _plain(value: Any) -> str | None:
    """Returns a value as text if it is a number, a string, a dtype, or a short tuple, list or dict of them."""
    if isinstance(value, (tuple, list)) and len(value) <= _MOST_ITEMS and not hasattr(value, "_fields"):
        items = [_plain(item) for item in value]
        return None if None in items else _cut(f"({', '.join(map(str, items))})")
    if isinstance(value, dict) and len(value) <= _MOST_ITEMS:
        pairs = [(_plain(key), _plain(item)) for key, item in value.items()]
        return None if any(None in pair for pair in pairs) else _cut(str(dict(pairs)))
    if value is None or isinstance(value, (bool, str)):
        return _cut(repr(value))
    if isinstance(value, (int, float, complex, np.number)):
        number = complex(value)
        return repr(number.real if not number.imag else number).removesuffix(".0")
    return _dtype_name(value)


def _dtype_name(value: Any) -> str | None:
    # numpy's scalar types are classes whose `dtype` is a descriptor; those of `jax.numpy` are classes whose `dtype` is
    # a dtype. Instances with such an attribute, like a config with a field `dtype`, are not dtypes.
    is_numpy = isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic))
    is_jax = isinstance(value, type) and isinstance(getattr(value, "dtype", None), np.dtype)
    if is_numpy or is_jax:
        try:
            return jnp.dtype(value).name
        except TypeError:
            return None
    return None


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 3]}..."


def _functions(value: Any, seen: set[int]) -> Iterator[str]:
    """Describes the functions that a value consists of: the name of each, and the plain values it closes over."""
    if id(value) in seen or len(seen) > _MOST_FUNCTIONS:
        return
    seen.add(id(value))
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _functions(item, seen)
    elif isinstance(value, dict):
        yield from _functions(list(value.values()), seen)
    elif isinstance(value, functools.partial):
        settings = {**{str(i): arg for i, arg in enumerate(value.args)}, **value.keywords}
        yield from _described(_name(value.func), settings, seen)
    elif callable(value) and not isinstance(value, type):
        function = getattr(value, "__wrapped__", value)
        code = getattr(function, "__code__", None)
        cells = getattr(function, "__closure__", None) or ()
        closure = {}
        for name, cell in zip(code.co_freevars if code else (), cells, strict=True):
            try:
                closure[name] = cell.cell_contents
            except ValueError:  # not bound yet
                continue
        yield from _described(_name(function), closure, seen)


def _described(name: str, settings: Mapping[str, Any], seen: set[int]) -> Iterator[str]:
    plain = {key: _plain(value) for key, value in settings.items()}
    shown = ", ".join(f"{key}={text}" for key, text in plain.items() if text is not None)
    inner = [text for key, value in settings.items() if plain[key] is None for text in _functions(value, seen)]
    if shown or not inner:  # a function that only holds others, such as a chain, adds no information
        yield _cut(f"{name}({shown})")
    yield from inner


def _name(function: Any) -> str:
    """Returns the name of the function that the user called: `adam` for `adam.<locals>.update_fn`."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", type(function).__name__)
    return name.partition(".<locals>")[0]
