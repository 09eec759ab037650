"""The fast path into a jitted function: a call that repeats an earlier one is made from a plan, without being split.

A `CallPlan` holds everything a repeated call needs: the compiled function, the cells to gather and the cells to write.
It is stored in the flat form of the Modules, which ends with any change of their structure. It refers to the compiled
function weakly, so that neither keeps the other alive. `ArgumentPositions` say where the Modules, Contexts and data are
in a call whose arguments are single leaves. Any other call takes the general path, `Jit.call`.
"""

import weakref
from collections.abc import Callable
from operator import getitem, setitem
from typing import Any, NamedTuple

from nnx.core.caches import WeakRegistry
from nnx.core.flat import joint_flat_if_cached
from nnx.core.module_info import ModuleBase, cached_flat
from nnx.core.trace import current_level
from nnx.core.versions import STRUCTURE
from nnx.sharding.rules import current_rules
from nnx.transforms.call import Call, data_types, is_context, is_data, is_module
from nnx.transforms.jit.compiled import NeedsGeneralPath
from nnx.transforms.tracebacks import hide_frames


class ArgumentPositions:
    """The positions of Modules, Contexts and data among the arguments, in the order of the call as a pytree."""

    __slots__ = ("modules", "contexts", "data")

    def __init__(self, values: tuple[Any, ...], in_order: list[int]):
        self.modules: list[int] = [i for i in in_order if is_module(values[i])]
        self.contexts: list[int] = [i for i in in_order if is_context(values[i])]
        self.data: list[int] = [i for i in in_order if is_data(values[i])]


class CallPlan(NamedTuple):
    """How to repeat a call. The first three fields say which call: together they are the plan's key in a flat form."""

    token: object  # identifies the jitted function
    arguments: ArgumentPositions | int  # an int n means the most common call: one Module, then n data arguments
    rules: Any  # the logical axis rules in force
    compiled: Any  # a weak reference to the Compiled
    dicts: list[dict[str, Any]]  # the cells to gather: dicts[i][names[i]]
    names: list[str]
    level: Any  # the trace level of the Modules
    output_dicts: list[dict[str, Any]]  # the cells to write, likewise
    output_names: list[str]
    contexts: tuple[Any, ...]


class PlanCache:
    """The plans of one jitted function.

    The plans themselves are stored in the flat forms of the Modules they are for: a structural change discards the flat
    form, and its plans with it, so no plan is ever out of date.

    Args:
      leads_with_module: whether calls of one Module and then data are recognized without positions.
    """

    def __init__(self, leads_with_module: bool) -> None:
        self.leads_with_module = leads_with_module
        self.token: object = object()
        self.positions: dict[tuple[Any, ...], ArgumentPositions] = {}
        self.flats: WeakRegistry = WeakRegistry()  # the flat forms that hold plans of this function

    def clear(self) -> None:
        """Forgets every plan."""
        for flat in self.flats.take_all():
            flat.last_plan = None
            for key in [key for key in list(flat.plans) if key[0] is self.token]:
                flat.plans.pop(key, None)

    def remember(self, call: Call, compiled: Any, result: tuple[Any, ...], args: tuple[Any, ...], kwargs: Any) -> None:
        """Makes a plan for the call that was just made, if the next one like it can be made from a plan."""
        flat, effects = call.flat, compiled.effects_of(result)
        if flat is None or flat.level is None or flat.sown or not effects.simple or len(result) != 2:
            return
        if any(i in flat.refs for i in effects.changed):
            return  # a Ref's owners outside the call have to be looked up each time
        values = (*args, *kwargs.values())
        if any(is_data(value) and type(value) not in data_types for value in values):
            return  # an argument that is a tree
        if len(call.roots) != sum(map(is_module, values)) or len(call.contexts) != sum(map(is_context, values)):
            return  # a Module inside an argument, or one that was passed twice
        if self.leads_with_module and not kwargs and is_module(args[0]) and all(map(is_data, args[1:])):
            arguments: Any = len(args) - 1
        else:
            by_name = sorted(range(len(kwargs)), key=list(kwargs).__getitem__)
            positions = ArgumentPositions(values, [*range(len(args)), *(len(args) + i for i in by_name)])
            arguments = self.positions.setdefault((len(args), *map(type, values), *kwargs), positions)
        key = (self.token, arguments, current_rules())
        weak_flat = weakref.ref(flat)

        def forget(_: Any) -> None:
            flat = weak_flat()
            if flat is not None:
                flat.plans.pop(key, None)
                flat.last_plan = None

        self.flats.add(flat)
        flat.plans[key] = flat.last_plan = CallPlan(
            *key,
            compiled=weakref.ref(compiled, forget),
            dicts=flat.dicts,
            names=flat.names,
            level=flat.level,
            output_dicts=[flat.dicts[i] for i in effects.changed],
            output_names=[flat.names[i] for i in effects.changed],
            contexts=call.signature.contexts,
        )


