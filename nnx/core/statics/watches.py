"""Watches: noticing that a mutable static value has changed in place, which no `__setattr__` sees.

A *watch* is `(keys, names, values, held)`: `values` reads again what a value holds each time it is iterated, and `held`
is a list of what it held when its key was made. For a dict with string keys, `keys` and `names` are the same for the
keys; otherwise they are None. A value may have several watches, one for its items and one for its attributes.

Every call of a jitted function compares the watches of its Modules, so they are plain tuples, and comparing them
happens in C.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any

Watch = tuple[Any, list[str] | None, Any, list[Any]]


def snapshot(keys: Any, values: Any) -> Watch:
    """Returns the watch of a value that holds this now. Names are compared by value, everything else by identity."""
    held = [*values]
    if keys is None:
        return None, None, values, held
    names = [*keys]
    if all(type(name) is str for name in names):
        return keys, names, values, held
    return None, None, ReadAgain(lambda: [*keys, *values]), [*names, *held]


class ReadAgain:
    """Calls a function at each iteration and yields from what it returns."""

    __slots__ = ("read",)

    def __init__(self, read: Callable[[], list[Any]]):
        self.read = read

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read())


def watched_unchanged(watches: Sequence[Watch]) -> bool:
    """Whether every watched value holds the very objects it held when the watch was made."""
    for keys, names, values, held in watches:
        if keys is not None:
            if [*keys] != names:
                return False
        else:
            if type(values) is ReadAgain:
                values = values.read()
            if len(values) != len(held):
                return False
        # By identity: a change from 1 to 1.0 counts, and `==` could run any code.
        if not all(map(is_, values, held)):
            return False
    return True


def comparison(watches: Sequence[Watch]) -> Callable[[], bool]:
    """Returns `watched_unchanged` for these watches, as a function without arguments.

    Every call of a jitted function pays for it, so the usual case, one config that all Modules share, needs no loop.
    """
    if len(watches) > 1 or watches[0][0] is None:
        return functools.partial(watched_unchanged, watches)
    keys, names, values, held = watches[0]
    return lambda: [*keys] == names and all(map(is_, values, held))
