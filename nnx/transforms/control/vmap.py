"""`vmap`: one function over many members, with Modules stacked or shared according to `variable_axes`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack, overload

import jax

from nnx.core.context import SharedBy
from nnx.core.module.attributes import decide_again
from nnx.core.module.info import info_of, new_module
from nnx.core.module.kinds import is_static
from nnx.core.structure.structure import GraphKey
from nnx.core.trace import is_of_this_trace
from nnx.core.variables.variables import BatchStat, Cache, Intermediate, Spec
from nnx.transforms.control.body_order import BodyOrder
from nnx.transforms.control.stacking import Stacking, argument_labels, check_module_axes, data_axes, move_axis
from nnx.transforms.engine.annotations import Decorator, P, R, VmapOptions
from nnx.transforms.engine.call import Call, callee_of, cell_paths, with_values
from nnx.transforms.engine.commit import commit, finish
from nnx.transforms.engine.decorators import decorator
from nnx.transforms.engine.enter import enter_call
from nnx.transforms.engine.leave import leave
from nnx.transforms.engine.outcome import Effects, Outcome
from nnx.transforms.engine.shared_traces import run_body


class MappedCall:
    """One call of a mapped function.

    Args:
        stacking: the options of the transform.
        fun: the user's function.
        call: the call, split.
        axes_of_data: the mapped axis of every data leaf, or None.
        labels: what the data leaves are called in errors.
        shared_by: what shared streams of Contexts are marked with.
    """

    def __init__(
        self, stacking: Stacking, fun: Any, call: Call, axes_of_data: Sequence[Any], labels: Any, shared_by: SharedBy
    ):
        self.stacking, self.fun, self.call, self.shared_by = stacking, fun, call, shared_by
        self.axes_of_data = axes_of_data
        self.mapped_data: list[int] = [i for i, axis in enumerate(axes_of_data) if axis is not None]
        self.groups: list[Any] = stacking.groups(call)
        self.size: int = stacking.find_size(call, self.groups, axes_of_data, labels)
        self.inner: GraphKey | None = stacking.inner_key(call.signature.key, self.groups)
        self.found: list[tuple[Effects, dict[int, Any]]] = []  # what the last trace of the body did
        self.order: BodyOrder = BodyOrder()

    def run(self, out_axes: Any, **options: Any) -> Outcome:
        """Maps the function over all members; `options` are those of `jax.vmap`."""
        call = self.call
        split, shared = self.stacking.keys(call, self.size)

        def body(cells: Any, slices: Any, split: Any) -> Any:
            contexts = self.stacking.contexts(call, split, shared, self.size, self.shared_by)
            return self._member(cells, slices, contexts, out_axes)

        cell_axes = [group if isinstance(group, int) else None for group in self.groups]
        in_axes = (cell_axes, [self.axes_of_data[i] for i in self.mapped_data], 0)
        mapped = jax.vmap(body, in_axes=in_axes, out_axes=(0, None, out_axes), axis_size=self.size, **options)
        stacked, same, out = mapped(call.cells(), [call.data[i] for i in self.mapped_data], split)
        return assemble(self.stacking, *self.found[0], iter(stacked), iter(same), out)

    def _member(self, cells: Any, slices: Any, contexts: Any, out_axes: Any) -> Any:
        """Runs one member; returns its changed values, stacked and shared, and its output."""
        call, stacking = self.call, self.stacking
        data = with_values(call.data, (self.mapped_data, slices))  # unmapped values can be of any type
        signature = call.signature._replace(key=self.inner)
        cells = stacking.transformed(self.inner, cells)
        entered, args, kwargs = enter_call(signature, call.statics, cells, data, contexts)
        self.order.keep(entered)
        out = run_body(self.fun, args, kwargs)
        if not isinstance(out_axes, int):
            check_module_axes(stacking, "out_axes", [out_axes], [out], ["the result"])
        self.order.keep(entered, out)
        outcome = leave(entered, stacking.name_new_axes(entered, out), stacking.name, repeated=True)
        return *self._sort_values(outcome), outcome.out

    def _sort_values(self, outcome: Outcome) -> tuple[list[Any], list[Any]]:
        """Returns the values that came out of a member: those that are stacked, and those that all members share."""
        effects = outcome.effects
        out_groups = self.stacking.output_groups(self.inner, self.groups, effects)
        self.found[:] = [(effects, out_groups)]
        key = effects.rewrite.key if effects.rewrite is not None else self.inner
        stacked, same = [], []
        for cell, value in zip(effects.outputs(), outcome.values):
            assert key is not None, "only a graph has cells"
            if isinstance(out_groups[cell], int):
                stacked.append(value)
                if self.shared_by.drawn and is_equal_by_mistake(key.kinds[cell], value):
                    while self.shared_by.drawn:
                        self.shared_by.warn(self.shared_by.drawn.pop())
            else:
                self.stacking.check_same(cell_paths(key)[cell], key.kinds[cell], value)
                same.append(value)
        return stacked, same


def assemble(
    stacking: Stacking, effects: Effects, out_groups: Mapping[int, Any], stacked: Any, others: Any, out: Any
) -> Outcome:
    """Returns the outcome of all runs together: stacked values with their axis in its place, the others unchanged."""
    values = []
    for cell in effects.outputs():
        group = out_groups[cell]
        values.append(move_axis(next(stacked), 0, group) if isinstance(group, int) else next(others))
    if effects.rewrite is not None:
        rewrite = stacking.outer_rewrite(effects.rewrite, out_groups)
        effects = replace(effects, rewrite=rewrite)
    return Outcome(values, out, effects)


def construct(stacking: Stacking, make: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Builds one Module whose variables are stacked over all members; the arguments are the same for all."""
    stacking.require_size()
    call = Call(args, kwargs)
    return commit(call, map_all(stacking, make, call, _shared_by(stacking, make)))


