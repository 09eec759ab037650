"""Counting the copies that donation makes because somebody else holds an array, to warn a program that always does."""

import weakref
from collections.abc import Callable
from typing import Any

import jax

from nnx.core.sizes import size_in_bytes

COPIES_BEFORE_WARNING = 3


class Copies:
    """The cells that were copied because somebody else holds them, and in how many calls in a row."""

    __slots__ = ("rows", "sizes", "_after")

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}  # by cell, the number of calls
        self.sizes: dict[int, int] = {}  # by cell, in bytes
        self._after: Callable[[], Any] = _nothing  # weakly, an array that the last call with copies returned

    def note(self, copied: list[int], cells: list[Any], changed: Any) -> None:
        """Notes that cells have been copied for a call that had these values and returned those that changed."""
        # Nearly all calls copy nothing, and they should not pay for counting. If the last call with copies was also the
        # last one of all, an array that it returned is still in the Modules, since every call replaces the same cells.
        last = self._after()
        in_a_row = last is not None and any(leaf is last for leaf in jax.tree.leaves(cells))
        rows = self.rows if in_a_row else {}
        self.rows = {cell: rows.get(cell, 0) + 1 for cell in copied}
        self.sizes = {cell: sum(map(_size, jax.tree.leaves(cells[cell]))) for cell in copied}
        first = next((leaf for leaf in jax.tree.leaves(changed) if isinstance(leaf, jax.Array)), None)
        self._after = _nothing if first is None else weakref.ref(first)

    def lasting(self) -> list[int]:
        """Returns the cells that have been copied several times in a row."""
        return [cell for cell, count in self.rows.items() if count >= COPIES_BEFORE_WARNING]


def _size(value: Any) -> int:
    return size_in_bytes(value.shape, value.dtype) if isinstance(value, jax.Array) else 0


def _nothing() -> None:
    return None
