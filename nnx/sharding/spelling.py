"""Spelling: which known name somebody probably meant by an unknown one."""

import difflib
from collections.abc import Iterable

CLOSE = 0.7  # the difflib ratio from which one name counts as a misspelling of the other
DID_YOU_MEAN = " Did you mean {name!r}?"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of a sentence about an unknown name: the known one it resembles, or nothing."""
    found = closest(name, known)
    return DID_YOU_MEAN.format(name=found) if found else ""


def closest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that `name` is probably a misspelling of.

    A name that contains a known one as a word, such as 'kv_heads', was derived from it and is not a misspelling.

    >>> closest("mpl", ["mlp", "embed"]), closest("lenght", ["length"]), closest("kv_heads", ["heads"])
    ('mlp', 'length', None)
    """
    words = name.split("_")
    candidates = [other for other in known if other not in words]
    letters = [other for other in candidates if sorted(other) == sorted(name)]  # letters swapped, in a short name
    found = letters or difflib.get_close_matches(name, candidates, 1, CLOSE)
    return found[0] if found else None
