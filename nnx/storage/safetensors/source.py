"""The tensors of a model in safetensors files, under the names they have in the target.

*Notes* are what NNX records about the tensors of a file in addition; files from other libraries have none.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nnx.storage.aligned_memory import aligned_copy
from nnx.storage.entry import Entry, dtype_text
from nnx.storage.errors import CheckpointError
from nnx.storage.expected import Expected
from nnx.storage.leaves import Leaves, resolve_alias
from nnx.storage.placing import Box
from nnx.storage.renaming import renamed
from nnx.storage.safetensors.file import TensorFile
from nnx.storage.safetensors.header import INVALID, Tensor
from nnx.storage.transfer_bar import moved

KEYS, ALIASES = "nnx.keys", "nnx.aliases"


class Notes(NamedTuple):
    """The notes that NNX adds to the metadata of a file.

    Attributes:
        keys: the PRNG implementation of each tensor that holds the data of keys, by name.
        aliases: the canonical path of each further path of a shared entry.
    """

    keys: dict[str, str]
    aliases: dict[str, str]

    def to_metadata(self) -> dict[str, str]:
        """Returns the notes as text, to be stored in a file."""
        return {name: json.dumps(note) for name, note in ((KEYS, self.keys), (ALIASES, self.aliases)) if note}


class Source:
    """The tensors of a model, under the names they have in the target.

    Args:
        files: the file of each tensor, by its name in the file.
        rename: the renaming rules, if any.
    """

    def __init__(self, files: Mapping[str, TensorFile], rename: Mapping[str, str] | None):
        self._files = files
        self._saved = renamed(files, rename or {})
        self.notes: Notes = _read_notes(files, {saved: new for new, saved in self._saved.items()})

    @property
    def names(self) -> list[str]:
        return list(self._saved)

    def tensor(self, name: str) -> Tensor:
        saved = self._saved[name]
        return self._files[saved].tensors[saved]

    def describe(self, name: str) -> Entry:
        """Returns the description of a tensor, or of the keys that it holds the data of."""
        tensor, impl = self.tensor(name), self.notes.keys.get(name)
        if impl is None:
            return Entry("array", dtype_text(tensor.dtype), tensor.shape)
        data = jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
        keys = jax.eval_shape(lambda data: jax.random.wrap_key_data(data, impl=impl), data)
        return Entry("key", dtype_text(keys.dtype), keys.shape, impl=impl)

    def named(self, leaves: Leaves, aliases: Mapping[str, str]) -> dict[str, list[str]]:
        """Returns the names of the tensors that belong to each leaf of a target, its own path first."""
        by_path: dict[str, list[str]] = {}
        for name in self.names:
            by_path.setdefault(resolve_alias(name, aliases), []).append(name)
        found: dict[str, list[str]] = {}
        for path in leaves.by_path:
            saved_as = resolve_alias(path, self.notes.aliases)
            names = by_path.get(path) or [name for name in (saved_as,) if name in self._saved]
            found[path] = sorted(names, key=lambda name: name != path)
        return found

    def is_same(self, a: str, b: str) -> bool:
        """Whether two tensors are equal, as bytes, so that NaN equals itself."""
        if self.tensor(a)[:2] != self.tensor(b)[:2]:  # dtype and shape
            return False
        return self.read(a, verify=False).tobytes() == self.read(b, verify=False).tobytes()

    def read(self, name: str, *range: int, verify: bool) -> np.ndarray:
        saved = self._saved[name]
        return self._files[saved].read(saved, *range, verify=verify)

    def value(self, name: str, expected: Expected, *, verify: bool) -> Any:
        """Returns a tensor as a target expects it; where devices need parts of it, it is read part by part.

        If a part is not contiguous in the file, the whole rows around it are in memory for a moment.
        """
        entry, rows, rows_at = self.describe(name), np.empty(0), None

        def read(box: Box) -> np.ndarray:
            nonlocal rows, rows_at
            if box.start == (0,) * len(box.start) and box.shape == entry.data_shape:
                return self.read(name, verify=verify)
            if (box.start[0], box.end[0]) != rows_at:  # parts of the same rows follow each other
                rows = np.empty(0)  # frees the memory of the old ones before more is read
                rows_at = (box.start[0], box.end[0])
                rows = self.read(name, *rows_at, verify=verify)
            part = rows[(slice(None), *box.slices()[1:])]
            return part if part.shape == rows.shape else aligned_copy(part)

        if expected.kind == "number" and entry.kind == "array":  # files have arrays instead of Python numbers
            assert expected.number is not None
            return expected.number(self.read(name, verify=verify).item())
        value = jax.block_until_ready(expected.value(entry, read))  # or many host copies would be in memory at once
        moved(self.tensor(name).nbytes)
        return value

    def mapped(self) -> dict[str, Any]:
        """Returns every tensor as a view of its file, and PRNG keys as keys."""
        views: dict[str, np.ndarray] = {}
        for file in {id(file): file for file in self._files.values()}.values():
            views.update(file.mapped())
        arrays: dict[str, Any] = {name: views[saved] for name, saved in self._saved.items()}
        for name, impl in self.notes.keys.items():
            if name in arrays:
                arrays[name] = jax.random.wrap_key_data(jnp.asarray(np.array(arrays[name])), impl=impl)
        return arrays


def _read_notes(files: Mapping[str, TensorFile], new_names: Mapping[str, str]) -> Notes:
    notes = Notes({}, {})
    for file in {id(file): file for file in files.values()}.values():
        for name, note in ((KEYS, notes.keys), (ALIASES, notes.aliases)):
            try:
                found = json.loads(file.metadata.get(name, "{}"))
                if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
                    raise ValueError("it does not map names to texts")
            except (ValueError, RecursionError) as error:
                reason = f"the metadata {name!r} cannot be read ({error})"
                raise CheckpointError(INVALID.format(path=file.path, reason=reason)) from error
            if name == KEYS:
                for path, impl in found.items():
                    if files.get(path) is file:
                        _check_key_data(file, path, impl)
            note.update({new_names.get(path, path): text for path, text in found.items()})
    return notes


def _check_key_data(file: TensorFile, name: str, impl: str) -> None:
    tensor = file.tensors[name]
    try:
        data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
        fits = tensor.dtype == data.dtype and tensor.shape[-data.ndim :] == data.shape
    except (ValueError, TypeError):
        fits = False
    if not fits:
        reason = f"{name!r} is not the data of keys of the kind {impl!r}"
        raise CheckpointError(INVALID.format(path=file.path, reason=reason))
