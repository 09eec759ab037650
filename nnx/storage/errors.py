"""The errors of everything that reads and writes files, and LoadReport: what did not fit when something was loaded."""

import dataclasses

from nnx.core.state.paths import listing


class CheckpointError(OSError, ValueError):
    """A checkpoint cannot be written, is damaged, or does not fit its target. The message names the paths."""


class DamagedError(CheckpointError):
    """A checkpoint is damaged or unfinished; an earlier one may be intact."""


def first_line(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message, to be quoted in another message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


@dataclasses.dataclass
class LoadReport:
    """A report of what did not fit when state was loaded with `strict=False`.

    A report is true if something did not fit; `moved` and `changed` do not count.

    Attributes:
        missing: the paths of the target that the source (a checkpoint, a mapping) does not have.
        unexpected: the paths of the source that the target does not have.
        mismatched: the paths with a different shape, dtype or kind, each with a description of the value in the
            source and of the one in the target.
        moved: the paths of optimizer state that was found elsewhere in the chain, each with the path it was saved
            under.
        changed: the static attributes that have changed since the save, each with the old and the new value.
        source: what was loaded, for the text.
    """

    missing: list[str] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    mismatched: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    moved: dict[str, str] = dataclasses.field(default_factory=dict)
    changed: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    source: str = "checkpoint"

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        lines = []
        if self.missing:
            lines.append(f"- missing from the {self.source}: {listing(self.missing)}")
        if self.unexpected:
            lines.append(f"- in the {self.source}, but not in the target: {listing(self.unexpected)}")
        shown = list(self.mismatched.items())[:12]
        lines += [f"- {path!r} is {have} in the {self.source} and {want} in the target" for path, (have, want) in shown]
        if len(self.mismatched) > len(shown):
            lines.append(f"- and {len(self.mismatched) - len(shown)} more with a different shape or dtype")
        if self.moved:
            pairs = [f"{saved} -> {path}" for path, saved in self.moved.items()]
            lines.append(f"- optimizer state that was found elsewhere in the chain: {listing(pairs)}")
        return "\n".join([*lines, *self.changes()])

    def changes(self) -> list[str]:
        """Returns a line for each static attribute that has changed since the save."""
        lines = [
            f"- {where} was {then} when the checkpoint was saved, and is {now} in the target"
            for where, (then, now) in list(self.changed.items())[:12]
        ]
        more = len(self.changed) - len(lines)
        return [*lines, f"- and {more} more settings"] if more > 0 else lines
