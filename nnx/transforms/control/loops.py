"""`while_loop` and `fori_loop`: bodies that run any number of times, with Modules handed from step to step."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nnx.transforms.control.body_order import BodyOrder
from nnx.transforms.control.body_rules import NEW_VARIABLE, check_aliases, check_carry, check_structure
from nnx.transforms.control.eager_traces import kept_trace
from nnx.transforms.control.scan import carry_structure, current_values, with_contexts_by_number
from nnx.transforms.engine.annotations import T
from nnx.transforms.engine.call import Call, check_runs_now
from nnx.transforms.engine.commit import finish
from nnx.transforms.engine.enter import Entered, enter_call
from nnx.transforms.engine.leave import leave
from nnx.transforms.engine.observed import refuse_observations
from nnx.transforms.engine.outcome import Effects, Outcome, Returned
from nnx.transforms.engine.shared_traces import run_body
from nnx.transforms.engine.tracebacks import boundary

CONDITION_CHANGES = """{name}: the condition changed a Module. It only decides whether to go on; move the change to \
the body."""

MAKE_BEFORE = "A loop has no place for it, since it may not run at all: make the variable before the loop."


class LoopCall:
    """One call of `while_loop` or `fori_loop`: all cells and all data are handed from step to step."""

    def __init__(self, name: str, init: Any):
        self.name = name
        self.call: Call = Call((init,), {})
        self.structure: Any = carry_structure(init, self.call)
        self.found: list[Effects] = []
        self.order: BodyOrder = BodyOrder()

    def fork(self) -> list[Any]:
        """Returns keys for a function of the loop, by Context; each function has its own."""
        return [ctx.partition().keys for ctx in self.call.contexts]

    def run(
        self,
        loop: Callable[..., Any],
        operands: tuple[Any, ...],
        functions: Sequence[Callable[..., Any]],
        options: Any,
        stateful: bool,
    ) -> Any:
        """Runs `loop(carry, *operands)` and writes what changed back.

        Args:
            loop: from the first carry to the last.
            operands: any other arrays it needs.
            functions: the user's functions that it runs.
            options: what else it depends on.
            stateful: whether changes to Modules are written back.
        """

        def work(cells: Any, data: Any, operands: Any) -> Outcome:
            # The carry starts with the number of the step, which is folded into keys: every step draws others.
            return self._outcome(loop((jnp.zeros((), jnp.int32), cells, data), *operands))

        outcome = kept_trace(
            work,
            (self.call.cells(), list(self.call.data), operands),
            functions=functions,
            options=(self.name, options),
            signature=self.call.signature,
        )
        out = jax.tree.map(
            lambda x: self.call.contexts[-2 - x.index] if isinstance(x, Returned) and x.index < 0 else x,
            outcome.out,
            is_leaf=lambda x: isinstance(x, Returned),
        )
        outcome = Outcome(outcome.values, out, outcome.effects)
        return finish(self.call, outcome, stateful)

    def body(self, fun: Callable[..., Any], keys: list[Any], carry: Any, *before: Any) -> Any:
        """One step."""
        step, cells, data = carry
        entered, args, contexts = self._enter(step, cells, data, keys)
        out = with_contexts_by_number(run_body(fun, (*before, *args), {}), contexts)
        refuse_observations(entered, self.name)
        self.order.keep(entered, out)
        outcome = leave(entered, out, self.name, repeated=True)
        check_carry(self.name, "a value", self.structure, outcome.out, self.call.signature.key)
        self._check(outcome.effects)
        self.found[:] = [outcome.effects]
        values = current_values(self.name, self.call.signature.key, entered, range(len(cells)))
        return step + 1, values, jax.tree.leaves(outcome.out)

    def condition(self, fun: Callable[..., Any], keys: list[Any], carry: Any) -> Any:
        """Whether there is another step."""
        step, cells, data = carry
        entered, args, _ = self._enter(step, cells, data, keys)
        out = run_body(fun, args, {})
        refuse_observations(entered, self.name)
        self.order.keep(entered, out)
        outcome = leave(entered, out, self.name, repeated=True)
        if outcome.effects.changed or outcome.effects.rewrite is not None:
            raise ValueError(CONDITION_CHANGES.format(name=self.name))
        return outcome.out

    def _enter(self, step: Any, cells: Any, data: Any, keys_of: list[Any]) -> tuple[Entered, Any, Any]:
        contexts = [
            definition.merge({name: jax.random.fold_in(key, step) for name, key in keys.items()})
            for definition, keys in zip(self.call.signature.contexts, keys_of)
        ]
        entered, args, _ = enter_call(self.call.signature, self.call.statics, cells, data, contexts)
        self.order.keep(entered)
        return entered, args, contexts

    def _check(self, effects: Effects) -> None:
        check_aliases(self.name, self.call.signature.key, effects.regrouped)
        if effects.rewrite is not None:
            added = check_structure(self.name, self.call.signature.key, effects.rewrite, effects.returns_modules)
            for _, path, kind in added:
                raise ValueError(NEW_VARIABLE.format(name=self.name, path=path, kind=kind, advice=MAKE_BEFORE))

    def _outcome(self, carry: Any) -> Outcome:
        _, cells, data = carry
        changed = self.found[0].changed if self.found else ()
        sown = self.found[0].sown if self.found else ()
        ties = self.call.signature.ties
        effects = Effects(changed, None, sown, bool(self.call.roots), ties.aliases, orders=ties.orders)
        return Outcome([cells[i] for i in changed], jax.tree.unflatten(self.structure, data), effects)


@boundary
def while_loop(cond_fun: Callable[[T], Any], body_fun: Callable[[T], T], init_val: T, *, stateful: bool = True) -> T:
    """`jax.lax.while_loop` with Modules and Contexts anywhere in `init_val`; changes to Modules are kept.

    A Context produces new keys in every step, and different ones in the condition and in the body. A static attribute
    or a submodule cannot change in a loop.

    Args:
        cond_fun: a function of the value; true while there is another step. It must not change anything.
        body_fun: a function from the value to the next one, of the same structure.
        init_val: the first value.
        stateful: whether changes to Modules are written back.

    >>> counter = nnx.Dict(n=nnx.Variable(jnp.array(0)))
    >>> def body(m):
    ...     m.n += 1
    ...     return m
    >>> out = nnx.while_loop(lambda m: m.n < 5, body, counter)
    >>> out is counter, int(counter.n)
    (True, 5)
    """
    check_runs_now(cond_fun, "nnx.while_loop")
    check_runs_now(body_fun, "nnx.while_loop")
    loop = LoopCall("nnx.while_loop", init_val)

    def run(carry: Any, body_keys: Any, condition_keys: Any) -> Any:
        return jax.lax.while_loop(
            lambda carry: loop.condition(cond_fun, condition_keys, carry),
            lambda carry: loop.body(body_fun, body_keys, carry),
            carry,
        )

    return loop.run(run, (loop.fork(), loop.fork()), (cond_fun, body_fun), None, stateful)


@boundary
def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, T], T],
    init_val: T,
    *,
    unroll: Any = None,
    stateful: bool = True,
) -> T:
    """`jax.lax.fori_loop` with Modules and Contexts anywhere in `init_val`; changes to Modules are kept.

    Args:
        lower: the first index.
        upper: the index after the last.
        body_fun: a function of the index and the value; returns the next value, of the same structure.
        init_val: the first value.
        unroll: as in JAX.
        stateful: whether changes to Modules are written back.

    >>> counter = nnx.Dict(n=nnx.Variable(jnp.array(0)))
    >>> def body(i, m):
    ...     m.n += i
    ...     return m
    >>> int(nnx.fori_loop(0, 5, body, counter).n)
    10
    """
    check_runs_now(body_fun, "nnx.fori_loop")
    loop = LoopCall("nnx.fori_loop", init_val)
    # An unrolled loop needs to know its bounds. Otherwise they are data, so that other bounds use the same trace.
    fixed = (lower, upper) if unroll is not None else ()

    def run(carry: Any, keys: Any, *bounds: Any) -> Any:
        lower, upper = fixed or bounds
        return jax.lax.fori_loop(
            lower, upper, lambda i, carry: loop.body(body_fun, keys, carry, i), carry, unroll=unroll
        )

    bounds = () if fixed else (lower, upper)
    return loop.run(run, (loop.fork(), *bounds), (body_fun,), (unroll, fixed), stateful)
