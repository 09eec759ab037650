"""A Linen module taken apart into its class and fields, and put together again.

A Linen module has an identity of its own, and JAX compares it with an `==` that cannot look into a config that has no
hash. Its class and fields are compared by content like any static value, so that modules built by the same code are
equal, and a config that is changed is noticed.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from nnx.core.extras import require


@dataclasses.dataclass
class LinenFields:
    """A Linen module: its class and its fields. Fields that are Linen modules are LinenFields, too."""

    cls: type
    fields: dict[str, Any]


def take_apart(value: Any, made: dict[int, Any] | None = None) -> Any:
    """Returns a value with every Linen module in it replaced by its LinenFields; one module makes one object."""
    linen = require("flax.linen", "bridge", "A model of Linen")
    made = {} if made is None else made
    if isinstance(value, linen.Module):
        if id(value) not in made:
            fields = [field.name for field in dataclasses.fields(value) if field.init and field.name != "parent"]
            made[id(value)] = LinenFields(
                type(value), {name: take_apart(getattr(value, name), made) for name in fields}
            )
        return made[id(value)]
    if isinstance(value, Mapping) and hasattr(value, "unfreeze"):  # what Linen turns dicts into
        return {name: take_apart(item, made) for name, item in value.items()}
    if type(value) in (list, tuple, dict):
        return _map_items(value, lambda item: take_apart(item, made))
    return value


def put_together(value: Any, made: dict[int, Any] | None = None) -> Any:
    """Returns what was taken apart, with new Linen modules that have no parent."""
    made = {} if made is None else made
    if type(value) is LinenFields:
        if id(value) not in made:
            fields = {name: put_together(field, made) for name, field in value.fields.items()}
            made[id(value)] = value.cls(**fields, parent=None)
        return made[id(value)]
    return _map_items(value, lambda item: put_together(item, made)) if type(value) in (list, tuple, dict) else value


def _map_items(value: Any, function: Any) -> Any:
    if type(value) is dict:
        return {name: function(item) for name, item in value.items()}
    return type(value)([function(item) for item in value])
