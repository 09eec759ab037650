"""Stacking: what `variable_axes`, `split_rngs` and their kin mean, written once for scan and vmap.

Every cell of a call has a *group*: an axis along which it is stacked, `CARRY` (scan: handed from step to step) or
`BROADCAST` (the same for all). Inside the body, a stacked Variable is one slice; with `metadata_params`, its `sharding`
then lacks the name of the stacked axis.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx.core.context import SharedBy, rng_answers, rng_predicate
from nnx.core.module.kinds import NODE, box
from nnx.core.state.filters import describe, to_predicate, untyped_parts
from nnx.core.state.paths import join
from nnx.core.state.state import State
from nnx.core.structure.structure import ChildAttribute, DataAttribute, GraphKey
from nnx.core.trace import is_of_this_trace
from nnx.core.variables.variables import Spec, raw_value
from nnx.sharding.axes import PARTITION_NAME, add_axis, remove_axis
from nnx.sharding.defaults import name_whole_axes
from nnx.transforms.control.body_rules import NEW_VARIABLE, check_aliases, check_structure
from nnx.transforms.engine.call import Call, cell_paths, is_data, is_module
from nnx.transforms.engine.enter import Entered
from nnx.transforms.engine.observed import Observation, is_observation, is_sliced, restacked
from nnx.transforms.engine.outcome import Effects
from nnx.transforms.engine.rewrite import Rewrite
from nnx.transforms.engine.selected_arguments import WRONG_COUNT

CARRY, BROADCAST = "carry", "broadcast"

NOT_A_MAPPING = "{name}: variable_axes maps filters to axes, e.g. {{nnx.Param: 0}}; got {axes!r}."

NOT_AN_AXIS = "{name}: variable_axes[{filter}] is an axis, an int; got {axis!r}."

NO_SUCH_AXIS = "{name}: {label} is mapped along axis {axis}, but its shape is {shape}."

NOT_A_PREFIX = "{name}: in_axes {axis!r} does not fit the argument: {error}"

NO_LENGTH = """Cannot use variable_axes without specifying a {size}: {name} was given variable_axes={axes}, and the \
number of slices cannot be inferred from a Module that does not exist yet. Write {size}=..."""

LENGTHS_DISAGREE = """{name}: the lengths disagree. {listing}. They must all be the same: check variable_axes, in_axes \
and {size}=..."""

UNKNOWN_LENGTH = """{name}: there is nothing to take the {size} from: no argument is mapped and no variable is \
stacked. Write {size}=..."""

TWO_AXES = """{name}: one variable is reached under two axes: {path!r} ({group}) and {other!r} ({other_group}). It is \
shared, so it has one value: make the filters of variable_axes agree on it."""

AXIS_AT_MODULE = """{name}: {option} has the axis {axis} for {place}, a Module ({kind}). in_axes and out_axes are for \
plain arrays; a Module's variables are stacked by their types. If they have a stacked axis, write \
variable_axes={{nnx.Param: {axis}}}, {size}=...; if all runs share the Module, write None in place of {axis}."""

PATHS_COMPARED = 10_000  # the most paths to Modules that are compared where Modules are shared

NO_GROUP = """{name}: {path!r}, {kind}, is in none of variable_axes={axes}, variable_broadcast={broadcast} and \
variable_carry={carry}. Add it to one of them (`...` is all the rest)."""

DIFFERS = """{name}: the variable {path!r} is not under variable_axes, so it is the same for all {size} members, but \
the body gave it a value that differs from member to member. Stack it (variable_axes={{{kind}: 0}}), or do not change \
it."""

READ_ONLY = """{name}: the body changed {path!r}, which is under variable_broadcast and so read only: every step reads \
the same value. Carry it from step to step (variable_carry), or stack it (variable_axes)."""

