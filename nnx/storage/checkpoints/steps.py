"""The directory of a run: one checkpoint per step, and a way to abandon later steps that survives being killed.

When a run goes back and saves an earlier step, the later steps are *abandoned*. They must not be removed before the new
step is complete, and must not be visible afterwards. Therefore an *intent* is written first: a small file that names
the step and the save. As soon as the checkpoint of that save is finished, later steps no longer count, whether or not
they have been removed yet.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nnx.storage.checkpoints.manifest import is_finished, read_manifest_or_none
from nnx.storage.files import atomic_file, open_regular, unique_token

_TRASH = ".removed-"
_INTENT = ".abandoned.json"


class Steps:
    """The steps in a directory. Only the holder of its lock may change it."""

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
        # `str(int(name))` leaves out names such as "007", which no save writes.
        steps = sorted(int(name) for name in names if name == str(int(name)) and is_finished(self.directory / name))
        return [step for step in steps if last is None or step <= last]

    def info(self, step: int) -> dict[str, Any]:
        """Returns the information stored with a step: its metrics, and the id of the save."""
        manifest = read_manifest_or_none(self.path(step))
        return dict(manifest.info) if manifest is not None else {}

    # Abandoning later steps

    def intend_to_end_at(self, step: int, save: str) -> None:
        """Records that a save, once it is finished, makes its step the last one."""
        with atomic_file(self.directory / _INTENT) as file:
            file.write(json.dumps({"step": step, "save": save}).encode())

    def _last(self) -> int | None:
        """Returns the step after which all are abandoned, if the save that abandons them is finished."""
        try:
            with open_regular(self.directory / _INTENT) as file:
                intent = json.loads(file.read(4096))
            step, save = intent["step"], intent["save"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        done = type(step) is int and self.info(step).get("save") == save
        return step if done else None

    def tidy(self) -> None:
        """Removes abandoned steps and the remains of interrupted removals."""
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
        # Renamed first, because a half-removed step must not look like a step.
        trash = self.directory / f"{_TRASH}{path.name}-{unique_token()}"
        with contextlib.suppress(FileNotFoundError):
            os.replace(path, trash)
        shutil.rmtree(trash, ignore_errors=True)
