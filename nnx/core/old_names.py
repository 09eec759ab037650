"""Old names: arguments that an earlier version called something else, or that are gone."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

BOTH_NAMES = "{function} was given both {new!r} and {old!r}, an older name of the same argument."


def adds_hint(hint_for: Callable[[TypeError, Any], str | None]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Adds `hint_for(error, kwargs)`, if any, to the error of a call that does not fit a function's signature."""

    def decorate(fun: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(fun)
        def explained(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return fun(*args, **kwargs)
            except TypeError as error:
                misfit = error.__traceback__ is not None and error.__traceback__.tb_next is None  # not from inside
                hint = hint_for(error, kwargs) if misfit else None
                if hint is not None:
                    error.args = (f"{error}. {hint}",)
                raise

        return explained

    return decorate


def former_names(**hints: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Adds a hint by an argument that is gone."""
    return adds_hint(lambda error, kwargs: next((hint for name, hint in hints.items() if name in kwargs), None))


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
