"""The state of an optax transformation as Variables.

optax keeps its state in nested tuples and dicts. Here, each of its arrays is an `OptState` with a readable path. A
*moment* is an array that belongs to one parameter: optax keeps it under the parameter's path, in a State like that of
the parameters. It *follows* the parameter: it has the same axis names and sharding, as far as its shape allows. Which
axes of its parameter a factored moment has kept is seen from the sizes; if several axes have the same size, from what
the transformation makes for parameters of slightly different sizes.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from nnx.core.module.variable_tree import key_segments, leaf_paths
from nnx.core.state.state import State
from nnx.core.trace import is_eager
from nnx.core.variables.variables import Node, Variable, raw_value, spec_of
from nnx.nn.support.draws import is_ordinary
from nnx.sharding.axes import aligned_names, matching_axes, taken_over
from nnx.sharding.placement import whole_beside

T = TypeVar("T")


class OptState(Variable[T]):
    """An array of optimizer state, kept by `nnx.Optimizer`. The collection "opt_state"."""

    __slots__ = ()
    collection = "opt_state"


class Moment(NamedTuple):
    """An array of the optimizer state that belongs to a parameter.

    Attributes:
        path: the path of the array in the optimizer state.
        parameter: the path of the parameter.
        rank: the number of axes of the parameter.
        axes: the axis of the parameter for each axis of the array (`matching_axes`).
    """

    path: str
    parameter: str
    rank: int
    axes: tuple[int | None, ...]


class Structure:
    """The nesting of an optax state, without its arrays; a static value that is hashed once.

    optax keeps moments in the containers of the parameters. Their metadata are left out, because they may change after
    the optimizer was made: `nnx.shard` writes axis names into them.

    Attributes:
        tree: the tree around the containers; each container is a leaf of it.
        boxes: the container of each leaf: the path of the parameter whose container it is, the spec of a container that
            does not belong to a parameter, or None for a leaf without a container.
        values: the structure of the list of values in the containers.
        paths: the path of each array.
        moments: the arrays that belong to a parameter.
    """

    __slots__ = ("tree", "boxes", "values", "paths", "moments", "_hash")

    tree: Any
    boxes: tuple[Any, ...]
    values: Any
    paths: tuple[str, ...]
    moments: tuple[Moment, ...]

    def __init__(self, tree: Any, boxes: Any, values: Any, paths: Any, moments: tuple[Moment, ...]):
        self.tree = tree
        self.boxes = boxes
        self.values = values
        self.paths = paths
        self.moments = moments
        self._hash = hash((tree, boxes, values, paths, moments))

    def has_form(self, tree: Any, values: Any) -> bool:
        """Whether an optax state with these parts has this structure."""
        return self.tree == tree and self.values == values

    def assemble(self, arrays: list[Any], params: State) -> Any:
        """Returns the optax state with these arrays, in the containers that the parameters have now."""
        boxed = map(_boxed, self.boxes, self.values.unflatten(arrays), itertools.repeat(params))
        return self.tree.unflatten(list(boxed))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Structure) or self._hash != other._hash:
            return False
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Structure({', '.join(self.paths)})"

    def __reduce__(self) -> Any:
        # Built again by the constructor, because the hash of a string differs from process to process.
        return Structure, (self.tree, self.boxes, self.values, self.paths, self.moments)


def _boxed(box: Any, value: Any, params: State) -> Any:
    if box is None:
        return value
    return (spec_of(params[box]) if isinstance(box, str) else box).box(value)


def flatten_state(opt_state: Any) -> tuple[list[Any], Any, Any]:
    """Returns the arrays of an optax state, and the `tree` and `values` of its Structure."""
    leaves, tree = jax.tree.flatten(opt_state, is_leaf=_is_box)
    arrays, values = jax.tree.flatten([raw_value(leaf) for leaf in leaves])
    return arrays, tree, values


_compiled_for: set[Any] = set()
"""The shapes and dtypes of parameters whose state was made by a compiled `tx.init`."""


def init_state(tx: Any, params: Any) -> Any:
    """Returns `tx.init(params)`; for abstract parameters an abstract state, which takes no memory.

    The first state for parameters of these shapes is made by one compiled program. In plain Python, `tx.init` compiles
    a small program for every shape, which takes twice as long or more; but those are kept, so later states of other
    transformations are made in plain Python.
    """
    leaves = jax.tree.leaves(params)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return jax.eval_shape(tx.init, params)
    shapes = tuple([(leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, jax.Array)])
    if shapes in _compiled_for or len(shapes) < len(leaves) or not _have_no_place(leaves):
        return tx.init(params)
    _compiled_for.add(shapes)
    try:
        return jax.jit(functools.partial(_init_of_arrays, tx))(params)
    except Exception:  # it needs concrete values; or the mistake is the user's, and is raised again without jit around
        return tx.init(params)


def _have_no_place(leaves: list[Any]) -> bool:
    """Returns whether jit makes the state where plain Python would.

    For parameters that are committed to devices it may not: zeros in the shape of a parameter would lose its sharding.
    """
    return is_eager() and is_ordinary() and not any(isinstance(leaf, Tracer) or leaf.committed for leaf in leaves)


def _init_of_arrays(tx: Any, params: Any) -> Any:
    state = tx.init(params)
    if not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state)):
        raise TypeError("jit would turn Python and numpy values of the state into arrays")
    return state


def as_variables(opt_state: Any, params: State, tx: Any) -> tuple[list[tuple[str, Any]], Structure]:
    """Returns a Variable for each array of an optax state, with its path, and the structure around them.

    Args:
        opt_state: the state.
        params: the parameters it was made for.
        tx: the transformation that made it.
    """
    arrays = list(_state_arrays(opt_state, params, tx))
    paths = [array.path for array in arrays]
    if len(set(paths)) < len(paths) or any("/" in path and _is_inside(path, set(paths)) for path in paths):
        paths = [str(i) for i in range(len(arrays))]  # the readable paths are ambiguous
    variables = [(path, array.variable(params)) for path, array in zip(paths, arrays, strict=True)]
    moments = [array.moment._replace(path=path) for path, array in zip(paths, arrays, strict=True) if array.moment]
    _, tree, values = flatten_state(opt_state)
    found = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_is_box)
    boxes = tuple([_box_of(keys, leaf, params) for keys, leaf in found])
    return variables, Structure(tree, boxes, values, tuple(paths), tuple(moments))


class _StateArray(NamedTuple):
    """An array of an optax state.

    Attributes:
        path: its path in the state.
        leaf: the array.
        param: the container of the parameter it belongs to, if it does.
        value: the array of the parameter.
        moment: what it has in common with the parameter; None if it does not belong to one.
    """

    path: str
    leaf: Any
    param: Any = None
    value: Any = None
    moment: Moment | None = None

    def variable(self, params: State) -> OptState[Any]:
        """Returns the Variable of the array, with the names and devices of its parameter."""
        if self.moment is None:
            return OptState(whole_beside(self.leaf, params))
        placed = _placed(self.leaf, self.value, self.moment)
        return OptState(placed, **_metadata(self.param, self.moment))


def moment_axes(opt_state: Any, params: State, tx: Any) -> dict[str, tuple[int | None, ...]]:
    """Returns, for each moment, the axis of its parameter that each of its axes is, by path in the optax state."""
    return {array.path: array.moment.axes for array in _state_arrays(opt_state, params, tx) if array.moment is not None}


def _state_arrays(opt_state: Any, params: State, tx: Any) -> Iterator[_StateArray]:
    probe = functools.cache(lambda: _probe(tx, params))
    for at, (keys, found) in enumerate(jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_is_box)):
        name = _name_in_state(keys)
        param = params.get(name)
        values: dict[str, Any] = dict(leaf_paths(raw_value(param))) if param is not None else {}
        for inner, leaf in leaf_paths(raw_value(found)):
            path = "/".join([*key_segments(keys), *([inner] if inner else [])]) or "state"
            shape = jnp.shape(values[inner]) if inner in values else None
            axes = None if shape is None else matching_axes(jnp.shape(leaf), shape)
            if shape is None or axes is None:
                yield _StateArray(path, leaf)
                continue
            if len(axes) < len(shape) and None in axes:
                axes = _axes_in_probe(axes, jnp.shape(leaf), shape, probe().get((at, inner)))
            yield _StateArray(path, leaf, param, values[inner], Moment(path, name, len(shape), axes))


def _probe(tx: Any, params: State) -> dict[tuple[int, str], tuple[int, ...]]:
    """Returns the shapes of the state for parameters whose axes have different sizes, by leaf and path within it."""

    def distinct(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(_distinct_sizes(jnp.shape(x)), jnp.result_type(x))

    try:
        state = jax.eval_shape(tx.init, jax.tree.map(distinct, params))
    except Exception:  # a transformation may be bound to the sizes of its model, and then equal axes stay unknown
        return {}
    leaves = jax.tree.leaves(state, is_leaf=_is_box)
    return {(at, inner): x.shape for at, leaf in enumerate(leaves) for inner, x in leaf_paths(raw_value(leaf))}


def _distinct_sizes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns slightly larger sizes that are all different, in the same order; of equal ones, the later is larger.

    optax factors the two largest axes, and takes the later of two equal ones for the larger.
    """
    sizes, last = list(shape), 0
    for axis in sorted(range(len(shape)), key=lambda axis: (shape[axis], axis)):
        sizes[axis] = last = max(shape[axis], last + 1)
    return tuple(sizes)


