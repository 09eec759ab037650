"""Errors that layers share: an input of the wrong size, a number where a tuple is meant."""

from collections.abc import Sequence
from numbers import Number
from typing import Any

import numpy as np

WRONG_FEATURES = (
    "{layer} expected {expected} features {where}, got {got}: the input has shape {shape}. "
    "Pass an input with {expected} features there, or build the layer with `{argument}={got}`."
)
TOO_FEW_AXES = "{layer} expected an input of shape {expected}, got shape {shape}, which has too few axes."
TUPLE_NOT_INT = (
    "{layer} takes `{argument}` as a tuple with one entry per spatial dimension, got the number {got}. "
    "Write `{argument}=({got},)` for one spatial dimension, `{argument}=({got}, {got})` for two."
)
WRONG_LENGTH = (
    "{layer}: `{argument}` must be an int or have {expected} entries, one per spatial dimension, got {got!r}."
)


def wrong_features(
    layer: object, expected: int, got: int, shape: Sequence[int], argument: str, where: str = "on the last axis"
) -> ValueError:
    """The error for an input with another number of features than the layer was built for."""
    return ValueError(
        WRONG_FEATURES.format(
            layer=type(layer).__name__, expected=expected, got=got, shape=tuple(shape), argument=argument, where=where
        )
    )


def check_last_axis(layer: object, x: Any, expected: int, argument: str) -> None:
    """Raises unless the last axis of `x` has `expected` entries."""
    shape = x.shape
    if not shape:
        raise ValueError(TOO_FEW_AXES.format(layer=type(layer).__name__, expected=f"(..., {expected})", shape=shape))
    if shape[-1] != expected:
        raise wrong_features(layer, expected, shape[-1], shape, argument)


def spatial_tuple(layer: str, argument: str, value: Any) -> tuple[Any, ...]:
    """`value` as a tuple; a bare number is a `TypeError` that shows the tuple to write."""
    if isinstance(value, Number):
        raise TypeError(TUPLE_NOT_INT.format(layer=layer, argument=argument, got=value))
    return tuple(value)


def per_dimension(layer: str, argument: str, value: int | Sequence[int] | None, dimensions: int) -> tuple[int, ...]:
    """One int per spatial dimension from an int, a sequence, or `None` (ones)."""
    if value is None:
        return (1,) * dimensions
    if isinstance(value, int | np.integer):
        return (int(value),) * dimensions
    entries = tuple(value)
    if len(entries) != dimensions:
        raise ValueError(WRONG_LENGTH.format(layer=layer, argument=argument, expected=dimensions, got=value))
    return entries
