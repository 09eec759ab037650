"""`scan`: a body that runs step by step, with Modules sliced, carried, or shared as the options choose."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from nnx.core.context import SharedBy
from nnx.core.hints.hints import explain_order
from nnx.core.old_names import old_names
from nnx.core.repr import type_text
from nnx.core.structure.structure import GraphKey
from nnx.transforms.control.body_order import BodyOrder
from nnx.transforms.control.body_rules import check_carry
from nnx.transforms.control.eager_traces import functions_run, kept_trace
from nnx.transforms.control.stacking import (
    BROADCAST,
    CARRY,
    READ_ONLY,
    Stacking,
    argument_labels,
    check_module_axes,
    data_axes,
    move_axis,
)
from nnx.transforms.control.vmap import assemble, is_init_method, stacked_init
from nnx.transforms.engine.annotations import Decorator, P, R, ScanOptions
from nnx.transforms.engine.call import Call, callee_of, cell_paths, is_module, with_values
from nnx.transforms.engine.commit import finish
from nnx.transforms.engine.decorators import decorator
from nnx.transforms.engine.enter import Entered, enter_call
from nnx.transforms.engine.leave import leave
from nnx.transforms.engine.outcome import Effects, Outcome, Returned
from nnx.transforms.engine.shared_traces import run_body

NOT_A_PAIR = """nnx.scan: the body must return a pair, (carry, y); {name} returned {got}. With nothing to collect, \
return `carry, None`."""

TOO_FEW_ARGUMENTS = "nnx.scan({name}) takes (module, carry, xs, ...), got {count} arguments."

ARGUMENTS_OF_LAX = """nnx.scan takes a function and options by keyword, got {count} arguments after the function. It \
returns the loop, which takes the rest: nnx.scan(f)(module, carry, xs), with f(module, carry, x). Without a Module, \
write `jax.lax.scan(f, carry, xs)` with f(carry, x)."""

TOO_MANY_AXES = """nnx.scan: in_axes has {given} entries, but {name} was called with {rest} arguments after the carry. \
The Module and the carry have no entry: in_axes is for what follows them."""

OTHER_TYPE = """{name}: the body changed the type of {path!r} from {before} to {after}. What is carried from step to \
step must keep its shape and dtype: cast it inside the body, or give it the right type before."""


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
@old_names(f="fun")
@decorator
def scan(
    fun: Any,
    *misplaced: Never,
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
            `__init__` (or with `is_init=True`) it builds the stacked variables. A Module class is scanned as by
            `nnx.Scan`.
        variable_axes: the variables that are stacked, `{filter: axis}`; each step sees one slice.
        variable_broadcast: a filter for variables that every step reads and none changes.
        variable_carry: a filter for variables that are handed from step to step; by default, everything else.
        split_rngs: an RNG filter for the streams of Contexts that differ from step to step.
        in_axes: the axis of `xs`; as a tuple, one entry for each argument after the carry, None for the same in all
            steps. Modules are stacked by `variable_axes`, so their entries should be None.
        out_axes: the axis along which `ys` are stacked.
        length: the number of steps; required with `variable_axes`.
        reverse, unroll: as in `jax.lax.scan`.
        data_transform: a function applied to the State of the Modules inside the body.
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
    if misplaced:
        raise TypeError(ARGUMENTS_OF_LAX.format(count=len(misplaced)))
    stacking = Stacking(
        name="nnx.scan",
        size_name="length",
        variable_axes=variable_axes,
        broadcast=variable_broadcast,
        carry=variable_carry,
        split_rngs=split_rngs,
        size=length,
        metadata_params=metadata_params,
        data_transform=data_transform,
    )
    stacking.require_size()
    if is_init_method(fun, is_init):
        return stacked_init(stacking, fun)
    callee = callee_of(fun, "nnx.scan")
    shared_by = SharedBy(f"nnx.scan({callee.name})")

    def lifted(*args: Any, **kwargs: Any) -> Any:
        args = (*callee.bound, *args)
        if len(args) < 2:
            raise TypeError(TOO_FEW_ARGUMENTS.format(name=callee.name, count=len(args)))
        try:
            scanned = ScanCall(stacking, callee.fun, callee.name, args, kwargs, in_axes, shared_by)
            outcome = scanned.run(in_axes, out_axes, reverse, unroll)
        except (TypeError, ValueError) as error:
            if args[0] is not None and not is_module(args[0]):
                _explain_first_argument(error, args, kwargs)
            raise
        return finish(scanned.call, outcome, stateful)

    return lifted


def _explain_first_argument(error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Adds a hint to an error of a call whose first argument is no Module, if another one or none of them is."""
    if is_module(args[1]):
        explain_order(error, has_module=True)
    elif not any(map(is_module, jax.tree.leaves((args, kwargs)))):
        explain_order(error, has_module=False)


