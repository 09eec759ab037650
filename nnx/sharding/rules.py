"""Rules: which mesh axis a logical axis name means.

A *rule* is a pair `(name, mesh axis)`; the mesh axis may also be a tuple of them, or None for "not split". Rules are
tried in order: each gives its mesh axis to its name, if the array has that name without an axis yet, no other dimension
has claimed the mesh axis, and (where shape and mesh are known) the axis divides the dimension. So a later rule for the
same name is a second choice, and `(name, None)` at the end means "leave it whole rather than fail". A *resolution* is
what the rules made of one array: its `PartitionSpec`, and what went wrong.
"""

import contextlib
import contextvars
import dataclasses
import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from nnx.sharding.axes import PartialAxes, axis_names

MeshAxes = str | tuple[str, ...] | None
Rule = tuple[str, MeshAxes]
Rules = tuple[Rule, ...]

_current: contextvars.ContextVar[Rules] = contextvars.ContextVar("nnx_logical_axis_rules", default=())


class RulesFallback(enum.Enum):
    """What a constraint does with an axis name that has no mesh axis under any rule."""

    AXIS_IS_UNSHARDED = "axis_is_unsharded"
    """The dimension is not split."""
    RAISE_ERROR = "raise_error"
    """`ValueError`."""
    NO_CONSTRAINT = "no_constraint"
    """The whole array is left as the partitioner wants it."""


@contextlib.contextmanager
def logical_axis_rules(rules: Any) -> Iterator[None]:
    """Within the `with` block these rules hold, in this thread, wherever no others are given.

    A function of `nnx.jit` is recompiled under other rules; one of `jax.jit` is not, and keeps the first.

    Args:
      rules: a sequence of pairs `(name, mesh axis)`, or a mapping.

    >>> with nnx.logical_axis_rules([("embed", "model"), ("batch", "data")]):
    ...     nnx.logical_to_mesh_axes(("batch", "embed"))
    P('data', 'model')
    """
    token = _current.set(as_rules(rules))
    try:
        yield
    finally:
        _current.reset(token)


def set_logical_axis_rules(rules: Any) -> None:
    """Makes these the rules of this thread from now on; `()` for none. Prefer `with nnx.logical_axis_rules(...)`."""
    _current.set(as_rules(rules))


def get_logical_axis_rules() -> Rules:
    """The rules that hold here; `()` if there are none.

    >>> with nnx.logical_axis_rules([("batch", "data")]):
    ...     nnx.get_logical_axis_rules()
    (('batch', 'data'),)
    """
    return _current.get()


current_rules = _current.get  # the same without a call in Python, for those who ask at every step


def as_rules(rules: Any) -> Rules:
    """Rules as a tuple of pairs; None means those that hold here.

    Raises:
      TypeError: an entry is not a rule.
    """
    if rules is None:
        return _current.get()
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise TypeError(f'Rules are pairs of a name and a mesh axis, as in [("embed", "model")]; got {rules!r}.')
    return tuple(_as_rule(rule) for rule in (rules.items() if isinstance(rules, Mapping) else rules))


def _as_rule(rule: Any) -> Rule:
    if isinstance(rule, (tuple, list)) and len(rule) == 2 and isinstance(rule[0], str):
        name, axes = rule
        if isinstance(axes, list):
            axes = tuple(axes)
        if axes is None or isinstance(axes, str):
            return name, axes
        if isinstance(axes, tuple) and all(isinstance(axis, str) for axis in axes):
            return name, axes
    raise TypeError(
        f"{rule!r} is not a rule: a rule is a pair of a logical axis name and a mesh axis, a tuple of mesh axes or "
        'None, as in ("embed", "model").'
    )


