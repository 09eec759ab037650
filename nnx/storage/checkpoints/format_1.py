"""Reading checkpoints of format version 1, whose array data Orbax wrote. `array_reader` reads version 3."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nnx.core.extras import require
from nnx.storage.checkpoints.manifest import DAMAGED, Manifest
from nnx.storage.errors import DamagedError, first_line
from nnx.storage.files import inside
from nnx.storage.locations import Location
from nnx.storage.placing import Box

READ_FAILED = "The checkpoint at {path} could not be read: {reason}. Nothing was loaded. Load an earlier one."

_ROOT = "."  # the name of the array if the target was a single array, whose path is empty


class Format1Reader:
    """Reads parts of the arrays of a checkpoint of version 1. It has no checksums, so `check` does nothing."""

    def __init__(self, place: Location, manifest: Manifest, verify: bool = True):
        assert place.local is not None
        self._directory, self._manifest = place.local, manifest
        for name, file in manifest.files.items():
            self._check_size(name, file.size)
        self._orbax = require("orbax.checkpoint", "checkpoint", "nnx.load of a checkpoint of format version 1")

    def _check_size(self, name: str, size: int) -> None:
        try:
            path = inside(self._directory, f"{self._manifest.data}/{name}")
            found = os.stat(path, follow_symlinks=False)
            reason = "" if found.st_size == size else f"has {found.st_size} bytes instead of {size}"
        except (OSError, ValueError) as error:
            reason = f"cannot be read ({error})"
        if reason:
            reason = f"the file {self._manifest.data}/{name} {reason}"
            raise DamagedError(DAMAGED.format(path=self._directory, reason=reason))

    def check(self, wanted: Mapping[str, Sequence[Box]]) -> None:
        pass

    def read(self, wanted: Mapping[str, Sequence[Box]]) -> dict[str, list[np.ndarray]]:
        """Reads the wanted boxes.

        Raises:
            DamagedError: Orbax cannot read them.
        """
        whole = {path or _ROOT: self._orbax.RestoreArgs(restore_type=np.ndarray) for path in wanted}
        checkpointer = self._orbax.Checkpointer(self._orbax.PyTreeCheckpointHandler())
        try:
            request = self._orbax.args.PyTreeRestore(
                item=dict.fromkeys(whole, 0), restore_args=whole, partial_restore=True
            )
            arrays = checkpointer.restore(self._directory / self._manifest.data, args=request)
        except Exception as error:
            reason = first_line(error)
            raise DamagedError(READ_FAILED.format(path=self._directory, reason=reason)) from error
        finally:
            checkpointer.close()
        return {path: self._parts(path, arrays[path or _ROOT], boxes) for path, boxes in wanted.items()}

    def _parts(self, path: str, array: Any, boxes: Sequence[Box]) -> list[np.ndarray]:
        dtype = self._manifest.entries[path].data_dtype  # the array may have been stored in a wider dtype
        return [np.ascontiguousarray(np.asarray(array)[box.slices()]).astype(dtype, copy=False) for box in boxes]

    def close(self) -> None:
        pass
