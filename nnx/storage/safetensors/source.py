"""The tensors of a model in safetensors files, under the names they have in the target.

*Notes* are what NNX records about the tensors of a file in addition; files from other libraries have none.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nnx.storage.errors import CheckpointError
from nnx.storage.fitting import Description
from nnx.storage.renaming import renamed
from nnx.storage.safetensors.file import TensorFile
from nnx.storage.safetensors.header import INVALID, Tensor

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

    def describe(self, name: str) -> Description:
        """Returns the description of a tensor, or of the keys that it holds the data of."""
        tensor, impl = self.tensor(name), self.notes.keys.get(name)
        if impl is None:
            return Description("array", str(tensor.dtype), tensor.shape)
        data = jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
        keys = jax.eval_shape(lambda data: jax.random.wrap_key_data(data, impl=impl), data)
        return Description("key", str(keys.dtype), keys.shape)

    def read(self, name: str, *range: int, verify: bool) -> np.ndarray:
        saved = self._saved[name]
        return self._files[saved].read(saved, *range, verify=verify)

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
