"""Errors of JAX that name what a lifted function is made of: positions in its flat results, and files of this package.

JAX sees functions of this package, which return `(values that changed, what the user's function returned)`. Its errors
say so, as in "output component [1]". They are rewritten where they leave a transform.
"""

import re

from nnx.core.user_warnings import PACKAGE

NOT_DATA = """A lifted function ({traced}) returned {kind}, which is neither a Module nor data that JAX can return: \
arrays, numbers, and pytrees of them. Leave it out of what the function returns, or return it from outside."""

_RETURNED = re.compile(
    r"function .*? traced for ([\w/ ]+?) returned a value of type <class '([\w.]+)'> at output component \S*, "
    r"which is not a valid JAX type"
)
_RUN_AT = re.compile(rf"^\S+ is run at {re.escape(PACKAGE)}.*\n?", re.MULTILINE)
_BRANCH_PATH = re.compile(r"(The output of \w+) at path \[1\]((?:\[[^\]]*\])*)")
_LOOP_CARRY = re.compile(r"loop_carry(\[\d+\])+")


def without_internal_names(text: str) -> str:
    """Returns the text of an error in the words of the user's program."""
    text = _RETURNED.sub(lambda m: NOT_DATA.format(traced=m[1], kind=f"a {m[2]}"), text)
    text = _RUN_AT.sub("", text)
    text = _BRANCH_PATH.sub(lambda m: f"{m[1]} at path {m[2]}" if m[2] else m[1], text)
    return _LOOP_CARRY.sub("of the loop", text)


def rewrite(error: BaseException) -> None:
    """Rewrites the text of a plain TypeError or ValueError."""
    if type(error) in (TypeError, ValueError) and len(error.args) == 1 and isinstance(error.args[0], str):
        text = without_internal_names(error.args[0])
        if text != error.args[0]:
            error.args = (text,)
