"""Checks of what users pass to layers: the shape of an input, and arguments with one entry per spatial dimension.

Spatial arguments are brought to one form in the constructor. A *padding* is a name ("SAME", "VALID", …), an int for all
sides, or one entry per spatial dimension, each an int for both sides or a pair `(low, high)`; it becomes a name or a
tuple of pairs.
"""

import math
import operator
from collections.abc import Collection, Sequence
from numbers import Number
from typing import Any

import numpy as np

PaddingLike = str | int | Sequence[int | tuple[int, int]]
Padding = str | tuple[tuple[int, int], ...]
Strides = int | Sequence[int] | None

WRONG_FEATURES = (
    "{layer} expected {expected} features {where}, got {got}: the input has shape {shape}. "
    "Pass an input with {expected} features there, or build the layer with `{argument}={got}`."
)
ADD_AN_AXIS = " If the input has one channel and no axis for it, write `x[..., None]`."
CHANNELS_FIRST = " Channels come last here. If they are on axis 1, as in PyTorch, write `jnp.moveaxis(x, 1, -1)`."
FLATTEN = " To join the last {count} axes into one of {expected}, write `x.reshape(*x.shape[:-{count}], -1)`."
NOT_AN_ARRAY = "{layer} expected an array, got {got}. Convert it first: `jnp.asarray(x)`."
TOO_FEW_AXES = "{layer} expected an input of shape {expected}, got shape {shape}, which has too few axes."
TUPLE_NOT_INT = (
    "{layer} takes `{argument}` as a tuple with one entry per spatial dimension, got the number {got}. "
    "Write `{argument}=({got},)` for one spatial dimension, `{argument}=({got}, {got})` for two."
)
WRONG_LENGTH = (
    "{layer}: `{argument}` must be an int or have {expected} entries, one per spatial dimension, got {got!r}."
)
NOT_A_SIZE = "{layer}: `{argument}` is a size, an int of at least 1, got {got!r}.{advice}"
NO_LAZY_SIZES = (
    " A layer makes its parameters in the constructor, so sizes are not inferred from the first input. "
    "Write the size{example}."
)
UNKNOWN_PADDING = (
    "{layer}: unknown padding {got!r}. Use one of {names}, an int, or one int or (low, high) pair per spatial "
    "dimension ({dimensions} here)."
)


def as_tuple(value: int | Sequence[int]) -> tuple[int, ...]:
    """Returns one int or several as a tuple."""
    return (value,) if isinstance(value, int | np.integer) else tuple(value)


# Sizes


def check_sizes(layer: object, **sizes: int | Sequence[int]) -> None:
    """Checks the sizes a layer is built with, each an int or a sequence of ints, by the names of the arguments.

    Raises:
        TypeError: one of them is not an int but, say, None.
        ValueError: one of them is less than 1.
    """
    for argument, value in sizes.items():
        entries: list[Any] = [*value] if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        for entry in entries:
            if type(entry) is int and entry > 0:  # nearly always
                continue
            error, advice = ValueError, ""
            if isinstance(entry, bool) or not hasattr(entry, "__index__") or np.ndim(entry):
                example = f", such as `{argument}=x.shape[-1]`" if argument in ("in_features", "num_features") else ""
                error, advice = TypeError, NO_LAZY_SIZES.format(example=example) if value is None else ""
            elif operator.index(entry) > 0:
                continue
            text = {"layer": type(layer).__name__, "argument": argument, "got": value, "advice": advice}
            raise error(NOT_A_SIZE.format(**text))


# Inputs


def shape_of(layer: object, x: Any) -> tuple[int, ...]:
    """Returns the shape of an input.

    Args:
        layer: the layer it was passed to, or the name of a function.
        x: the input.

    Raises:
        TypeError: if it is not an array but, say, a list.
    """
    try:
        return x.shape
    except AttributeError:
        name = layer if isinstance(layer, str) else type(layer).__name__
        raise TypeError(NOT_AN_ARRAY.format(layer=name, got=type(x).__name__)) from None


