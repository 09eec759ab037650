"""`cond` and `switch`: changes that the branch that ran made to Modules are kept.

The branches are traced first. What any of them changes is an output of all of them, so that JAX can choose.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from nnx.core.repr import type_text
from nnx.core.state.paths import join
from nnx.core.structure.structure import GraphKey, module_path
from nnx.transforms.control.body_order import BodyOrder
from nnx.transforms.control.body_rules import check_aliases, check_structure
from nnx.transforms.control.eager_traces import kept_trace
from nnx.transforms.engine.annotations import R
from nnx.transforms.engine.call import Call, callee_of, cell_paths
from nnx.transforms.engine.commit import finish
from nnx.transforms.engine.enter import enter_call
from nnx.transforms.engine.leave import leave
from nnx.transforms.engine.observed import refuse_observations
from nnx.transforms.engine.outcome import Outcome, structure_text
from nnx.transforms.engine.rewrite import Rewrite
from nnx.transforms.engine.shared_traces import run_body
from nnx.transforms.engine.tracebacks import boundary

NO_BRANCHES = "nnx.switch needs at least one branch."

OUTPUTS_DISAGREE = """{name}: the branches disagree in structure: branch 0 returns {first}, branch {number} returns \
{other}. All branches must return the same structure."""

NEW_VARIABLES_DISAGREE = """{name}: the branches disagree in structure: {what}. A new variable is allowed in a branch \
only if every branch makes it, with the same type. Make it before, or in all of them."""

TYPES_DISAGREE = """{name}: the branches disagree about {path!r}: it is {first} after branch 0 and {other} after \
branch {number}. Cast it, so that its type does not depend on the branch."""


class BranchCall:
    """One call of `cond` or `switch`."""

    def __init__(self, name: str, functions: Sequence[Any], operands: tuple[Any, ...]):
        self.name = name
        self.callees = [callee_of(fun, name) for fun in functions]
        bound = {id(owner): owner for callee in self.callees for owner in callee.bound}
        self.bound: list[Any] = list(bound.values())
        self.call: Call = Call((self.bound, *operands), {})
        self.order: BodyOrder = BodyOrder()
        self.effects: list[Any] = []
        self.shapes: list[Any] = []
        self.rewrite: Rewrite | None = None

    def run(self, choose: Callable[..., Any], selector: Any, stateful: bool) -> Any:
        """Runs the branch that `choose(selector, functions, *operands)` takes, and writes back what it changed."""
        numbers = range(len(self.callees))

        def work(selector: Any, *operands: Any) -> Outcome:
            self._trace_branches(*operands)
            return self._outcome(*choose(selector, [self.function(i) for i in numbers], *operands))

        # Which branch is bound to which Module is part of the trace, and the functions alone do not show it.
        places = {id(owner): i for i, owner in enumerate(self.bound)}
        owners = tuple([tuple([places[id(owner)] for owner in callee.bound]) for callee in self.callees])
        outcome = kept_trace(
            work,
            (selector, self.call.cells(), list(self.call.data), self.call.forks()),
            functions=[callee.fun for callee in self.callees],
            options=(self.name, owners),
            signature=self.call.signature,
        )
        return finish(self.call, outcome, stateful)

    def _trace_branches(self, cells: Any, data: Any, forks: Any) -> None:
        """Traces the branches to see what each of them changes."""
        self.shapes = [jax.eval_shape(self.branch(i), cells, data, forks) for i in range(len(self.callees))]
        self.effects = [shape.effects for shape in self.shapes]
        self.rewrite = self._common_rewrite()
        self._check_outputs(cells)

    def branch(self, number: int) -> Callable[..., Outcome]:
        """Returns one branch as a function of the split call."""
        callee = self.callees[number]

        def run(cells: Any, data: Any, forks: Any) -> Outcome:
            signature = self.call.signature
            entered, args, _ = enter_call(signature, self.call.statics, cells, data, signature.contexts_from(forks))
            self.order.keep(entered)
            owners, *operands = args
            owner = [owners[i] for i, o in enumerate(self.bound) for b in callee.bound if o is b]
            out = run_body(callee.fun, (*owner, *operands), {})
            refuse_observations(entered, self.name)
            self.order.keep(entered, out)
            return leave(entered, out, self.name, repeated=True)

        return run

    def _common_rewrite(self) -> Rewrite | None:
        key = self.call.signature.key
        rewrites = [effects.rewrite for effects in self.effects]
        added = []
        for effects in self.effects:
            check_aliases(self.name, key, effects.regrouped)
            if effects.rewrite is None:
                added.append({})
            else:
                found = check_structure(self.name, key, effects.rewrite, effects.returns_modules)
                added.append({path: kind for _, path, kind in found})
        for number, paths in enumerate(added):
            for path in {**added[0], **paths}:
                if added[0].get(path) is not paths.get(path):
                    first, other = added[0].get(path, "nothing"), paths.get(path, "nothing")
                    what = f"at {path!r} branch 0 makes {first}, branch {number} makes {other}"
                    raise ValueError(NEW_VARIABLES_DISAGREE.format(name=self.name, what=what))
        present = [rewrite for rewrite in rewrites if rewrite is not None]
        first = self.effects[0]
        differ = any(r is None or r.key is not present[0].key or r.refs != present[0].refs for r in rewrites)
        if not present or differ or any(effects.aliases != first.aliases for effects in self.effects):
            if present and any(added):
                raise ValueError(NEW_VARIABLES_DISAGREE.format(name=self.name, what="they make other Modules"))
            return None
        # A source of -1 means that the value came out; so the minimum is -1 for a cell that any branch changed.
        sources = tuple(min(column) for column in zip(*(r.sources for r in present)))
        return replace(present[0], sources=sources)

    def _check_outputs(self, cells: Sequence[Any]) -> None:
        first = jax.tree.structure(self.shapes[0].out)
        for number, shape in enumerate(self.shapes):
            other = jax.tree.structure(shape.out)
            if other != first:
                text = {"first": structure_text(first), "number": number, "other": structure_text(other)}
                raise TypeError(OUTPUTS_DISAGREE.format(name=self.name, **text))
        columns = [self.union_values(number, shape, cells) for number, shape in enumerate(self.shapes)]
        paths = self._union_paths()
        for i, path in enumerate(paths):
            types = [type_text(column[i]) for column in columns]
            for number, text in enumerate(types):
                if text != types[0]:
                    raise TypeError(
                        TYPES_DISAGREE.format(name=self.name, path=path, first=types[0], other=text, number=number)
                    )

    def union(self) -> list[int]:
        """Returns the cells that every branch outputs, numbered in the rewritten graph if there is one."""
        if self.rewrite is not None:
            return self.rewrite.outputs()
        return sorted({cell for effects in self.effects for cell in effects.changed})

    def _union_paths(self) -> list[str]:
        key = self.rewrite.key if self.rewrite is not None else self.call.signature.key
        if self.rewrite is None:
            return [cell_paths(key)[i] for i in self.union()]
        return [_rewritten_path(self.call.signature.key, self.rewrite, i) for i in self.union()]

    def union_values(self, number: int, outcome: Outcome, cells: Sequence[Any]) -> list[Any]:
        """Returns one branch's values for all the cells that are output."""
        effects = outcome.effects
        if self.rewrite is None:
            own = dict(zip(effects.changed, outcome.values))
            return [own[i] if i in own else cells[i] for i in self.union()]
        own = dict(zip(effects.rewrite.outputs(), outcome.values))  # type: ignore[union-attr]
        sources = effects.rewrite.sources  # type: ignore[union-attr]
        return [own[i] if i in own else cells[sources[i]] for i in self.union()]

    def function(self, number: int) -> Callable[..., Any]:
        branch = self.branch(number)

        def run(cells: Any, data: Any, forks: Any) -> Any:
            outcome = branch(cells, data, forks)
            return self.union_values(number, outcome, cells), outcome.out

        return run

    def _outcome(self, values: Any, out: Any) -> Outcome:
        first = self.effects[0]
        sown = tuple(dict.fromkeys(item for effects in self.effects for item in effects.sown))
        changed = () if self.rewrite is not None else tuple(self.union())
        orders = tuple({cell: order for effects in reversed(self.effects) for cell, order in effects.orders}.items())
        return Outcome(values, out, replace(first, changed=changed, rewrite=self.rewrite, sown=sown, orders=orders))


