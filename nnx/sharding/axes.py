"""Axis names of one Variable, and how stacking changes them.

*Logical axis names* are a Variable's `sharding` metadata: a tuple (or `PartitionSpec`) with one entry per dimension,
each a name, a tuple of names, or None. A scan or vmap over stacked Variables adds a dimension, whose name comes from
`metadata_params={nnx.PARTITION_NAME: "layers"}`. The stacked Variable has that name outside the transform; the slices
inside the body do not.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from nnx.core.variables.variables import Spec

PARTITION_NAME = "partition_name"
"""The key of `metadata_params` with the name of the axis along which a scan or vmap stacks Variables."""


class DefaultAxes(tuple[Any, ...]):
    """Names that a layer declares for its arrays: they describe an array's last axes, and are cut to fit its rank."""

    __slots__ = ()


class PartialAxes(DefaultAxes):
    """Names that an array inherits from one with a different shape, as a factored moment does from its parameter.

    No rule was written with this shape in mind, so an axis that does not divide stays whole and is not an error.
    """

    __slots__ = ()


def taken_over(names: Sequence[Any], axes: Sequence[int | None]) -> DefaultAxes:
    """Returns the names of an array that was made from another array.

    Args:
        names: the names of the other array, one entry per axis.
        axes: for each axis of the new array, the axis of the other one, as `matching_axes` returns them.
    """
    found = [None if axis is None else names[axis] for axis in axes]
    return PartialAxes(found) if list(axes) != list(range(len(names))) else DefaultAxes(found)


def matching_axes(shape: Sequence[int], of: Sequence[int]) -> tuple[int | None, ...] | None:
    """Returns, for each axis of an array, the axis it came from in the array it was made from.

    The array may have the same shape as the other one, new axes in front (a history of gradients), or fewer axes (a
    factored moment). Where the sizes match in several ways, an axis without a unique answer is None.

    Args:
        shape: the shape of the array.
        of: the shape of the array it was made from.

    Returns:
        One entry per axis; None if the shapes do not match at all.

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
    # Each fit is one way to choose the axes; transposed, they list the candidates for each axis.
    return tuple([axes[0] if len(set(axes)) == 1 else None for axes in zip(*fits, strict=True)])


def axis_names(sharding: Any) -> tuple[Any, ...]:
    """Returns the names in `sharding` metadata as a tuple; an empty one for None.

    Raises:
        TypeError: the metadata are not a tuple, list or PartitionSpec of names.
    """
    if sharding is None:
        return ()
    if isinstance(sharding, str) or not isinstance(sharding, (tuple, list, PartitionSpec)):
        hint = ONE_DIMENSION.format(name=sharding) if isinstance(sharding, str) else ""
        raise TypeError(NOT_NAMES.format(got=sharding, hint=hint))
    for entry in sharding:
        names = entry if isinstance(entry, tuple) else (entry,)
        if not all(name is None or name is PartitionSpec.UNCONSTRAINED or isinstance(name, str) for name in names):
            raise TypeError(NOT_A_NAME.format(entry=entry, sharding=sharding))
    return tuple(sharding)


def aligned_names(sharding: Any, ndim: int) -> tuple[Any, ...]:
    """Returns the names in `sharding` metadata for an array of `ndim` dimensions.

    Default names are aligned with the last axes. Explicit ones are returned unchanged, even if there are too many.
    """
    names = axis_names(sharding)
    if isinstance(sharding, DefaultAxes):
        missing = ndim - len(names)
        return (None,) * missing + names if missing >= 0 else names[-missing:]
    return names


def add_axis(spec: Spec, index: int, params: Mapping[Any, Any]) -> Spec:
    """Returns the spec of a Variable that was stacked along axis `index`, with the new name inserted in `sharding`.

    Args:
        spec: the type and metadata of one slice; returned unchanged if it has no `sharding`.
        index: the new axis; a negative one counts from the end, the new name included.
        params: the transform's `metadata_params`; without `PARTITION_NAME`, the spec is returned unchanged.
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
    """Returns the spec of one slice of a stacked Variable; the inverse of `add_axis`.

    Raises:
        ValueError: the `sharding` has a different name at that axis.
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


NOT_NAMES = "sharding is a tuple of axis names, one per dimension, or a PartitionSpec; got {got!r}.{hint}"

ONE_DIMENSION = " For an array of one dimension write ({name!r},)."

NOT_A_NAME = "An axis name is a string, a tuple of strings or None; got {entry!r} in {sharding!r}."

WRONG_STACKED_NAME = """metadata_params says that axis {index} of the stacked Variables is named {name!r}, but {spec} \
has {found} there. Build the stack with the same metadata_params, or give the stacked Variable a `sharding` with \
{name!r} at axis {index}."""


def _concerns(sharding: Any, params: Mapping[Any, Any]) -> bool:
    # Default names describe the last axes at any rank, so nothing can be inserted at a fixed index. Modules that
    # are built in a body get one explicit name per axis first (`defaults.name_whole_axes`).
    return sharding is not None and not isinstance(sharding, DefaultAxes) and PARTITION_NAME in params


def _with_sharding(spec: Spec, sharding: Any, names: Iterable[Any]) -> Spec:
    new = PartitionSpec(*names) if isinstance(sharding, PartitionSpec) else tuple(names)
    return Spec.of(spec.type, {**spec.metadata, "sharding": new})
