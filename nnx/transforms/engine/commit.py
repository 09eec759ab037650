"""The end of a call: what changed is written into the caller's Modules in one step, or discarded.

With `stateful=False`, changes are discarded: the caller's Modules are left alone, and Modules in the output are built
from copies.
"""

from collections.abc import Mapping, Sequence
from operator import setitem
from typing import Any

import jax

from nnx.core.errors import MUTATE_AT_OTHER_LEVEL, TraceContextError
from nnx.core.module.info import info_of
from nnx.core.state.updates import check_level, note_mutable_trees
from nnx.core.structure.flat import Flat
from nnx.core.trace import current_level
from nnx.transforms.engine.call import Call, cell_paths
from nnx.transforms.engine.enter import enter
from nnx.transforms.engine.observed import keep_observations
from nnx.transforms.engine.outcome import Effects, Outcome, Returned


def finish(call: Call, outcome: Outcome, stateful: bool) -> Any:
    """Ends a call: commits the outcome, or discards it if `stateful` is off; returns the output."""
    return commit(call, outcome) if stateful else discard(call, outcome)


def commit(call: Call, outcome: Outcome, taking: Mapping[int, Any] | None = None) -> Any:
    """Writes what changed into the caller's Modules and returns the output, with their Modules in it.

    Args:
        call: the split call.
        outcome: the result of running it.
        taking: Modules, by number, that take the place of new ones; see `Rewrite.apply`.

    Raises:
        TraceContextError: a Module that changed belongs to another trace level. Nothing is written in that case.
    """
    effects = outcome.effects
    if call.flat is None and effects.rewrite is None:
        return outcome.out
    modules: list[Any] = []
    if effects.rewrite is not None:
        mutables = call.flat.mutables if call.flat is not None else []
        values = effects.tie(outcome.values)
        modules = effects.rewrite.apply(_modules(call), call.signature.key, values, mutables, taking)
    elif effects.changed:
        write(call.flat, effects, effects.tie(outcome.values))  # type: ignore[arg-type]
    if effects.sown:
        _mark_sown(modules or _modules(call), effects.sown)
    if effects.returns_modules:
        return fill_returned(outcome.out, modules or _modules(call))
    return outcome.out


def write(flat: Flat, effects: Effects, values: Sequence[Any]) -> None:
    """Writes changed values into their cells in one step, which an interrupt cannot split."""
    if flat.level is not current_level():
        check_writable(flat, effects.changed)
    note_mutable_trees(flat, effects.changed, values)
    if flat.refs and not flat.refs.keys().isdisjoint(effects.changed):
        _write_with_refs(flat, effects.changed, values)
        return
    writer = flat.writers.get(effects.changed)
    if writer is None:
        writer = flat.writers[effects.changed] = _writer(flat, effects.changed)
    # `setitem` returns None, so `any` exhausts the iterator, all inside one C call. Python delivers signals only
    # between bytecodes, so Ctrl-C arrives either before every write or after every write, never in between.
    any(map(setitem, *writer, values))


def _writer(flat: Flat, changed: Sequence[int]) -> tuple[list[Any], list[str]]:
    return [flat.dicts[i] for i in changed], [flat.names[i] for i in changed]


def _write_with_refs(flat: Flat, changed: Sequence[int], values: Sequence[Any]) -> None:
    """Writes values to all owners of their cells; nothing is cached, since owners outside the graph come and go."""
    dicts, names, repeated = [], [], []
    for i, value in zip(changed, values):
        ref = flat.refs.get(i)
        for values_of, name in [(flat.dicts[i], flat.names[i])] if ref is None else ref.targets():
            dicts.append(values_of)
            names.append(name)
            repeated.append(value)
    any(map(setitem, dicts, names, repeated))


def check_writable(flat: Flat, cells: Sequence[int]) -> None:
    """Raises TraceContextError if one of the cells belongs to a Module of another trace level."""
    for i in cells:
        at, name, _ = flat.key.cells[i]
        module = flat.modules[at]()
        if module is not None:
            check_level(module, f"writing {cell_paths(flat.key)[i]!r} back")


def _modules(call: Call) -> list[Any]:
    if call.flat is None:
        return []
    modules = [weak() for weak in call.flat.modules]
    if any(module is None for module in modules):
        raise TraceContextError(MUTATE_AT_OTHER_LEVEL.format(action="writing back", owner="a Module that is gone"))
    return modules


def _mark_sown(modules: Sequence[Any], sown: Any) -> None:
    for index, names in sown:
        info_of(modules[index]).mark_sown(*names)


def fill_returned(out: Any, modules: Sequence[Any]) -> Any:
    """Returns the output with Modules in place of their numbers."""
    return jax.tree.map(
        lambda x: modules[x.index] if isinstance(x, Returned) else x, out, is_leaf=lambda x: isinstance(x, Returned)
    )


def discard(call: Call, outcome: Outcome) -> Any:
    """Returns the output without any effect on the caller's Modules (`stateful=False`); Modules in it are new.

    They are built the way the body's own were, so they share only immutable values with the caller's.
    """
    effects = outcome.effects
    if not effects.survives_discard:
        return outcome.out
    signature, values = call.signature, effects.tie(outcome.values)
    keep_observations(lambda: _modules(call), effects.rewrite, values)
    if not effects.returns_modules:
        return outcome.out
    copies = enter(signature.key, call.statics, call.cells(), signature.ties)
    modules = copies.graph.modules
    if effects.rewrite is not None:
        modules = effects.rewrite.apply(modules, signature.key, values, copies.graph.mutables)
    else:
        for cell, value in zip(effects.changed, values):
            copies.write(cell, value)
    return fill_returned(outcome.out, modules)