def logical_to_mesh_axes(names: Any, rules: Any = None) -> PartitionSpec:
    """The mesh axes of an array with these axis names, as a `PartitionSpec`.

    Args:
      names: one entry per dimension: a name, a tuple of names, or None.
      rules: by default those of `logical_axis_rules`. A name without a rule is not split.

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
    """What the rules made of one array.

    Attributes:
      spec: its mesh axes.
      errors: what makes the array impossible to place.
      notes: which names went without a mesh axis although a rule has one for them, and why.
      without_rule: the names that no rule gave anything to.
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
      names: its axis names; `PartialAxes` leave an axis whole that does not divide.
      rules: in the order in which they are tried.
      shape: of the array, if known.
      mesh_shape: the size of every mesh axis, if known.
    """
    yields = isinstance(names, PartialAxes)
    names = axis_names(names)
    flat = [name for entry in names for name in _entry_names(entry)]
    repeated = sorted({name for name in flat if flat.count(name) > 1})
    if repeated:
        return Resolution(PartitionSpec(), (REPEATED_NAME.format(name=repeated[0], names=names),))
    if shape is not None and len(names) > len(shape):
        text = TOO_MANY_NAMES.format(names=names, count=len(names), shape=tuple(shape), rank=len(shape))
        return Resolution(PartitionSpec(), (text,))
    place = {name: (axis, entry) for axis, entry in enumerate(names) for name in _entry_names(entry)}
    given: dict[str, tuple[str, ...] | None] = {}  # what each name got
    claimed: dict[str, str] = {}  # who has a mesh axis
    refusals: dict[str, list[str]] = {}
    unfit: dict[str, str] = {}  # refusals that are errors unless a later rule helps
    unknown: list[str] = []
    for rule in rules:
        name, axes = rule[0], _mesh_axes(rule[1])
        if name not in place or name in given:
            continue
        if not axes:
            given[name] = None
            continue
        axis, entry = place[name]
        taken = next((mesh_axis for mesh_axis in axes if mesh_axis in claimed), None)
        if taken is not None:
            text = CLAIMED_TWICE.format(axis=axis, name=name, mesh_axis=taken, other=claimed[taken], rule=rule)
            refusals.setdefault(name, []).append(text)
            continue
        if mesh_shape is not None:
            missing = next((mesh_axis for mesh_axis in axes if mesh_axis not in mesh_shape), None)
            if missing is not None:
                unknown.append(UNKNOWN_MESH_AXIS.format(rule=rule, mesh_axis=missing, known=tuple(mesh_shape)))
                continue
            if shape is not None:
                shared = [a for other in _entry_names(entry) if other != name for a in given.get(other) or ()]
                parts = math.prod(mesh_shape[a] for a in (*shared, *axes))
                if shape[axis] % parts:
                    text = DOES_NOT_DIVIDE.format(
                        axis=axis, name=name, size=shape[axis], mesh_axes=_shown(axes), parts=parts, rule=rule
                    )
                    refusals.setdefault(name, []).append(text)
                    unfit[name] = text
                    continue
        given[name] = axes
        claimed.update(dict.fromkeys(axes, name))
    misfits = [] if yields else [name for name in unfit if name not in given]
    errors = (*unknown, *(f"{unfit[name]} {CURE_DIVISION.format(name=name)}" for name in misfits))
    return Resolution(
        PartitionSpec(*(_assigned(entry, given) for entry in names)),
        errors,
        tuple(text for name, texts in refusals.items() for text in texts if not given.get(name)),
        tuple(name for name in flat if name not in given),
    )


REPEATED_NAME = "the axis name {name!r} appears twice in {names}: every dimension of an array needs its own name."

TOO_MANY_NAMES = (
    "the sharding {names} has {count} entries, more than the array's rank: its shape is {shape}, {rank} axes."
)

UNKNOWN_MESH_AXIS = (
    "the rule {rule} names the mesh axis {mesh_axis!r}, which the mesh does not have; its axes are {known}."
)

CLAIMED_TWICE = "axis {axis}, {name!r}: rule {rule} wants the mesh axis {mesh_axis!r}, already claimed by {other!r}."

DOES_NOT_DIVIDE = """axis {axis}, {name!r}, of size {size} cannot be divided by mesh axis {mesh_axes} of size {parts} \
(rule {rule})."""

CURE_DIVISION = "Change the size, or add the rule ({name!r}, None) after it to leave such axes whole."


def _entry_names(entry: Any) -> tuple[str, ...]:
    names = entry if isinstance(entry, tuple) else (entry,)
    return tuple(name for name in names if isinstance(name, str))


def _mesh_axes(axes: MeshAxes) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


def _assigned(entry: Any, given: Mapping[str, tuple[str, ...] | None]) -> Any:
    if entry is PartitionSpec.UNCONSTRAINED:
        return entry
    axes = tuple(axis for name in _entry_names(entry) for axis in given.get(name) or ())
    return None if not axes else axes[0] if len(axes) == 1 else axes


def _shown(axes: tuple[str, ...]) -> str:
    return repr(axes[0] if len(axes) == 1 else axes)
