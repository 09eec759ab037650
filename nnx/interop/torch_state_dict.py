"""`load_torch_state_dict`: the weights of a PyTorch model, in the Module that was written after it."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nnx.core.module.info import info_of, values_of
from nnx.core.module.kinds import SUBMODULE
from nnx.core.module.module import Module
from nnx.core.repr import short
from nnx.core.state.paths import join, listing, path_order
from nnx.core.structure.flat import Flat, flat_of
from nnx.core.variables.variables import BatchStat, Container, Param
from nnx.interop.torch_layers import Conversion, Mismatch, Rule, dotted, layer_rule, unchanged
from nnx.interop.torch_recurrent import recurrent_rule
from nnx.storage.entry import Entry
from nnx.storage.errors import LoadReport
from nnx.storage.matching import TWO_VALUES, Texts, match, misfit

NOT_A_MODULE = "load_torch_state_dict takes the Module to load into first, got {got}."
NOT_A_STATE_DICT = """load_torch_state_dict takes a state dict, i.e. a mapping from names such as "encoder.weight" to \
tensors or arrays; got {got}."""
NOT_AN_ARRAY = "load_torch_state_dict: {name!r} is not a tensor or an array, but {got}."
DOES_NOT_FIT = """load_torch_state_dict: the state dict does not fit this {model}, and nothing was changed.
{differences}{sought}{prefix}
Rename the entries, or change the model; strict=False loads what fits."""
SOUGHT = "\n- names that were looked for and not found: {names}"
PREFIX = "\n- all names begin with {prefix!r}, which a wrapper of PyTorch adds: remove it from the names"

_WRAPPERS = ("module.", "_orig_mod.")


def load_torch_state_dict(model: Module, mapping: Mapping[str, Any], *, strict: bool = True) -> LoadReport:
    """Loads the weights of a PyTorch model into a Module, in place.

    The submodules of the Module have the names of those in PyTorch: `encoder.layers.0.weight` belongs to the layer at
    `encoder/layers/0`. What the weights of a layer are called and how they are laid out follows from the type of the
    layer. `Linear`, `LinearGeneral`, `Conv`, `ConvTranspose`, the norms with their running statistics, `Embed`,
    `LearnedPositionEmbed`, `MultiHeadAttention` with PyTorch's packed projection, `PReLU`, and the recurrent cells are
    known. An `RNN`, a `Bidirectional`, or a `Sequence` of these takes the levels and directions of one `LSTM` or `GRU`.
    Variables of your own Modules are loaded as they are, by name.

    Only weights are loaded. The settings of a layer are those it was built with, and some defaults of PyTorch differ:
    `LayerNorm(..., epsilon=1e-5)`, `Conv(..., padding=0)`, `BatchNorm(..., momentum=0.9)`, and
    `GRUCell(..., hidden_bias=True)` are PyTorch's.

    Args:
        model: the Module to load into. Its arrays keep their dtypes and shardings.
        mapping: the state dict: tensors, which may be on any device, or arrays by name.
        strict: whether all parameters and batch statistics of the Module must be in the mapping, and all entries of
            the mapping in the Module. If False, what fits is loaded.

    Returns:
        A report of what did not fit; it is empty if `strict`.

    Raises:
        TypeError: the model is not a Module, or the mapping not a mapping of arrays by name.
        ValueError: the mapping does not fit. The message lists everything missing, unexpected and mismatched, and
            nothing was changed.

    >>> model = nnx.Sequence([nnx.Linear(3, 2, ctx=nnx.context(0)), nnx.LayerNorm(2)])
    >>> weights = {"0.weight": np.ones((2, 3)), "0.bias": np.zeros(2), "1.weight": np.ones(2), "1.bias": np.zeros(2)}
    >>> bool(nnx.load_torch_state_dict(model, weights))  # nothing to report
    False
    >>> model[0].kernel.shape
    (3, 2)
    """
    if not isinstance(model, Module):
        raise TypeError(NOT_A_MODULE.format(got=short(model)))
    if not isinstance(mapping, Mapping) or not all(isinstance(name, str) for name in mapping):
        raise TypeError(NOT_A_STATE_DICT.format(got=short(mapping)))
    flat = flat_of(model)
    leaves: dict[str, Any] = dict(Module.get_state(model).items())
    report = LoadReport(source="state dict")
    conversions, ignored = _all_conversions(model, flat, leaves, mapping)
    values, sought = _matched(conversions, flat, leaves, mapping, report)
    known = {name for conversion in conversions for name in conversion.tensors} | ignored
    report.unexpected = [name for name in mapping if name not in known]
    if report and strict:
        raise ValueError(_does_not_fit(model, report, sought, mapping))
    Module.load_state(model, values, strict=False, cast=True)
    return report


def _all_conversions(
    model: Module, flat: Flat, leaves: Any, mapping: Mapping[str, Any]
) -> tuple[list[Conversion], set[str]]:
    """Returns the conversions of all layers and of the other variables, and the names to ignore."""
    conversions: list[Conversion] = []
    ignored: set[str] = set()
    for path, rule in _rules(model, mapping):
        conversions += [conversion.below(path) for conversion in rule.conversions]
        ignored |= {dotted(path, name) for name in rule.ignored}
    covered = {_canonical(flat, conversion.path) for conversion in conversions}
    used = {name for conversion in conversions for name in conversion.tensors}
    for path, leaf in leaves.items():
        name = path.replace("/", ".")
        if path not in covered and (isinstance(leaf, (Param, BatchStat)) or name in mapping):
            conversions += unchanged(path, name, _value(leaf))
    for name in mapping:  # the other names of shared variables
        path = name.replace(".", "/")
        cell = None if name in used or path in leaves else flat.key.find(path)
        if cell is not None and flat.key.layout.paths[cell] not in covered:
            conversions += unchanged(path, name, _value(leaves[flat.key.layout.paths[cell]]))
    return conversions, ignored


def _matched(
    conversions: list[Conversion], flat: Flat, leaves: Mapping[str, Any], mapping: Mapping[str, Any], report: LoadReport
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns the arrays by canonical path, and the names that were looked for in vain; adds misfits to the report."""
    values: dict[str, np.ndarray] = {}
    sought: list[str] = []
    names: dict[str, list[str]] = {}  # the paths under which each variable was found, by its canonical path
    by_path = {conversion.path: conversion for conversion in conversions}
    for conversion in conversions:
        path = _canonical(flat, conversion.path)
        found = names.setdefault(path, [])
        lacking = [name for name in conversion.tensors if name not in mapping]
        if not lacking:
            found.append(conversion.path)
        elif path == conversion.path:  # a second name of something shared may be left out
            sought += lacking

    def misfit_at(path: str, name: str) -> Texts | None:
        try:
            values[path] = _converted(by_path[name], leaves[path], mapping)
        except Mismatch as problem:
            return problem.have, problem.want
        return None

    def conflict(path: str, name: str, other: str) -> Texts | None:
        try:
            value = _converted(by_path[other], leaves[path], mapping)
        except Mismatch as problem:
            return problem.have, problem.want
        if path not in values or np.array_equal(values[path], value):
            return None
        return TWO_VALUES.format(have=listing(by_path[other].tensors), other=name), short(value)

    match(names, (), misfit_at, report, conflict)
    report.missing.sort(key=path_order)
    return values, sought


