"""`explain`: goes through the entries of a `config.json`, and says what becomes of each."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal

from nnx.core.repr import short
from nnx.models.config import FILE_ENTRIES
from nnx.models.family import Family
from nnx.models.files.config_entries import Key
from nnx.models.files.directory import read_entries
from nnx.models.files.entry_kinds import missing_feature
from nnx.models.files.text_part import text_entries
from nnx.models.registry import ARCHITECTURES
from nnx.storage.files import local_path

Verdict = Literal["understood", "neutral", "not understood"]

UNKNOWN_TYPE = "no family here has this model_type; known are {known}"
NOT_A_CONFIG = "explain takes a directory, the entries of a config.json, or a config of nnx.models; got {got}."


@dataclasses.dataclass(frozen=True)
class ExplainedEntry:
    """One entry of a `config.json`.

    Attributes:
        name, value: the entry.
        verdict: "understood" if it sets something here, "neutral" if it changes nothing that a model computes, "not
            understood" if the model cannot be opened because of it.
        meaning: what it sets, why it is neutral, or which feature is missing.
    """

    name: str
    value: Any
    verdict: Verdict
    meaning: str

    def __str__(self) -> str:
        return f"{self.verdict:14}  {self.name}={short(self.value)}: {self.meaning}"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What becomes of each entry of a `config.json`; `print` shows those that matter first.

    Attributes:
        model_type: the family that the file names.
        entries: its entries, in their order.
        error: why such a model cannot be opened, as far as the config tells; None if it can.
    """

    model_type: Any
    entries: tuple[ExplainedEntry, ...]
    error: str | None

    @property
    def not_understood(self) -> tuple[ExplainedEntry, ...]:
        """The entries because of which the model cannot be opened."""
        return tuple(entry for entry in self.entries if entry.verdict == "not understood")

    def __str__(self) -> str:
        order = ("not understood", "understood", "neutral")
        lines = [str(entry) for entry in sorted(self.entries, key=lambda entry: order.index(entry.verdict))]
        end = "" if self.error is None else f"\ncannot be opened: {self.error}"
        return "\n".join([f"model_type {self.model_type!r}", *lines]) + end


def explain(config: str | os.PathLike[str] | Mapping[str, Any] | Any) -> Explanation:
    """Says for each entry of a `config.json` whether it is understood, neutral, or not understood.

    No weights are read.

    Args:
        config: the directory of a published model, the entries of a `config.json`, or a config of `nnx.models`.

    Raises:
        FileNotFoundError: there is no such directory, or it has no config.
        TypeError: `config` is none of these.

    >>> explanation = nnx.models.explain({"model_type": "llama", "hidden_size": 64, "dropout": 0.1, "alibi": True})
    >>> [(entry.name, entry.verdict) for entry in explanation.entries[1:]]
    [('hidden_size', 'understood'), ('dropout', 'neutral'), ('alibi', 'not understood')]
    >>> explanation.not_understood[0].meaning
    'positions as biases of attention (ALiBi)'
    """
    entries = text_entries(_entries(config), "config.json")
    model_type = entries.get("model_type")
    architecture = ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        found = tuple(_of_unknown_family(name, entries, known) for name in entries)
        return Explanation(model_type, found, UNKNOWN_TYPE.format(known=known))
    family = next(family for family in architecture.families if family.model_type == model_type)
    error = None
    try:
        family.read(entries)
    except ValueError as reason:
        error = str(reason)
    return Explanation(model_type, tuple(_of_family(name, entries, family) for name in entries), error)


def _entries(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if isinstance(config, (str, os.PathLike)):
        return read_entries(local_path(config).absolute())
    for architecture in ARCHITECTURES.values():
        if any(isinstance(config, family.config) for family in architecture.families):
            return architecture.write_config(config)
    raise TypeError(NOT_A_CONFIG.format(got=short(config)))


def _of_family(name: str, entries: Mapping[str, Any], family: Family) -> ExplainedEntry:
    value = entries[name]
    if name in family.only and value is not None and not _is_only(family, name, value):
        have = f"{family.model_type} models here have {family.only[name]!r}"
        return ExplainedEntry(name, value, "not understood", have)
    if name in family.known(entries):
        return ExplainedEntry(name, value, "understood", _meaning(name, family))
    feature = None if name in family.neutral else missing_feature(name, entries)
    if feature is None:
        return ExplainedEntry(name, value, "neutral", "changes nothing that a model computes")
    return ExplainedEntry(name, value, "not understood", feature)


def _is_only(family: Family, name: str, value: Any) -> bool:
    only = family.only[name]
    return callable(only) or value == only


def _meaning(name: str, family: Family) -> str:
    key = family.keys.get(family.aliases.get(name, name))
    if key is not None:
        fields = (key.field, *key.also) if isinstance(key, Key) else (key,)
        return f"sets {', '.join(fields)}"
    if name in FILE_ENTRIES:
        return "describes the file"
    return "the only value there is" if name in family.only else "sets a part of the config"


def _of_unknown_family(name: str, entries: Mapping[str, Any], known: str) -> ExplainedEntry:
    if name == "model_type":
        return ExplainedEntry(name, entries[name], "not understood", UNKNOWN_TYPE.format(known=known))
    feature = None if name in FILE_ENTRIES else missing_feature(name, entries)
    if feature is None:
        return ExplainedEntry(name, entries[name], "neutral", "changes nothing that a model computes")
    return ExplainedEntry(name, entries[name], "not understood", feature)
