"""`scan`, `while_loop` and `fori_loop`: bodies that run many times, with Modules handed from step to step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from nnx.core.graph import GraphKey
from nnx.transforms.annotations import Decorator, P, R, ScanOptions, T
from nnx.transforms.axes import (
    BROADCAST,
    CARRY,
    READ_ONLY,
    Axes,
    argument_labels,
    check_module_axes,
    data_axes,
    move_axis,
)
from nnx.transforms.bodies import NEW_VARIABLE, check_aliases, check_structure
from nnx.transforms.lift import MODULE as MODULE_LEAF
from nnx.transforms.lift import (
    Call,
    Effects,
    Entered,
    Outcome,
    Returned,
    cell_paths,
    commit,
    discard,
    enter_call,
    leave,
    sort_of,
    target_of,
)
from nnx.transforms.maps import assemble, is_init_method, stacked_init
from nnx.transforms.reuse import reused
from nnx.transforms.wrapper import decorator

NOT_A_PAIR = """nnx.scan: the body must return a pair, (carry, y); {name} returned {got}. With nothing to collect, \
return \
`carry, None`."""

TOO_MANY_AXES = """nnx.scan: in_axes has {given} entries, but {name} was called with {rest} arguments after the carry. \
The Module and the carry have no entry: in_axes is for what follows them."""

OTHER_CARRY = """{name}: the body received {what} of the structure {before} and returned {after}. What is handed \
from step \
to step must keep its structure."""

OTHER_TYPE = """{name}: the body changed the type of {path!r} from {before} to {after}. What is carried from step \
to step \
must keep shape and dtype: cast it inside the body, or give it the right type before."""


@overload
def scan(
    fun: Callable[P, R],
    *,
    variable_axes: Mapping[Any, int] | None = None,
    length: int | None = None,
    **options: Unpack[ScanOptions],
) -> Callable[P, R]: ...
@overload
def scan(
    *, variable_axes: Mapping[Any, int] | None = None, length: int | None = None, **options: Unpack[ScanOptions]
) -> Decorator: ...
@decorator
def scan(
    fun: Any,
    *,
    variable_axes: Mapping[Any, int] | None = None,
    variable_broadcast: Any = None,
    variable_carry: Any = ...,
    split_rngs: Any = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    data_transform: Callable[[Any], Any] | None = None,
    metadata_params: Mapping[Any, Any] | None = None,
    stateful: bool = True,
    is_init: bool | None = None,
) -> Callable[..., Any]:
    """Runs a function over steps: `f(module, carry, x, *broadcast)` returns `(carry, y)`.

    Args:
      fun: the function, a Module, or a bound method of one. On a method, `@nnx.scan(...)` scans over `self`; on
        `__init__` (or with `is_init=True`) it builds the stacked variables.
      variable_axes: which variables are stacked, `{filter: axis}`; each step sees one slice.
      variable_broadcast: which variables every step reads and none may change.
      variable_carry: which variables are handed from step to step; everything else, by default.
      split_rngs: which streams of Contexts differ from step to step; an RNG filter.
      in_axes: the axis of `xs`; as a tuple, one entry for each argument after the carry, None for the same in all
        steps. Modules are stacked by `variable_axes`, so their entries should be None.
      out_axes: the axis along which `ys` are stacked.
      length: the number of steps; needed with `variable_axes`.
      reverse, unroll: as in `jax.lax.scan`.
      data_transform: applied to the State of the Modules inside the body.
      metadata_params: with `{nnx.PARTITION_NAME: "layers"}`, the stacked axis's name in `sharding` metadata.
      stateful: whether changes to Modules are written back.
      is_init: whether the function builds variables; by default, whether its name is `__init__`.

    >>> layers = nnx.Dict(w=nnx.Param(jnp.array([1.0, 2.0, 3.0])))
    >>> @nnx.scan(variable_axes={nnx.Param: 0}, length=3)
    ... def product(layer, carry, _):
    ...     return carry * layer.w, carry
    >>> carry, ys = product(layers, 1.0, None)
    >>> float(carry), ys.tolist()
    (6.0, [1.0, 1.0, 2.0])
    """
    axes = Axes.of(
        "nnx.scan",
        "length",
        variable_axes,
        variable_broadcast,
        variable_carry,
        split_rngs,
        length,
        metadata_params,
        data_transform,
    )
    axes.require_size()
    if is_init_method(fun, is_init):
        return stacked_init(axes, fun)
    target = target_of(fun, "nnx.scan")

    def lifted(*args: Any, **kwargs: Any) -> Any:
        args = (*target.bound, *args)
        if len(args) < 2:
            raise TypeError(f"nnx.scan({target.name}) takes (module, carry, xs, ...), got {len(args)} arguments.")
        steps = Steps(axes, target.fun, target.name, args, kwargs, in_axes)
        outcome = steps.run(in_axes, out_axes, reverse, unroll)
        return commit(steps.call, outcome) if stateful else discard(steps.call, outcome)

    return lifted


class Steps:
    """One call of a scanned function."""

    def __init__(self, axes: Axes, fun: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], in_axes: Any):
        self.axes, self.fun, self.name = axes, fun, name
        self.call: Call = Call(args, kwargs)
        rest = len(args) - 2
        after = tuple(in_axes) if isinstance(in_axes, (tuple, list)) else (in_axes,) + (None,) * (rest - 1)
        after = (*after, *(None,) * (rest - len(after)))[:rest]
        if isinstance(in_axes, (tuple, list)):
            if len(in_axes) > rest:
                raise ValueError(TOO_MANY_AXES.format(given=len(in_axes), rest=rest, name=name))
            check_module_axes(axes, "in_axes", after, args[2:], argument_labels(len(args))[2:])
        self.data_axes, labels = data_axes(axes.name, (None, None, *after), args, kwargs, None)
        flags, _ = data_axes(axes.name, (None, 0, *(None,) * rest), args, kwargs, None)
        self.carry_data: list[int] = [i for i, flag in enumerate(flags) if flag is not None]
        self.slice_data: list[int] = [i for i, axis in enumerate(self.data_axes) if axis is not None]
        self.groups: list[Any] = axes.groups(self.call)
        self.size: int = axes.find_size(self.call, self.groups, self.data_axes, labels)
        self.carry_cells: list[int] = [i for i, group in enumerate(self.groups) if group == CARRY]
        self.stacked_cells: list[int] = [i for i, group in enumerate(self.groups) if isinstance(group, int)]
        self.carry_structure: Any = _carry_structure(args[1], self.call)
        self.inner: GraphKey | None = axes.inner_key(self.call.signature.key, self.groups)
        self.found: list[Any] = []

    def run(self, in_axes: Any, out_axes: Any, reverse: bool, unroll: Any) -> Outcome:
        call = self.call
        split, shared = self.axes.keys(call, self.size)
        # Values that are the same in all steps and are not arrays stay what they are: a flag can decide an `if`.
        traced = [
            i
            for i, value in enumerate(call.data)
            if self.data_axes[i] is not None or i in self.carry_data or isinstance(value, (jax.Array, np.ndarray))
        ]
        kept = {i: value for i, value in enumerate(call.data) if i not in traced}

        def work(cells: Any, values: Any, split: Any, shared: Any) -> Outcome:
            data = {**kept, **dict(zip(traced, values))}
            return self._scan(cells, [data[i] for i in range(len(data))], split, shared, out_axes, reverse, unroll)

        return reused(
            work,
            (call.cells(), [call.data[i] for i in traced], split, shared),
            functions=(self.fun,),
            options=(self.axes, in_axes, out_axes, reverse, unroll, kept),
            signature=(call.signature, tuple(self.groups), self.size),
        )

    def _scan(
        self, cells: Any, data: Any, split: Any, shared: Any, out_axes: Any, reverse: bool, unroll: Any
    ) -> Outcome:
        init = ([cells[i] for i in self.carry_cells], [data[i] for i in self.carry_data])
        xs = (
            [move_axis(cells[i], self.groups[i], 0) for i in self.stacked_cells],
            [move_axis(data[i], self.data_axes[i], 0) for i in self.slice_data],
            split,
        )

        def body(carry: Any, x: Any) -> Any:
            return self.step(carry, x, cells, data, shared, out_axes)

        try:
            (final, final_data), (stacked, ys) = jax.lax.scan(
                body, init, xs, length=self.size, reverse=reverse, unroll=unroll
            )
        except TypeError as error:
            raise TypeError(self._with_labels(str(error))) from error
        effects, out_groups = self.found[0]
        by_cell = dict(zip(self.carry_cells, final))
        others = iter(
            [by_cell[_origin(effects, self.inner, cell)] for cell in _outputs(effects) if out_groups[cell] == CARRY]
        )
        ys = jax.tree.map(lambda y, a: jnp.moveaxis(y, 0, a), ys, _spread(out_axes, ys))
        out = (jax.tree.unflatten(self.carry_structure, final_data), ys)
        return assemble(self.axes, effects, out_groups, iter(stacked), others, out)

    def _with_labels(self, text: str) -> str:
        """An error of `jax.lax.scan` with the carry as the user wrote it."""
        leaves = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(self.carry_structure, self.carry_data))
        for number, (path, _) in enumerate(leaves):
            text = text.replace(f"carry[1][{number}]", f"carry{jax.tree_util.keystr(path)}")
        return text

    def step(
        self, carry: Any, x: Any, outer_cells: Sequence[Any], outer_data: Sequence[Any], shared: Any, out_axes: Any
    ) -> Any:
        (carried, carried_data), (slices, data_slices, split) = carry, x
        cells, data = list(outer_cells), list(outer_data)
        for numbers, values in ((self.carry_cells, carried), (self.stacked_cells, slices)):
            for i, value in zip(numbers, values):
                cells[i] = value
        for numbers, values in ((self.carry_data, carried_data), (self.slice_data, data_slices)):
            for i, value in zip(numbers, values):
                data[i] = value
        contexts = self.axes.contexts(self.call, split, shared)
        signature = self.call.signature._replace(key=self.inner)
        cells = self.axes.transformed(self.inner, cells)
        entered, args, kwargs = enter_call(signature, self.call.statics, cells, data, contexts)
        out = self.fun(*args, **kwargs)
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            raise TypeError(NOT_A_PAIR.format(name=self.name, got=type(out).__name__))
        if not isinstance(out_axes, int):
            check_module_axes(self.axes, "out_axes", [out_axes], [out[1]], ["the collected result"])
        outcome = leave(entered, self.axes.name_new_axes(entered, (out[0], out[1])), self.axes.name)
        return self._collect(entered, outcome, cells)

    def _collect(self, entered: Entered, outcome: Outcome, cells: list[Any]) -> Any:
        effects = outcome.effects
        out_groups = self.axes.output_groups(self.inner, self.groups, effects)
        self.found[:] = [(effects, out_groups)]
        stacked = []
        for cell, value in zip(_outputs(effects), outcome.values):
            if isinstance(out_groups[cell], int):
                stacked.append(value)
            elif out_groups[cell] == BROADCAST:
                path = cell_paths(self.inner)[_origin(effects, self.inner, cell)]
                raise ValueError(READ_ONLY.format(name=self.axes.name, path=path))
        carry_out, y = outcome.out
        structure = jax.tree.structure(carry_out)
        if structure != self.carry_structure:
            text = {"what": "a carry", "before": self.carry_structure, "after": structure}
            raise TypeError(OTHER_CARRY.format(name=self.axes.name, **text))
        carried = current_values(self.axes.name, self.inner, entered, self.carry_cells)
        return (carried, jax.tree.leaves(carry_out)), (stacked, y)


def _outputs(effects: Effects) -> Any:
    return effects.changed if effects.rewrite is None else effects.rewrite.outputs()


def _origin(effects: Effects, before: GraphKey | None, cell: int) -> int:
    """The cell before the body that an output cell was."""
    if effects.rewrite is None:
        return cell
    at, name, _ = effects.rewrite.key.cells[cell]
    return next(i for i, (a, n, _) in enumerate(before.cells) if (a, n) == (at, name))


def _carry_structure(carry: Any, call: Call) -> Any:
    """The structure of the carry, with the Modules in it by number."""
    key = call.signature.key
    roots = list(dict.fromkeys(key.table[0])) if key is not None else []
    numbers = {id(root): number for root, number in zip(call.roots, roots)}
    numbered = jax.tree.map(lambda x: Returned(numbers[id(x)]) if sort_of(x) == MODULE_LEAF else x, carry)
    return jax.tree.structure(_with_contexts_by_number(numbered, call.contexts))


def _with_contexts_by_number(value: Any, contexts: Sequence[Any]) -> Any:
    """A carried value with its Contexts by number: one that is handed on stands for the caller's own."""
    numbers = {id(ctx): -2 - n for n, ctx in enumerate(contexts)}
    return jax.tree.map(
        lambda x: Returned(numbers[id(x)]) if id(x) in numbers else x, value, is_leaf=lambda x: isinstance(x, Returned)
    )


