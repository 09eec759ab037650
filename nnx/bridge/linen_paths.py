"""Paths of Linen's variables. Linen has a tree per collection, and NNX one tree for all.

A variable keeps its path. Where another collection has it already, a segment gets the name of the collection behind a
dot: `scale.batch_stats/mean`. A segment that ends so by itself gets a second one, so that the way back is clear.
"""

from collections.abc import Iterable


class Paths:
    """The paths that are in use in one model."""

    def __init__(self, used: Iterable[str] = ()):
        self.variables: set[str] = set()
        self.modules: set[str] = set()
        for path in used:
            self.add(path)

    def add(self, path: str) -> None:
        """Notes a path as used."""
        self.variables.add(path)
        while "/" in path:
            path = path.rpartition("/")[0]
            self.modules.add(path)

    def new(self, collection: str, name: str) -> str:
        """Returns a path for a new variable of a collection, and notes it; `name` is its path in Linen's tree."""
        suffix, path = f".{collection}", ""
        *_, last = segments = name.split("/")
        for number, segment in enumerate(segments):
            path += f"{segment}{suffix}" if segment.endswith(suffix) else segment
            if path in self.variables or (number == len(segments) - 1 and path in self.modules):
                path += suffix
            path += "/" if number < len(segments) - 1 else ""
        self.add(path)
        return path


def name_in_linen(collection: str, path: str) -> str:
    """Returns the path in the tree of its collection of the variable with this path in a Module."""
    return "/".join([segment.removesuffix(f".{collection}") for segment in path.split("/")])
