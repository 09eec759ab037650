"""The directory of a run: one checkpoint per step, and a way to abandon later steps that a kill cannot interrupt.

When a step is saved over an earlier part of the run, the later steps are *abandoned*. They must not be removed before
the new step is there, and must not be seen after it is. So an *intent* is written first: a small file that names the
step and the save. As soon as a checkpoint of that very save is finished, later steps are not steps any more, whether
they have been removed already or not.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nnx.core.files import atomic_file, open_regular, unique_token
from nnx.training.manifest import is_finished, read_manifest_or_none

_TRASH = ".removed-"
_INTENT = ".abandoned.json"


class Steps:
    """The steps in a directory. Everything that changes it must be done by the holder of its lock."""

    def __init__(self, directory: Path):
        self.directory = directory

    def path(self, step: int) -> Path:
        return self.directory / str(step)

    def finished(self) -> list[int]:
        """Returns the steps that have a finished checkpoint and were not abandoned, in order."""
        if not self.directory.is_dir():
            return []
        names = [path.name for path in self.directory.iterdir() if path.name.isascii() and path.name.isdecimal()]
        last = self._last()
        steps = sorted(int(name) for name in names if name == str(int(name)) and is_finished(self.directory / name))
        return [step for step in steps if last is None or step <= last]

    def info(self, step: int) -> dict[str, Any]:
        """Returns what was noted with a step: its metrics, and which save it is."""
        manifest = read_manifest_or_none(self.path(step))
        return dict(manifest.info) if manifest is not None else {}

    # Abandoning later steps

    def intend_to_end_at(self, step: int, save: str) -> None:
        """Notes that a save, when it is finished, makes its step the last one."""
        with atomic_file(self.directory / _INTENT) as file:
            file.write(json.dumps({"step": step, "save": save}).encode())

    def _last(self) -> int | None:
        """Returns the step after which all were abandoned, if the save that abandons them is finished."""
        try:
            with open_regular(self.directory / _INTENT) as file:
                intent = json.loads(file.read(4096))
            step, save = intent["step"], intent["save"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        done = type(step) is int and self.info(step).get("save") == save
        return step if done else None

    def tidy(self) -> None:
        """Removes abandoned steps and what interrupted removals left."""
        for leftover in self.directory.glob(f"{_TRASH}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        last = self._last()
        if last is not None:
            for path in list(self.directory.iterdir()):
                if path.name.isascii() and path.name.isdecimal() and int(path.name) > last:
                    self._remove(path)
        with contextlib.suppress(FileNotFoundError):
            (self.directory / _INTENT).unlink()

    def remove(self, steps: Iterable[int]) -> None:
        """Removes steps."""
        for step in steps:
            self._remove(self.path(step))

    def _remove(self, path: Path) -> None:
        # renamed first: a step that is half removed must not look like one
        trash = self.directory / f"{_TRASH}{path.name}-{unique_token()}"
        with contextlib.suppress(FileNotFoundError):
            os.replace(path, trash)
        shutil.rmtree(trash, ignore_errors=True)
