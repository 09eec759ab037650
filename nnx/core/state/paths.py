"""Paths: how attribute names become the segments of a path, and how paths are sorted, joined and listed.

The name in `__dict__` and the segment of a path are the same, with one exception: an item of a `Dict` whose key is also
the name of something on the class, or looks like a name of Python's own, is stored under "/key", where attribute access
does not find it.
"""

import functools
from collections.abc import Iterable


def segment_of(name: str) -> str:
    """Returns the path segment of the attribute stored under `name`."""
    return name[1:] if name[0] == "/" else name


def is_dunder(name: str) -> bool:
    """Whether a name has two underscores at both ends, like the special names of Python."""
    return name[:2] == "__" and name[-2:] == "__"


@functools.lru_cache(maxsize=4096)  # the same few names appear again and again
def segment_order(name: str) -> tuple[int, int, str]:
    """The sort key of a path segment: numbers come first, by value, then names."""
    segment = segment_of(name)
    if segment.isdecimal() and segment.isascii():
        return (0, int(segment), segment)
    return (1, 0, segment)


def path_order(path: str) -> list[tuple[int, int, str]]:
    """The sort key of a path: its segments in turn."""
    return [segment_order(segment) if segment else (-1, 0, "") for segment in path.split("/")]


def join(prefix: str, name: str) -> str:
    """Returns the path of the attribute `name` of the Module at `prefix`."""
    segment = segment_of(name)
    return f"{prefix}/{segment}" if prefix else segment


def listing(paths: Iterable[str], limit: int = 12) -> str:
    """Returns quoted paths for an error message: the first few, and how many more there are."""
    paths = list(paths)
    more = f" and {len(paths) - limit} more" if len(paths) > limit else ""
    return ", ".join(map(repr, paths[:limit])) + more
