"""Errors of JAX that name what a lifted function is made of: positions in its flat results, and files of this package.

JAX sees functions of this package, which return `(values that changed, what the user's function returned)`. Its errors
say so, as in "output component [1]", and name a line of this package where the user's code asked for a value. They are
rewritten where they leave a transform.
"""

import os
import re
import traceback

import jax
import jax.errors as errors

from nnx.core.user_warnings import PACKAGE

TRACER_ERRORS = (
    errors.ConcretizationTypeError,  # TracerBoolConversionError is one
    errors.TracerArrayConversionError,
    errors.TracerIntegerConversionError,
    errors.NonConcreteBooleanIndexError,
)
"""What JAX raises if a program needs a value while it is being traced."""

BRANCH = "To choose between values use jnp.where, to choose between computations nnx.cond; for loops, nnx.while_loop."

NOT_DATA = """A lifted function ({traced}) returned {kind}, which is neither a Module nor data that JAX can return: \
arrays, numbers, and pytrees of them. Leave it out of what the function returns, or return it from outside."""

_RETURNED = re.compile(
    r"function .*? traced for ([\w/ ]+?) returned a value of type <class '([\w.]+)'> at output component \S*, "
    r"which is not a valid JAX type"
)
_RUN_AT = re.compile(rf"^\S+ is run at {re.escape(PACKAGE)}.*\n?", re.MULTILINE)
_BRANCH_PATH = re.compile(r"(The output of \w+) at path \[1\]((?:\[[^\]]*\])*)")
_TRACED = re.compile(
    rf"The error occurred while tracing the function \S+ at {re.escape(PACKAGE)}\S+ for \w+\. This concrete value was "
    r"not available in Python because it depends on the values? of the arguments? [^\n]*"
)
_TRACER = re.compile(rf"This \w+ with object id \d+ was created on line:\n +{re.escape(PACKAGE)}.*\n?")
_JAX = os.path.dirname(jax.__file__)

NOT_AVAILABLE = """The error occurred in {place}, which is being traced. This concrete value is not available in \
Python, because it depends on an argument of the traced function or on state of a Module.{advice}"""

_LOOP_CARRY = re.compile(r"loop_carry(\[\d+\])+")


def without_internal_names(text: str) -> str:
    """Returns the text of an error in the words of the user's program."""
    text = _RETURNED.sub(lambda m: NOT_DATA.format(traced=m[1], kind=f"a {m[2]}"), text)
    text = _RUN_AT.sub("", text)
    text = _BRANCH_PATH.sub(lambda m: f"{m[1]} at path {m[2]}" if m[2] else m[1], text)
    return _LOOP_CARRY.sub("of the loop", text)


def rewrite(error: BaseException) -> None:
    """Rewrites the text of a plain TypeError or ValueError, or of an error about a tracer."""
    if not isinstance(error, TRACER_ERRORS) and type(error) not in (TypeError, ValueError):
        return
    if len(error.args) == 1 and isinstance(error.args[0], str):
        text = without_internal_names(error.args[0])
        text = _with_place(text, error)  # JAX's scan raises errors about tracers again as a plain TypeError
        if text != error.args[0]:
            error.args = (text,)


def _with_place(text: str, error: BaseException) -> str:
    """Returns the text of an error about a tracer with the user's line instead of the one that JAX found."""
    advice = f"\n{BRANCH}" if text.startswith("Attempted boolean conversion") else ""
    text = _TRACED.sub(lambda _: NOT_AVAILABLE.format(place=_users_place(error), advice=advice), text)
    return _TRACER.sub("", text)


def _users_place(error: BaseException) -> str:
    """Returns the last function of the user's on the way to an error, with its line."""
    place = "the function"
    for raised in (error, error.__cause__):
        for frame, line in traceback.walk_tb(raised and raised.__traceback__):
            code = frame.f_code
            if not code.co_filename.startswith((PACKAGE, _JAX)):
                place = f"{code.co_name} at {code.co_filename}:{line}"
    return place