def make_function(owner: Any) -> Callable[..., Any]:
    """Makes the function that the user of a `Jit` calls.

    It is a closure over local names and contains its whole fast path: everything here is paid by every training step,
    so there is one Python frame, no attribute lookup that can be avoided, and no helper function.

    A plan is valid if the flat form is (one comparison of stamps, in the steady state), and if it was made for this
    function, these argument positions and these axis rules. A result of length 2 is of the first set of effects (see
    `Compiled`), the one plans are made for.
    """
    structure, nothing, leaf_types = STRUCTURE, object(), data_types
    token, all_positions, bound = owner.plans.token, owner.plans.positions, owner.bound

    def general(*args: Any, **kwargs: Any) -> Any:
        try:
            return owner.call(args, kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    def module_first(first: Any = nothing, /, *rest: Any, **kwargs: Any) -> Any:
        # Entering `try` costs nothing, and it has to be here: a wrapper would be a second frame per call.
        try:
            if not kwargs and isinstance(first, ModuleBase):
                for arg in rest:
                    if type(arg) not in leaf_types:
                        break
                else:  # the most common call: a Module, then data
                    flat = cached_flat(first)
                    if flat is not None and (
                        flat.ready is structure.stamp
                        or (flat.watched is structure.stamp and flat.unchanged())
                        or flat.is_ready()
                    ):
                        plan = flat.last_plan
                        if (
                            plan is None
                            or plan[0] is not token
                            or plan[1] != len(rest)
                            or plan[2] is not current_rules()
                        ):
                            plan = flat.last_plan = flat.plans.get((token, len(rest), current_rules()))
                        if plan is not None:
                            _, _, _, compiled, dicts, names, level, output_dicts, output_names, _ = plan
                            compiled = compiled()
                            try:
                                if compiled is None:  # another thread has just cleared the cache
                                    raise NeedsGeneralPath
                                if compiled.donation is None:
                                    result = compiled.jitted([*map(getitem, dicts, names)], rest)
                                elif level is current_level():
                                    result = compiled.donation.run([*map(getitem, dicts, names)], rest, ())
                                else:
                                    raise NeedsGeneralPath
                            except NeedsGeneralPath:
                                pass  # made below, outside the handler: errors must not be chained to this one
                            else:
                                if len(result) == 2 and level is current_level():
                                    # One C call, so Ctrl-C comes before all writes or after all of them; see effects.
                                    any(map(setitem, output_dicts, output_names, result[0]))
                                    return result[1]
                                return owner.finish_unplanned(compiled, result, (first, *rest), kwargs)
                            return owner.call((first, *rest), kwargs)
            return any_arguments(*(() if first is nothing else (first, *rest)), **kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    def any_arguments(*args: Any, **kwargs: Any) -> Any:
        try:
            values = (*bound, *args, *kwargs.values())
            positions = all_positions.get((len(values) - len(kwargs), *map(type, values), *kwargs))
            if positions is None:
                return owner.call(args, kwargs)
            flat = joint_flat_if_cached([values[i] for i in positions.modules])
            if flat is None or not (
                flat.ready is structure.stamp
                or (flat.watched is structure.stamp and flat.unchanged())
                or flat.is_ready()
            ):
                return owner.call(args, kwargs)
            plan = flat.last_plan
            if plan is None or plan[0] is not token or plan[1] is not positions or plan[2] is not current_rules():
                plan = flat.last_plan = flat.plans.get((token, positions, current_rules()))
            contexts = [values[i] for i in positions.contexts]
            if plan is None or (contexts and not _are_like(contexts, plan.contexts)):
                return owner.call(args, kwargs)
            _, _, _, compiled, dicts, names, level, output_dicts, output_names, _ = plan
            compiled = compiled()
            if compiled is None or (compiled.donation is not None and level is not current_level()):
                return owner.call(args, kwargs)
            cells, data = [*map(getitem, dicts, names)], tuple([values[i] for i in positions.data])
            forks = tuple([ctx.fork_data() for ctx in contexts])
            try:
                if compiled.donation is not None:
                    result = compiled.donation.run(cells, data, forks)
                elif forks:
                    result = compiled.jitted(cells, data, forks)
                else:
                    result = compiled.jitted(cells, data)
            except NeedsGeneralPath:
                for ctx in contexts:
                    ctx.undo_fork()  # the general path forks again, and must draw the same keys
            else:
                if len(result) == 2 and level is current_level():
                    any(map(setitem, output_dicts, output_names, result[0]))
                    return result[1]
                return owner.finish_unplanned(compiled, result, args, kwargs)
            return owner.call(args, kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    if not owner.repeats:
        return general
    return module_first if owner.plans.leads_with_module else any_arguments


def _are_like(contexts: list[Any], definitions: tuple[Any, ...]) -> bool:
    """Whether the Contexts of a call have these definitions, and are distinct as they were in the planned call."""
    if len(contexts) > 1 and len(set(map(id, contexts))) < len(contexts):
        return False  # one Context twice is one Context inside
    return tuple([ctx.definition() for ctx in contexts]) == definitions