def _axes_in_probe(
    axes: tuple[int | None, ...], shape: tuple[int, ...], of: tuple[int, ...], probed: tuple[int, ...] | None
) -> tuple[int | None, ...]:
    """Returns the axes that a moment has kept, as its counterpart in the probe shows; `axes` if it does not."""
    found = None if probed is None else matching_axes(probed, _distinct_sizes(of))
    if found is None or len(found) != len(shape):
        return axes
    fits = all(axis is not None and of[axis] == size for axis, size in zip(found, shape))
    return found if fits else axes


def _name_in_state(keys: Any) -> str:
    """Returns the path that a key path ends with, if it leads into a State; else an empty one."""
    return keys[-1].key if keys and isinstance(keys[-1], jax.tree_util.DictKey) else ""


def _box_of(keys: Any, leaf: Any, params: State) -> Any:
    if not _is_box(leaf):
        return None
    param: Any = params.get(_name_in_state(keys))
    return _name_in_state(keys) if _is_box(param) and spec_of(param) is spec_of(leaf) else spec_of(leaf)


def _is_box(x: Any) -> bool:
    return isinstance(x, Node)


def _is_inside(path: str, paths: set[str]) -> bool:
    segments = path.split("/")
    return any("/".join(segments[:i]) in paths for i in range(1, len(segments)))


