"""Counts in a `config.json`, compared with the headers of the files before anything is built.

A model is built layer by layer, and rotary frequencies feature by feature. A config that promises a billion of either
would take all memory, or hours, before anybody notices that the tensors are not there.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

TOO_MANY = (
    "{where}: {key}={got!r} cannot be, because the files next to it have {tensors} tensors, whose longest axis is "
    "{axis}."
)

# The fields of configs that count something; the families say under which names they stand in a file.
_LAYERS = ("num_layers", "num_decoder_layers", "depths")
_EXPERTS = ("num_experts",)
_AXES = ("features", "head_dim", "rotary_dim", "max_source_length")
_LABELS = {"num_labels", "_num_labels"}  # no field: labels have names
# As many experts of all layers together as there may be although no tensor is named after them: where they share one.
_UNNAMED = 100_000


def check_counts(
    fields: Mapping[str, Any], tensors: Mapping[str, Any], where: str, names_of: Callable[..., frozenset[str]]
) -> None:
    """Raises `ValueError` if a config counts more layers, experts, features or labels than there can be in the files.

    Args:
        fields: the entries of the `config.json`.
        tensors: the tensors in the files by name, with a `shape`.
        where: the name of the config, for the error.
        names_of: a function that returns the names of the entries that set some fields of a config.
    """
    number = len(tensors)
    # Empty tensors have axes of any length, at no cost.
    axis = max((size for tensor in tensors.values() if 0 not in tensor.shape for size in tensor.shape), default=0)
    layers = 1
    for key, count in _counts(fields, names_of(*_LAYERS)):
        _check(key, count, number, number, axis, where)
        layers = max(layers, count)
    for key, count in _counts(fields, names_of(*_AXES) | _LABELS):
        _check(key, count, axis, number, axis, where)
    for key, count in _counts(fields, names_of(*_EXPERTS)):
        _check(key, count, min(max(number, axis), max(number, _UNNAMED) // layers), number, axis, where)


def _check(key: str, count: int, limit: int, tensors: int, axis: int, where: str) -> None:
    if count > limit:
        raise ValueError(TOO_MANY.format(where=where, key=key, got=count, tensors=tensors, axis=axis))


def _counts(fields: Mapping[str, Any], keys: frozenset[str]) -> Iterator[tuple[str, int]]:
    """Yields the counts under some keys, in a config and in the configs of the parts of its model."""
    for entries in (fields, *(value for value in fields.values() if isinstance(value, Mapping))):
        for key in sorted(keys & entries.keys()):
            values = entries[key] if isinstance(entries[key], list) else [entries[key]]
            # Anything else is reported by whoever translates the entry.
            yield from ((key, count) for count in values if isinstance(count, int))