def wrong_features(
    layer: object, expected: int, got: int, shape: Sequence[int], argument: str, where: str = "on the last axis"
) -> ValueError:
    """Makes the error for an input whose number of features is not the one the layer was built for."""
    text = WRONG_FEATURES.format(
        layer=type(layer).__name__, expected=expected, got=got, shape=tuple(shape), argument=argument, where=where
    )
    return ValueError(text + _how_to_reshape(shape, expected))


def _how_to_reshape(shape: Sequence[int], expected: int) -> str:
    """Returns how an input of this shape gets the expected last axis, if it may be one of the usual mistakes."""
    if len(shape) < 3:
        return ""
    if shape[1] == expected:
        return CHANNELS_FIRST
    if expected == 1:
        return ADD_AN_AXIS
    joined = (count for count in range(2, len(shape)) if math.prod(shape[-count:]) == expected)
    count = next(joined, None)
    return "" if count is None else FLATTEN.format(count=count, expected=expected)


def too_few_axes(layer: str, expected: str, shape: Sequence[int]) -> ValueError:
    """Makes the error for an input with too few axes; `expected` describes the shape it should have."""
    return ValueError(TOO_FEW_AXES.format(layer=layer, expected=expected, shape=tuple(shape)))


def check_last_axis(layer: object, x: Any, expected: int, argument: str) -> None:
    """Raises `ValueError` unless the last axis of `x` has `expected` entries."""
    shape = shape_of(layer, x)
    if not shape:
        raise too_few_axes(type(layer).__name__, f"(..., {expected})", shape)
    if shape[-1] != expected:
        raise wrong_features(layer, expected, shape[-1], shape, argument)


def check_spatial_axes(layer: str, x: Any, dimensions: int, features: int | str = "features") -> None:
    """Raises `ValueError` unless `x` has `dimensions` spatial axes and a feature axis."""
    if len(shape_of(layer, x)) < dimensions + 1:
        spatial = ", ".join(f"d{i}" for i in range(dimensions))
        raise too_few_axes(layer, f"(..., {spatial}, {features})", x.shape)


# Spatial arguments


def spatial_tuple(layer: str, argument: str, value: Any) -> tuple[Any, ...]:
    """Returns `value` as a tuple.

    Raises:
        TypeError: for a bare number, because it does not say how many spatial dimensions there are; the message shows
            the tuple to write.
    """
    if isinstance(value, Number):
        raise TypeError(TUPLE_NOT_INT.format(layer=layer, argument=argument, got=value))
    return tuple(value)


def per_dimension(layer: str, argument: str, value: Strides, dimensions: int) -> tuple[int, ...]:
    """Returns one int per spatial dimension from an int, a sequence, or `None` (ones)."""
    if value is None:
        return (1,) * dimensions
    if isinstance(value, int | np.integer):
        return (int(value),) * dimensions
    entries = tuple(value)
    if len(entries) != dimensions:
        raise ValueError(WRONG_LENGTH.format(layer=layer, argument=argument, expected=dimensions, got=value))
    return entries


def normalize_padding(layer: str, padding: PaddingLike, dimensions: int, names: Collection[str]) -> Padding:
    """Returns `padding` as one of `names` or as one `(low, high)` pair per dimension.

    >>> normalize_padding("Conv", (1, (0, 2)), 2, ("SAME",))
    ((1, 1), (0, 2))
    """
    error = ValueError(
        UNKNOWN_PADDING.format(
            layer=layer, got=padding, names=", ".join(repr(name) for name in names), dimensions=dimensions
        )
    )
    if isinstance(padding, str):
        if padding.upper() not in names:
            raise error
        return padding.upper()
    if isinstance(padding, int | np.integer):
        return ((int(padding), int(padding)),) * dimensions
    if len(padding) != dimensions:
        raise error
    pairs = []
    for entry in padding:
        pair = (entry, entry) if isinstance(entry, int | np.integer) else tuple(entry)
        if len(pair) != 2 or not all(isinstance(side, int | np.integer) for side in pair):
            raise error
        pairs.append((int(pair[0]), int(pair[1])))
    return tuple(pairs)
