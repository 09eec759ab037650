"""Rules: which mesh axis a logical axis name refers to.

A *rule* is a pair `(name, mesh axis)`; the mesh axis can also be a tuple of several, or None for "not split". Rules are
tried in order. Each assigns its mesh axis to its name if the array has that name and it has no mesh axis yet, no other
dimension has claimed the mesh axis, and (where shape and mesh are known) the mesh axis divides the dimension. A later
rule for the same name is therefore a second choice, and `(name, None)` at the end means "leave it whole rather than
fail". A *resolution* is the result of the rules for one array: its `PartitionSpec`, and what went wrong.

A *memory rule* (`nnx.on_host`) says which memory the arrays of some Variables are kept in. It is about whole arrays, so
it selects them with a filter, not by the names of their axes.
"""

import contextlib
import contextvars
import dataclasses
import enum
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from nnx.core.state.filters import Filter, to_predicate
from nnx.sharding.axes import PartialAxes, axis_names
from nnx.sharding.spelling import did_you_mean

MeshAxes = str | tuple[str, ...] | None
Rule = tuple[str, MeshAxes]


@dataclasses.dataclass(frozen=True)
class MemoryRule:
    """A rule that keeps the arrays of some Variables in a certain memory; made by `nnx.on_host`.

    Attributes:
        where: the filter of the Variables.
        memory_kind: the name of the memory, as in `jax.sharding.NamedSharding`.
    """

    where: Any
    memory_kind: str


Rules = tuple[Rule | MemoryRule, ...]
RulesLike = Mapping[str, MeshAxes] | Iterable[tuple[str, MeshAxes] | MemoryRule] | None
"""Rules as a user writes them; None for the current ones."""
AnyMesh = Mesh | AbstractMesh

_current: contextvars.ContextVar[Rules] = contextvars.ContextVar("nnx_logical_axis_rules", default=())


class RulesFallback(enum.Enum):
    """The response of a constraint to an axis name for which no rule has a mesh axis."""

    AXIS_IS_UNSHARDED = "axis_is_unsharded"
    """The dimension is not split."""
    RAISE_ERROR = "raise_error"
    """A `ValueError` is raised."""
    NO_CONSTRAINT = "no_constraint"
    """The whole array is left to the partitioner."""


@contextlib.contextmanager
def logical_axis_rules(rules: RulesLike) -> Iterator[None]:
    """Makes these the rules inside a `with` block, in this thread, wherever no others are given.

    Under different rules, a function compiled by `nnx.jit` is recompiled. One compiled by `jax.jit` is not: it keeps
    the rules it was traced under.

    Args:
        rules: the rules, as a sequence of pairs `(name, mesh axis)` or a mapping.

    >>> with nnx.logical_axis_rules([("embed", "model"), ("batch", "data")]):
    ...     nnx.logical_to_mesh_axes(("batch", "embed"))
    P('data', 'model')
    """
    token = _current.set(as_rules(rules))
    try:
        yield
    finally:
        _current.reset(token)


def set_logical_axis_rules(rules: RulesLike) -> None:
    """Makes these the rules of this thread from now on, `()` for none. Prefer `with nnx.logical_axis_rules(...)`."""
    _current.set(as_rules(rules))


def get_logical_axis_rules() -> Rules:
    """Returns the current rules; `()` if there are none.

    >>> with nnx.logical_axis_rules([("batch", "data")]):
    ...     nnx.get_logical_axis_rules()
    (('batch', 'data'),)
    """
    return _current.get()


current_rules: Callable[[], Rules] = _current.get  # the same without a Python call, for code that asks at every step


def as_rules(rules: Any) -> Rules:
    """Returns rules as a tuple of pairs; the current ones for None.

    Raises:
        TypeError: an entry is not a rule.
    """
    if rules is None:
        return _current.get()
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        hint = NOT_CALLED if callable(rules) else NOT_IN_A_LIST if isinstance(rules, MemoryRule) else ""
        raise TypeError(NOT_RULES.format(got=rules, hint=hint))
    return tuple(_as_rule(rule) for rule in (rules.items() if isinstance(rules, Mapping) else rules))


def _as_rule(rule: Any) -> Rule | MemoryRule:
    if isinstance(rule, MemoryRule):
        return rule
    if isinstance(rule, (tuple, list)) and len(rule) == 2 and isinstance(rule[0], str):
        name, axes = rule
        if isinstance(axes, list):
            axes = tuple(axes)
        if axes is None or isinstance(axes, str):
            return name, axes
        if isinstance(axes, tuple) and all(isinstance(axis, str) for axis in axes):
            return name, axes
    raise TypeError(NOT_A_RULE.format(got=rule))