def _spread(axes: Any, tree: Any) -> Any:
    """One axis per leaf of `tree`, from a prefix of it."""
    if isinstance(axes, int):
        return jax.tree.map(lambda _: axes, tree)
    return jax.tree.map(lambda a, sub: jax.tree.map(lambda _: a, sub), axes, tree, is_leaf=lambda a: a is None)


def current_values(name: str, key: GraphKey | None, entered: Entered, cells: Sequence[int]) -> list[Any]:
    """What cells hold at the end of a body.

    Raises:
      TypeError: one of them has another shape or dtype than before.
    """
    values = []
    for i in cells:
        at, attribute, _ = key.cells[i]
        value = entered.graph.modules[at].__dict__[attribute]
        before, after = _type_text(entered.before[i]), _type_text(value)
        if i in entered.trees:
            before = _type_text(jax.tree.unflatten(entered.trees[i][1], entered.trees[i][0]))
        if before != after:
            path = cell_paths(key)[i]
            raise TypeError(OTHER_TYPE.format(name=name, path=path, before=before, after=after))
        values.append(value)
    return values


def _type_text(value: Any) -> str:
    def one(x: Any) -> str:
        return f"{jnp.result_type(x)}{list(jnp.shape(x))}"

    leaves, treedef = jax.tree.flatten(value)
    return one(value) if len(leaves) == 1 and leaves[0] is value else f"{treedef} of {', '.join(map(one, leaves))}"


