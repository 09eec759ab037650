"""Which layers of a decoder are linear recurrences, in `config.json`: all but every n-th, or listed layer by layer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from nnx.models.files.config_entries import NOT_A_NUMBER

BAD_LAYER_TYPE = "{where}: expected layer_types of 'full_attention' and 'linear_attention', got {got!r}."

_INTERVAL = "full_attention_interval"


@dataclasses.dataclass(frozen=True)
class LinearLayers:
    """The part of a decoder's config that sets `layer_types`, if some layers are "linear".

    Attributes:
        interval: every how many layers there is one with attention, in a file that does not say so.
    """

    interval: int = 4

    def known(self, entries: Mapping[str, Any]) -> set[str]:
        return {"layer_types", _INTERVAL}

    def read(self, entries: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        def bad(key: str, expected: str, got: Any) -> ValueError:
            return ValueError(NOT_A_NUMBER.format(where=where, key=key, expected=expected, got=got))

        count, interval = values["num_layers"], entries.get(_INTERVAL, self.interval)
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
            raise bad(_INTERVAL, "a positive integer", interval)
        types = entries.get("layer_types")
        if types is None:
            types = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
        if not isinstance(types, list) or not set(types) <= {"full_attention", "linear_attention"}:
            raise ValueError(BAD_LAYER_TYPE.format(where=where, got=types))
        if len(types) != count:
            raise bad("layer_types", f"a list of {count} entries", types)
        return {"layer_types": tuple(kind.removesuffix("_attention") for kind in types)}

    def write(self, config: Any) -> dict[str, Any]:
        """Returns the list, which newer and older readers prefer to the rule."""
        return {"layer_types": [f"{kind}_attention" for kind in config.layer_types]}
