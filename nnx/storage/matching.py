"""Matching: which value of a source belongs to which path of a target, and what does not fit.

A *source* is whatever is loaded: a checkpoint, tensors in files, a mapping, a state dict of PyTorch. Each of them knows
under which of its *names* the value of a path can be; what is done with the answer is the same for all.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from nnx.storage.load_report import LoadReport

TWO_VALUES = "{have}, a different value from {other!r}, which it is shared with,"

Texts = tuple[str, str]
"""Two values that do not fit, as text: the one in the source and the one in the target."""


def match(
    names: Mapping[str, Sequence[str]],
    offered: Iterable[str],
    misfit: Callable[[str, str], Texts | None],
    report: LoadReport,
    conflict: Callable[[str, str, str], Texts | None] = lambda path, name, other: None,
) -> dict[str, str]:
    """Finds the value for each path of the target.

    Args:
        names: the names in the source that lead to the value of each path, the one to be loaded first; none if the
            source does not have it.
        offered: all names in the source.
        misfit: a function of a path and a name that returns why the value does not fit, or None if it does.
        report: the report to which everything missing, unexpected and mismatched is added.
        conflict: a function of a path, its first name and another one, that returns how their values differ, or None.

    Returns:
        The names of the values that fit, by path.
    """
    found: dict[str, str] = {}
    known: set[str] = set()
    for path, candidates in names.items():
        if not candidates:
            report.missing.append(path)
            continue
        known.update(candidates)
        first, *others = candidates
        texts = misfit(path, first)
        if texts is None:
            found[path] = first
        else:
            report.mismatched[path] = texts
        for other in others:
            texts = conflict(path, first, other)
            if texts is not None:
                report.mismatched[other] = texts
    report.unexpected += [name for name in offered if name not in known]
    return found
