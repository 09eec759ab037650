"""Module selectors: short descriptions of some of the submodules of a model, for arguments called `where`.

A selector is a Module type, a glob over paths (`"blocks/*/attention"`), a function `f(path, module) -> bool`, a list
of selectors, or `...` for all Modules. The path of the model itself is `""`.
"""

from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, cast

from nnx.core.module.info import ModuleBase
from nnx.core.repr import short
from nnx.core.state.filters import PathMatches, describe, everything
from nnx.core.state.paths import listing
from nnx.core.structure.walk import named_modules

ModuleSelector = type | str | EllipsisType | Callable[[str, Any], bool] | Sequence["ModuleSelector"]

NOT_A_SELECTOR = """{name}: {value} does not select Modules. `where` is a Module type (nnx.Linear), a glob over paths \
("blocks/*/attention"), a function f(path, module) -> bool, a tuple or list of these, or `...` for all Modules."""
NOTHING_SELECTED = "{name}: where={where} selects nothing in this {model}. Its Modules are: {paths}."


def to_module_predicate(where: Any, name: str) -> Callable[[str, Any], bool]:
    """Returns the predicate that a selector describes; `name` is the caller, for the error.

    Raises:
        TypeError: `where` is not a selector.
    """
    if where is ...:
        return everything
    if isinstance(where, str):
        return PathMatches(where)
    if isinstance(where, type) and issubclass(where, ModuleBase):
        return lambda path, module: isinstance(module, where)
    if isinstance(where, (tuple, list)):
        predicates = [to_module_predicate(part, name) for part in where]
        return lambda path, module: any(predicate(path, module) for predicate in predicates)
    if callable(where) and not isinstance(where, (type, ModuleBase)):
        return cast(Callable[[str, Any], bool], where)
    raise TypeError(NOT_A_SELECTOR.format(name=name, value=short(where)))


def select_modules(model: Any, where: Any, name: str) -> dict[str, Any]:
    """Returns the distinct Modules of a model that a selector picks, by canonical path.

    Raises:
        TypeError: `where` is not a selector.
        ValueError: it picks nothing.
    """
    matches = to_module_predicate(where, name)
    modules = dict(named_modules(model))
    selected = {path: module for path, module in modules.items() if matches(path, module)}
    if not selected:
        text = {"where": describe(where), "model": type(model).__name__, "paths": listing(modules)}
        raise ValueError(NOTHING_SELECTED.format(name=name, **text))
    return selected
