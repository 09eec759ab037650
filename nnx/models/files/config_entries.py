"""Checks of the entries of a `config.json`, and of the config dataclasses they become.

*Labels* are the names of the classes that a classifier tells apart; *task* is what the head of a model is for.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

NOT_A_NUMBER = "{where}: expected {key!r} to be {expected}, got {got!r}."
NOT_SUPPORTED = "{where}: {key}={got!r} is not supported for {family}; only {only!r} is."
NOT_POSITIVE = "{config}: expected {field} to be a positive integer, got {got!r}."
HEADS_DO_NOT_DIVIDE = "{config}: expected features={features} to be a multiple of num_heads={heads}."
NO_LABELS = "{config}: expected labels to be a tuple of strings, one per class, got {got!r}."
UNKNOWN_TASK = "{config}: expected task to be one of {known} or None, got {got!r}."

ENCODER = {  # entries that most encoders have
    **{"hidden_size": "features", "intermediate_size": "hidden_features", "hidden_act": "activation"},
    **{"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "layer_norm_eps": "norm_epsilon"},
}
TWO_LABELS = ("LABEL_0", "LABEL_1")  # what `transformers` assumes if the file lists none


class Key(NamedTuple):
    """How one entry of a file and a field correspond, if the field is not just the entry under another name.

    Attributes:
        field: the field that the entry sets.
        read: a function of the entry and of the fields that were read before it; the value of the field.
        write: a function of the value of the field and of the config; the inverse.
        kind: the type of the entry; by default, that of the field.
        also: other fields that have the same value.
    """

    field: str
    read: Callable[[Any, Mapping[str, Any]], Any] = lambda value, values: value
    write: Callable[[Any, Any], Any] = lambda value, config: value
    kind: Any = None
    also: tuple[str, ...] = ()


class Part(Protocol):
    """A part of a config that takes several entries to describe, and that is therefore read by a function."""

    def known(self, entries: Mapping[str, Any]) -> set[str]:
        """Returns the names of the entries that this part understands."""
        ...

    def read(self, entries: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Returns fields, given those that were read before; `where` names the file in errors."""
        ...

    def write(self, config: Any) -> dict[str, Any]:
        """Returns entries; the inverse of `read`."""
        ...


def checked(value: Any, kind: Any, key: str, where: str) -> Any:
    """Returns the value of an entry, a list as a tuple, after checking it against the type of a field."""
    fits, expected = _fits(value, kind)
    if not fits:
        raise ValueError(NOT_A_NUMBER.format(where=where, key=key, expected=expected, got=value))
    return tuple(value) if isinstance(value, list) else value


def _fits(value: Any, kind: Any) -> tuple[bool, str]:
    """Returns whether a value of JSON can be that of a type, and what else the type expects."""
    if isinstance(kind, types.UnionType):
        options = [_fits(value, option) for option in typing.get_args(kind) if option is not types.NoneType]
        return any(fits for fits, _ in options), options[0][1]
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        fits = isinstance(value, list) and all(_fits(entry, inner)[0] for entry in value)
        return fits, f"a list of {_PLURALS.get(inner, 'names')}"
    if kind is bool:
        return isinstance(value, bool), "true or false"
    if kind is str or typing.get_origin(kind) is Literal:
        return isinstance(value, str), "a name"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False, "a positive integer" if kind is int else "a number"
    return kind is float or (isinstance(value, int) and value >= 0), "a positive integer"


_PLURALS = {int: "positive integers", float: "numbers", bool: "flags"}


class Labels:
    """The part of a config that names the classes of a classifier."""

    NAMES: ClassVar[set[str]] = {"id2label", "label2id", "num_labels", "_num_labels"}

    def known(self, entries: Mapping[str, Any]) -> set[str]:
        return self.NAMES

    def read(self, entries: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Returns the labels by number: those of `id2label`, or `LABEL_0`, … if only their number is known."""
        listed, number = entries.get("id2label"), entries.get("num_labels", entries.get("_num_labels"))
        if listed is None:
            count = checked(2 if number is None else number, int, "num_labels", where)
            return {"labels": tuple(f"LABEL_{i}" for i in range(count))}
        wanted = [str(i) for i in range(len(listed))]
        if not isinstance(listed, Mapping) or sorted(wanted) != sorted(listed):
            expected = "an object with a label for each number from 0"
            raise ValueError(NOT_A_NUMBER.format(where=where, key="id2label", expected=expected, got=listed))
        return {"labels": tuple(str(listed[i]) for i in wanted)}

    def write(self, config: Any) -> dict[str, Any]:
        """Returns both directions of the table, as `transformers` expects them."""
        return {
            "id2label": {str(i): label for i, label in enumerate(config.labels)},
            "label2id": {label: i for i, label in enumerate(config.labels)},
        }


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """The tokens for padding and for the ends of a text, which no field holds.

    If they are absent, `transformers` takes those of the family's first model, such as 32000 for phi3, and refuses a
    smaller vocabulary. They are then written as null.

    Attributes:
        needed: a function of a config that tells whether absent ones must be written.
    """

    needed: Callable[[Any], bool] = lambda config: not config.extra  # a config from a file has them if it needs them
    NAMES: ClassVar[tuple[str, ...]] = ("bos_token_id", "eos_token_id", "pad_token_id")

    def known(self, entries: Mapping[str, Any]) -> set[str]:
        """Returns the names of those that are null; others are kept as they are."""
        return {name for name in self.NAMES if entries.get(name) is None}

    def read(self, entries: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        return {}

    def write(self, config: Any) -> dict[str, Any]:
        """Returns a null for each token that is needed and unknown."""
        held = dict(config.extra)
        return {name: None for name in self.NAMES if name not in held} if self.needed(config) else {}


def check_config(config: Any, sizes: tuple[str, ...], tasks: tuple[str, ...] = ()) -> None:
    """Raises `ValueError` if the sizes, heads, labels or task of a config are impossible."""
    name = type(config).__name__
    for field in sizes:
        values = getattr(config, field)
        for value in values if isinstance(values, tuple) else (values,):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(NOT_POSITIVE.format(config=name, field=field, got=values))
    if "num_heads" in sizes and "head_dim" not in sizes and config.features % config.num_heads:
        raise ValueError(HEADS_DO_NOT_DIVIDE.format(config=name, features=config.features, heads=config.num_heads))
    labels = getattr(config, "labels", TWO_LABELS)
    if not isinstance(labels, tuple) or not labels or not all(isinstance(label, str) for label in labels):
        raise ValueError(NO_LABELS.format(config=name, got=labels))
    if getattr(config, "task", None) not in (None, *tasks):
        raise ValueError(UNKNOWN_TASK.format(config=name, known=", ".join(map(repr, tasks)), got=config.task))
