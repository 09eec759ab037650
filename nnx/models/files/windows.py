"""Which layers of a decoder have a window, in `config.json`: by a rule of the family, or listed layer by layer."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from nnx.models.files.config_entries import NOT_A_NUMBER

BAD_LAYER_TYPE = "{where}: expected layer_types of 'full_attention' and 'sliding_attention', got {got!r}."

_PATTERN = "sliding_window_pattern"


def every(number: int) -> Callable[[int, Mapping[str, Any]], bool]:
    """Returns the rule that all layers have a window but every n-th; the file may set n."""
    return lambda i, entries: bool((i + 1) % (entries.get(_PATTERN) or number))


@dataclasses.dataclass(frozen=True)
class Windows:
    """The part of a decoder's config that sets `layer_types` and `sliding_window`.

    Attributes:
        default: the window of a file that mentions none; None if it means that there is none.
        rule: which layers have it if the file does not list them: a function of the layer's number and the entries. By
            default all of them, and then the file cannot list them either.
        switch: the entry that must be true for any window to apply, if there is one.
    """

    default: int | None = None
    rule: Callable[[int, Mapping[str, Any]], bool] | None = None
    switch: str | None = None

    def known(self, entries: Mapping[str, Any]) -> set[str]:
        switch = {self.switch} if self.switch else set()
        return {"sliding_window", "layer_types", "max_window_layers", _PATTERN, f"_{_PATTERN}"} | switch

    def read(self, entries: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        def bad(key: str, expected: str, got: Any) -> ValueError:
            return ValueError(NOT_A_NUMBER.format(where=where, key=key, expected=expected, got=got))

        count = values["num_layers"]
        window = entries.get("sliding_window", self.default)
        if self.switch and not entries.get(self.switch, False):
            window = None
        if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
            raise bad("sliding_window", "a positive integer or null", window)
        listed = entries.get("layer_types")
        if listed is None:
            has_window = self.rule or (lambda i, entries: True)
            types = ["sliding_attention" if has_window(i, entries) else "full_attention" for i in range(count)]
        else:
            types = listed
            if not isinstance(types, list) or not set(types) <= {"full_attention", "sliding_attention"}:
                raise ValueError(BAD_LAYER_TYPE.format(where=where, got=listed))
            if len(types) != count:
                raise bad("layer_types", f"a list of {count} entries", listed)
        kinds = tuple("full" if window is None else kind.removesuffix("_attention") for kind in types)
        return {"layer_types": kinds, "sliding_window": window if "sliding" in kinds else None}

    def write(self, config: Any) -> dict[str, Any]:
        """Returns the entries. Where all layers are alike, transformers takes a file that lists them for another."""
        entries: dict[str, Any] = {"sliding_window": config.sliding_window}
        if self.rule is not None:
            entries["layer_types"] = [f"{kind}_attention" for kind in config.layer_types]
        if self.switch:
            entries[self.switch] = "sliding" in config.layer_types
        return entries
