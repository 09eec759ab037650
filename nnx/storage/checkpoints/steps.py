"""The checkpoints of a run, one folder per step, and a way to abandon later steps that survives being killed.

When a run goes back and saves an earlier step, the later steps are *abandoned*. They must not be removed before the new
step is complete, and must not be visible afterwards. Therefore an *intent* is written first: a small file that names
the step and the save. As soon as the checkpoint of that save is finished, later steps no longer count, whether or not
they have been removed yet.
"""

import contextlib
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from nnx.storage.checkpoints.manifest import FILE_NAME, are_finished, leftovers, read_manifest_or_none
from nnx.storage.files import remove_empty
from nnx.storage.locations import Location

_TRASH = ".removed-"  # what NNX 0.2 renamed steps to before it removed them
_INTENT = ".abandoned.json"


class Rest(NamedTuple):
    """What is left of a step that no longer counts: its location, and the names of what to remove there."""

    place: Location
    names: list[str]


class Steps:
    """The steps at a location."""

    def __init__(self, place: Location):
        self.place = place

    def path(self, step: int) -> Location:
        return self.place / str(step)

    def finished(self) -> list[int]:
        """Returns the steps that have a finished checkpoint and were not abandoned, in order."""
        names = self.place.names()
        steps, last = _steps_of(names), self._last() if _INTENT in names else None
        finished = are_finished(self.place, list(map(str, steps)))
        return [n for n, done in zip(steps, finished, strict=True) if done and (last is None or n <= last)]

    def info(self, step: int) -> dict[str, Any]:
        """Returns the information stored with a step: its metrics and metadata, and the id of the save."""
        manifest = read_manifest_or_none(self.path(step))
        return dict(manifest.info) if manifest is not None else {}

    # Abandoning later steps

    def intend_to_end_at(self, step: int, save: str) -> None:
        """Records that a save, once it is finished, makes its step the last one."""
        self.place.write(_INTENT, json.dumps({"step": step, "save": save}).encode())

    def _last(self) -> int | None:
        """Returns the step after which all are abandoned, if the save that abandons them is finished."""
        try:
            intent = json.loads(self.place.read(_INTENT).value or b"")
            step, save = intent["step"], intent["save"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        done = type(step) is int and self.info(step).get("save") == save
        return step if done else None

    def has_intent(self) -> bool:
        """Whether a save has gone back, and what it abandoned may still be there."""
        return self.place.read(_INTENT).value is not None

    def tidy(self) -> list[Rest]:
        """Makes abandoned steps and the rest of killed saves invisible, and returns what is left to remove."""
        names = self.place.names()
        steps, last = _steps_of(names), self._last()
        finished = are_finished(self.place, list(map(str, steps)))
        gone = [n for n, done in zip(steps, finished, strict=True) if not done or (last is not None and n > last)]
        rests = self.forget(gone)
        if _INTENT in names:
            self.place.remove([_INTENT])
        return [*rests, Rest(self.place, [name for name in names if name.startswith(_TRASH)])]

    def forget(self, steps: Iterable[int]) -> list[Rest]:
        """Removes the manifests of steps, so that they no longer count, and returns what is left to remove."""
        rests: list[Rest] = []
        for step in steps:
            place = self.path(step)
            # Listed before the manifest is removed. A save that wrote any of it began before that, so it has a claim,
            # which is removed here: it fails. What a later save writes is not in the list.
            names = leftovers(place)
            found = place.read(FILE_NAME)
            if found.value is None or place.replace(FILE_NAME, None, found.generation) is not None:
                rests.append(Rest(place, names))
        return rests


def _steps_of(names: Iterable[str]) -> list[int]:
    # `str(int(name))` leaves out names such as "007", which no save writes.
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal() and name == str(int(name)))


def remove(rests: Iterable[Rest]) -> None:
    """Removes what is left of steps. What cannot be removed now is left for the next save."""
    for place, names in rests:
        with contextlib.suppress(OSError):
            place.remove(names)
            if place.local is not None:
                remove_empty(place.local)