ADD_TO_AXES = "Every run makes its own value, so it must be stacked: add its type to variable_axes, e.g. {{{kind}: 0}}."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stacking:
    """The options of one scan or vmap that concern Modules and Contexts, as a value that can be hashed.

    Args:
        name: the transform's name, for errors.
        size_name: what the option for the number of slices is called, "length" or "axis_size".
        variable_axes: a mapping from filter to the axis along which its variables are stacked; kept as pairs.
        broadcast, carry: filters for variables that every run reads, and that are handed from step to step.
        split_rngs: an RNG filter for the streams that differ from run to run.
        size: the number of slices, if given.
        metadata_params: the metadata of the stacked axis, such as its name in `sharding`; kept as pairs.
        data_transform: a function applied to the State inside the body.

    Raises:
        TypeError: `variable_axes` is not a mapping from filters to axes.
    """

    name: str
    size_name: str
    variable_axes: Any
    broadcast: Any
    carry: Any = None
    split_rngs: Any
    size: int | None
    metadata_params: Any
    data_transform: Callable[[State], State] | None = None

    def __post_init__(self) -> None:
        axes = {} if self.variable_axes is None else self.variable_axes
        if not isinstance(axes, Mapping):
            raise TypeError(NOT_A_MAPPING.format(name=self.name, axes=axes))
        for filter, axis in axes.items():
            to_predicate(filter)
            if not isinstance(axis, int):
                raise TypeError(NOT_AN_AXIS.format(name=self.name, filter=describe(filter), axis=axis))
        rng_predicate(self.split_rngs)  # raises if it is not an RNG filter
        hashable = {
            "variable_axes": tuple(axes.items()),
            "split_rngs": tuple(self.split_rngs) if isinstance(self.split_rngs, list) else self.split_rngs,
            "metadata_params": tuple((self.metadata_params or {}).items()),
        }
        for field, value in hashable.items():
            object.__setattr__(self, field, value)  # the dataclass is frozen

    def require_size(self) -> None:
        if self.variable_axes and self.size is None:
            axes = "{" + ", ".join(f"{describe(f)}: {a}" for f, a in self.variable_axes) + "}"
            raise ValueError(NO_LENGTH.format(size=self.size_name, name=self.name, axes=axes))

    # Groups

    def classifier(self) -> Callable[[str, Any], Any]:
        cases = [(to_predicate(f), axis) for f, axis in self.variable_axes]
        rest = [(self.broadcast, BROADCAST), (self.carry, CARRY)]
        rest.sort(key=lambda case: case[0] is ...)  # `...` means what no other filter takes, so it comes last
        cases += [(to_predicate(f), group) for f, group in rest]

        def classify(path: str, leaf: Any) -> Any:
            if isinstance(leaf, Observation):  # the library's own, which no filter of the user is about
                return 0 if is_sliced(leaf, self.size) else BROADCAST
            return next((group for matches, group in cases if matches(path, leaf)), None)

        return classify

    def groups(self, call: Call) -> list[Any]:
        """Returns the group of every cell of a call.

        Raises:
            ValueError: a cell is in no group, or shared between Modules in two.
        """
        if call.flat is None:
            return []
        classify, key = self.classifier(), call.flat.key
        leaves = call.flat.leaves()
        groups = [classify(path, leaf) for (_, path), leaf in zip(key.cell_roots(), leaves)]
        for group, path, kind in zip(groups, cell_paths(key), key.kinds):
            if group is None:
                axes = tuple(f"{describe(f)}: {a}" for f, a in self.variable_axes)
                rest = {"broadcast": describe(self.broadcast), "carry": describe(self.carry)}
                raise ValueError(NO_GROUP.format(name=self.name, path=path, kind=kind, axes=axes, **rest))
        if self._depends_on_paths():
            self._check_one_group(key, leaves, groups)
        for first, *others in call.signature.ties.aliases:
            for other in others:
                if groups[other] != groups[first]:
                    paths = {"path": cell_paths(key)[first], "other": cell_paths(key)[other]}
                    text = {"group": groups[first], "other_group": groups[other]}
                    raise ValueError(TWO_AXES.format(name=self.name, **paths, **text))
        return groups

    def _depends_on_paths(self) -> bool:
        filters = [*(filter for filter, _ in self.variable_axes), self.broadcast, self.carry]
        return next(untyped_parts(filters), None) is not None

    def _check_one_group(self, key: GraphKey, leaves: Sequence[Any], groups: Sequence[Any]) -> None:
        """Raises ValueError if a cell has another group on another path to it, from any Module of the call."""
        classify, paths = self.classifier(), cell_paths(key)
        for label, path, cell in all_paths(key):
            group = classify(path, leaves[cell])
            if group != groups[cell]:
                text = {"path": paths[cell], "group": groups[cell], "other": join(label, path) if label else path}
                raise ValueError(TWO_AXES.format(name=self.name, other_group=group, **text))

    # Sizes

    def find_size(self, call: Call, groups: Sequence[Any], data_axes: Sequence[Any], labels: Sequence[str]) -> int:
        """Returns how many slices there are.

        Raises:
            ValueError: the arguments and variables disagree about the number, or do not determine it.
        """
        found: list[tuple[str, int]] = [] if self.size is None else [(f"{self.size_name}=", self.size)]
        for path, group, value in zip(cell_paths(call.signature.key), groups, call.cells()):
            if isinstance(group, int):
                found += [(path, size) for size in _sizes(value, group, path, self.name)]
        for label, axis, value in zip(labels, data_axes, call.data):
            if axis is not None:
                found += [(label, size) for size in _sizes(value, axis, label, self.name)]
        if not found:
            raise ValueError(UNKNOWN_LENGTH.format(name=self.name, size=self.size_name))
        if len({size for _, size in found}) > 1:
            listing = ", ".join(f"{label}: {size}" if label[-1] != "=" else f"{label}{size}" for label, size in found)
            raise ValueError(LENGTHS_DISAGREE.format(name=self.name, listing=listing, size=self.size_name))
        return found[0][1]

    # Random keys

    def keys(self, call: Call, size: int) -> tuple[list[Any], list[Any]]:
        """Forks every Context; returns `{stream: keys}` of the streams that are split, and of the others."""
        selects = rng_predicate(self.split_rngs)
        split, shared = [], []
        for ctx in call.contexts:
            keys = ctx.partition().keys
            split.append({name: jax.random.split(key, size) for name, key in keys.items() if selects(name)})
            shared.append({name: key for name, key in keys.items() if not selects(name)})
        return split, shared

    def contexts(self, call: Call, split: list[Any], shared: list[Any], size: int, shared_by: SharedBy) -> list[Any]:
        """Returns the Contexts of one run; drawing from a stream that is shared, and was not meant to be, warns."""
        # A single run shares its keys with no other one, so there is nothing to warn about.
        answer_of = rng_answers({...: False} if size == 1 else self.split_rngs)
        contexts = []
        for definition, own, others in zip(call.signature.contexts, split, shared):
            unsaid = [name for name in others if answer_of(name) is None]
            contexts.append(definition.sharing(unsaid, shared_by).merge({**own, **others}))
        return contexts

    # Specs inside and outside

    def inner_key(self, key: GraphKey | None, groups: Sequence[Any]) -> GraphKey | None:
        """Returns the structure as the body sees it: stacked Variables without the name of the stacked axis."""
        if key is None:
            return key
        key = restacked(key, enumerate(groups), -1)
        if not self.metadata_params:
            return key
        params = dict(self.metadata_params)
        stacked = {i: g for i, g in enumerate(groups) if isinstance(g, int) and type(key.kinds[i]) is Spec}
        return key.with_specs({i: remove_axis(key.kinds[i], axis, params) for i, axis in stacked.items()})

    def name_new_axes(self, entered: Entered, out: Any) -> Any:
        """Writes the default axis names of Variables made in the body into their metadata; returns the body's result.

        The name of the stacked axis can then be inserted among them, as among explicit ones.
        """
        if PARTITION_NAME in dict(self.metadata_params):
            modules = entered.graph.modules
            known = [(modules[at], name) for at, name, _ in entered.key.cells] if entered.key is not None else []
            made = [leaf for leaf in jax.tree.leaves(out) if is_module(leaf)]
            name_whole_axes([*entered.roots, *made], known)
        return out

    def outer_rewrite(self, rewrite: Rewrite, groups: Mapping[int, Any]) -> Rewrite:
        """Returns a Rewrite found inside the body, with the Variables as they are outside."""
        key = restacked(rewrite.key, groups.items(), 1)
        if not self.metadata_params:
            return rewrite if key is rewrite.key else replace(rewrite, key=key)
        params = dict(self.metadata_params)
        stacked = {i: g for i, g in groups.items() if isinstance(g, int) and type(key.kinds[i]) is Spec}
        outer = key.with_specs({i: add_axis(key.kinds[i], axis, params) for i, axis in stacked.items()})
        return replace(rewrite, key=outer)

    def transformed(self, key: GraphKey | None, cells: list[Any]) -> list[Any]:
        """Returns the cells after the user's `data_transform`, which sees them as a State."""
        if self.data_transform is None or key is None:
            return cells
        paths = [path for _, path in key.cell_roots()]
        leaves = list(map(box, key.kinds, cells))
        state = self.data_transform(State(dict(zip(paths, leaves))))
        return [raw_value(state[path]) for path in paths]

    # What came out of a body

    def output_groups(self, before: GraphKey | None, groups: Sequence[Any], effects: Effects) -> dict[int, Any]:
        """Returns the group of each value of an outcome; new variables are classified by the filters.

        Raises:
            ValueError: the body changed the structure in a way it must not, or added a variable that is not stacked.
        """
        rewrite = effects.rewrite
        check_aliases(self.name, before, effects.regrouped)
        if rewrite is None:
            return {i: groups[i] for i in effects.changed}
        classify = self.classifier()
        added = check_structure(self.name, before, rewrite, effects.returns_modules)
        found: dict[int, Any] = {}
        for cell, source in enumerate(rewrite.sources):
            if source >= 0:
                found[cell] = groups[source]
        for cell, (module, name, _) in enumerate(rewrite.key.cells):
            origin = before.cell_at(module, name) if before is not None else None
            if cell not in found and origin is not None:
                found[cell] = groups[origin]
        for cell, path, kind in added:
            leaf = jnp.zeros(()) if kind is NODE else box(kind, None)
            group = 0 if is_observation(kind) else classify(path, leaf)
            if not isinstance(group, int) and rewrite.key.cells[cell].module < rewrite.old_count:
                raise self._not_stacked(path, kind)
            found[cell] = group if isinstance(group, int) else BROADCAST
        return found

    def _not_stacked(self, path: str, kind: Any) -> ValueError:
        advice = ADD_TO_AXES.format(kind=kind.type.__name__ if type(kind) is Spec else "nnx.buffers")
        return ValueError(NEW_VARIABLE.format(name=self.name, path=path, kind=kind, advice=advice))

    def check_not_new(self, rewrite: Rewrite | None, cell: int) -> None:
        """Raises ValueError if a cell that is not stacked is in a Module that every step makes again."""
        if rewrite is not None and rewrite.key.cells[cell].module >= rewrite.old_count:
            raise self._not_stacked(rewrite.key.cell_roots()[cell].path, rewrite.key.kinds[cell])

    def check_same(self, path: str, kind: Any, value: Any) -> None:
        """Raises ValueError if a value that should be the same for all members is not."""
        if any(map(is_of_this_trace, jax.tree.leaves(value))):
            label = kind.type.__name__ if type(kind) is Spec else "nnx.buffers"
            raise ValueError(DIFFERS.format(name=self.name, path=path, size=self.size or "the", kind=label))


