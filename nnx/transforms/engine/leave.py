"""Leaving a call: finds what a function did to the Modules that it was given, as an `Outcome`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from nnx.core.errors import TraceContextError
from nnx.core.module.info import info_of
from nnx.core.trace import same_level
from nnx.core.variables.ties import is_news, orders_of
from nnx.core.variables.trees import leaf_types
from nnx.transforms.engine.call import Signature, is_context, is_module
from nnx.transforms.engine.enter import Entered, enter_call
from nnx.transforms.engine.outcome import Effects, Outcome, Returned
from nnx.transforms.engine.rewrite import find_rewrite
from nnx.transforms.engine.shared_traces import run_body
from nnx.transforms.engine.view_rules import check_views

CONTEXT_RETURNED = """A Context in the result of {name}: its keys belong to the transform that has just ended. Return \
the keys you need (ctx.make_rng(...)), or use the caller's Context: it has advanced."""

ATTACHED_FROM_OUTSIDE = """Cannot write back a Module from a different trace level: {owner} at {path!r} was made \
outside the function that {name} runs (a closure, perhaps) and was attached to a Module, or returned, inside it.
Pass it to the function as an argument: then it is one and the same Module inside and outside."""


def leave(entered: Entered, out: Any, name: str, *, repeated: bool = False) -> Outcome:
    """Finds what happened to the Modules since they were entered.

    Args:
        entered: the Modules.
        out: what the function returned.
        name: the transform.
        repeated: whether the function runs any number of times, so that an equal static value in the place of another
            one is no change.

    Raises:
        TypeError: there is a Context in the output.
        TraceContextError: a Module of another trace level was attached or returned.
    """
    leaves, treedef = jax.tree.flatten(out)
    if any(map(is_context, leaves)):
        raise TypeError(CONTEXT_RETURNED.format(name=name))
    returned = [leaf for leaf in leaves if is_module(leaf)]
    modules = entered.graph.modules
    known = {id(module): i for i, module in enumerate(modules)}
    sown = tuple(
        (i, tuple(names))
        for i, module in enumerate(modules)
        if info_of(module).sown and (names := info_of(module).sown_names(module.__dict__))
    )
    # A walk is needed only if something noted a change of structure, or a Module comes out that did not go in.
    found = None
    if entered.is_restructured() or any(id(module) not in known for module in returned):
        found = find_rewrite(entered, returned, repeated)
        _check_levels(found.walk, name)
        check_views(entered, found.walk, name)
    if found is not None and found.rewrite is not None:
        known = {id(module): i for i, module in enumerate(found.walk.modules)}
        values = found.values
        parts = {"aliases": found.aliases, "regrouped": found.regrouped}
        effects = Effects((), found.rewrite, sown, bool(returned), **parts, trees=_trees(values), orders=found.orders)
    else:
        current = [entered.value(i) for i in range(len(entered.before))]
        aliases, regrouped = entered.regrouped(range(len(current)), current)
        others = set(regrouped)
        changed = tuple([i for i, value in enumerate(current) if i in others or entered.is_changed(i, value)])
        values = [current[i] for i in changed]
        parts = {"aliases": aliases, "regrouped": tuple(regrouped)}
        orders = orders_of(enumerate(current))
        effects = Effects(changed, None, sown, bool(returned), **parts, trees=_trees(values), orders=orders)
    if returned:
        out = jax.tree.unflatten(treedef, [Returned(known[id(x)], type(x)) if is_module(x) else x for x in leaves])
    return Outcome(values, out, effects)


def _trees(values: Sequence[Any]) -> tuple[int, ...]:
    """Returns the positions of the values that are mutable trees, which flat forms keep track of."""
    if all(map(leaf_types.get, set(map(type, values)))):
        return ()
    return tuple([i for i, value in enumerate(values) if is_news(value, None)])


def _check_levels(walk: Any, name: str) -> None:
    for i, module in enumerate(walk.modules):
        if not same_level(info_of(module).level):
            text = ATTACHED_FROM_OUTSIDE.format(owner=type(module).__name__, path=walk.path(i), name=name)
            raise TraceContextError(text)


def run(
    fun: Callable[..., Any], signature: Signature, statics: Any, cells: Any, data: Any, forks: Any, name: str
) -> Outcome:
    """Runs a function on the Modules, Contexts and data of a split call, inside the current trace."""
    entered, args, kwargs = enter_call(signature, statics, cells, data, signature.contexts_from(forks))
    return leave(entered, run_body(fun, args, kwargs), name)
