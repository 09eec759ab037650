"""Noticing structural changes: a version per Module or Ref, and one global stamp over all of them.

A change of kinds, static values or submodules is *structural*; a new value in an existing cell is not. If a cached flat
form has seen the object that changed, the change raises the object's *version* and replaces the global *stamp*. A flat
form that saw the current stamp is valid without a further look; otherwise it compares the versions it watches.
"""

from typing import Any

from nnx.core.caches import WeakRegistry


class GlobalStamp:
    """Holds the stamp: a fresh object after every structural change that a flat form could have seen."""

    __slots__ = ("stamp",)

    def __init__(self) -> None:
        self.stamp: object = object()


STRUCTURE = GlobalStamp()


class Version:
    """Counts the structural changes of one object. A cache can hold it without owning that object."""

    __slots__ = ("count",)

    count: int

    def __init__(self) -> None:
        self.count = 0

    def changed(self) -> None:
        self.count += 1
        STRUCTURE.stamp = object()

    def change_steps(self) -> list[tuple[Any, str, Any]]:
        """Returns what `changed` does, as assignments `(object, attribute, value)` to be made later."""
        return [(self, "count", self.count + 1), (STRUCTURE, "stamp", object())]


flat_holders = WeakRegistry()
"""The ModuleInfos that cache a flat form."""


def forget_flat_forms() -> None:
    """Drops every cached flat form: one of them may be the last thing that keeps a removed submodule alive."""
    for info in flat_holders.take_all():
        info.flat = info.joint = None
