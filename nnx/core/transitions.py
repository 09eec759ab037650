"""Transitions: how a graph moves from one flat form to another, so that it can move the same way again.

A function that records values with `sow`, and a caller who pops them, move a model back and forth between two
structures. Each structure keeps its flat form (see versions), so the second time nothing has to be found out: a
`Transition` is the difference between two flat forms as lists of single writes. There are transitions only between
forms that differ in plain variables, those that are not on a Ref.
"""

import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, delitem, is_, is_not, setitem
from typing import Any

from nnx.core.flat import Flat, use
from nnx.core.module_info import info_of, is_view
from nnx.core.structure import DataAttribute
from nnx.core.ties import NO_TIES
from nnx.core.versions import STRUCTURE


class Transition:
    """The way from one flat form to another. It owns no Module, and refers to the flat forms weakly.

    Args:
        before, after: the flat forms, of the same Modules.
        changes: per Module that differs, its number and its variables before and after, as kinds by name.
        outputs: the places that new values are written to, as the number of the Module and the name.
    """

    __slots__ = ("_after", "_dicts", "_names", "_kinds", "_left_dicts", "_left_names", "_objects", "_fields", "_moved")

    def __init__(
        self,
        before: Flat,
        after: Flat,
        changes: Sequence[tuple[int, dict[str, Any], dict[str, Any]]],
        outputs: Iterable[tuple[int, str]],
    ):
        modules: list[Any] = [weak() for weak in before.modules]
        self._after = weakref.ref(after)
        # The writes: new values into instance dicts, then new kinds into the dicts of kinds.
        self._dicts: list[dict[str, Any]] = []
        self._names: list[str] = []
        for number, name in outputs:
            self._dicts.append(modules[number].__dict__)
            self._names.append(name)
        self._kinds: list[Any] = []
        # The removals, from both.
        self._left_dicts: list[dict[str, Any]] = []
        self._left_names: list[str] = []
        for number, old, new in changes:
            kinds = info_of(modules[number]).kinds
            for name in [name for name in new if old.get(name) is not new[name]]:
                self._dicts.append(kinds)
                self._names.append(name)
                self._kinds.append(new[name])
            for name in [name for name in old if name not in new]:
                self._left_dicts += [modules[number].__dict__, kinds]
                self._left_names += [name, name]
        # The assignments: the revisions, then the global stamp, which is a new object each time.
        numbers = [number for number, *_ in changes]
        self._objects: list[Any] = [*(after.versions[number] for number in numbers), STRUCTURE]
        self._fields: list[str] = [*("revision" for _ in numbers), "stamp"]
        self._moved: list[Any] = [after.revisions[number] for number in numbers]

    @staticmethod
    def between(before: Flat, after: Flat, outputs: Iterable[tuple[int, str]]) -> "Transition | None":
        """Returns the way between two flat forms, or None if they differ in more than plain variables.

        Args:
            before, after: the flat forms. The second one is valid.
            outputs: the places that new values are written to.
        """
        if not (before.may_come_back() and before.ties is NO_TIES and after.ties is NO_TIES):
            return None
        if before.refs or after.refs or before.has_mutable_trees or after.has_mutable_trees or before.level is None:
            return None
        modules = [weak() for weak in before.modules]
        # By identity: a user's Module may define `__eq__`.
        if len(after.modules) != len(modules) or not all(map(is_, modules, [weak() for weak in after.modules])):
            return None
        if any(module is None or is_view(module) for module in modules):
            return None
        pairs = enumerate(zip(before.revisions, after.revisions, strict=True))
        changed = [number for number, (old, new) in pairs if old is not new]
        changes = [(number, _variables(before, number), _variables(after, number)) for number in changed]
        return Transition(before, after, changes, outputs)

    def make(self, before: Flat, roots: Sequence[Any], values: Iterable[Any] = ()) -> bool:
        """Moves the Modules to the other structure; returns False if another thread has just changed theirs.

        Args:
            before: the flat form that they have, which the caller has found valid.
            roots: the roots of the graph.
            values: the values to write, one per output.
        """
        after, stamp = self._after(), object()
        # All of this is one C call. Python delivers signals only between bytecodes, so an interrupt arrives before the
        # first write or after the last one, and no other thread sees some writes without the rest. `any` stops at the
        # first true result. Writes return None, so only the question that comes first can stop it: has the structure
        # changed since `before` was found valid? If not, nothing can change it before the last write, and the form
        # after is valid as well.
        if any(
            chain(
                map(is_not, map(_stamp, (STRUCTURE,)), (before.ready,)),
                map(setitem, self._dicts, self._names, chain(values, self._kinds)),
                map(delitem, self._left_dicts, self._left_names),
                map(setattr, self._objects, self._fields, (*self._moved, stamp)),
                map(setattr, () if after is None else (after,), ("ready",), (stamp,)),
            )
        ):
            return False
        if after is not None:
            use(after, roots)
        return True


_stamp = attrgetter("stamp")


def _variables(flat: Flat, module: int) -> dict[str, Any]:
    """Returns the kinds of a Module's variables by name."""
    attributes = flat.key.attributes(module)
    return {attribute.name: attribute.kind for attribute in attributes if type(attribute) is DataAttribute}
