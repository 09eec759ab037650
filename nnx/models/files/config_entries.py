"""Entries of a `config.json` as fields of a config dataclass, and back, for the families that are not decoders.

In the file an absent entry means the default of `transformers`. The dataclasses have the same defaults, and the type of
a default is what an entry is checked against. Entries that no field corresponds to are kept in the field `extra` and
written back. *Labels* are the names of the classes that a classifier tells apart; *task* is what the head is for.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from nnx.models.config import FILE_ENTRIES, frozen_extra
from nnx.models.families import NOT_A_NUMBER, NOT_SUPPORTED
from nnx.models.files.quantized_files import decoding

NOT_POSITIVE = "{config}: expected {field} to be a positive integer, got {got!r}."
HEADS_DO_NOT_DIVIDE = "{config}: expected features={features} to be a multiple of num_heads={heads}."
NO_LABELS = "{config}: expected labels to be a tuple of strings, one per class, got {got!r}."
UNKNOWN_TASK = "{config}: expected task to be one of {known} or None, got {got!r}."
UNKNOWN_CLASS = "{where}: the architecture {got!r} is not among the known ones of {family}: {known}."

TWO_LABELS = ("LABEL_0", "LABEL_1")  # what `transformers` assumes if the file lists none


@dataclasses.dataclass(frozen=True)
class ConfigEntries:
    """How a `config.json` translates to a config dataclass.

    Attributes:
        model_type: the family.
        config: the dataclass; every field has a default.
        keys: for each entry of the file, the field that it sets.
        only: for each entry that must have one value (or be absent), that value.
        classes: the class name in `architectures` for each task; the plain model is `None`.
    """

    model_type: str
    config: type
    keys: Mapping[str, str]
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    classes: Mapping[str | None, str] = dataclasses.field(default_factory=dict)

    def read(self, fields: Mapping[str, Any], where: str) -> Any:
        """Returns the config; `where` is the name of the file, for errors."""
        decoding(fields, where)  # raises if the weights are quantized in a way that cannot be read
        for key, only in self.only.items():
            if fields.get(key) not in (None, only):
                raise ValueError(
                    NOT_SUPPORTED.format(where=where, key=key, got=fields[key], family=self.model_type, only=only)
                )
        defaults = {field.name: field.default for field in dataclasses.fields(self.config)}
        values = {
            field: checked(fields[key], defaults[field], key, where)
            for key, field in self.keys.items()
            if fields.get(key) is not None
        }
        if "task" in defaults:
            values["task"] = self._task(fields.get("architectures"), where)
        if "labels" in defaults:
            values["labels"] = _read_labels(fields, where)
        known = {*self.keys, *self.only, *FILE_ENTRIES, "id2label", "label2id", "num_labels", "_num_labels"}
        extra = frozen_extra({key: value for key, value in fields.items() if key not in known})
        return self.config(**values, extra=extra)

    def write(self, config: Any) -> dict[str, Any]:
        """Returns the entries with which `transformers` loads a model of the config."""
        fields: dict[str, Any] = {**self.only, **{name: json.loads(text) for name, text in config.extra}}
        fields |= {"model_type": self.model_type, "architectures": [self.classes[getattr(config, "task", None)]]}
        for key, field in self.keys.items():
            value = getattr(config, field)
            fields[key] = list(value) if isinstance(value, tuple) else value
        if hasattr(config, "labels"):
            fields["id2label"] = {str(i): label for i, label in enumerate(config.labels)}
            fields["label2id"] = {label: i for i, label in enumerate(config.labels)}
        return fields

    def _task(self, classes: Any, where: str) -> str | None:
        """Returns the task of the first class in `architectures`; without one, the model is plain."""
        name = classes[0] if isinstance(classes, list) and classes else self.classes[None]
        for task, known in self.classes.items():
            if name == known:
                return task
        known = ", ".join(self.classes.values())
        raise ValueError(UNKNOWN_CLASS.format(where=where, got=name, family=self.model_type, known=known))


def checked(value: Any, default: Any, key: str, where: str) -> Any:
    """Returns the value of an entry after checking it against the type of its default: a size, a number, a name, …."""

    def is_size(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0

    if isinstance(default, bool):
        fits, expected = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        fits, expected = is_size(value), "a positive integer"
    elif isinstance(default, str):
        fits, expected = isinstance(value, str), "a name"
    elif isinstance(default, tuple):
        fits, expected = isinstance(value, list) and all(map(is_size, value)), "a list of positive integers"
        value = tuple(value) if fits else value
    else:
        fits, expected = isinstance(value, (int, float)) and not isinstance(value, bool), "a number"
    if not fits:
        raise ValueError(NOT_A_NUMBER.format(where=where, key=key, expected=expected, got=value))
    return value


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


def _read_labels(fields: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Returns the labels by number: those of `id2label`, or `LABEL_0`, … if only their number is known."""
    listed, number = fields.get("id2label"), fields.get("num_labels", fields.get("_num_labels"))
    if listed is None:
        return tuple(f"LABEL_{i}" for i in range(checked(2 if number is None else number, 2, "num_labels", where)))
    wanted = [str(i) for i in range(len(listed))]
    if not isinstance(listed, Mapping) or sorted(wanted) != sorted(listed):
        expected = "an object with a label for each number from 0"
        raise ValueError(NOT_A_NUMBER.format(where=where, key="id2label", expected=expected, got=listed))
    return tuple(str(listed[i]) for i in wanted)