class ScanCall:
    """One call of a scanned function."""

    def __init__(
        self,
        stacking: Stacking,
        fun: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        in_axes: Any,
        shared_by: SharedBy,
    ):
        self.stacking, self.fun, self.name, self.shared_by = stacking, fun, name, shared_by
        self.call: Call = Call(args, kwargs)
        rest = len(args) - 2
        after = tuple(in_axes) if isinstance(in_axes, (tuple, list)) else (in_axes,) + (None,) * (rest - 1)
        after = (*after, *(None,) * (rest - len(after)))[:rest]
        if isinstance(in_axes, (tuple, list)):
            if len(in_axes) > rest:
                raise ValueError(TOO_MANY_AXES.format(given=len(in_axes), rest=rest, name=name))
            check_module_axes(stacking, "in_axes", after, args[2:], argument_labels(len(args))[2:])
        self.data_axes, labels = data_axes(stacking.name, (None, None, *after), args, kwargs, None)
        # The same again with an axis for the carry alone, which shows the leaves that belong to it.
        flags, _ = data_axes(stacking.name, (None, 0, *(None,) * rest), args, kwargs, None)
        self.carry_data: list[int] = [i for i, flag in enumerate(flags) if flag is not None]
        self.slice_data: list[int] = [i for i, axis in enumerate(self.data_axes) if axis is not None]
        self.groups: list[Any] = stacking.groups(self.call)
        self.size: int = stacking.find_size(self.call, self.groups, self.data_axes, labels)
        self.carry_cells: list[int] = [i for i, group in enumerate(self.groups) if group == CARRY]
        self.stacked_cells: list[int] = [i for i, group in enumerate(self.groups) if isinstance(group, int)]
        self.carry_structure: Any = carry_structure(args[1], self.call)
        self.inner: GraphKey | None = stacking.inner_key(self.call.signature.key, self.groups)
        self.found: list[Any] = []
        self.order: BodyOrder = BodyOrder()

    def run(self, in_axes: Any, out_axes: Any, reverse: bool, unroll: Any) -> Outcome:
        call = self.call
        split, shared = self.stacking.keys(call, self.size)
        # Values that are the same in all steps and are not arrays stay what they are: a flag can decide an `if`.
        traced = [
            i
            for i, value in enumerate(call.data)
            if self.data_axes[i] is not None or i in self.carry_data or isinstance(value, (jax.Array, np.ndarray))
        ]
        fixed = {i: value for i, value in enumerate(call.data) if i not in traced}

        def work(cells: Any, values: Any, split: Any, shared: Any) -> Outcome:
            data = {**fixed, **dict(zip(traced, values))}
            return self._scan(cells, [data[i] for i in range(len(data))], split, shared, out_axes, reverse, unroll)

        return kept_trace(
            work,
            (call.cells(), [call.data[i] for i in traced], split, shared),
            functions=functions_run(self.fun, call),
            options=(self.stacking, in_axes, out_axes, reverse, unroll, fixed),
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
            [by_cell[_origin(effects, self.inner, cell)] for cell in effects.outputs() if out_groups[cell] == CARRY]
        )
        ys = jax.tree.map(lambda y, a: jnp.moveaxis(y, 0, a), ys, _spread(out_axes, ys))
        out = (jax.tree.unflatten(self.carry_structure, final_data), ys)
        return assemble(self.stacking, effects, out_groups, iter(stacked), others, out)

    def _with_labels(self, text: str) -> str:
        """Returns an error text of `jax.lax.scan` with the carry as the user wrote it."""
        leaves = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(self.carry_structure, self.carry_data))
        for number, (path, _) in enumerate(leaves):
            text = text.replace(f"carry[1][{number}]", f"carry{jax.tree_util.keystr(path)}")
        return text

    def step(
        self, carry: Any, x: Any, outer_cells: Sequence[Any], outer_data: Sequence[Any], shared: Any, out_axes: Any
    ) -> Any:
        (carried, carried_data), (slices, data_slices, split) = carry, x
        cells = with_values(outer_cells, (self.carry_cells, carried), (self.stacked_cells, slices))
        data = with_values(outer_data, (self.carry_data, carried_data), (self.slice_data, data_slices))
        contexts = self.stacking.contexts(self.call, split, shared, self.size, self.shared_by)
        signature = self.call.signature._replace(key=self.inner)
        cells = self.stacking.transformed(self.inner, cells)
        entered, args, kwargs = enter_call(signature, self.call.statics, cells, data, contexts)
        self.order.keep(entered)
        out = run_body(self.fun, args, kwargs)
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            raise TypeError(NOT_A_PAIR.format(name=self.name, got=type(out).__name__))
        if not isinstance(out_axes, int):
            check_module_axes(self.stacking, "out_axes", [out_axes], [out[1]], ["the collected result"])
        self.order.keep(entered, out)
        out = self.stacking.name_new_axes(entered, (out[0], out[1]))
        outcome = leave(entered, out, self.stacking.name, repeated=True)
        return self._collect(entered, outcome, cells)

    def _collect(self, entered: Entered, outcome: Outcome, cells: list[Any]) -> Any:
        effects = outcome.effects
        carry_out, y = outcome.out
        check_carry(self.stacking.name, "a carry", self.carry_structure, carry_out, self.inner)
        out_groups = self.stacking.output_groups(self.inner, self.groups, effects)
        self.found[:] = [(effects, out_groups)]
        stacked = []
        for cell, value in zip(effects.outputs(), outcome.values):
            if isinstance(out_groups[cell], int):
                stacked.append(value)
            elif out_groups[cell] == BROADCAST:
                self.stacking.check_not_new(effects.rewrite, cell)
                path = cell_paths(self.inner)[_origin(effects, self.inner, cell)]
                raise ValueError(READ_ONLY.format(name=self.stacking.name, path=path))
        carried = current_values(self.stacking.name, self.inner, entered, self.carry_cells)
        return (carried, jax.tree.leaves(carry_out)), (stacked, y)


