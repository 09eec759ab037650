"""Modules that a function reaches without taking them as arguments; to `nnx.jit` they would be constants."""

import functools
import types
from typing import Any

from nnx.core.captures import find_captured_module
from nnx.core.module_info import ModuleBase
from nnx.transforms.global_names import global_chains


def captured_modules(fun: Any) -> list[str]:
    """Returns the Modules a function reaches through its closure or by a global name, each with its place."""
    if not isinstance(fun, types.FunctionType):
        captured = find_captured_module(fun) if isinstance(fun, (functools.partial, types.MethodType)) else None
        return [f"{type(captured[0]).__name__} ({captured[1]})"] if captured is not None else []
    found = []
    for name, cell in zip(fun.__code__.co_freevars, fun.__closure__ or ()):
        try:
            captured = find_captured_module(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
        if captured is not None:
            found.append(f"{name!r} ({type(captured[0]).__name__}) in its closure")
    for name in dict.fromkeys(chain[0] for chain in global_chains(fun.__code__)):
        value = fun.__globals__.get(name)
        if isinstance(value, ModuleBase):
            found.append(f"the global {name!r} ({type(value).__name__})")
    return found
