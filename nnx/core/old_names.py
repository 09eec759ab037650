"""Old names: arguments that an earlier version called something else."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

BOTH_NAMES = "{function} was given both {new!r} and {old!r}, an older name of the same argument."


def old_names(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Lets a function take arguments by older names, `old="new"`. To a type checker it has the new ones only."""

    def decorate(fun: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(fun)
        def renamed(*args: Any, **kwargs: Any) -> R:
            for old, new in names.items():
                if old in kwargs:
                    if new in kwargs:
                        raise TypeError(BOTH_NAMES.format(function=fun.__name__, new=new, old=old))
                    kwargs[new] = kwargs.pop(old)
            return fun(*args, **kwargs)

        return renamed

    return decorate
