"""Call plans: how to repeat a call of a jitted function without splitting it again.

A plan is stored in the flat form of the Modules that it is for. Every change of their structure ends the flat form, and
its plans with it, so a plan is never out of date. It refers to the compiled function weakly, so that neither keeps the
other alive.
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from operator import itemgetter, setitem
from typing import Any, NamedTuple

from nnx.core.caches import WeakRegistry
from nnx.core.module.info import cached_flat
from nnx.core.structure.flat import Flat, flat_that_came_back, joint_flat_if_cached
from nnx.sharding.rules import current_rules
from nnx.transforms.engine.call import DATA_MARK, Call, is_data, is_module
from nnx.transforms.engine.outcome import Effects
from nnx.transforms.engine.selected_arguments import Selection
from nnx.transforms.jit.argument_forms import ArgumentForm
from nnx.transforms.jit.compiled import Compiled


@dataclasses.dataclass(slots=True, eq=False)
class CallPlan:
    """How to repeat a call. The first three fields say which call: together they are the plan's key in a flat form.

    A class with slots, because reading a slot is the cheapest of all lookups: a NamedTuple costs 0.1 µs more per call.
    """

    token: object  # identifies the jitted function
    arguments: Any  # an ArgumentForm, what it reads, or an int n for the most common call: one Module, then n data
    rules: Any  # the logical axis rules in force
    compiled: Any  # a weak reference to the Compiled
    captured: Any  # the Captured of the function; None if it captures nothing
    input_dicts: list[dict[str, Any]]  # cell i, captured ones last, is `input_dicts[i][input_names[i]]`
    input_names: list[str]
    level: Any  # the trace level of the Modules
    output_dicts: list[dict[str, Any]]  # where to write what changed, likewise
    output_names: list[str]
    spread: Callable[[Any], Any] | None  # returns one value per place to write, if that is not what came out
    contexts: tuple[Any, ...]  # their definitions
    alone: int | None  # the sum of the reference counts of the cells to donate, if nobody else holds one of them

    def write(self, values: Any) -> None:
        """Writes what changed, in one C call. The fast path has this line written out, to save the frame."""
        values = values if self.spread is None else self.spread(values)
        any(map(setitem, self.output_dicts, self.output_names, values))


class PlanCache:
    """The plans of one jitted function.

    Args:
        static: the static arguments of the function.
        stateful: whether its changes to Modules are written back.
        leads_with_module: whether calls of one Module and then data are recognized without a form.
    """

    def __init__(self, static: Selection, stateful: bool, leads_with_module: bool) -> None:
        self.static = static
        self.stateful = stateful
        self.leads_with_module = leads_with_module
        self.token: object = object()
        self.forms: dict[tuple[Any, ...], ArgumentForm] = {}  # by the types and names of the arguments
        self.flats: WeakRegistry = WeakRegistry()  # the flat forms that hold plans of this function

    def clear(self) -> None:
        """Forgets every plan."""
        self.forms.clear()
        for flat in self.flats.take_all():
            flat.last_plan = None
            for key in [key for key in list(flat.plans) if key[0] is self.token]:
                flat.plans.pop(key, None)

    def find(self, roots: Sequence[Any], arguments: Any) -> tuple[Flat | None, CallPlan | None]:
        """Returns the plan for a call and the flat form that it is stored in, or None for both.

        A plan applies if the flat form of the Modules is valid, and if it was made for this function, these arguments
        and these axis rules.
        """
        flat = cached_flat(roots[0]) if len(roots) == 1 else joint_flat_if_cached(roots)
        if flat is None or not flat.is_valid():
            flat = flat_that_came_back(roots)
            if flat is None:
                return None, None
        plan, rules = flat.last_plan, current_rules()
        if plan is None or plan.token is not self.token or plan.arguments != arguments or plan.rules is not rules:
            plan = flat.plans.get((self.token, arguments, rules))
            if plan is None:
                return None, None
            flat.last_plan = plan
        return flat, plan

    def remember(
        self, call: Call, compiled: Compiled, result: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Makes a plan for the call that was just made, if the next one like it can be made from a plan."""
        flat, donation = call.flat, compiled.donation
        if flat is None or flat.level is None or len(result) != 2 or _repeats_an_object(call):
            return
        if donation is not None and (donation.runs_python or not donation.applies_to(call)):
            return
        writes = _writes(flat, compiled.effects_of(result), self.stateful)
        arguments = None if writes is None else self._recognize(args, kwargs, compiled, writes)
        if writes is None or arguments is None:
            return
        usual = None if donation is None else donation.usual
        key = (self.token, arguments, current_rules())
        self.flats.add(flat)
        flat.plans[key] = flat.last_plan = CallPlan(
            *key,
            compiled=_weak_until_gone(compiled, flat, key),
            captured=compiled.captured if compiled.captured else None,
            input_dicts=[*flat.dicts, *compiled.captured.dicts],
            input_names=[*flat.names, *compiled.captured.names],
            level=flat.level,
            output_dicts=writes.dicts,
            output_names=writes.names,
            spread=writes.spread,
            contexts=call.signature.contexts,
            alone=None if usual is None else sum(usual.counts_alone(flat)),
        )

    def _recognize(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: Compiled, writes: "_Writes"
    ) -> Any | None:
        """Returns what later calls with such arguments are recognized by; None if they cannot be."""
        values = (*args, *kwargs.values())
        form_key = (len(args), *map(type, values), *kwargs)
        form = self.forms.get(form_key) or ArgumentForm(args, kwargs, self.static)
        reading = form.read(values) if form.can_repeat(values, compiled.static_arguments) else None
        if reading is None:
            return None
        self.forms.setdefault(form_key, form)
        is_common = self.leads_with_module and form.is_plain and writes.spread is None and not kwargs
        if is_common and is_module(args[0]) and all(map(is_data, args[1:])):
            return len(args) - 1
        return form if form.is_plain else reading.arguments


