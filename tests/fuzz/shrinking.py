"""Making a failing program smaller, so that a person can read it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.fuzz.programs import ILLEGAL, Program


def shrink(program: Any, fails: Callable[[Any], bool]) -> Any:
    """A smaller program that still fails: drops lines, calls, edits and transforms while it does."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in reductions(program):
            if fails(candidate):
                program, smaller = candidate, True
                break
    return program


def reductions(program: Any) -> Iterator[Any]:
    """Programs with one thing less, the largest steps first."""
    if not isinstance(program, Program):  # a constructor
        for i in range(len(program.build)):
            yield replace(program, build=program.build[:i] + program.build[i + 1 :])
        return
    changes = [change for _, change in ILLEGAL.values()]
    for i in range(len(program.calls)):
        if len(program.calls) > 1:
            yield replace(program, calls=program.calls[:i] + program.calls[i + 1 :])
    for name in ("f", "g", "build"):
        lines = getattr(program, name)
        half = len(lines) // 2
        if half > 1 and name != "build" and program.illegal is None:
            yield replace(program, **{name: lines[:half]})
            yield replace(program, **{name: lines[half:]})
        for i in reversed(range(len(lines))):
            if (name != "build" or i < len(lines) - 1) and lines[i] not in changes:
                yield replace(program, **{name: lines[:i] + lines[i + 1 :]})
    for e, lines in enumerate(program.edits):
        for i in range(len(lines)):
            edits = [*program.edits[:e], lines[:i] + lines[i + 1 :], *program.edits[e + 1 :]]
            yield replace(program, edits=edits)
    for i, call in enumerate(program.calls):
        if call.edit is not None:
            yield replace(program, calls=[*program.calls[:i], call._replace(edit=None), *program.calls[i + 1 :]])
    if len(program.transforms) > 1:
        for i in range(len(program.transforms)):
            yield replace(program, transforms=program.transforms[:i] + program.transforms[i + 1 :])
    if program.returns != "None":
        yield replace(program, returns="None")