class Loop:
    """One call of `while_loop` or `fori_loop`: all cells and all data are handed from step to step."""

    def __init__(self, name: str, init: Any):
        self.name = name
        self.call: Call = Call((init,), {})
        self.structure: Any = _carry_structure(init, self.call)
        self.found: list[Effects] = []

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
          operands: the arrays it needs besides.
          functions: the user's functions that it runs.
          options: what else it depends on.
          stateful: whether changes to Modules are written back.
        """

        def work(cells: Any, data: Any, operands: Any) -> Outcome:
            return self._outcome(loop((jnp.zeros((), jnp.int32), cells, data), *operands))

        outcome = reused(
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
        return commit(self.call, outcome) if stateful else discard(self.call, outcome)

    def body(self, fun: Callable[..., Any], keys: list[Any], carry: Any, *before: Any) -> Any:
        """One step."""
        step, cells, data = carry
        entered, args, contexts = self._enter(step, cells, data, keys)
        out = _with_contexts_by_number(fun(*before, *args), contexts)
        outcome = leave(entered, out, self.name)
        self._check(outcome.effects)
        structure = jax.tree.structure(outcome.out)
        if structure != self.structure:
            text = {"what": "a value", "before": self.structure, "after": structure}
            raise TypeError(OTHER_CARRY.format(name=self.name, **text))
        self.found[:] = [outcome.effects]
        values = current_values(self.name, self.call.signature.key, entered, range(len(cells)))
        return step + 1, values, jax.tree.leaves(outcome.out)

    def condition(self, fun: Callable[..., Any], keys: list[Any], carry: Any) -> Any:
        """Whether there is another step."""
        step, cells, data = carry
        entered, args, _ = self._enter(step, cells, data, keys)
        outcome = leave(entered, fun(*args), self.name)
        if outcome.effects.changed or outcome.effects.rewrite is not None:
            raise ValueError(
                f"{self.name}: the condition changed a Module. It only decides whether to go on; move it to the body."
            )
        return outcome.out

    def _enter(self, step: Any, cells: Any, data: Any, keys_of: list[Any]) -> tuple[Entered, Any, Any]:
        contexts = [
            definition.merge({name: jax.random.fold_in(key, step) for name, key in keys.items()})
            for definition, keys in zip(self.call.signature.contexts, keys_of)
        ]
        entered, args, _ = enter_call(self.call.signature, self.call.statics, cells, data, contexts)
        return entered, args, contexts

    def _check(self, effects: Effects) -> None:
        check_aliases(self.name, self.call.signature.key, effects.regrouped)
        if effects.rewrite is not None:
            added = check_structure(self.name, self.call.signature.key, effects.rewrite, effects.returns_modules)
            for _, path, kind in added:
                cure = "A loop has no place for it, since it may not run at all: make the variable before the loop."
                raise ValueError(NEW_VARIABLE.format(name=self.name, path=path, kind=kind, cure=cure))

    def _outcome(self, carry: Any) -> Outcome:
        _, cells, data = carry
        changed = self.found[0].changed if self.found else ()
        sown = self.found[0].sown if self.found else ()
        effects = Effects(changed, None, sown, bool(self.call.roots), self.call.signature.ties.aliases)
        return Outcome([cells[i] for i in changed], jax.tree.unflatten(self.structure, data), effects)


def while_loop(cond_fun: Callable[[T], Any], body_fun: Callable[[T], T], init_val: T, *, stateful: bool = True) -> T:
    """`jax.lax.while_loop` with Modules and Contexts anywhere in `init_val`; changes to Modules are kept.

    A Context produces new keys in every step, and different ones in the condition and in the body. A static attribute
    or a submodule cannot change in a loop.

    Args:
      cond_fun: of the value; true while there is another step. It changes nothing.
      body_fun: from the value to the next, of the same structure.
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
    loop = Loop("nnx.while_loop", init_val)

    def run(carry: Any, body_keys: Any, condition_keys: Any) -> Any:
        return jax.lax.while_loop(
            lambda carry: loop.condition(cond_fun, condition_keys, carry),
            lambda carry: loop.body(body_fun, body_keys, carry),
            carry,
        )

    return loop.run(run, (loop.fork(), loop.fork()), (cond_fun, body_fun), None, stateful)


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
      body_fun: of index and value; returns the next value, of the same structure.
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
    loop = Loop("nnx.fori_loop", init_val)
    # An unrolled loop needs to know its bounds. Otherwise they are data, so that other bounds use the same trace.
    fixed = (lower, upper) if unroll is not None else ()

    def run(carry: Any, keys: Any, *bounds: Any) -> Any:
        lower, upper = fixed or bounds
        return jax.lax.fori_loop(
            lower, upper, lambda i, carry: loop.body(body_fun, keys, carry, i), carry, unroll=unroll
        )

    bounds = () if fixed else (lower, upper)
    return loop.run(run, (loop.fork(), *bounds), (body_fun,), (unroll, fixed), stateful)