def _repeats_an_object(call: Call) -> bool:
    """Whether a Module or a Context was passed twice."""
    marks = call.signature.marks
    modules, contexts = sum(mark > DATA_MARK for mark in marks), sum(mark < DATA_MARK for mark in marks)
    return modules != len(call.roots) or contexts != len(call.contexts)


def _weak_until_gone(compiled: Compiled, flat: Flat, key: Any) -> "weakref.ref[Compiled]":
    """Returns a weak reference to a compiled function; when that is gone, the plan with this key goes as well."""
    weak_flat = weakref.ref(flat)

    def forget(_: Any) -> None:
        flat = weak_flat()
        if flat is not None:
            flat.plans.pop(key, None)
            flat.last_plan = None

    return weakref.ref(compiled, forget)


class _Writes(NamedTuple):
    """Where the values that a function changed are to be written."""

    dicts: list[dict[str, Any]]
    names: list[str]
    spread: Callable[[Any], Any] | None  # see CallPlan


def _writes(flat: Flat, effects: Effects, stateful: bool) -> _Writes | None:
    """Returns where to write what a function changed, or None if that has to be looked up on every call.

    A cell on a Ref is written in several places: to all owners of the Ref. New owners, and owners that leave, end the
    flat form. But a plan must not keep an owner outside the graph alive, so those are looked up each time.
    """
    changed = effects.changed if stateful else ()
    dicts, names, sources = [flat.dicts[i] for i in changed], [flat.names[i] for i in changed], None
    if not flat.refs.keys().isdisjoint(changed):
        inside = {id(module.__dict__) for weak in flat.modules if (module := weak()) is not None}
        dicts, names, sources = [], [], []
        for source, i in enumerate(changed):
            ref = flat.refs.get(i)
            if ref is not None and any(id(owner.__dict__) not in inside for owner, _ in ref.owners()):
                return None
            for values, name in [(flat.dicts[i], flat.names[i])] if ref is None else ref.targets():
                dicts.append(values)
                names.append(name)
                sources.append(source)
    spread = None if sources is None else itemgetter(*sources)  # a Ref is a target itself, so there are at least two
    if not {cell for cell, _ in effects.orders}.isdisjoint(changed):  # dicts to put back in order
        spread = _after(effects.tie, spread)
    return _Writes(dicts, names, spread)


def _after(first: Callable[[Any], Any], then: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    return first if then is None else lambda values: then(first(values))
