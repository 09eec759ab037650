"""`Module.load_state`: writing a mapping of arrays into a Module, after checking that all of it fits."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.core
import numpy as np

from nnx.core.hints.hints import torch_names_hint
from nnx.core.module.info import ModuleBase, info_of
from nnx.core.module.kinds import Absent, box
from nnx.core.repr import short
from nnx.core.state.paths import join, path_order
from nnx.core.state.state import State
from nnx.core.state.updates import update
from nnx.core.structure.flat import Flat, flat_of
from nnx.core.structure.walk import named_modules
from nnx.core.variables.variables import Container, values_equal
from nnx.storage.entry import describe
from nnx.storage.errors import LoadReport
from nnx.storage.expected import Expected, converted
from nnx.storage.matching import TWO_VALUES, Texts, match, misfit

NOT_A_MAPPING = """load_state takes a State, or a flat or nested mapping of arrays such as {{"encoder/kernel": w}} or \
{{"encoder": {{"kernel": w}}}}; got {got}."""
BAD_KEY = "load_state: the keys of the mapping are paths or segments of paths, i.e. strings; got {key!r}{below}."
GIVEN_TWICE = "load_state: the mapping has {path!r} twice, as a flat path and as nested keys."
DOES_NOT_FIT = """load_state: the mapping does not fit this {module}, and nothing was changed.
{differences}
Rename or convert the entries, pass cast=True to convert dtypes, or pass strict=False to load only what fits."""


def load_state(root: Any, mapping: Any, strict: bool, cast: bool) -> LoadReport:
    """Implements `Module.load_state`; see there."""
    if not isinstance(mapping, Mapping) or isinstance(mapping, ModuleBase):
        hint = "a Module; pass its get_state()" if isinstance(mapping, ModuleBase) else short(mapping)
        raise TypeError(NOT_A_MAPPING.format(got=hint))
    flat, absent, given = flat_of(root), _absent_paths(root), _flattened(mapping, flat_of(root))
    names: dict[str, list[str]] = {path: [] for path in sorted({*flat.key.layout.paths, *absent}, key=path_order)}
    # The canonical name of something shared comes first, and its other names are compared with it.
    for name in sorted(given, key=lambda name: (name not in flat.key.layout.index, path_order(name))):
        cell = flat.key.find(name)
        path = name if cell is None else flat.key.layout.paths[cell]
        names.get(path, []).append(name)
    values: dict[str, Any] = {}

    def leaf_at(path: str) -> Any:
        cell = flat.key.find(path)
        assert cell is not None  # or the path is absent
        return box(flat.key.kinds[cell], flat.dicts[cell][flat.names[cell]])

    def misfit_at(path: str, name: str) -> Texts | None:
        if path in absent:
            values[path] = given[name]
            return None
        value = _fitting(given[name], leaf_at(path), cast)
        if isinstance(value, str):
            return value, short(leaf_at(path))
        values[path] = value[0]
        return None

    def conflict(path: str, name: str, other: str) -> Texts | None:
        have = TWO_VALUES.format(have=short(given[other]), other=name)
        return None if _same_value(given[other], given[name]) else (have, short(leaf_at(path)))

    report = LoadReport(source="mapping")
    match(names, given, misfit_at, report, conflict)
    if report and strict:
        text = DOES_NOT_FIT.format(module=type(root).__name__, differences=report)
        raise ValueError(text + torch_names_hint(report.unexpected))
    update(root, State(values))
    return report


def _absent_paths(root: Any) -> list[str]:
    """Returns the paths of the variables that were given no state when the Module was rebuilt."""
    return [
        join(path, name)
        for path, module in named_modules(root)
        for name, kind in info_of(module).kinds.items()
        if type(kind) is Absent
    ]


def _flattened(mapping: Mapping[Any, Any], flat: Flat) -> dict[str, Any]:
    """Returns the values by path. A mapping at the path of a variable is its value, not a further level."""
    leaves: dict[str, Any] = {}
    stack: list[tuple[str, Mapping[Any, Any]]] = [("", mapping)]
    while stack:
        prefix, inner = stack.pop()
        for key, value in inner.items():
            if not isinstance(key, str) or not key:
                raise TypeError(BAD_KEY.format(key=key, below=f" below {prefix!r}" if prefix else ""))
            path = f"{prefix}/{key}" if prefix else key
            if isinstance(value, Mapping) and flat.key.find(path) is None:
                stack.append((path, value))
            elif path in leaves:
                raise ValueError(GIVEN_TWICE.format(path=path))
            else:
                leaves[path] = value
    return leaves


def _fitting(new: Any, leaf: Any, cast: bool) -> tuple[Any] | str:
    """Returns the value to store, in a tuple, if it fits a leaf of the Module; otherwise the text for the report."""
    if isinstance(new, Container) and isinstance(leaf, Container) and type(new) is not type(leaf):
        return short(new)
    new_leaves, new_tree = jax.tree.flatten(_raw(new))
    old_leaves, old_tree = jax.tree.flatten(_raw(leaf))
    if new_tree != old_tree:
        return short(new)
    new_leaves = [_as_array(value) for value in new_leaves]
    for value, old in zip(new_leaves, old_leaves, strict=True):
        have, want = describe(value), describe(old, type(leaf).__name__)
        if have is None or want is None or isinstance(value, jax.ShapeDtypeStruct):
            return short(new)
        reason = misfit(have, want, "any" if cast else "same", on_host=Expected.of(old).on_host)
        if reason is not None:
            return f"{short(new)}{reason}"
    return (jax.tree.unflatten(old_tree, map(converted, new_leaves, old_leaves)),)  # `update` restores the order


def _raw(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Container) else leaf


def _as_array(value: Any) -> Any:
    """Returns an array of another library, such as a tensor of PyTorch, as a NumPy array."""
    known = (jax.Array, jax.core.Tracer, jax.ShapeDtypeStruct, np.ndarray, np.generic)
    return np.asarray(value) if hasattr(value, "__array__") and not isinstance(value, known) else value


def _same_value(a: Any, b: Any) -> bool:
    a, b = _raw(a), _raw(b)
    if a is b or any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((a, b))):
        return a is b
    return values_equal(a, b)
