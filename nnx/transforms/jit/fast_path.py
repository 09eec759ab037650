"""The fast path into a jitted function: a call that repeats an earlier one is made from its plan, without being split.

Every training step pays for what is here. So each function is a closure over local names and contains its whole path:
one Python frame, no attribute lookup that can be avoided, and helpers only where a call leaves the steady state. For
the same reason callables are bound to a local first: a method call looks for a method, which takes 50 ns longer.

A result of length 2 is of the first set of effects (see `Compiled`): values changed, and nothing else did. Any other
result, and any call without a plan, takes the general path (`Jit.finish_unplanned`, `Jit.call`).
"""

from collections.abc import Callable
from operator import getitem, setitem
from typing import Any

import jax

from nnx.core.module.info import ModuleBase, cached_flat
from nnx.core.structure.versions import STRUCTURE
from nnx.core.trace import current_level
from nnx.sharding.rules import current_rules
from nnx.transforms.engine.call import data_types
from nnx.transforms.engine.internal_names import rewrite
from nnx.transforms.engine.tracebacks import hide_frames
from nnx.transforms.jit.donation import NeedsGeneralPath
from nnx.transforms.jit.holders import getrefcount

_NOTHING = object()  # in place of a first argument that was not given


def make_function(owner: Any) -> Callable[..., Any]:
    """Makes the function that the user of a `Jit` calls."""
    any_arguments = _for_any_arguments(owner)
    return _for_module_first(owner, any_arguments) if owner.plans.leads_with_module else any_arguments


def _for_module_first(owner: Any, any_arguments: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with a fast path for the most common call, a Module and then data; it passes on all others."""
    structure, nothing, leaf_types, nans, infs = STRUCTURE, _NOTHING, data_types, jax.debug_nans, jax.debug_infs
    token, find_plan = owner.plans.token, owner.plans.find

    def module_first(first: Any = nothing, /, *rest: Any, **kwargs: Any) -> Any:
        plan: Any = None
        compiled: Any = None
        cells: Any = None
        done: Any = None  # the result of a donated call, in a list that C fills
        # Entering `try` costs nothing, and it has to be here: a wrapper would be a second frame per call.
        try:
            if kwargs or not isinstance(first, ModuleBase):
                return any_arguments(*(() if first is nothing else (first, *rest)), **kwargs)
            for arg in rest:
                if type(arg) not in leaf_types:
                    return any_arguments(first, *rest)
            # The steady state of `find_plan`, without its frames.
            flat = cached_flat(first)
            if (
                flat is None
                or (plan := flat.last_plan) is None
                or plan.token is not token
                or plan.arguments != len(rest)
                or plan.rules is not current_rules()
                or flat.ready is not structure.stamp
                or ((unchanged := flat.unchanged) is not None and not unchanged())
            ):
                flat, plan = find_plan((first,), len(rest))
                if plan is None:
                    return any_arguments(first, *rest)
            reference, level = plan.compiled, plan.level
            compiled = reference()
            if compiled is None or (plan.captured is not None and not plan.captured.is_current(compiled.functions)):
                return owner.call((first, *rest), kwargs)
            # One C call, so no other thread can commit a step while the cells are read.
            cells, donation = [*map(getitem, plan.input_dicts, plan.input_names)], compiled.donation
            try:
                if donation is None:
                    jitted = compiled.jitted
                    result = jitted(cells, rest)
                elif level is not current_level() or nans.value or infs.value:
                    raise NeedsGeneralPath
                else:
                    done, variant = [], donation.usual
                    given = () if variant is None else variant.given(cells)
                    # No count is below that of an array that nobody else holds, so comparing the sums is enough.
                    if variant is not None and sum(map(getrefcount, given)) == plan.alone:
                        jitted, kept = variant.jitted, variant.kept(cells)
                        # Python handles a signal after a CALL, never within one. A result that this CALL returned
                        # would be lost then; one that is in `done` is not.
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
                    # One C call, so Ctrl-C comes before all writes or after all of them; see commit.
                    any(map(setitem, plan.output_dicts, plan.output_names, result[0]))
                    return result[1]
                return owner.finish_unplanned(compiled, [result] if done is None else done, (first, *rest), kwargs)
            # These variables would count as holders of the arrays that the general path is about to donate.
            done = cells = given = kept = None
            return owner.call((first, *rest), kwargs)
        except BaseException as error:
            args = () if first is nothing else (first, *rest)
            _after_error(error, owner, plan, compiled, cells, done, args, kwargs)
            raise

    return module_first


def _for_any_arguments(owner: Any) -> Callable[..., Any]:
    """Returns a function with a fast path for calls whose arguments have a form (see `argument_forms`)."""
    forms, bound, find_plan = owner.plans.forms, owner.bound, owner.plans.find
    nans, infs = jax.debug_nans, jax.debug_infs

    def any_arguments(*args: Any, **kwargs: Any) -> Any:
        plan: Any = None
        compiled: Any = None
        cells: Any = None
        done: Any = None  # as above
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
            flat, plan = find_plan([values[i] for i in positions.modules], arguments)
            contexts = [values[i] for i in positions.contexts]
            if plan is None or (contexts and not _are_like(contexts, plan.contexts)):
                return owner.call(args, kwargs)
            compiled, level = plan.compiled(), plan.level
            if compiled is None or (plan.captured is not None and not plan.captured.is_current(compiled.functions)):
                return owner.call(args, kwargs)
            donation = compiled.donation
            if donation is not None and (level is not current_level() or nans.value or infs.value):
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
                    spread = plan.spread
                    new = result[0] if spread is None else spread(result[0])
                    any(map(setitem, plan.output_dicts, plan.output_names, new))
                    return result[1]
                return owner.finish_unplanned(compiled, [result] if done is None else done, args, kwargs)
            return owner.call(args, kwargs, forks)
        except BaseException as error:
            _after_error(error, owner, plan, compiled, cells, done, args, kwargs)
            raise

    return any_arguments


def _after_error(
    error: BaseException,
    owner: Any,
    plan: Any,
    compiled: Any,
    cells: Any,
    done: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Leaves the Modules of a call whole after an exception, and puts the exception in the user's words.

    Args:
        error: the exception, which may be an interrupt.
        owner: the `Jit`.
        plan, compiled, cells: how the call was being made; the values that its cells had.
        done: None if the call donated nothing; else its result in a list, which is empty if there is none.
        args, kwargs: the arguments.
    """
    if done:
        # XLA has taken the old values, and an interrupt has come before the new ones were written, or just after:
        # writing them twice does no harm. See donation.
        if len(done[0]) == 2:
            plan.write(done[0][0])
        else:
            owner.finish_unplanned(compiled, done, args, kwargs)
    elif done is not None:
        compiled.donation.note_loss(error, cells)
    if isinstance(error, Exception):
        owner.explain_error(error, args, kwargs)
        rewrite(error)
        hide_frames(error)


def _are_like(contexts: list[Any], definitions: tuple[Any, ...]) -> bool:
    """Whether the Contexts of a call have these definitions, and are distinct as they were in the planned call."""
    if len(contexts) > 1 and len(set(map(id, contexts))) < len(contexts):
        return False  # one Context twice is one Context inside
    return tuple([ctx.definition() for ctx in contexts]) == definitions