def on_host(where: Filter, memory_kind: str = "pinned_host") -> MemoryRule:
    """Returns a rule that keeps the arrays of some Variables in the memory of the host, split as the other rules say.

    Scalars stay on the devices. `nnx.Optimizer.update` and `nnx.TrainState.apply_gradients` move optimizer state to the
    devices for the update, and back. Any other array has to be moved before it is computed with:
    `jax.device_put(x, jax.memory.Space.Device)`.

    Args:
        where: a filter for the Variables, e.g. `nnx.OptState`; in a `TrainState`, `nnx.PathMatches("opt_state/**")`.
        memory_kind: the name of the memory; `device.addressable_memories()` lists those a device has.

    Raises:
        TypeError: `where` is not a filter.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> rules = [nnx.on_host(nnx.Param), ("embed", "data")]
    >>> nnx.shard(nnx.Dict(w=nnx.Param(jnp.ones(4), ("embed",))), mesh, rules).w.sharding.memory_kind
    'pinned_host'
    """
    to_predicate(where)  # raises here rather than at the first use
    return MemoryRule(tuple(where) if isinstance(where, list) else where, memory_kind)


def axis_rules(rules: Rules) -> tuple[Rule, ...]:
    """Returns the rules for axis names, without those for memories."""
    return tuple(rule for rule in rules if not isinstance(rule, MemoryRule))


def memory_kind_of(path: str, leaf: Any, container: Any, rules: Rules) -> str | None:
    """Returns the memory that the rules choose for an array of a Variable; None for that of the device.

    The first rule that matches decides. A scalar, such as a counter, always stays on the device: there is nothing to
    gain, and code that uses it would have to move it first.
    """
    kinds = [rule for rule in rules if isinstance(rule, MemoryRule)]
    if not kinds or getattr(leaf, "shape", None) == ():
        return None
    return next((rule.memory_kind for rule in kinds if to_predicate(rule.where)(path, container)), None)


def logical_to_mesh_axes(names: Any, rules: RulesLike = None) -> PartitionSpec:
    """Returns the mesh axes of an array with these axis names, as a `PartitionSpec`.

    Args:
        names: the axis names, one entry per dimension: a name, a tuple of names, or None.
        rules: the rules to use; by default those of `logical_axis_rules`. A name without a rule is not split.

    Raises:
        ValueError: a name appears twice.

    >>> nnx.logical_to_mesh_axes(("heads", "embed"), [("embed", "model"), ("heads", "model")])
    P(None, 'model')
    """
    resolution = resolve(names, as_rules(rules))
    resolution.check(f"axis names {axis_names(names)}")
    return resolution.spec


@dataclasses.dataclass(frozen=True)
class Resolution:
    """The result of the rules for one array.

    Attributes:
        spec: the mesh axes of the array.
        errors: the reasons why the array cannot be placed.
        notes: the names that have a rule but got no mesh axis, and why. A mesh axis that splits another dimension is
            a reason only if no later rule decides the name.
        without_rule: the names that no rule decided.
    """

    spec: PartitionSpec
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    without_rule: tuple[str, ...] = ()

    def check(self, where: str) -> None:
        if self.errors:
            raise ValueError(f"{where}: {' '.join(self.errors)}")


def resolve(
    names: Any, rules: Rules, shape: Sequence[int] | None = None, mesh_shape: Mapping[str, int] | None = None
) -> Resolution:
    """Tries the rules on one array.

    Args:
        names: the axis names; with `PartialAxes`, an axis that does not divide stays whole.
        rules: the rules, in the order in which they are tried.
        shape: the shape of the array, if known.
        mesh_shape: the size of every mesh axis, if known.
    """
    yields = isinstance(names, PartialAxes)
    names = axis_names(names)
    flat = names_in(names)
    repeated = sorted({name for name in flat if flat.count(name) > 1})
    if repeated:
        return Resolution(PartitionSpec(), (REPEATED_NAME.format(name=repeated[0], names=names),))
    if shape is not None and len(names) > len(shape):
        text = TOO_MANY_NAMES.format(names=names, count=len(names), shape=tuple(shape), rank=len(shape))
        return Resolution(PartitionSpec(), (text,))
    tried = _Trial(names, shape, mesh_shape)
    for rule in axis_rules(rules):
        tried.add(rule)
    given, refusals = tried.given, tried.refusals
    misfits = [] if yields else [name for name in refusals if name not in given]
    return Resolution(
        PartitionSpec(*(_assigned(entry, given) for entry in names)),
        (*tried.unknown, *(f"{refusals[name][-1]} {LEAVE_IT_WHOLE.format(name=name)}" for name in misfits)),
        (
            *(text for name, texts in refusals.items() for text in texts if not given.get(name)),
            *(text for name, texts in tried.crowded.items() for text in texts if name not in given),
        ),
        tuple(name for name in flat if name not in given),
    )


