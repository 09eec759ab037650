"""`Family`: how the published models of one `model_type` are written down, as data that is used in both directions.

An *entry* is a name and a value in `config.json`, a *field* one of our config dataclass. Most entries are fields under
another name. What takes several entries to describe (rotary embeddings, windows, labels) is a `Part`.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from nnx.models.config import FILE_ENTRIES, DecoderConfig, frozen_extra
from nnx.models.files.config_entries import NOT_SUPPORTED, Key, Labels, Part, checked
from nnx.models.files.entry_kinds import check_understood
from nnx.models.files.quantized_files import decoding
from nnx.models.files.table import Table, linear

NO_KEY = "{where}: the entry {key!r}, which a {family} model needs, is missing."
UNKNOWN_CLASS = "{where}: the architecture {got!r} is not among the known ones of {family}: {known}."
CANNOT_EXPRESS = (
    "A {family} config.json cannot express {field}={got!r} (it would mean {means!r}). Change the {config}, or save the "
    "model with nnx.save."
)
SET_TWICE = "Family({family!r}): the field {field!r} must be set by one key or one constant; defaults are for keys."

_BY_TENSORS = ("head", "labels")  # fields of decoders that follow from the tensors in a file


@dataclasses.dataclass(frozen=True)
class Family:
    """The models that share a `model_type`.

    Attributes:
        model_type: its name in `config.json`.
        classes: the class that `transformers` expects in `architectures`; if there are several, by task (None for the
            plain model).
        table: the names of the tensors, or a function from the config to such a table.
        keys: for each entry of the file, the field that it sets, or a `Key`.
        constants: the fields that no entry sets; a function of the other fields if they follow from these.
        defaults: the values of fields whose entry is absent, likewise.
        only: for each entry that must have one value (or be absent), that value, likewise.
        neutral: entries that change nothing in this family, in addition to those that never do.
        parts: the parts of the config that functions read.
        aliases: other names of entries, which some versions of `transformers` write.
        config: the dataclass of configs.
    """

    model_type: str
    classes: str | Mapping[str | None, str]
    table: Table | Callable[[Any], Table]
    keys: Mapping[str, str | Key]
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    neutral: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    config: type = DecoderConfig
    _keys: Mapping[str, Key] = dataclasses.field(init=False, repr=False)
    _fields: Mapping[str, dataclasses.Field[Any]] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        fields = {field.name: field for field in dataclasses.fields(self.config)}
        keys = {name: key if isinstance(key, Key) else Key(key) for name, key in self.keys.items()}
        read = [field for key in keys.values() for field in (key.field, *key.also)]
        once = [*read, *self.constants]
        for field in {*once, *self.defaults}:
            if once.count(field) != 1 or field not in fields or (field in self.defaults and field in self.constants):
                raise ValueError(SET_TWICE.format(family=self.model_type, field=field))
        object.__setattr__(self, "_keys", keys)
        object.__setattr__(self, "_fields", fields)

    def table_of(self, config: Any) -> Table:
        """Returns the table of the models with a config."""
        table = self.table if isinstance(self.table, Table) else self.table(config)
        match getattr(config, "head", "tokens"):
            case "labels":
                return dataclasses.replace(table, head=linear("score", "head"))
            case "none":  # published without the start of the names that those with a head share
                return dataclasses.replace(table, head=(), prefix="", others=(table.prefix, *table.others))
        return table

    def class_of(self, config: Any) -> str:
        """Returns the name of the class of the models with a config."""
        if not isinstance(self.classes, str):
            return self.classes[getattr(config, "task", None)]
        stem = re.sub("(ForCausalLM|ForMaskedLM|LMHeadModel)$", "", self.classes)
        ends = {"labels": f"{stem}ForSequenceClassification", "none": f"{stem}Model"}
        return ends.get(getattr(config, "head", "tokens"), self.classes)

    def known(self, entries: Mapping[str, Any]) -> set[str]:
        """Returns the names of entries that are understood; whatever else a file has is kept in the field `extra`."""
        parts = (part.known(entries) for part in self.parts)
        return set().union(self.keys, self.only, self.aliases, FILE_ENTRIES, *parts)

    def names_of(self, fields: Collection[str]) -> set[str]:
        """Returns the names of the entries that set one of these fields."""
        names = {name for name, key in self._keys.items() if key.field in fields}
        return names | {alias for alias, name in self.aliases.items() if name in names}

    def read(self, entries: Mapping[str, Any], where: str = "config.json") -> Any:
        """Translates the entries of a `config.json`; `where` is the name of the file, for errors.

        Raises:
            ValueError: an entry is missing or malformed, or a setting is not supported.
        """
        renamed = {name: entries[alias] for alias, name in self.aliases.items() if alias in entries}
        entries = renamed | {name: entry for name, entry in entries.items() if name not in self.aliases}
        decoding(entries, where)  # raises if the weights are quantized in a way that cannot be read
        values: dict[str, Any] = {}
        for name in self.keys:
            values |= self._field(name, entries, values, where)
        for name, required in self.only.items():
            only = _resolved(required, values)
            if entries.get(name) is not None and entries[name] != only:
                message = NOT_SUPPORTED.format(
                    where=where, key=name, got=entries[name], family=self.model_type, only=only
                )
                raise ValueError(message)
        for part in self.parts:
            values |= part.read(entries, values, where)
        if "task" in self._fields:
            values["task"] = self._task(entries.get("architectures"), where)
        values |= {field: _resolved(constant, values) for field, constant in self.constants.items()}
        if "model_type" in self._fields:
            values["model_type"] = self.model_type
        known = self.known(entries)
        unread = [name for name in entries if name not in known]
        check_understood([name for name in unread if name not in self.neutral], entries, self.model_type, where)
        extra = frozen_extra({name: entries[name] for name in unread})
        return self.config(**values, extra=extra)

    def write(self, config: Any) -> dict[str, Any]:
        """Returns the entries of the `config.json` with which `transformers` loads such a model.

        Raises:
            ValueError: a field has a value that no model of the family has, so the file cannot express it.
        """
        values = {field: getattr(config, field) for field in self._fields}
        entries = {name: _resolved(only, values) for name, only in self.only.items()}
        entries = {name: only for name, only in entries.items() if only is not None}
        entries |= {name: json.loads(text) for name, text in config.extra}
        entries |= {"model_type": self.model_type, "architectures": [self.class_of(config)]}
        for name, key in self._keys.items():
            value = key.write(values[key.field], config)
            entries[name] = list(value) if isinstance(value, tuple) else value
        for part in self.parts:
            entries |= part.write(config)
        if values.get("head") == "labels":
            entries |= Labels().write(config)
        again = self.read(entries, type(config).__name__)
        for field, value in values.items():
            if field not in ("extra", *_BY_TENSORS) and getattr(again, field) != value:
                message = CANNOT_EXPRESS.format(
                    family=self.model_type,
                    field=field,
                    got=value,
                    means=getattr(again, field),
                    config=type(config).__name__,
                )
                raise ValueError(message)
        return entries

    def _field(self, name: str, entries: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Returns the fields that one entry sets, after checking it."""
        key, entry = self._keys[name], entries.get(name)
        field = self._fields[key.field]
        if entry is not None:
            value = key.read(checked(entry, key.kind or field.type, name, where), values)
        elif name in entries and field.default is None:
            value = None
        elif key.field in self.defaults:
            value = _resolved(self.defaults[key.field], values)
        elif field.default is dataclasses.MISSING:
            raise ValueError(NO_KEY.format(where=where, key=name, family=self.model_type))
        else:
            value = field.default
        return dict.fromkeys((key.field, *key.also), value)

    def _task(self, classes: Any, where: str) -> str | None:
        """Returns the task of the first class in `architectures`; without one, the model is plain."""
        if isinstance(self.classes, str):
            return None
        name = classes[0] if isinstance(classes, list) and classes else self.classes[None]
        for task, known in self.classes.items():
            if name == known:
                return task
        known = ", ".join(self.classes.values())
        raise ValueError(UNKNOWN_CLASS.format(where=where, got=name, family=self.model_type, known=known))


def _resolved(value: Any, values: Mapping[str, Any]) -> Any:
    """Returns a value that may be a function of the fields read so far."""
    return value(values) if callable(value) else value
