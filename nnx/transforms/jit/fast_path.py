"""The fast path into a jitted function: a call that repeats an earlier one is made from a plan, without being split.

A `CallPlan` holds everything a repeated call needs: the compiled function, the cells to gather and the cells to write.
It is stored in the flat form of the Modules, which ends with any change of their structure. It refers to the compiled
function weakly, so that neither keeps the other alive. Any other call takes the general path, `Jit.call`.
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from operator import getitem, itemgetter, setitem
from typing import Any, NamedTuple

import jax

from nnx.core.caches import WeakRegistry
from nnx.core.module.info import ModuleBase, cached_flat
from nnx.core.structure.flat import Flat, flat_that_came_back, joint_flat_if_cached
from nnx.core.structure.versions import STRUCTURE
from nnx.core.trace import current_level
from nnx.sharding.rules import current_rules
from nnx.transforms.engine.call import DATA_MARK, Call, data_types, is_data, is_module
from nnx.transforms.engine.selected_arguments import Selection
from nnx.transforms.engine.tracebacks import hide_frames
from nnx.transforms.jit.argument_forms import ArgumentForm
from nnx.transforms.jit.compiled import Compiled
from nnx.transforms.jit.donation import NeedsGeneralPath
from nnx.transforms.jit.holders import getrefcount


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
    output_dicts: list[dict[str, Any]]  # the places to write, likewise
    output_names: list[str]
    spread: Callable[[Any], Any] | None  # returns one value per place to write, if that is not what came out
    contexts: tuple[Any, ...]
    alone: int | None  # the sum of the reference counts of the cells to donate, if nobody else holds one of them


class PlanCache:
    """The plans of one jitted function.

    The plans themselves are stored in the flat forms of the Modules they are for: a structural change discards the flat
    form, and its plans with it, so no plan is ever out of date.

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

    def remember(
        self, call: Call, compiled: Compiled, result: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Makes a plan for the call that was just made, if the next one like it can be made from a plan."""
        flat = call.flat
        if flat is None or flat.level is None or len(result) != 2:
            return
        if sum(mark > DATA_MARK for mark in call.signature.marks) != len(call.roots):
            return  # a Module that was passed twice
        if sum(mark < DATA_MARK for mark in call.signature.marks) != len(call.contexts):
            return  # a Context that was passed twice
        alone = None
        if compiled.donation is not None:
            if compiled.donation.runs_python or not compiled.donation.applies_to(call):
                return
            if compiled.donation.usual is not None:
                alone = sum(compiled.donation.usual.counts_alone(flat))
        effects = compiled.effects_of(result)
        places = _places(flat, effects.changed if self.stateful else ())
        if places is None:
            return
        if not {cell for cell, _ in effects.orders}.isdisjoint(effects.changed):  # dicts to put back in order
            places = places._replace(spread=_after(effects.tie, places.spread))
        values = (*args, *kwargs.values())
        form_key = (len(args), *map(type, values), *kwargs)
        form = self.forms.get(form_key) or ArgumentForm(args, kwargs, self.static)
        if not form.can_repeat(values, compiled.static_arguments):
            return
        reading = form.read(values)
        if reading is None:
            return
        self.forms.setdefault(form_key, form)
        arguments: Any = form if form.is_plain else reading.arguments
        is_common = self.leads_with_module and form.is_plain and places.spread is None and not kwargs
        if is_common and is_module(args[0]) and all(map(is_data, args[1:])):
            arguments = len(args) - 1
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
            captured=compiled.captured if compiled.captured else None,
            input_dicts=[*flat.dicts, *compiled.captured.dicts],
            input_names=[*flat.names, *compiled.captured.names],
            level=flat.level,
            output_dicts=places.dicts,
            output_names=places.names,
            spread=places.spread,
            contexts=call.signature.contexts,
            alone=alone,
        )


def _after(first: Callable[[Any], Any], then: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    return first if then is None else lambda values: then(first(values))


class _Places(NamedTuple):
    """Where the values that a function changed are to be written."""

    dicts: list[dict[str, Any]]
    names: list[str]
    spread: Callable[[Any], Any] | None


def _places(flat: Flat, changed: Sequence[int]) -> _Places | None:
    """Returns the places to write for these cells, or None if they have to be looked up on every call.

    A cell on a Ref has several: all owners of the Ref. New owners, and owners that leave, end the flat form. But a plan
    must not keep an owner outside the graph alive, so those are looked up each time.
    """
    if flat.refs.keys().isdisjoint(changed):
        return _Places([flat.dicts[i] for i in changed], [flat.names[i] for i in changed], None)
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
    return _Places(dicts, names, itemgetter(*sources))  # a Ref is a place itself, so there are at least two


def make_function(owner: Any) -> Callable[..., Any]:
    """Makes the function that the user of a `Jit` calls.

    It is a closure over local names and contains its whole fast path: everything here is paid by every training step,
    so there is one Python frame, no attribute lookup that can be avoided, and no helper function.

    A plan is valid if the flat form is (one comparison of stamps, in the steady state), and if it was made for this
    function, these arguments and these axis rules. A result of length 2 is of the first set of effects (see
    `Compiled`): values changed, and nothing else did.
    """
    structure, nothing, leaf_types = STRUCTURE, object(), data_types
    nans, infs = jax.debug_nans, jax.debug_infs
    token, forms, bound = owner.plans.token, owner.plans.forms, owner.bound

    def module_first(first: Any = nothing, /, *rest: Any, **kwargs: Any) -> Any:
        done: Any = None  # the result of a donated call, in a list that C fills
        # Entering `try` costs nothing, and it has to be here: a wrapper would be a second frame per call.
        try:
            if not kwargs and isinstance(first, ModuleBase):
                for arg in rest:
                    if type(arg) not in leaf_types:
                        break
                else:  # the most common call: a Module, then data
                    flat = cached_flat(first)
                    # Attributes that are called are read first: `flat.unchanged()` looks for a method, which takes
                    # 50 ns longer. That is also why what is called below has a name first.
                    if flat is not None and (
                        (flat.ready is structure.stamp and ((unchanged := flat.unchanged) is None or unchanged()))
                        or flat.is_valid()
                        or (flat := flat_that_came_back((first,))) is not None
                    ):
                        plan = flat.last_plan
                        if (
                            plan is None
                            or plan.token is not token
                            or plan.arguments != len(rest)
                            or plan.rules is not current_rules()
                        ):
                            plan = flat.plans.get((token, len(rest), current_rules()))
                            if plan is not None:
                                flat.last_plan = plan
                        if plan is not None:
                            reference, level = plan.compiled, plan.level
                            compiled = reference()
                            try:
                                if compiled is None:  # another thread has just cleared the cache
                                    raise NeedsGeneralPath
                                if plan.captured is not None and not plan.captured.is_current(compiled.functions):
                                    raise NeedsGeneralPath
                                # One C call, so no other thread can commit a step while the cells are read.
                                cells, donation = [*map(getitem, plan.input_dicts, plan.input_names)], compiled.donation
                                if donation is None:
                                    jitted = compiled.jitted
                                    result = jitted(cells, rest)
                                elif level is not current_level() or nans.value or infs.value:
                                    raise NeedsGeneralPath
                                else:
                                    done, variant = [], donation.usual
                                    given = () if variant is None else variant.given(cells)
                                    # No count is less than that of an array nobody else holds, so the sum tells.
                                    if variant is not None and sum(map(getrefcount, given)) == plan.alone:
                                        jitted, kept = variant.jitted, variant.kept(cells)
                                        # Python handles a signal after a CALL, never within one. A result that
                                        # this CALL returned would be lost then; one that is in `done` is not.
                                        done.extend(map(jitted, (given,), (kept,), (rest,)))
                                    else:
                                        given = None  # which would count as a holder
                                        donation.repeat(cells, rest, (), flat, done)
                                    result = done[0]
                            except NeedsGeneralPath:
                                pass  # made below, outside the handler: errors must not be chained to this one
                            except Exception:
                                if done != [] or variant is None or not variant.was_refused(cells, rest):
                                    raise
                            else:
                                if len(result) == 2 and level is current_level():
                                    # One C call, so Ctrl-C comes before all writes or after all of them; see effects.
                                    any(map(setitem, plan.output_dicts, plan.output_names, result[0]))
                                    return result[1]
                                late = [result] if done is None else done
                                return owner.finish_unplanned(compiled, late, (first, *rest), kwargs)
                            # These would count as holders of the arrays that the general path is about to donate.
                            done = cells = given = kept = None
                            return owner.call((first, *rest), kwargs)
            return any_arguments(*(() if first is nothing else (first, *rest)), **kwargs)
        except BaseException as error:
            if done:
                # XLA has taken the old values, and an interrupt has come before the new ones were written, or just
                # after: writing them twice does no harm. See donation.
                if len(done[0]) == 2:
                    assert plan is not None
                    any(map(setitem, plan.output_dicts, plan.output_names, done[0][0]))
                else:
                    owner.finish_unplanned(compiled, done, (first, *rest), kwargs)
            elif done is not None:
                assert donation is not None
                donation.note_loss(error, cells)
            if isinstance(error, Exception):
                owner.explain_error(error, () if first is nothing else (first, *rest), kwargs)
                hide_frames(error)
            raise

    def any_arguments(*args: Any, **kwargs: Any) -> Any:
        done: Any = None
        try:
            values = (*bound, *args, *kwargs.values())
            form = forms.get((len(values) - len(kwargs), *map(type, values), *kwargs))
            if form is None:
                return owner.call(args, kwargs)
            arguments = positions = form
            if not form.is_plain:
                reading = form.read(values)
                if reading is None:
                    return owner.call(args, kwargs)
                arguments, positions, values = reading
            roots = [values[i] for i in positions.modules]
            flat = joint_flat_if_cached(roots)
            if flat is None or not (
                (flat.ready is structure.stamp and ((unchanged := flat.unchanged) is None or unchanged()))
                or flat.is_valid()
            ):
                flat = flat_that_came_back(roots)
                if flat is None:
                    return owner.call(args, kwargs)
            plan = flat.last_plan
            if (
                plan is None
                or plan.token is not token
                or plan.arguments != arguments
                or plan.rules is not current_rules()
            ):
                plan = flat.plans.get((token, arguments, current_rules()))
                flat.last_plan = plan
            contexts = [values[i] for i in positions.contexts]
            if plan is None or (contexts and not _are_like(contexts, plan.contexts)):
                return owner.call(args, kwargs)
            compiled, level, spread = plan.compiled(), plan.level, plan.spread
            if compiled is None:
                return owner.call(args, kwargs)
            donation = compiled.donation
            if donation is not None and (level is not current_level() or nans.value or infs.value):
                return owner.call(args, kwargs)
            if plan.captured is not None and not plan.captured.is_current(compiled.functions):
                return owner.call(args, kwargs)
            cells = [*map(getitem, plan.input_dicts, plan.input_names)]
            data = tuple([values[i] for i in positions.data])
            forks = tuple([ctx.fork_data() for ctx in contexts])
            try:
                if donation is not None:
                    done = []
                    donation.repeat(cells, data, forks, flat, done)
                    result = done[0]
                elif forks:
                    result = compiled.jitted(cells, data, forks)
                else:
                    result = compiled.jitted(cells, data)
            except NeedsGeneralPath:
                done = cells = None  # which would count as a holder on the general path; it draws the same keys
            else:
                if len(result) == 2 and level is current_level():
                    new = result[0] if spread is None else spread(result[0])
                    any(map(setitem, plan.output_dicts, plan.output_names, new))
                    return result[1]
                return owner.finish_unplanned(compiled, [result] if done is None else done, args, kwargs)
            return owner.call(args, kwargs, forks)
        except BaseException as error:
            if done:  # as above
                if len(done[0]) == 2:
                    assert plan is not None
                    new = done[0][0] if spread is None else spread(done[0][0])
                    any(map(setitem, plan.output_dicts, plan.output_names, new))
                else:
                    owner.finish_unplanned(compiled, done, args, kwargs)
            elif done is not None:
                assert donation is not None
                donation.note_loss(error, cells)
            if isinstance(error, Exception):
                owner.explain_error(error, args, kwargs)
                hide_frames(error)
            raise

    return module_first if owner.plans.leads_with_module else any_arguments


def _are_like(contexts: list[Any], definitions: tuple[Any, ...]) -> bool:
    """Whether the Contexts of a call have these definitions, and are distinct as they were in the planned call."""
    if len(contexts) > 1 and len(set(map(id, contexts))) < len(contexts):
        return False  # one Context twice is one Context inside
    return tuple([ctx.definition() for ctx in contexts]) == definitions