def _sizes(value: Any, axis: int, label: str, name: str) -> list[int]:
    sizes = []
    for leaf in jax.tree.leaves(value):
        shape = np.shape(leaf)  # jnp.shape would warn about a non-array before the error below can name it
        if not -len(shape) <= axis < len(shape):
            raise ValueError(NO_SUCH_AXIS.format(name=name, label=label, axis=axis, shape=shape))
        sizes.append(shape[axis])
    return sizes


def all_paths(key: GraphKey) -> Iterator[tuple[str, str, int]]:
    """Yields every way to every cell that passes no Module twice: `(label of the root, path, cell)`.

    The ways multiply with each shared Module on top of another, so at most `PATHS_COMPARED` Modules are visited.
    """
    visits = 0
    for number, root in enumerate(key.roots):
        label = f"(Module {number})" if len(key.roots) > 1 else ""
        stack: list[tuple[int, str, frozenset[int]]] = [(root, "", frozenset())]
        while stack and visits < PATHS_COMPARED:
            module, prefix, above = stack.pop()
            visits += 1
            for attribute in key.attributes(module):
                path = join(prefix, attribute.name)
                if type(attribute) is DataAttribute:
                    yield label, path, attribute.cell
                elif type(attribute) is ChildAttribute:
                    if attribute.module != module and attribute.module not in above:
                        stack.append((attribute.module, path, above | {module}))


