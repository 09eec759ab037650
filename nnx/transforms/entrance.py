"""The fast path into a jitted function: a call that repeats an earlier one reuses what was remembered of it.

A *plan* is all that a repeated call needs: the entry, the cells to gather and those to write. It is stored in the flat
form of the Modules, which ends with any change of their structure, and refers to the entry weakly, so that neither
keeps the other alive. A *frame* records the positions of Modules, Contexts and data in a call whose arguments are
single leaves. Calls that do not repeat take the general path, `Jit.call`.
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
from nnx.transforms.lift import CONTEXT, DATA, MODULE, Call, data_types, sort_of


class NeedsCaller(Exception):
    """A function called from a plan has to be traced (for new shapes, say), which only the general path can do."""


class Plan(NamedTuple):
    """What a repeated call needs, after what tells whether it is one."""

    token: object  # of the function
    where: Any  # a frame, or the number of data after the one Module
    rules: Any  # the logical axis rules under which it was made
    entry: Any  # a weak reference
    dicts: list[dict[str, Any]]
    names: list[str]
    level: Any
    into: list[dict[str, Any]]  # where the values that changed go
    under: list[str]
    contexts: tuple[Any, ...]


class Frame:
    """Where Modules, Contexts and data stand among the arguments; data in the order of the pytree of the call."""

    __slots__ = ("modules", "contexts", "data")

    def __init__(self, sorts: list[int], in_order: list[int]):
        self.modules: list[int] = [i for i in in_order if sorts[i] == MODULE]
        self.contexts: list[int] = [i for i in in_order if sorts[i] == CONTEXT]
        self.data: list[int] = [i for i in in_order if sorts[i] == DATA]


class Memory:
    """The plans of one jitted function."""

    def __init__(self, knows_first: bool) -> None:
        self.knows_first = knows_first  # whether calls of a Module and then data go without a frame
        self.token: object = object()
        self.frames: dict[tuple[Any, ...], Frame] = {}
        self.flats: WeakRegistry = WeakRegistry()  # the flat forms that have plans of it

    def clear(self) -> None:
        """Forgets every plan."""
        for flat in self.flats.take_all():
            flat.last_plan = None
            for key in [key for key in list(flat.plans) if key[0] is self.token]:
                flat.plans.pop(key, None)

    def keep(self, call: Call, entry: Any, result: tuple[Any, ...], args: tuple[Any, ...], kwargs: Any) -> None:
        """Remembers a call that has just been made, if the next one like it can be made from a plan."""
        flat, effects = call.flat, entry.effects_of(result)
        if flat is None or flat.level is None or flat.sown or not effects.simple or len(result) != 2:
            return
        if any(i in flat.refs for i in effects.changed):
            return
        values = (*args, *kwargs.values())
        sorts = [sort_of(value) for value in values]
        if not all(sort != DATA or type(value) in data_types for sort, value in zip(sorts, values)):
            return  # an argument that is a tree
        if len(call.roots) != sorts.count(MODULE) or len(call.contexts) != sorts.count(CONTEXT):
            return  # a Module inside of an argument, or one that was passed twice
        if self.knows_first and not kwargs and sorts[0] == MODULE and set(sorts[1:]) <= {DATA}:
            where: Any = len(args) - 1
        else:
            by_name = sorted(range(len(kwargs)), key=list(kwargs).__getitem__)
            frame = Frame(sorts, [*range(len(args)), *(len(args) + i for i in by_name)])
            where = self.frames.setdefault((len(args), *map(type, values), *kwargs), frame)
        key = (self.token, where, current_rules())
        into, under = [flat.dicts[i] for i in effects.changed], [flat.names[i] for i in effects.changed]
        weak_flat = weakref.ref(flat)

        def forget(_: Any) -> None:
            flat = weak_flat()
            if flat is not None:
                flat.plans.pop(key, None)
                flat.last_plan = None

        self.flats.add(flat)
        weak_entry = weakref.ref(entry, forget)
        gather = (flat.dicts, flat.names, flat.level)
        flat.plans[key] = flat.last_plan = Plan(*key, weak_entry, *gather, into, under, call.signature.contexts)


def entrance(me: Any) -> Callable[..., Any]:
    """The function that the user of a `Jit` calls. Plain closures, and little in them: this is what a step adds."""
    structure, nothing, leaf_types = STRUCTURE, object(), data_types
    token, frames, bound = me.memory.token, me.memory.frames, me.bound

    def general(*args: Any, **kwargs: Any) -> Any:
        return me.call(args, kwargs)

    def lifted(first: Any = nothing, /, *rest: Any, **kwargs: Any) -> Any:
        if not kwargs and isinstance(first, ModuleBase):
            for arg in rest:
                if type(arg) not in leaf_types:
                    break
            else:  # the commonest call: a Module, then data
                flat = cached_flat(first)
                if flat is not None and (
                    flat.ready is structure.stamp
                    or (flat.watched is structure.stamp and flat.unchanged())
                    or flat.is_ready()
                ):
                    plan = flat.last_plan
                    if plan is None or plan[0] is not token or plan[1] != len(rest) or plan[2] is not current_rules():
                        plan = flat.last_plan = flat.plans.get((token, len(rest), current_rules()))
                    if plan is not None:
                        _, _, _, entry, dicts, names, level, into, under, _ = plan
                        entry = entry()
                        if entry is None:  # another thread has just cleared the cache
                            return me.call((first, *rest), kwargs)
                        try:
                            if entry.donation is None:
                                result = entry.jitted([*map(getitem, dicts, names)], rest)
                            elif level is current_level():
                                result = entry.donation.run([*map(getitem, dicts, names)], rest, ())
                            else:
                                return me.call((first, *rest), kwargs)
                        except NeedsCaller:
                            return me.call((first, *rest), kwargs)
                        if len(result) == 2 and level is current_level():
                            any(map(setitem, into, under, result[0]))  # one C call: an interrupt cannot tear it
                            return result[1]
                        return me.finish(entry, result, (first, *rest), kwargs)
        return framed(*(() if first is nothing else (first, *rest)), **kwargs)

    def framed(*args: Any, **kwargs: Any) -> Any:
        values = (*bound, *args, *kwargs.values())
        frame = frames.get((len(values) - len(kwargs), *map(type, values), *kwargs))
        if frame is None:
            return me.call(args, kwargs)
        flat = joint_flat_if_cached([values[i] for i in frame.modules])
        if flat is None or not (flat.ready is structure.stamp or flat.is_ready()):
            return me.call(args, kwargs)
        plan = flat.last_plan
        if plan is None or plan[0] is not token or plan[1] is not frame or plan[2] is not current_rules():
            plan = flat.last_plan = flat.plans.get((token, frame, current_rules()))
        contexts = [values[i] for i in frame.contexts]
        if plan is None or (contexts and not _are_like(contexts, plan.contexts)):
            return me.call(args, kwargs)
        _, _, _, entry, dicts, names, level, into, under, _ = plan
        entry = entry()
        if entry is None or (entry.donation is not None and level is not current_level()):
            return me.call(args, kwargs)
        cells, data = [*map(getitem, dicts, names)], tuple([values[i] for i in frame.data])
        forks = tuple([ctx.fork_data() for ctx in contexts])
        try:
            if entry.donation is not None:
                result = entry.donation.run(cells, data, forks)
            elif forks:
                result = entry.jitted(cells, data, forks)
            else:
                result = entry.jitted(cells, data)
        except NeedsCaller:
            for ctx in contexts:
                ctx.undo_fork()  # the general path forks again, and must draw the same keys
            return me.call(args, kwargs)
        if len(result) == 2 and level is current_level():
            any(map(setitem, into, under, result[0]))
            return result[1]
        return me.finish(entry, result, args, kwargs)

    if not me.repeats:
        return general
    return lifted if me.memory.knows_first else framed


def _are_like(contexts: list[Any], definitions: tuple[Any, ...]) -> bool:
    if len(contexts) > 1 and len(set(map(id, contexts))) < len(contexts):
        return False  # one Context twice is one Context inside
    return tuple([ctx.definition() for ctx in contexts]) == definitions