def _rewritten_path(key: GraphKey | None, rewrite: Rewrite, cell: int) -> str:
    at, name, _ = rewrite.key.cells[cell]
    if key is None or at >= rewrite.old_count:
        return rewrite.key.cell_roots()[cell].path
    return join(module_path(key.parents(), at), name)


@boundary
def cond(
    pred: Any, true_fun: Callable[..., R], false_fun: Callable[..., R], *operands: Any, stateful: bool = True
) -> R:
    """`jax.lax.cond` with Modules and Contexts anywhere in the operands; changes by the branch that ran are kept.

    Args:
        pred: a boolean, or an array that holds one.
        true_fun: the function to call with the operands if it is true, or a bound method of a Module.
        false_fun: the function to call if it is false. Both return the same structure and make the same new variables.
        *operands: the arguments.
        stateful: whether changes to Modules are written back.

    Raises:
        TypeError: the branches return different structures, or leave a variable with different types.
        ValueError: the branches change the structure of a Module differently.

    >>> m = nnx.Dict(n=nnx.Variable(jnp.array(0)))
    >>> def add(m): m.n += 10
    >>> nnx.cond(True, add, lambda m: None, m)
    >>> int(m.n)
    10
    """
    branches = BranchCall("nnx.cond", (true_fun, false_fun), operands)
    return branches.run(lambda pred, functions, *rest: jax.lax.cond(pred, *functions, *rest), pred, stateful)


@boundary
def switch(index: Any, branches: Sequence[Callable[..., R]], *operands: Any, stateful: bool = True) -> R:
    """`jax.lax.switch` with Modules and Contexts anywhere in the operands; changes by the branch that ran are kept.

    Args:
        index: the branch to run; as in JAX, an index out of range is clamped.
        branches: functions, or bound methods of Modules, under the same conditions as the two of `cond`.
        *operands: the arguments.
        stateful: whether changes to Modules are written back.

    >>> m = nnx.Dict(n=nnx.Variable(jnp.array(1)))
    >>> def double(m): m.n *= 2
    >>> nnx.switch(1, [lambda m: None, double], m)
    >>> int(m.n)
    2
    """
    if not branches:
        raise ValueError(NO_BRANCHES)
    return BranchCall("nnx.switch", tuple(branches), operands).run(jax.lax.switch, index, stateful)