def argument_labels(count: int) -> list[str]:
    """Returns what positional arguments are called in errors."""
    return [f"argument {i}" for i in range(count)]


def data_axes(
    name: str, axes: Any, args: Sequence[Any], kwargs: Mapping[str, Any], keyword: Any
) -> tuple[list[Any], list[str]]:
    """Returns the axis of every data leaf of a call, from `in_axes` over the arguments, and a label for each."""
    if isinstance(axes, (tuple, list)):
        if len(axes) != len(args):
            raise ValueError(WRONG_COUNT.format(option=f"{name}: in_axes", given=len(axes), count=len(args)))
        per_argument = list(axes)
    else:
        per_argument = [axes] * len(args)
    found: list[Any] = []
    labels: list[str] = []
    for i, (argument, axis) in enumerate([*zip(args, per_argument), *((kwargs[k], keyword) for k in sorted(kwargs))]):
        label = argument_labels(len(args))[i] if i < len(args) else sorted(kwargs)[i - len(args)]
        for path, leaf_axis in _prefix_axes(name, axis, argument):
            found.append(leaf_axis)
            labels.append(f"{label}{jax.tree_util.keystr(path)}")
    return found, labels


def _prefix_axes(name: str, axis: Any, argument: Any) -> list[tuple[Any, Any]]:
    """Returns the axis of every data leaf of an argument, from axes for a prefix of it."""
    leaves = jax.tree_util.tree_leaves_with_path(argument)
    if axis is None or isinstance(axis, int):
        return [(path, axis) for path, leaf in leaves if is_data(leaf)]
    if all(is_module(leaf) for _, leaf in leaves):
        return []
    try:
        spread = jax.tree.map(
            lambda a, sub: jax.tree.map(lambda _: (a,), sub), axis, argument, is_leaf=lambda a: a is None
        )
    except ValueError as error:
        raise ValueError(NOT_A_PREFIX.format(name=name, axis=axis, error=error)) from None
    flat = jax.tree.leaves(spread, is_leaf=lambda x: isinstance(x, tuple) and len(x) == 1)
    return [(path, a[0]) for (path, leaf), a in zip(leaves, flat) if is_data(leaf)]