def map_all(stacking: Stacking, make: Callable[..., Any], call: Call, shared_by: SharedBy) -> Outcome:
    """Maps a function over the members of a call whose arguments are the same for all of them."""
    count = len(call.data)
    return MappedCall(stacking, make, call, [None] * count, [""] * count, shared_by).run(0)


def _shared_by(stacking: Stacking, make: Callable[..., Any]) -> SharedBy:
    """Returns what shared streams of a constructor are marked with.

    A shared key is fine for a variable that the members share, so the warning waits for what the constructor made.
    """
    return SharedBy(f"{stacking.name}({getattr(make, '__name__', type(make).__name__)})", drawn=set())


def is_equal_by_mistake(kind: Any, value: Any) -> bool:
    """Whether a stacked variable, of a type that is usually drawn at random, has one value for all members."""
    if type(kind) is not Spec or issubclass(kind.type, (BatchStat, Cache, Intermediate)):
        return False
    return not any(map(is_of_this_trace, jax.tree.leaves(value)))


def is_init_method(fun: Any, is_init: bool | None) -> bool:
    """Whether a decorated function builds variables; if the option is None, whether it is an `__init__`."""
    return getattr(fun, "__name__", "") == "__init__" if is_init is None else is_init


def stacked_init(stacking: Stacking, fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a constructor that runs `fun` once per member and gives `self` the stacked variables.

    Inside, `self` is a member. When the members have been built, `self` takes the member's place in the result, so that
    everything that refers to the member (a child's parent, a bound method) refers to `self`.
    """
    stacking.require_size()
    shared_by = _shared_by(stacking, fun)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        statics = {name: self.__dict__[name] for name, kind in info_of(self).kinds.items() if is_static(kind)}

        def make(*args: Any, **kwargs: Any) -> Any:
            member = new_module(type(self), {}, constructing=True)
            for name, value in statics.items():
                setattr(member, name, value)
            fun(member, *args, **kwargs)
            decide_again(member)
            info_of(member).constructing = False
            return member

        call = Call(args, kwargs)
        outcome = map_all(stacking, make, call, shared_by)
        commit(call, outcome, taking={outcome.out.index: self})

    return init


@overload
def vmap(
    fun: Callable[P, R],
    *,
    variable_axes: Mapping[Any, int] | None = None,
    axis_size: int | None = None,
    **options: Unpack[VmapOptions],
) -> Callable[P, R]: ...
@overload
def vmap(
    *, variable_axes: Mapping[Any, int] | None = None, axis_size: int | None = None, **options: Unpack[VmapOptions]
) -> Decorator: ...
@decorator
def vmap(
    fun: Any,
    *,
    variable_axes: Mapping[Any, int] | None = None,
    variable_broadcast: Any = ...,
    split_rngs: Any = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_size: int | None = None,
    axis_name: Any = None,
    spmd_axis_name: Any = None,
    data_transform: Callable[[Any], Any] | None = None,
    metadata_params: Mapping[Any, Any] | None = None,
    stateful: bool = True,
    is_init: bool | None = None,
) -> Callable[..., Any]:
    """Maps a function over axes of its arguments and of the variables of its Modules.

    Args:
        fun: the function, a Module, or a bound method of one. On a method, `@nnx.vmap(...)` maps over `self`; on
            `__init__` (or with `is_init=True`) it builds the stacked variables. A Module class is mapped as by
            `nnx.Vmap`.
        variable_axes: the variables that are stacked, `{filter: axis}`; each member sees one slice.
        variable_broadcast: a filter for variables that are the same for all members; by default, everything else.
        split_rngs: an RNG filter for the streams of Contexts that differ from member to member.
        in_axes, out_axes: as in `jax.vmap`, for plain arrays. Modules are stacked by `variable_axes` and Contexts are
            split by `split_rngs`, so their entries should be None.
        axis_size: the number of members, if the arguments do not determine it.
        axis_name, spmd_axis_name: as in `jax.vmap`.
        data_transform: a function applied to the State of the Modules inside the body.
        metadata_params: with `{nnx.PARTITION_NAME: "name"}`, the stacked axis's name in `sharding` metadata.
        stateful: whether changes to Modules are written back.
        is_init: whether the function builds variables; by default, whether its name is `__init__`.

    >>> models = nnx.Vmap(nnx.Linear, variable_axes={nnx.Param: 0}, split_rngs="params", axis_size=6, in_axes=None)(
    ...     3, 2, ctx=nnx.context(0))
    >>> models(jnp.ones((4, 3))).shape
    (6, 4, 2)
    """
    stacking = Stacking(
        name="nnx.vmap",
        size_name="axis_size",
        variable_axes=variable_axes,
        broadcast=variable_broadcast,
        split_rngs=split_rngs,
        size=axis_size,
        metadata_params=metadata_params,
        data_transform=data_transform,
    )
    if is_init_method(fun, is_init):
        return stacked_init(stacking, fun)
    callee = callee_of(fun, "nnx.vmap")
    shared_by = SharedBy(f"nnx.vmap({callee.name})")
    options = {"axis_name": axis_name, "spmd_axis_name": spmd_axis_name}
    options = {k: v for k, v in options.items() if v is not None}

    def lifted(*args: Any, **kwargs: Any) -> Any:
        if callee.bound:
            args = (*callee.bound, *args)
        entries = in_axes
        if callee.bound and isinstance(in_axes, (tuple, list)):
            entries = (None, *in_axes)
        if isinstance(entries, (tuple, list)):
            check_module_axes(stacking, "in_axes", entries, args, argument_labels(len(args)))
        call = Call(args, kwargs)
        axes_of_data, labels = data_axes(stacking.name, entries, args, kwargs, 0)
        outcome = MappedCall(stacking, callee.fun, call, axes_of_data, labels, shared_by).run(out_axes, **options)
        return finish(call, outcome, stateful)

    return lifted
