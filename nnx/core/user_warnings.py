"""Warnings that point at the user's code: the line from which the running call was made."""

import os
import sys
import warnings

import jax

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = (PACKAGE, os.path.dirname(os.path.abspath(jax.__file__)) + os.sep)


def warn_user(text: str) -> None:
    """Warns, with the line of the user's code that the running call was made from."""
    level, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level + 1)
