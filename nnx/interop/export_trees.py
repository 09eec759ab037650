"""Forms: the nesting of a program's inputs and outputs as JSON, so that it can be rebuilt without any Python classes.

The *form* of an array is its number among all arrays of the tree. That of a container is an object with one entry: a
"tuple", a "list", a "dict", or a "record" (a named tuple, with its name and its fields). None is null.
"""

import collections
import math
from collections.abc import Sequence
from typing import Any

from nnx.core.repr import short
from nnx.core.state.state import State

NOT_A_FORM = """nnx.export: {where} is {value}. Arguments and results of an exported program are arrays in dicts (by \
string), lists and tuples; {advice}."""
OTHER_FORM = "{name}: {where} should be {expected}, as when it was exported; got {value}."


def form_of(tree: Any, arrays: list[Any], where: str, advice: str) -> Any:
    """Returns the form of a tree, and appends its arrays to `arrays`. A State becomes a dict of arrays by path.

    Args:
        tree: the tree.
        arrays: the list of arrays to append to.
        where: what the tree is, for the error.
        advice: what to do about a leaf that is not an array, for the error.

    Raises:
        TypeError: the tree contains something else.
    """
    if tree is None:
        return None
    if isinstance(tree, State):
        tree = tree.arrays()
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        return {"dict": {key: form_of(tree[key], arrays, f"{where}[{key!r}]", advice) for key in sorted(tree)}}
    if type(tree) in (tuple, list):
        items = [form_of(item, arrays, f"{where}[{i}]", advice) for i, item in enumerate(tree)]
        return {type(tree).__name__: items}
    names = getattr(tree, "_fields", None) if isinstance(tree, tuple) else None
    if names is not None:
        fields = {name: form_of(getattr(tree, name), arrays, f"{where}.{name}", advice) for name in names}
        return {"record": [type(tree).__name__, fields]}
    if not hasattr(tree, "shape") or not hasattr(tree, "dtype"):
        raise TypeError(NOT_A_FORM.format(where=where, value=short(tree), advice=advice))
    arrays.append(tree)
    return len(arrays) - 1


def flattened(form: Any, tree: Any, name: str, where: str) -> list[Any]:
    """Returns the arrays of a tree that must have a form, in order.

    Raises:
        TypeError: it has another one.
    """
    if isinstance(form, int):
        return [tree]
    if form is None:
        if tree is not None:
            raise TypeError(OTHER_FORM.format(name=name, where=where, expected=None, value=short(tree)))
        return []
    ((kind, inner),) = form.items()
    if kind in ("tuple", "list"):
        if not isinstance(tree, (tuple, list)) or len(tree) != len(inner):
            text = f"a {kind} of {len(inner)}"
            raise TypeError(OTHER_FORM.format(name=name, where=where, expected=text, value=short(tree)))
        return [x for i, item in enumerate(inner) for x in flattened(item, tree[i], name, f"{where}[{i}]")]
    if kind == "record":
        kind, inner = inner
        tree = {field: getattr(tree, field) for field in inner if hasattr(tree, field)}
    if not isinstance(tree, dict) or set(tree) != set(inner):
        text = f"a {kind} with {', '.join(map(repr, inner))}"
        raise TypeError(OTHER_FORM.format(name=name, where=where, expected=text, value=short(tree)))
    return [x for key, item in inner.items() for x in flattened(item, tree[key], name, f"{where}[{key!r}]")]


def rebuilt(form: Any, arrays: Sequence[Any]) -> Any:
    """Returns the tree of a form with these arrays."""
    if form is None or isinstance(form, int):
        return None if form is None else arrays[form]
    ((kind, inner),) = form.items()
    if kind == "dict":
        return {key: rebuilt(item, arrays) for key, item in inner.items()}
    if kind == "record":
        name, fields = inner
        record: Any = collections.namedtuple(name, fields)  # noqa: PYI024
        return record(*(rebuilt(item, arrays) for item in fields.values()))
    items = [rebuilt(item, arrays) for item in inner]
    return items if kind == "list" else tuple(items)


def check_form(form: Any, count: float = math.inf) -> list[int]:
    """Returns the numbers of the arrays in a form that was read from a file, which can hold anything.

    Raises:
        ValueError: it is not a form.
    """
    if form is None:
        return []
    if type(form) is int and 0 <= form < count:
        return [form]
    if isinstance(form, dict) and len(form) == 1:
        ((kind, inner),) = form.items()
        if kind == "record" and isinstance(inner, list) and len(inner) == 2 and isinstance(inner[0], str):
            kind, inner = "dict", inner[1]
            if isinstance(inner, dict) and not all(name.isidentifier() for name in (form["record"][0], *inner)):
                inner = None
        if kind == "dict" and isinstance(inner, dict):
            return [number for item in inner.values() for number in check_form(item, count)]
        if kind in ("tuple", "list") and isinstance(inner, list):
            return [number for item in inner for number in check_form(item, count)]
    raise ValueError(f"a form is {short(form)}")
