"""Copies of Modules, as `copy.copy` and `copy.deepcopy` make them."""

import copy
import types
from typing import Any

from nnx.core.module.info import class_of, info_of, is_view, new_module, values_of
from nnx.core.module.kinds import SUBMODULE, Absent
from nnx.core.structure.walk import number_modules
from nnx.core.variables.refs import Ref


def shallow_copy(module: Any) -> Any:
    """Returns a new Module with the same attributes; attributes on a Ref stay tied."""
    copied, values = new_module(class_of(module), {}), values_of(module)
    for name, kind in info_of(module).kinds.items():
        if type(kind) is Ref:
            kind.attach(copied, name)
        info_of(copied).kinds[name] = kind
        if name in values:
            value = values[name]
            own_method = isinstance(value, types.MethodType) and value.__self__ is module
            copied.__dict__[name] = types.MethodType(value.__func__, copied) if own_method else value
    return copied


def deep_copy(root: Any, memo: dict[int, Any]) -> Any:
    """Copies the whole graph at once, so that depth does not matter; `memo` preserves sharing with other objects."""
    modules = number_modules((root,)).modules
    new = [module for module in modules if id(module) not in memo and not is_view(module)]
    for module in new:
        memo[id(module)] = new_module(type(module), {})
    for module in new:
        copied = memo[id(module)]
        for name, kind in info_of(module).kinds.items():
            value = module.__dict__.get(name)
            if kind is SUBMODULE:
                value = copy.deepcopy(value, memo) if is_view(value) else memo[id(value)]
            elif type(kind) is Ref:
                kind = copy.deepcopy(kind, memo)
                kind.attach(copied, name)
                value = kind.__dict__["value"]
            else:
                value = copy.deepcopy(value, memo)
            info_of(copied).kinds[name] = kind
            if type(kind) is not Absent:
                copied.__dict__[name] = value
    return memo[id(root)]
