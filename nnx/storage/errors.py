"""The errors of everything that reads and writes files, and how they quote the error of a system."""


class CheckpointError(OSError, ValueError):
    """A checkpoint cannot be written, is damaged, or does not fit its target. The message names the paths."""


class DamagedError(CheckpointError):
    """A checkpoint is damaged or unfinished; an earlier one may be intact."""


def first_line(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message, to be quoted in another message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
