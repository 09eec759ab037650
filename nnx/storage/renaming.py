"""Patterns of paths: renaming those of a checkpoint, and choosing which to load."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

BAD_RENAME = """rename maps the paths of the checkpoint to those of the target, as in {{"old/**": "new/**"}}; this \
does not work for {old!r}: {new!r}, because {reason}."""
MATCHES_NOTHING = "no path of the checkpoint matches {old!r}; its paths are: {paths}"
SAME_NAME = "rename={rename} maps {first!r} and {second!r} of the checkpoint to the same name, {new!r}."


def renamed(paths: Iterable[str], rename: Mapping[str, str]) -> dict[str, str]:
    """Returns the paths of a checkpoint by their new names.

    Args:
        paths: the paths in the checkpoint.
        rename: the new name for each pattern. `*` matches one segment or a part of one, `**` any number of segments;
            the n-th wildcard on the right is replaced by what the n-th one on the left matched. The first pattern that
            matches a path is used.

    Raises:
        ValueError: a pattern matches nothing, or two paths get the same name.
    """
    paths = list(paths)
    patterns = [(_split(old, old, new), _split(new, old, new), old, new) for old, new in rename.items()]
    for left, right, old, new in patterns:
        if _wildcards(left) != _wildcards(right):
            reason = "both sides must have the same wildcards, in the same order"
            raise ValueError(BAD_RENAME.format(old=old, new=new, reason=reason))
    used: set[str] = set()
    found: dict[str, str] = {}
    for path in paths:
        name = path
        for left, right, old, _ in patterns:
            captured = _match(left, path.split("/"))
            if captured is not None:
                used.add(old)
                name = _fill(right, captured)
                break
        if name in found:
            raise ValueError(SAME_NAME.format(rename=dict(rename), first=found[name], second=path, new=name))
        found[name] = path
    for _, _, old, new in patterns:
        if old not in used:
            shown = ", ".join(map(repr, paths[:8])) + (" ..." if len(paths) > 8 else "")
            reason = MATCHES_NOTHING.format(old=old, paths=shown)
            raise ValueError(BAD_RENAME.format(old=old, new=new, reason=reason))
    return found


def selected(paths: Iterable[str], only: str | Sequence[str] | None) -> set[str]:
    """Returns the paths that are to be loaded: those that a pattern of `only` matches, and all below them.

    >>> sorted(selected(["model/a", "model/b/c", "ema/a", "step"], ["model", "s*"]))
    ['model/a', 'model/b/c', 'step']
    """
    if only is None:
        return set(paths)
    patterns = [_split(pattern, pattern, pattern) for pattern in ([only] if isinstance(only, str) else only)]
    found = set()
    for path in paths:
        segments = path.split("/")
        beginnings = [segments[:count] for count in range(1, len(segments) + 1)]
        if any(_match(pattern, beginning) is not None for pattern in patterns for beginning in beginnings):
            found.add(path)
    return found


def _split(pattern: object, old: object, new: object) -> list[str]:
    if not isinstance(pattern, str):
        raise ValueError(BAD_RENAME.format(old=old, new=new, reason=f"{pattern!r} is not a string"))
    return pattern.split("/")


def _wildcards(segments: Sequence[str]) -> list[str]:
    return list(itertools.chain(*(["**"] if part == "**" else ["*"] * part.count("*") for part in segments)))


def _match(pattern: Sequence[str], segments: Sequence[str]) -> list[str] | None:
    """Returns what each wildcard of a pattern matched in a path; None if the pattern does not match."""
    if not pattern:
        return None if segments else []
    head, rest = pattern[0], pattern[1:]
    if head == "**":  # takes as many segments as possible
        for count in range(len(segments), -1, -1):
            captured = _match(rest, segments[count:])
            if captured is not None:
                return ["/".join(segments[:count]), *captured]
        return None
    if not segments:
        return None
    first = _match_segment(head, segments[0])
    captured = None if first is None else _match(rest, segments[1:])
    return None if first is None or captured is None else [*first, *captured]


def _match_segment(pattern: str, segment: str) -> list[str] | None:
    head, star, rest = pattern.partition("*")
    if not star:
        return [] if segment == pattern else None
    if not segment.startswith(head):
        return None
    for end in range(len(segment), len(head) - 1, -1):
        captured = _match_segment(rest, segment[end:])
        if captured is not None:
            return [segment[len(head) : end], *captured]
    return None


def _fill(pattern: Sequence[str], captured: Sequence[str]) -> str:
    values = iter(captured)
    filled = []
    for part in pattern:
        if part == "**":
            filled.append(next(values))
        else:
            pieces = part.split("*")
            filled.append(pieces[0] + "".join(next(values) + piece for piece in pieces[1:]))
    return "/".join(filter(None, filled))
