"""What a cache may hold on to: classes that live as long as the process, and weak references to everything else."""

import sys
import weakref
from collections.abc import Iterator
from typing import Any

_MADE_BY_CLASS_STATEMENT = 1 << 9  # CPython's flag for types on the heap; the built-in ones are never freed


def made_by_class_statement(cls: type) -> bool:
    """Whether a class comes from a `class` statement; a few types of C extensions look the same."""
    return bool(cls.__flags__ & _MADE_BY_CLASS_STATEMENT)


def outlives_caches(cls: type) -> bool:
    """Whether a class lives as long as the process, so that a cache may hold on to it.

    Classes defined in functions or in a notebook come and go; a cache that keeps them would keep all they refer to.
    """
    if not made_by_class_statement(cls):
        return True
    if cls.__module__ == "__main__":
        return False
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is cls


class WeakRegistry:
    """Objects to be found again while they are alive. Unlike a WeakSet, it can be used from several threads.

    Every operation on the dict is a single C call, so no other thread can come in between.
    """

    __slots__ = ("_references",)

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Any]] = {}

    def add(self, item: Any) -> None:
        """Remembers an object until it is taken or freed."""
        references, number = self._references, id(item)
        references[number] = weakref.ref(item, lambda _: references.pop(number, None))

    def take_all(self) -> Iterator[Any]:
        """Removes and yields every object that is still alive."""
        while self._references:
            try:
                _, reference = self._references.popitem()
            except KeyError:  # another thread took the last one
                return
            item = reference()
            if item is not None:
                yield item
