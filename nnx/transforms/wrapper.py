"""How transforms are offered: as functions and as decorators, with the wrapped function's name and signature."""

import functools
from collections.abc import Callable
from typing import Any

from nnx.core.module_info import ModuleBase


def decorator(transform: Callable[..., Any]) -> Callable[..., Any]:
    """Lets `transform(fun, **options)` also be used as `@transform` and as `@transform(**options)`.

    A checker cannot follow this, so every transform states its forms as overloads.
    """

    @functools.wraps(transform)
    def offered(*args: Any, **options: Any) -> Any:
        if args and callable(args[0]) and not isinstance(args[0], type):
            return dress(transform(*args, **options), args[0])
        if args:
            return lambda fun: offered(fun, *args, **options)
        return lambda fun: offered(fun, **options)

    return offered


def dress(lifted: Callable[..., Any], fun: Any) -> Callable[..., Any]:
    """Gives a lifted function the name, docstring and signature of what it lifts."""
    source = type(fun).__call__ if isinstance(fun, ModuleBase) else fun
    functools.update_wrapper(lifted, source)
    lifted.__wrapped__ = fun
    return lifted
