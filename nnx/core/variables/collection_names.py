"""Collection names: every Variable type has one, so that a string can name a type.

The registry holds the types weakly: a class defined in a function or a notebook is forgotten with it.
"""

import re
import weakref
from typing import Any

_types: dict[str, list[weakref.ref[type]]] = {}


def register_collection(cls: Any) -> None:
    """Enters a Variable type under its collection name."""
    _types.setdefault(cls.collection, []).append(weakref.ref(cls))


def collection_type(name: str) -> Any:
    """Returns the first Variable type with this collection name that is still alive, or None."""
    return next((cls for cls in (weak() for weak in _types.get(name, ())) if cls is not None), None)


def known_collections() -> list[str]:
    """Returns the collection names in use, sorted."""
    return sorted(name for name in _types if collection_type(name) is not None)


def snake_case(name: str) -> str:
    """Returns a class name in snake_case: the collection name of a type that does not set one."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