class _Trial:
    """The rules that were tried on one array so far, and what came of them.

    Attributes:
        given: the mesh axes of each name that is decided; None if it stays whole.
        refusals: for each name, the rules whose mesh axis does not divide the dimension; an error, unless a later rule
            decides the name.
        crowded: for each name, the rules whose mesh axis splits another dimension; often intended.
        unknown: the rules for mesh axes that the mesh does not have; always an error.
    """

    def __init__(self, names: tuple[Any, ...], shape: Sequence[int] | None, mesh_shape: Mapping[str, int] | None):
        self._shape, self._mesh_shape = shape, mesh_shape
        self._place = {name: (axis, entry) for axis, entry in enumerate(names) for name in names_in_entry(entry)}
        self._claimed: dict[str, str] = {}  # the name that has each mesh axis
        self.given: dict[str, tuple[str, ...] | None] = {}
        self.refusals: dict[str, list[str]] = {}
        self.crowded: dict[str, list[str]] = {}
        self.unknown: list[str] = []

    def add(self, rule: Rule) -> None:
        """Tries one more rule."""
        name, axes = rule[0], mesh_axes_of(rule[1])
        if name not in self._place or name in self.given:
            return
        if not axes:
            self.given[name] = None
        elif not (self._is_claimed(axes, rule) or self._is_unknown(axes, rule) or self._does_not_divide(axes, rule)):
            self.given[name] = axes
            self._claimed.update(dict.fromkeys(axes, name))

    def _is_claimed(self, axes: tuple[str, ...], rule: Rule) -> bool:
        name = rule[0]
        taken = next((mesh_axis for mesh_axis in axes if mesh_axis in self._claimed), None)
        if taken is not None:
            where = {"axis": self._place[name][0], "name": name, "mesh_axis": taken, "other": self._claimed[taken]}
            self.crowded.setdefault(name, []).append(CLAIMED_TWICE.format(**where, rule=rule))
        return taken is not None

    def _is_unknown(self, axes: tuple[str, ...], rule: Rule) -> bool:
        known = self._mesh_shape
        missing = None if known is None else next((mesh_axis for mesh_axis in axes if mesh_axis not in known), None)
        if known is None or missing is None:
            return False
        text = UNKNOWN_MESH_AXIS.format(
            rule=rule, mesh_axis=missing, known=tuple(known), hint=did_you_mean(missing, known)
        )
        self.unknown.append(text)
        return True

    def _does_not_divide(self, axes: tuple[str, ...], rule: Rule) -> bool:
        if self._mesh_shape is None or self._shape is None:
            return False
        name = rule[0]
        axis, entry = self._place[name]
        # One dimension can have several names, whose mesh axes divide it together.
        shared = [a for other in names_in_entry(entry) if other != name for a in self.given.get(other) or ()]
        parts = math.prod(self._mesh_shape[a] for a in (*shared, *axes))
        if self._shape[axis] % parts == 0:
            return False
        where = {"axis": axis, "name": name, "size": self._shape[axis], "mesh_axes": _shown(axes), "parts": parts}
        self.refusals.setdefault(name, []).append(DOES_NOT_DIVIDE.format(**where, rule=rule))
        return True


NOT_RULES = 'Rules are pairs of a name and a mesh axis, as in [("embed", "model")]; got {got!r}.{hint}'
NOT_CALLED = " Call the function to get its rules."
NOT_IN_A_LIST = " Put the rule into a list, in front of the others."

NOT_A_RULE = """{got!r} is not a rule: a rule is a pair of a logical axis name and a mesh axis, a tuple of mesh axes \
or None, as in ("embed", "model")."""

REPEATED_NAME = "the axis name {name!r} appears twice in {names}: every dimension of an array needs its own name."

TOO_MANY_NAMES = (
    "the sharding {names} has {count} entries, more than the array's rank: its shape is {shape}, {rank} axes."
)

UNKNOWN_MESH_AXIS = (
    "the rule {rule} names the mesh axis {mesh_axis!r}, which the mesh does not have; its axes are {known}.{hint}"
)

CLAIMED_TWICE = "axis {axis}, {name!r}: rule {rule} needs the mesh axis {mesh_axis!r}, already claimed by {other!r}."

DOES_NOT_DIVIDE = (
    "axis {axis}, {name!r}, of size {size} cannot be divided by mesh axis {mesh_axes} of size {parts} (rule {rule})."
)

LEAVE_IT_WHOLE = "Change the size, or add the rule ({name!r}, None) after it to leave such axes whole."


def names_in(names: Iterable[Any]) -> tuple[str, ...]:
    """Returns the axis names in the entries of a `sharding`, one after another."""
    return tuple(name for entry in names for name in names_in_entry(entry))


def names_in_entry(entry: Any) -> tuple[str, ...]:
    """Returns the axis names in one entry: none, one, or several."""
    names = entry if isinstance(entry, tuple) else (entry,)
    return tuple(name for name in names if isinstance(name, str))


def mesh_axes_of(axes: MeshAxes) -> tuple[str, ...]:
    """Returns the mesh axes of a rule as a tuple."""
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


def _assigned(entry: Any, given: Mapping[str, tuple[str, ...] | None]) -> Any:
    if entry is PartitionSpec.UNCONSTRAINED:
        return entry
    axes = tuple(axis for name in names_in_entry(entry) for axis in given.get(name) or ())
    return None if not axes else axes[0] if len(axes) == 1 else axes


def _shown(axes: tuple[str, ...]) -> str:
    return repr(axes[0] if len(axes) == 1 else axes)
