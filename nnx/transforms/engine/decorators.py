"""How transforms are offered: as functions and as decorators, with the wrapped function's name and signature."""

import functools
import types
from collections.abc import Callable
from typing import Any

from nnx.core.module.info import ModuleBase
from nnx.transforms.engine.bad_arguments import explains_self
from nnx.transforms.engine.call import refuse_class_method
from nnx.transforms.engine.tracebacks import boundary

MODULE_CLASS = """nnx.{transform} takes a function, a Module or a method; got the Module class {name}. Make a Module \
first, nnx.{transform}({name}(...)), or lift a function that does."""

class_forms: dict[str, Callable[..., Any]] = {}
"""What `scan`, `vmap` and `remat` mean for a Module class, by name; filled by class_forms."""


def _makes_modules(value: Any) -> bool:
    """Whether a value is a Module class, or a constructor that a class form returned."""
    return issubclass(value, ModuleBase) if isinstance(value, type) else getattr(value, "makes_modules", False) is True


def decorator(transform: Callable[..., Any]) -> Callable[..., Any]:
    """Lets `transform(fun, **options)` also be used as `@transform`, `@transform(**options)` and `@transform(filter)`.

    The function can also be passed by name, and `scan`, `vmap` and `remat` of a Module class are their class forms.
    What the transform returns becomes a boundary for tracebacks. A type checker cannot follow this, so every transform
    declares its forms as overloads.
    """

    @functools.wraps(transform)
    def offered(*args: Any, **options: Any) -> Any:
        if "fun" in options:
            args = (options.pop("fun"), *args)
        if args and transform.__name__ in class_forms and _makes_modules(args[0]):
            return class_forms[transform.__name__](*args, **options)
        if args and isinstance(args[0], type) and issubclass(args[0], ModuleBase):
            raise TypeError(MODULE_CLASS.format(transform=transform.__name__, name=args[0].__name__))
        if args:
            refuse_class_method(args[0], f"nnx.{transform.__name__}")
        # Any other class is a filter here (`@nnx.grad(nnx.Param)`), although it could be called.
        if args and callable(args[0]) and not isinstance(args[0], type):
            lifted = transform(*args, **options)
            if isinstance(lifted, types.FunctionType):
                lifted = boundary(lifted, explains_self(f"nnx.{transform.__name__}", args[0]))
            return named_after(lifted, args[0])
        return lambda fun: offered(fun, *args, **options)

    return offered


def named_after(lifted: Callable[..., Any], fun: Any) -> Callable[..., Any]:
    """Gives a lifted function the name, docstring and signature of what it lifts, and returns it."""
    source = type(fun).__call__ if isinstance(fun, ModuleBase) else fun
    functools.update_wrapper(lifted, source)
    lifted.__wrapped__ = fun
    return lifted