def _origin(effects: Effects, before: GraphKey | None, cell: int) -> int:
    """Returns the number that an output cell had before the body."""
    if effects.rewrite is None:
        return cell
    module, name, _ = effects.rewrite.key.cells[cell]
    assert before is not None, "what comes out of a changed graph was in one before"
    return before.cell_numbers[module, name]


def carry_structure(carry: Any, call: Call) -> Any:
    """Returns the structure of a carry, with numbers in place of its Modules and Contexts."""
    key = call.signature.key
    roots = key.roots if key is not None else ()
    numbers = {id(root): number for root, number in zip(call.roots, roots)}
    numbered = jax.tree.map(lambda x: Returned(numbers[id(x)], type(x)) if is_module(x) else x, carry)
    return jax.tree.structure(with_contexts_by_number(numbered, call.contexts))


def with_contexts_by_number(value: Any, contexts: Sequence[Any]) -> Any:
    """Returns a carried value with numbers in place of its Contexts, so that a carried Context is the caller's own."""
    numbers = {id(ctx): -2 - n for n, ctx in enumerate(contexts)}
    return jax.tree.map(
        lambda x: Returned(numbers[id(x)], type(x)) if id(x) in numbers else x,
        value,
        is_leaf=lambda x: isinstance(x, Returned),
    )


def _spread(axes: Any, tree: Any) -> Any:
    """Returns one axis per leaf of `tree`, from axes for a prefix of it."""
    if isinstance(axes, int):
        return jax.tree.map(lambda _: axes, tree)
    return jax.tree.map(lambda a, sub: jax.tree.map(lambda _: a, sub), axes, tree, is_leaf=lambda a: a is None)


def current_values(name: str, key: GraphKey | None, entered: Entered, cells: Sequence[int]) -> list[Any]:
    """Returns what cells hold at the end of a body.

    Raises:
        TypeError: the shape or dtype of one of them has changed.
    """
    values = []
    for i in cells:
        assert key is not None, "only a graph has cells"
        at, attribute, _ = key.cells[i]
        value = entered.graph.modules[at].__dict__[attribute]
        before, after = type_text(entered.before[i]), type_text(value)
        if i in entered.trees:
            before = type_text(jax.tree.unflatten(entered.trees[i].treedef, entered.trees[i].leaves))
        if before != after:
            path = cell_paths(key)[i]
            raise TypeError(OTHER_TYPE.format(name=name, path=path, before=before, after=after))
        values.append(value)
    return values
