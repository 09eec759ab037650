"""Errors about arguments that are neither Modules nor data, in the user's words.

JAX reports that a value "was passed to the function at path data[0]". The most common case is a transform on a method
of a class that is not a Module: then the value is `self`.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from nnx.core.repr import article, short
from nnx.transforms.engine.call import is_data

SELF_IS_NO_MODULE = """{transform}: {name} is a method of {owner}, which is not an nnx.Module, so `self` is neither a \
Module nor data that can be traced. Ways to write it:
- make it a Module, whose changes are then written back: class {owner}(nnx.Module)
- lift a function of the Modules it holds, and call that in the method: {function} = {transform}(lambda model, x: ...)\
{static}"""

STATIC_SELF = """
- if it holds nothing but settings, which never change, make it static: @{transform}(static_argnums=0)"""

NOT_DATA = """nnx.jit({name}): {argument} is {value}, {kind}, which is neither a Module or Context nor data that can \
be traced (arrays, numbers, and pytrees of them). If its value decides what is compiled, make the argument static: \
nnx.jit(..., static_argnames={root!r})."""

# How JAX, and vmap, refuse a value that is not data.
_REFUSED = re.compile(r"not a valid JAX type|abstract array|axis -?\d+, but its shape is \(\)")


def explain_self(error: Exception, transform: str, fun: Any, args: Sequence[Any]) -> None:
    """Rewrites the error of a lifted method if it is about a `self` that is not a Module."""
    if isinstance(error, (TypeError, ValueError)) and _REFUSED.search(str(error)) and _is_plain_self(fun, args):
        _blame_self(error, transform, fun, args)


def explains_self(transform: str, fun: Callable[..., Any]) -> Callable[[Exception, Sequence[Any]], None]:
    """Returns `explain_self` for one lifted function."""
    return lambda error, args: explain_self(error, transform, fun, args)


def _is_plain_self(fun: Any, args: Sequence[Any]) -> bool:
    """Whether a method was called with a `self` that cannot be traced because it is not a Module."""
    method = inspect.getattr_static(type(args[0]), getattr(fun, "__name__", ""), None) if args else None
    return method is not None and inspect.unwrap(method) is inspect.unwrap(fun) and not can_be_traced(args[0])


def _blame_self(error: Exception, transform: str, fun: Any, args: Sequence[Any]) -> None:
    owner, name = type(args[0]), fun.__name__
    static = STATIC_SELF.format(transform=transform) if transform in ("nnx.jit", "nnx.remat") else ""
    text = {"name": f"{owner.__name__}.{name}", "owner": owner.__name__, "function": name, "static": static}
    error.args = (SELF_IS_NO_MODULE.format(transform=transform, **text),)


def explain_data(
    error: Exception, fun: Any, name: str, args: Sequence[Any], names: Sequence[str], data: Sequence[Any]
) -> None:
    """Rewrites the error of a call of nnx.jit if some of its data, all of which is traced, cannot be.

    Args:
        error: the error.
        fun, name: the function and its name.
        args: the positional arguments of the call.
        names, data: what the user calls the leaves that are neither Modules nor Contexts, and these leaves.
    """
    wrong = next(((argument, value) for argument, value in zip(names, data) if not can_be_traced(value)), None)
    if wrong is None:
        return
    if _is_plain_self(fun, args):
        _blame_self(error, "nnx.jit", fun, args)
        return
    argument, value = wrong
    root = re.split(r"[.\[]", argument)[0]
    text = {"argument": argument, "value": short(value), "kind": article(type(value).__name__), "root": root}
    error.args = (NOT_DATA.format(name=name, **text),)


def can_be_traced(value: Any) -> bool:
    """Whether a leaf of the arguments is a Module, a Context, or data of a type that JAX knows."""
    if not is_data(value) or hasattr(value, "dtype"):
        return True
    try:
        jax.typeof(value)
    except TypeError:
        return False
    return True
