"""Paths that were renamed since they were saved: `rename={"old/**": "new/**"}`.

A rule is a pattern and what to write in its place. In a pattern `*` stands for any text within a segment and `**` for
any number of segments, as in `nnx.PathMatches`; what they matched goes to the same wildcards of the new path, in order.
"""

import re
from collections.abc import Iterable, Mapping

BAD_RENAME = """rename maps patterns of saved paths to new paths, e.g. {{"old/**": "new/**"}}: {old!r} and {new!r} \
must be texts with the same wildcards in the same order."""
NO_MATCH = "rename has the pattern {pattern!r}, which matches nothing that was saved. There are: {names}."
SAME_NAME = "rename maps both {first!r} and {second!r} to {path!r}."


def rename_paths(paths: Iterable[str], rename: Mapping[str, str] | None) -> dict[str, str]:
    """Applies the rules to saved paths; the first rule that matches a path counts, and other paths stay.

    Returns:
        The saved path for each new one, in the order of the saved ones.

    Raises:
        ValueError: a rule is malformed or matches nothing, or two paths become one.

    >>> rename_paths(["encoder/0/w", "head/b"], {"encoder/**": "body/encoder/**", "head/*": "*"})
    {'body/encoder/0/w': 'encoder/0/w', 'b': 'head/b'}
    """
    rules = [_Rule(old, new) for old, new in (rename or {}).items()]
    paths = list(paths)
    found: dict[str, str] = {}
    for path in paths:
        new = next((new for rule in rules if (new := rule.apply(path)) is not None), path)
        if new in found:
            raise ValueError(SAME_NAME.format(first=found[new], second=path, path=new))
        found[new] = path
    for rule in rules:
        if not rule.used:
            names = ", ".join(map(repr, paths[:12])) + (f" and {len(paths) - 12} more" if len(paths) > 12 else "")
            raise ValueError(NO_MATCH.format(pattern=rule.old, names=names or "none"))
    return found


class _Rule:
    def __init__(self, old: str, new: str):
        if not isinstance(old, str) or not isinstance(new, str) or _wildcards(old) != _wildcards(new):
            raise ValueError(BAD_RENAME.format(old=old, new=new))
        self.old = old
        self.used = False
        self._pattern = old.split("/")
        self._template = new.split("/")

    def apply(self, path: str) -> str | None:
        """Returns the new path, or None if the rule does not match."""
        matched = _match(self._pattern, path.split("/"))
        if matched is None:
            return None
        self.used = True
        texts = iter(matched)
        segments = [re.sub(r"\*\*?", lambda _: next(texts), segment) for segment in self._template]
        return "/".join(segment for segment in segments if segment)


def _wildcards(path: str) -> list[str]:
    return re.findall(r"\*\*?", path)


def _match(pattern: list[str], segments: list[str]) -> list[str] | None:
    """Returns what the wildcards of a pattern match, in order."""
    if not pattern:
        return None if segments else []
    head, *rest = pattern
    if head == "**":
        for count in range(len(segments) + 1):
            later = _match(rest, segments[count:])
            if later is not None:
                return ["/".join(segments[:count]), *later]
        return None
    found = re.fullmatch(re.sub(r"(?:\\\*)+", "(.*)", re.escape(head)), segments[0], re.DOTALL) if segments else None
    later = None if found is None else _match(rest, segments[1:])
    return None if found is None or later is None else [*found.groups(), *later]
