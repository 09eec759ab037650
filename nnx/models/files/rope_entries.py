"""Rotary settings in `config.json`: older entries (`rope_theta`, `rope_scaling`) and the newer `rope_parameters`.

`Rotary` is the part of a family that reads and writes both styles.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from nnx.models.layer_spec import RotaryConfig
from nnx.nn.attention.rotary_scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    RotaryScaling,
    YaRNScaling,
)

UNKNOWN_ROPE = "{where}: the rope_type {got!r} is not among the known ones: {known}."
BAD_ROPE = "{where}: expected {key!r} in the rotary settings to be {expected}, got {got!r}."
NO_ROPE_KEY = "{where}: the rope_type {kind!r} needs the entry {key!r}."
ROPE_OPTION = "{where}: the rotary setting {key}={got!r} is not supported."

_ORIGINAL, _FRACTION = "original_max_position_embeddings", "partial_rotary_factor"

# For each kind, its class and the entry of the file for each field.
_SCALINGS: dict[str, tuple[type[RotaryScaling], dict[str, str]]] = {
    "linear": (LinearScaling, {"factor": "factor"}),
    # No entry for the length above which it scales, which is the model's context length.
    "dynamic": (DynamicNTKScaling, {"factor": "factor"}),
    "llama3": (
        Llama3Scaling,
        {
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_length": _ORIGINAL,
        },
    ),
    "yarn": (
        YaRNScaling,
        {
            "factor": "factor",
            "original_max_length": _ORIGINAL,
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "attention_factor": "attention_factor",
            "truncate": "truncate",
            "mscale": "mscale",
            "mscale_all_dim": "mscale_all_dim",
        },
    ),
    "longrope": (
        LongRoPEScaling,
        {
            "short_factors": "short_factor",
            "long_factors": "long_factor",
            "original_max_length": _ORIGINAL,
            "factor": "factor",
            "attention_factor": "attention_factor",
        },
    ),
}
_OTHERS = {"rope_type", "type", "rope_theta", _FRACTION, _ORIGINAL}


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The part of a decoder's config that sets `rotary` and `local_rotary`.

    Attributes:
        base: the base of a file that mentions none.
        local_base: the same for layers with a window, where they have their own frequencies.
        shares_base: whether layers with a window have the base of the others, but never their scaling.
        fraction: the part of each head that rotates in a file that mentions none.
        dim: the entry with the number of features of a head that rotate, if the family has one.
        scaling: the scaling of a file that mentions none, as such a file would write it.
        original: the length of training texts of a file that mentions none; the context length by default.
        interleaved: whether neighboring features rotate together.
        entries: the entries with the base, and with that of layers with a window.
    """

    base: float = 10000.0
    local_base: float | None = None
    shares_base: bool = False
    fraction: float = 1.0
    dim: str | None = None
    scaling: Mapping[str, Any] | None = None
    original: int | None = None
    interleaved: bool = False
    entries: tuple[str, str] = ("rope_theta", "rope_local_base_freq")

    def known(self, entries: Mapping[str, Any]) -> set[str]:
        dim = set() if self.dim is None else {self.dim}
        return {*self.entries, "rope_scaling", "rope_parameters", _FRACTION, _ORIGINAL} | dim

    def read(self, entries: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        if self.scaling and not entries.get("rope_scaling") and not entries.get("rope_parameters"):
            entries = {**entries, "rope_scaling": self.scaling}
        if self.dim is not None and entries.get(self.dim) is not None and _FRACTION not in entries:
            entries = {**entries, _FRACTION: _number(entries[self.dim], self.dim, where) / values["head_dim"]}
        length = values["max_length"]
        fields = {"rotary": self._rotary(self._settings(entries, "full_attention", where), self.base, length, where)}
        if self.shares_base or self.local_base is not None:
            settings = self._settings(entries, "sliding_attention", where)
            base = self.base if self.local_base is None else self.local_base
            fields["local_rotary"] = self._rotary(settings, base, length, where)
        return fields

    def write(self, config: Any) -> dict[str, Any]:
        """Returns the entries of both styles, so that older and newer readers agree."""
        rotary, local = config.rotary, config.local_rotary
        if rotary is None:
            return {}
        full = _written(rotary, config.max_length)
        if self.fraction != 1.0:  # where an absent entry means another fraction, all of a head is written as well
            full[_FRACTION] = rotary.fraction
        base, local_base = self.entries
        entries: dict[str, Any] = {base: rotary.base, "rope_parameters": full}
        if _FRACTION in full:
            entries[_FRACTION] = rotary.fraction
        if rotary.scaling is not None:
            entries["rope_scaling"] = {
                name: value for name, value in full.items() if name not in ("rope_theta", _FRACTION)
            }
        if isinstance(rotary.scaling, LongRoPEScaling):
            # As published; older versions of transformers accept nothing else in a phi3.
            entries[_ORIGINAL] = entries["rope_scaling"].pop(_ORIGINAL)
            entries["rope_scaling"]["type"] = entries["rope_scaling"].pop("rope_type")
        if local is not None:
            entries |= {} if self.shares_base else {local_base: local.base}
            inner = {"full_attention": full, "sliding_attention": _written(local, config.max_length)}
            entries["rope_parameters"] = inner
        return entries

    def _rotary(self, settings: Mapping[str, Any], default_base: float, max_length: int, where: str) -> RotaryConfig:
        base, fraction = settings.get("rope_theta"), settings.get(_FRACTION)
        name = settings.get("rope_type", settings.get("type")) or "default"
        return RotaryConfig(
            _number(default_base if base is None else base, "rope_theta", where),
            None if name == "default" else _scaling(name, settings, max_length, where),
            _number(self.fraction if fraction is None else fraction, _FRACTION, where),
            self.interleaved,
        )

    def _settings(self, entries: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
        """Returns the rotary settings of one kind of layers as one dict, whichever style the file uses."""
        new, old = entries.get("rope_parameters") or {}, entries.get("rope_scaling") or {}
        for name, found in (("rope_parameters", new), ("rope_scaling", old)):
            if not isinstance(found, Mapping):
                raise ValueError(BAD_ROPE.format(where=where, key=name, expected="an object", got=found))
        base, local_base = self.entries
        outer = {"rope_theta": entries[base]} if base in entries else {}
        outer |= {_FRACTION: entries[_FRACTION]} if _FRACTION in entries else {}
        if "full_attention" in new or "sliding_attention" in new:
            return {**outer, **(new.get(kind) or {})}
        if kind == "sliding_attention":
            # Local layers are never scaled, and have their own base.
            local = entries.get(base if self.shares_base else local_base)
            return {} if local is None else {"rope_theta": local}
        original = entries.get(_ORIGINAL, self.original)
        # At the top level of the file, as in every phi3, this entry takes precedence.
        return {**outer, **old, **new, **({} if original is None else {_ORIGINAL: original})}


def _scaling(name: Any, settings: Mapping[str, Any], max_length: int, where: str) -> RotaryScaling:
    if name in ("su", "yarn") and "long_factor" in settings:
        name = "longrope"  # its names in the first versions of phi3
    if name not in _SCALINGS:
        known = ", ".join(("default", *_SCALINGS))
        raise ValueError(UNKNOWN_ROPE.format(where=where, got=name, known=known))
    cls, keys = _SCALINGS[name]
    # Reject options that would change the frequencies but that this class does not implement.
    unknown = next(
        (key for key, value in settings.items() if key not in {*_OTHERS, *keys.values()} and value is not None), None
    )
    if unknown is not None:
        raise ValueError(ROPE_OPTION.format(where=where, key=unknown, got=settings[unknown]))
    original = settings.get(_ORIGINAL) if _ORIGINAL in keys.values() else None
    original = max_length if original is None else _number(original, _ORIGINAL, where)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        key = keys.get(field.name, "")
        value = original if field.name == "original_max_length" else settings.get(key)
        if value is None and cls is LongRoPEScaling and field.name == "factor":
            value = max_length / original
        if value is not None:
            read = _flag if field.name == "truncate" else _numbers if field.name.endswith("_factors") else _number
            values[field.name] = read(value, key, where)
        elif field.default is dataclasses.MISSING:
            raise ValueError(NO_ROPE_KEY.format(where=where, kind=name, key=key))
    return cls(**values)


def _written(rotary: RotaryConfig, max_length: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"rope_type": "default", "rope_theta": rotary.base}
    if rotary.fraction != 1.0:
        settings[_FRACTION] = rotary.fraction
    for name, (cls, keys) in _SCALINGS.items():
        if type(rotary.scaling) is cls:
            values: dict[str, Any] = {key: getattr(rotary.scaling, field) for field, key in keys.items()}
            values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
            if cls is LongRoPEScaling and values["factor"] == max_length / values[_ORIGINAL]:
                del values["factor"]  # no published file has it
            if values.get("truncate") is True:
                del values["truncate"]  # the default, an entry that older versions of transformers do not know
            settings |= {"rope_type": name, **{key: value for key, value in values.items() if value is not None}}
    return settings


def _number(value: Any, key: str, where: str) -> Any:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(BAD_ROPE.format(where=where, key=key, expected="a number", got=value))
    return value


def _flag(value: Any, key: str, where: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(BAD_ROPE.format(where=where, key=key, expected="true or false", got=value))
    return value


def _numbers(value: Any, key: str, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(BAD_ROPE.format(where=where, key=key, expected="a list of numbers", got=value))
    return tuple(_number(entry, key, where) for entry in value)