def check_module_axes(stacking: Stacking, option: str, entries: Any, values: Any, labels: Sequence[str]) -> None:
    """Checks that no integer axis is meant for a Module alone, unless `variable_axes` says how it is stacked.

    One integer for everything (`in_axes=0`) is meant for the arrays. So is one for a list or dict that holds arrays.

    Args:
        stacking: the options of the transform.
        option: the name of the option, for the error.
        entries: one axis, or tree of axes, per value.
        values: the arguments or results, Modules included.
        labels: what to call them in the error.

    Raises:
        ValueError: there is such an axis.
    """
    if stacking.variable_axes:
        return
    for entry, value, label in zip(entries, values, labels):
        found, treedef = jax.tree_util.tree_flatten_with_path(entry, is_leaf=lambda axis: axis is None)
        try:
            parts = treedef.flatten_up_to(value)
        except ValueError:  # a different structure: for a Module, no axes were meant; otherwise vmap raises
            found, parts = [((), entry)], [value]
        for (path, axis), part in zip(found, parts):
            leaves = jax.tree.leaves(part)
            modules = [leaf for leaf in leaves if is_module(leaf)]
            if axis is not None and modules and not any(is_data(leaf) for leaf in leaves):
                text = {"option": option, "axis": axis, "place": f"{label}{jax.tree_util.keystr(path)}"}
                kind, size = type(modules[0]).__name__, stacking.size_name
                raise ValueError(AXIS_AT_MODULE.format(name=stacking.name, kind=kind, size=size, **text))


def move_axis(value: Any, source: int, destination: int) -> Any:
    """Moves an axis of every array in a value."""
    return value if source == destination else jax.tree.map(lambda x: jnp.moveaxis(x, source, destination), value)
