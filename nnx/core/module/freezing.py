"""Freezing: marking Variables as not trained, by the metadata entry `frozen`.

The mark is part of a Variable's metadata, so it is in every State, survives copies and `partition`/`merge`, and a
compiled function notices when it changes. `nnx.grad`, `nnx.Optimizer` and `nnx.summary` ask `is_frozen`.
"""

from collections.abc import Callable
from typing import Any

from nnx.core.module.attributes import set_spec, variable_of
from nnx.core.module.info import ModuleBase, info_of
from nnx.core.module.kinds import is_variable
from nnx.core.state.filters import Matcher, PathMatches, describe, to_predicate
from nnx.core.state.paths import join, listing
from nnx.core.state.selectors import to_module_predicate
from nnx.core.state.updates import check_levels
from nnx.core.structure.walk import named_modules, number_modules
from nnx.core.variables.collection_names import known_collections
from nnx.core.variables.refs import Ref
from nnx.core.variables.variables import BatchStat, Cache, Container, Intermediate, Loss, Spec, spec_of

NOTHING_TO_FREEZE = """{name}: where={where} matches no Variable in this {model}, and no Module that has one. Its \
Modules are: {modules}; for the Variables, see `model.get_state()`."""

_NEVER_TRAINED = (BatchStat, Cache, Intermediate, Loss)

Predicate = Callable[[str, Any], bool]


def is_frozen(leaf: Any) -> bool:
    """Whether a leaf of a State is a Variable that is marked as not trained."""
    return isinstance(leaf, Container) and bool(spec_of(leaf).metadata.get("frozen", False))


def set_frozen(model: Any, where: Any, frozen: bool, name: str) -> None:
    """Marks the selected Variables of a model as frozen, or removes the mark; `name` is the caller, for errors.

    Raises:
        ValueError: `where` selects nothing.
    """
    of_modules, of_variables = _predicates(where, name)
    modules = dict(named_modules(model))
    inside = {
        id(inner)
        for path, module in modules.items()
        if of_modules(path, module)
        for inner in number_modules((module,)).modules
    }
    chosen: list[tuple[Any, str, Spec]] = []
    for path, module in modules.items():
        for attribute, kind in info_of(module).kinds.items():
            spec = spec_of(kind) if type(kind) is Ref else kind
            if not is_variable(spec):
                continue
            below = id(module) in inside and not issubclass(spec.type, _NEVER_TRAINED)
            if below or of_variables(join(path, attribute), variable_of(module, attribute)):
                chosen.append((module, attribute, spec))
    if not chosen:
        text = {"where": describe(where), "model": type(model).__name__, "modules": listing(modules)}
        raise ValueError(NOTHING_TO_FREEZE.format(name=name, **text))
    check_levels([module for module, _, _ in chosen], name)
    for module, attribute, spec in chosen:
        rest = {key: value for key, value in spec.metadata.items() if key != "frozen"}
        new = Spec.of(spec.type, {**rest, "frozen": True} if frozen else rest)
        if new is not spec:
            set_spec(module, attribute, new)


def _predicates(where: Any, name: str) -> tuple[Predicate, Predicate]:
    """Returns `where` as two predicates: one on Modules, one on Variables."""
    if isinstance(where, (tuple, list)):
        parts = [_predicates(part, name) for part in where]
        return (
            lambda path, module: any(of_modules(path, module) for of_modules, _ in parts),
            lambda path, variable: any(of_variables(path, variable) for _, of_variables in parts),
        )
    if isinstance(where, str) and where not in known_collections():
        return PathMatches(where), PathMatches(where)
    is_filter = isinstance(where, (str, Matcher)) or (isinstance(where, type) and not issubclass(where, ModuleBase))
    if is_filter or where is None:
        return to_predicate(None), to_predicate(where)
    if where is ... or isinstance(where, type):
        return to_module_predicate(where, name), to_predicate(None)
    predicate = to_module_predicate(where, name)  # a function
    return predicate, predicate
