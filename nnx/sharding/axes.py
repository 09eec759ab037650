"""Axis names of one Variable, and what stacking does to them.

*Logical axis names* are a Variable's `sharding` metadata: a tuple (or `PartitionSpec`) with one entry per dimension,
each a name, a tuple of names, or None. A scan or vmap over stacked Variables adds a dimension, whose name comes from
`metadata_params={nnx.PARTITION_NAME: "layers"}`: outside, the stacked Variable has the name; inside the body, it does
not.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from nnx.core.variables import Spec

PARTITION_NAME = "partition_name"
"""The key of `metadata_params` that names the axis along which a scan or vmap stacks Variables."""


class DefaultAxes(tuple[Any, ...]):
    """Names that a layer declares for its arrays: they belong to an array's last axes, and are cut to fit its rank."""

    __slots__ = ()


class PartialAxes(DefaultAxes):
    """Names taken over by an array of another shape, such as a factored moment.

    No rule was written with that shape in mind, so an axis that does not divide stays whole instead of being an error.
    """

    __slots__ = ()


def taken_over(names: Sequence[Any], axes: Sequence[int | None]) -> DefaultAxes:
    """The names of an array that is made from another one with these names.

    Args:
      names: one entry per axis of the other array.
      axes: what `matching_axes` found.
    """
    found = [None if axis is None else names[axis] for axis in axes]
    return PartialAxes(found) if list(axes) != list(range(len(names))) else DefaultAxes(found)


def matching_axes(shape: Sequence[int], of: Sequence[int]) -> tuple[int | None, ...] | None:
    """For each axis of an array the axis of another array that it was made from.

    An array may have the shape of the other one, new axes in front of it (a history of gradients), or fewer axes (a
    factored moment). Where the sizes fit in several ways, an axis without a unique answer is None.

    >>> matching_axes((8, 16), (8, 16)), matching_axes((5, 8, 16), (8, 16)), matching_axes((16,), (8, 16))
    ((0, 1), (None, 0, 1), (1,))
    >>> matching_axes((2, 8), (2, 8, 8)), matching_axes((7,), (8, 16))
    ((0, None), None)
    """
    shape, of = tuple(shape), tuple(of)
    extra = len(shape) - len(of)
    if extra >= 0:
        return (None,) * extra + tuple(range(len(of))) if shape[extra:] == of else None
    fits = [
        axes for axes in itertools.combinations(range(len(of)), len(shape)) if tuple([of[a] for a in axes]) == shape
    ]
    if not shape or not fits:
        return None
    return tuple([axes[0] if len(set(axes)) == 1 else None for axes in zip(*fits, strict=True)])


def axis_names(sharding: Any) -> tuple[Any, ...]:
    """The names in `sharding` metadata as a tuple; none for None.

    Raises:
      TypeError: it is not a tuple, list or PartitionSpec of names.
    """
    if sharding is None:
        return ()
    if isinstance(sharding, str) or not isinstance(sharding, (tuple, list, PartitionSpec)):
        hint = f" For an array of one dimension write ({sharding!r},)." if isinstance(sharding, str) else ""
        raise TypeError(
            f"sharding is a tuple of axis names, one per dimension, or a PartitionSpec; got {sharding!r}.{hint}"
        )
    for entry in sharding:
        names = entry if isinstance(entry, tuple) else (entry,)
        if not all(name is None or name is PartitionSpec.UNCONSTRAINED or isinstance(name, str) for name in names):
            raise TypeError(f"An axis name is a string, a tuple of strings or None; got {entry!r} in {sharding!r}.")
    return tuple(sharding)


def aligned_names(sharding: Any, ndim: int) -> tuple[Any, ...]:
    """The names in `sharding` metadata for an array of `ndim` dimensions; default names are those of its last axes."""
    names = axis_names(sharding)
    if isinstance(sharding, DefaultAxes):
        missing = ndim - len(names)
        return (None,) * missing + names if missing >= 0 else names[-missing:]
    return names


def add_axis(spec: Spec, index: int, params: Mapping[Any, Any]) -> Spec:
    """The spec of a Variable that was stacked along axis `index`: its `sharding` has the new name there.

    Args:
      spec: type and metadata of one slice. Without `sharding` it stays as it is.
      index: the new axis; negative ones count from the end of the names there are then.
      params: the transform's `metadata_params`. Without `PARTITION_NAME` the spec stays as it is.
    """
    sharding = spec.metadata.get("sharding")
    if not _concerns(sharding, params):
        return spec
    names = list(axis_names(sharding))
    at = index if index >= 0 else len(names) + 1 + index
    names += [None] * (at - len(names))
    names.insert(at, params[PARTITION_NAME])
    return _with_sharding(spec, sharding, names)


def remove_axis(spec: Spec, index: int, params: Mapping[Any, Any]) -> Spec:
    """The spec of one slice of a stacked Variable: `add_axis` undone.

    Raises:
      ValueError: the `sharding` has another name at that axis.
    """
    sharding = spec.metadata.get("sharding")
    if not _concerns(sharding, params):
        return spec
    names = list(axis_names(sharding))
    at = index if index >= 0 else len(names) + index
    name = params[PARTITION_NAME]
    if not 0 <= at < len(names):
        if name is None:
            return spec
        raise ValueError(WRONG_STACKED_NAME.format(spec=spec, name=name, index=index, found="no entry"))
    if names[at] != name:
        raise ValueError(WRONG_STACKED_NAME.format(spec=spec, name=name, index=index, found=repr(names[at])))
    del names[at]
    return _with_sharding(spec, sharding, names)


WRONG_STACKED_NAME = """metadata_params says that axis {index} of the stacked Variables is named {name!r}, but {spec} \
has {found} there. Build the stack with the same metadata_params, or give the stacked Variable a `sharding` with \
{name!r} at axis {index}."""


def _concerns(sharding: Any, params: Mapping[Any, Any]) -> bool:
    # Default names belong to the last axes, so there is no place for another one among them. Modules that are built in
    # a body get whole names first (`defaults.name_whole_axes`).
    return sharding is not None and not isinstance(sharding, DefaultAxes) and PARTITION_NAME in params


def _with_sharding(spec: Spec, sharding: Any, names: Iterable[Any]) -> Spec:
    new = PartitionSpec(*names) if isinstance(sharding, PartitionSpec) else tuple(names)
    return Spec.of(spec.type, {**spec.metadata, "sharding": new})
