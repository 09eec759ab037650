"""Tracebacks of errors in lifted functions: they show the user's frames; the library hides its own, as JAX does.

A transform puts many frames of this package between the user's call and the user's function. At each *boundary*, where
the user's code calls a transform, an exception that passes through loses the frames of the package. JAX does the same
for its own frames at its own boundaries, so what remains is the user's code. `JAX_TRACEBACK_FILTERING` governs both:

- `off`: nothing is hidden.
- `quiet_remove_frames` (JAX's default outside IPython): frames are removed, and a note on the exception says so.
- `remove_frames`: the same, and the complete traceback is attached as the exception's cause.
- `tracebackhide` (the default in IPython): frames stay, marked as hidden for tools that know `__tracebackhide__`.
"""

import functools
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax

from nnx.core.user_warnings import PACKAGE
from nnx.transforms.engine.internal_names import rewrite

F = TypeVar("F", bound=Callable[..., Any])

FRAMES_REMOVED = """--------------------
For simplicity, NNX has removed its internal frames from the traceback of the following exception. Set \
JAX_TRACEBACK_FILTERING=off to include these."""

FULL_TRACEBACK = "{error}\n\nThe traceback above is complete; the one below leaves out the internal frames of NNX."


class UnfilteredTraceback(Exception):
    """Holds the complete traceback of an exception, as its cause, under `JAX_TRACEBACK_FILTERING=remove_frames`."""


def boundary(fun: F, explain: Callable[[Exception, Sequence[Any]], Any] | None = None) -> F:
    """Makes a function hide the frames of this package in exceptions that leave it; for functions that users call.

    Args:
        fun: the function.
        explain: rewrites the message of an exception, given the positional arguments of the call.
    """

    @functools.wraps(fun)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        try:
            return fun(*args, **kwargs)
        except Exception as error:
            if explain is not None:
                explain(error, args)
            rewrite(error)
            hide_frames(error)
            raise

    return cast(F, bounded)


def hide_frames(error: BaseException) -> None:
    """Hides the frames of this package in an exception's traceback; call it in an `except` that ends in `raise`.

    A bare `raise` continues with the traceback that the exception has by then, and adds no entry for the frame it is
    in. So the function that catches the exception disappears from the traceback as well.
    """
    mode = _filtering_mode()
    traceback = error.__traceback__
    if mode == "off" or traceback is None:
        return
    if mode == "tracebackhide":
        for entry in _entries(traceback):
            if _is_internal(entry):
                entry.tb_frame.f_locals["__tracebackhide__"] = True
        return
    visible = None
    for entry in reversed(_entries(traceback)):
        if not _is_internal(entry):
            visible = types.TracebackType(visible, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.__traceback__ = visible
    if mode == "remove_frames":
        if not isinstance(error.__cause__, UnfilteredTraceback):
            _attach_complete(error, traceback)
    else:
        _note_removal(error)


def _note_removal(error: BaseException) -> None:
    """Notes that frames were removed; if JAX has said so, once is enough."""
    notes = getattr(error, "__notes__", [])
    if any("JAX_TRACEBACK_FILTERING" in note for note in notes if note != FRAMES_REMOVED):
        notes[:] = [note for note in notes if note != FRAMES_REMOVED]
    elif FRAMES_REMOVED not in notes:
        error.add_note(FRAMES_REMOVED)


def _entries(traceback: types.TracebackType) -> list[types.TracebackType]:
    entries = []
    entry: types.TracebackType | None = traceback
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    return entries


def _is_internal(entry: types.TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(PACKAGE)


def _attach_complete(error: BaseException, traceback: types.TracebackType) -> None:
    """Inserts the complete traceback between an exception and its cause."""
    complete = UnfilteredTraceback(FULL_TRACEBACK.format(error=repr(error))).with_traceback(traceback)
    complete.__cause__, complete.__context__ = error.__cause__, error.__context__
    complete.__suppress_context__ = error.__suppress_context__
    error.__cause__, error.__context__ = complete, None


def _filtering_mode() -> str:
    mode = (
        getattr(jax.config, "jax_traceback_filtering", None) or "auto"
    )  # JAX does not declare its options as attributes
    if mode != "auto":
        return mode
    ipython = sys.modules.get("IPython")
    return "tracebackhide" if ipython is not None and ipython.get_ipython() is not None else "quiet_remove_frames"
