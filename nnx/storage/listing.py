"""The contents of a saved file in any format that NNX can read."""

import contextlib
import os
from pathlib import Path

from nnx.storage.checkpoints.checkpoint import CheckpointEntry
from nnx.storage.checkpoints.checkpoint import checkpoint_entries as entries_of_checkpoint
from nnx.storage.locations import location
from nnx.storage.safetensors.shards import holds_safetensors, open_model
from nnx.storage.safetensors.source import Source


def checkpoint_entries(path: str | os.PathLike[str]) -> dict[str, CheckpointEntry]:
    """Lists what a checkpoint or a safetensors file contains, by path, without reading arrays.

    Args:
        path: the directory or URL of a checkpoint; or a safetensors file, an index, or a directory that contains one of
            them.

    Returns:
        The type, shape and dtype of each entry, by path.

    Raises:
        FileNotFoundError: there is nothing at the path.
        CheckpointError: the file or directory is damaged, malformed or incomplete.

    >>> import tempfile
    >>> path, model = tempfile.mkdtemp(), nnx.Linear(2, 3, ctx=nnx.context(0))
    >>> nnx.save(path + "/model", model)
    >>> for name, entry in nnx.checkpoint_entries(path + "/model").items():
    ...     print(name, entry.dtype, entry.shape, entry.type)
    bias float32 (3,) Param
    kernel float32 (2, 3) Param
    >>> nnx.save_safetensors(path + "/model.safetensors", model)
    >>> sorted(nnx.checkpoint_entries(path + "/model.safetensors"))
    ['bias', 'kernel']
    """
    place = location(path)
    if place.local is not None and holds_safetensors(place.local):
        return entries_of_safetensors(place.local)
    return entries_of_checkpoint(place)


def entries_of_safetensors(path: Path) -> dict[str, CheckpointEntry]:
    """Lists the tensors of a safetensors file, an index or a directory.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: a file is malformed.
    """
    with contextlib.ExitStack() as opened:
        source = Source(open_model(path, opened), None)
        entries = {name: source.describe(name) for name in source.names}
        return {name: CheckpointEntry(entry.kind, entry.shape, entry.dtype, "") for name, entry in entries.items()}
