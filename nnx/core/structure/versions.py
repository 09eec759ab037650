"""Noticing structural changes: a version per Module or Ref, and one global stamp over all of them.

A change of kinds, static values or submodules is *structural*; a new value in an existing cell is not. If a cached flat
form has seen the object that changed, the change moves the object's *version* to another *revision* and replaces the
global *stamp*. A flat form that saw the current stamp is valid without further checks; otherwise it compares the
revisions it saw with the current ones.

Revisions can come back. A *series* is a run of revisions that differ in plain variables alone: variables that were
added, removed or given another spec, but for Refs. Inside a series, the revision is found by the difference from the
first one: what has changed or is gone, and what was added, in order. So a variable that every step creates and the
caller pops (`sow` and `pop_state`) moves a Module between two revisions, and the flat forms of both remain useful. Any
other change, such as one to a static value or a submodule, starts a new series, even if it restores what was there.
"""

from typing import Any, NamedTuple

from nnx.core.caches import WeakRegistry

MAX_REVISIONS = 64  # per series; a Module that needs more does not go back and forth, so a new series begins


class GlobalStamp:
    """Holds the stamp: a fresh object after every structural change that a flat form could have seen.

    An object rather than a counter, because no two threads can make the same one, and replacing it is one step.
    """

    __slots__ = ("stamp",)

    def __init__(self) -> None:
        self.stamp: object = object()


STRUCTURE = GlobalStamp()


class Delta(NamedTuple):
    """How one revision differs from the first of its series."""

    changed: frozenset[tuple[str, Any]] = frozenset()  # first variables with another kind, or None for those removed
    added: tuple[tuple[str, Any], ...] = ()  # in order; a variable that was removed and set again is in both


class Revision:
    """One structure that an object has had. Only one and the same object is the same revision.

    Args:
        series: the series it belongs to. The first revision gets one when a second follows: most never do.
        difference: the plain variables, as (name, kind), that are not as in the first.
    """

    __slots__ = ("series", "difference", "following")

    def __init__(self, series: "Series | None" = None, difference: Delta = Delta()):  # noqa: B008
        self.series: Series | None = series
        self.difference: Delta = difference
        self.following: dict[tuple[str, Any, Any], Revision] = {}  # of the same series, by the change that leads there

    def can_lead_to(self, other: "Revision") -> bool:
        """Whether changes of plain variables alone can lead from this revision to another one."""
        return self is other or (self.series is not None and self.series is other.series)

    def after(self, name: str, before: Any, after: Any) -> "Revision":
        """Returns the revision in which one plain variable has another kind; None means that it is absent.

        The caller guarantees that nothing else changes, and that the value is not a mutable tree, which flat forms
        would have to know of.
        """
        change = (name, before, after)
        found = self.following.get(change)  # steps that sow and pop make the same change again and again
        if found is None:
            if self.series is None:
                self.series = Series(self)
            found = self.series.find(dict(self.difference.changed), dict(self.difference.added), name, before, after)
            if found.series is self.series:
                self.following[change] = found
        return found


class Series:
    """Revisions of one object that differ in plain variables alone."""

    __slots__ = ("first_kinds", "revisions")

    def __init__(self, first: Revision) -> None:
        self.first_kinds: dict[str, Any] = {}  # of variables that have changed since the first revision
        self.revisions: dict[Delta, Revision] = {first.difference: first}

    def find(self, changed: dict[str, Any], added: dict[str, Any], name: str, before: Any, after: Any) -> Revision:
        """Returns the revision that differs from the first in these variables and one more."""
        if name in added and after is None:
            del added[name]
        elif name in added or before is None:
            added[name] = after
        elif self.first_kinds.setdefault(name, before) is after:
            changed.pop(name, None)
        else:
            changed[name] = after
        difference = Delta(frozenset(changed.items()), tuple(added.items()))
        found = self.revisions.get(difference)
        if found is None:
            if len(self.revisions) >= MAX_REVISIONS:
                return Revision()
            found = self.revisions.setdefault(difference, Revision(self, difference))
        return found


class Version:
    """Says which revision one object is at. A cache can hold it without owning that object."""

    __slots__ = ("revision",)

    def __init__(self) -> None:
        self.revision: Revision = Revision()

    def changed(self) -> None:
        """Notes a change that starts a new series."""
        self.revision = Revision()
        STRUCTURE.stamp = object()

    def change_steps(self, revision: Revision | None = None) -> list[tuple[Any, str, Any]]:
        """Returns how to move to a revision, or to a new series, as assignments `(object, attribute, value)`."""
        return [(self, "revision", revision or Revision()), (STRUCTURE, "stamp", object())]


flat_holders = WeakRegistry()
"""The ModuleInfos that cache a flat form."""


def forget_flat_forms() -> None:
    """Drops every cached flat form: one of them may be the last thing that keeps a removed submodule alive."""
    for info in flat_holders.take_all():
        info.forget()