def _rules(model: Module, mapping: Mapping[str, Any]) -> Iterator[tuple[str, Rule]]:
    """Yields the paths and rules of all layers, under every path of those that are shared."""
    stack: list[tuple[str, Any, tuple[int, ...]]] = [("", model, ())]
    while stack:
        path, module, above = stack.pop()
        if id(module) in above:  # a cycle
            continue

        def has(name: str, path: str = path) -> bool:
            return dotted(path, name) in mapping

        rule = recurrent_rule(module, has) or layer_rule(module, has)
        if rule is not None:
            yield path, rule
        info, values = info_of(module), values_of(module)
        for name in reversed(info.sorted_names()):  # so that the first one is on top
            if info.kinds[name] is SUBMODULE and (rule is None or name not in rule.submodules):
                stack.append((join(path, name), values[name], (*above, id(module))))


def _canonical(flat: Flat, path: str) -> str:
    cell = flat.key.find(path)
    assert cell is not None, path
    return flat.key.layout.paths[cell]


def _value(leaf: Any) -> Any:
    """Returns the array of a leaf of a State; None if it holds a pytree."""
    value = leaf.value if isinstance(leaf, Container) else leaf
    return (
        value
        if hasattr(value, "shape")
        else np.asarray(value)
        if isinstance(value, (bool, int, float, complex))
        else None
    )


def _converted(conversion: Conversion, leaf: Any, mapping: Mapping[str, Any]) -> np.ndarray:
    """Returns the array of a conversion, after checking the tensors that it is made from."""
    tensors = {name: _as_numpy(name, mapping[name]) for name in conversion.tensors}
    dtype = str(_value(leaf).dtype)
    for name, tensor in tensors.items():
        have = Entry("array", str(tensor.dtype), tensor.shape)
        reason = misfit(have, Entry("array", dtype, tuple(conversion.tensors[name])), "sort")
        if reason is not None:
            shown = f"{have.dtype}{list(have.shape)} ({name!r}){reason}"
            raise Mismatch(shown, f"{dtype}{list(conversion.tensors[name])}, in the layout of PyTorch,")
    return conversion.convert(*tensors.values())


def _as_numpy(name: str, value: Any) -> np.ndarray:
    """Returns a tensor or an array as a NumPy array, without importing PyTorch."""
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        value = value.detach().cpu()
        if "bfloat16" in str(value.dtype):  # a dtype that tensors cannot hand over to NumPy
            value = value.float()
    array = np.asarray(value)
    if array.dtype.kind in "OUSM":
        raise TypeError(NOT_AN_ARRAY.format(name=name, got=short(value)))
    return array


def _does_not_fit(model: Module, report: LoadReport, sought: list[str], mapping: Mapping[str, Any]) -> str:
    prefix = next((w for w in _WRAPPERS if mapping and all(name.startswith(w) for name in mapping)), None)
    return DOES_NOT_FIT.format(
        model=type(model).__name__,
        differences=report,
        sought=SOUGHT.format(names=listing(dict.fromkeys(sought))) if sought else "",
        prefix=PREFIX.format(prefix=prefix) if prefix else "",
    )
