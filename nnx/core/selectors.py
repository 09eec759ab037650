"""Module selectors: short descriptions of some of the Modules of a model, as `where=` takes them.

A filter selects entries of a State; a selector selects Modules. So a string is a glob over paths here, not the name of
a collection.
"""

from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, cast

from nnx.core.filters import OfType, PathMatches, Predicate, everything
from nnx.core.module_info import ModuleBase
from nnx.core.repr import short

Selector = type | str | EllipsisType | Callable[[str, Any], bool] | Sequence["Selector"]
"""What selects Modules: a Module type, a path glob, a function of path and Module, `...`, or several of these."""

NOT_A_SELECTOR = """Invalid Module selector {value}. Write a Module type (nnx.Linear), a path glob \
("blocks/*/attention"), a function f(path, module) -> bool, `...` for all Modules, or a sequence of these."""


def selects(where: Any) -> Predicate:
    """Returns a Module selector as a predicate, `f(path, module)`.

    Raises:
      TypeError: `where` is not a Module selector.
    """
    if where is ...:
        return everything
    if isinstance(where, str):
        return PathMatches(where)
    if isinstance(where, type):
        return OfType(where)
    if isinstance(where, (tuple, list)):
        parts = [selects(part) for part in where]
        return lambda path, module: any(part(path, module) for part in parts)
    if callable(where) and not isinstance(where, ModuleBase):
        return cast(Predicate, where)
    raise TypeError(NOT_A_SELECTOR.format(value=short(where)))
