"""Errors about tracers in the user's words: the user's function, argument names and paths of Variables.

JAX calls the values of a traced function by the parameters of that function. Ours is called with lists of cells and
data, so JAX would report that a value depends on `cells[3]`. The function it traces also *stands for* the user's: JAX
reports the name and the line of the user's function, and profiles show it.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax.errors as errors

from nnx.transforms.engine.call import Signature
from nnx.transforms.engine.internal_names import BRANCH
from nnx.transforms.jit.argument_names import ArgumentNames

STATIC = """If the value decides what is compiled, pass a Python value and make the argument static: \
nnx.jit(..., static_argnames={names})."""
NUMPY = "Use jax.numpy instead of numpy inside the function, or convert what it returns."
MASK = """The shape of `x[mask]` depends on values, which are not known yet. Keep the shape: jnp.where(mask, x, fill), \
or jnp.nonzero(mask, size=...)."""
WHILE_TRACING = "The error occurred while tracing {source} for nnx.jit."

_ORIGIN = r"the function {source} for jit\b"
_TOKEN = re.compile(r"\b(cells|data|forks)\[(\d+)\]")


def source_of(fun: Callable[..., Any]) -> str:
    """Returns where a function is defined, in JAX's format: `step at train.py:12`."""
    code = getattr(inspect.unwrap(fun), "__code__", None)
    name = getattr(inspect.unwrap(fun), "__name__", type(fun).__name__)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


def standing_for(traced: Callable[..., Any], fun: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns a new function that does what `traced` does, and to JAX has the name and place of the user's function."""

    def function(*args: Any) -> Any:
        return traced(*args)

    function.__name__ = function.__qualname__ = name
    # JAX follows `__wrapped__` to the source of a function, and stops at `__signature__` to name its arguments.
    function.__wrapped__ = fun
    function.__signature__ = inspect.signature(traced)
    return function


def explain(error: Exception, fun: Callable[..., Any], signature: Signature) -> None:
    """Rewrites the message of an error that was raised while a call of the user's function was traced."""
    source, text = source_of(fun), str(error)
    if isinstance(error, errors.NonConcreteBooleanIndexError):
        if "nnx.jit" not in text:
            error.args = (_with_advice(text, f"{WHILE_TRACING.format(source=source)} {MASK}"),)
        return
    found = re.search(_ORIGIN.format(source=re.escape(source)), text)
    if found is None:  # a tracer of another function, around this one or inside it
        return
    names = ArgumentNames(fun, signature)
    given: list[str] = []  # the arguments, other than Modules and trees, that the value depends on

    def named(match: re.Match[str]) -> str:
        group, position = match[1], int(match[2])
        if group == "cells":
            return names.cells()[position]
        if group == "forks":
            return names.contexts[position]
        if names.data[position].isidentifier():
            given.append(names.data[position])
        return names.data[position]

    text = text.replace(found[0], found[0].removesuffix(" for jit") + " for nnx.jit")
    error.args = (_with_advice(_TOKEN.sub(named, text), _advice(error, given)),)


def _advice(error: Exception, given: list[str]) -> str:
    static = STATIC.format(names=repr(given[0] if len(given) == 1 else tuple(given))) if given else ""
    if isinstance(error, errors.TracerBoolConversionError):
        return f"{BRANCH} {static}".strip()
    return NUMPY if isinstance(error, errors.TracerArrayConversionError) else static or BRANCH


def _with_advice(text: str, advice: str) -> str:
    """Returns the message with advice before JAX's link, which ends it."""
    body, see, link = text.rpartition("See https://")
    return f"{body.rstrip()}\n{advice}\n{see}{link}" if see else f"{text.rstrip()}\n{advice}"