def _metadata(param: Any, moment: Moment) -> dict[str, Any]:
    """Returns the metadata of a moment: those of its parameter, or the names of the axes it kept."""
    if not isinstance(param, Node):
        return {}
    if moment.axes == tuple(range(moment.rank)):
        return dict(param.metadata)
    sharding = param.metadata.get("sharding")
    if sharding is None:
        return {}
    names = aligned_names(sharding, moment.rank)
    return {"sharding": taken_over(names + (None,) * (moment.rank - len(names)), moment.axes)}


def _placed(leaf: Any, value: Any, moment: Moment) -> Any:
    """Returns a moment on the devices of its parameter, split along the same axes."""
    if isinstance(leaf, Tracer) or isinstance(value, Tracer):
        return leaf
    sharding = getattr(value, "sharding", None)
    if moment.axes != tuple(range(moment.rank)) and sharding is not None:
        if not isinstance(sharding, NamedSharding):
            return leaf
        spec = _spec_of_part(sharding, moment, jnp.shape(leaf))
        sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    # If the parameter is not committed to its devices, its moments are not either.
    if not isinstance(value, jax.Array) or not value.committed or leaf.sharding == sharding:
        return leaf
    return jax.device_put(leaf, sharding)


def _spec_of_part(sharding: NamedSharding, moment: Moment, shape: tuple[int, ...]) -> PartitionSpec:
    """Returns how a moment with other axes than its parameter is split.

    It keeps the split of the axes it kept. The mesh axes of those it lost split its first axis that is whole and can be
    divided: the moments of fully sharded parameters are then fully sharded, too.
    """
    whole = tuple(sharding.spec) + (None,) * (moment.rank - len(sharding.spec))
    spec = [None if axis is None else whole[axis] for axis in moment.axes]
    lost = [entry for axis, entry in enumerate(whole) if axis not in moment.axes and entry is not None]
    free = tuple(name for entry in lost for name in (entry if isinstance(entry, tuple) else (entry,)))
    parts = math.prod(sharding.mesh.shape[name] for name in free)
    for axis, size in enumerate(shape):
        if free and spec[axis] is None and size % parts == 0:
            spec[axis] = free
            break
    return PartitionSpec(*spec)
