"""Reading tensors into a target: which tensor belongs to which path, and how its value is placed there.

The *target* is a State that defines the expected paths, types, shapes, dtypes and shardings. *Notes* are what NNX
records about the tensors of a file in addition; files from other libraries have none.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nnx.storage.aligned_memory import aligned_copy
from nnx.storage.checkpoints.manifest import CheckpointError
from nnx.storage.fitting import Description, bound_sharding, describe_value, described_misfit, fits, was_narrower
from nnx.storage.leaves import Entries, Entry, resolve_alias
from nnx.storage.load_report import LoadReport
from nnx.storage.renaming import renamed
from nnx.storage.safetensors.file import TensorFile
from nnx.storage.safetensors.header import INVALID, Tensor

TWO_VALUES = "two different values, {path!r} and {alias!r}, for an entry that is shared in the target"
NEEDS_X64 = "{dtype}[{shape}], which JAX converts to {narrow} unless jax_enable_x64 is set (cast=True allows it)"

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

    def describe(self, name: str) -> tuple[str, Any, tuple[int, ...]]:
        """Returns the kind of a tensor, "array" or "key", and the dtype and shape it has in a State."""
        tensor, impl = self.tensor(name), self.notes.keys.get(name)
        if impl is None:
            return "array", tensor.dtype, tensor.shape
        data = jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
        keys = jax.eval_shape(lambda data: jax.random.wrap_key_data(data, impl=impl), data)
        return "key", keys.dtype, keys.shape

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


# Matching


def match(
    source: Source, entries: Entries, aliases: Mapping[str, str], cast: bool
) -> tuple[dict[str, str], LoadReport]:
    """Finds the tensor for each path of the target, and reports everything that does not fit.

    Returns:
        The names of the tensors by path, and the report.
    """
    report = LoadReport()
    found: dict[str, str] = {}
    by_path: dict[str, list[str]] = {}
    for name in source.names:
        by_path.setdefault(resolve_alias(name, aliases), []).append(name)
    known: set[str] = set()
    present = set(source.names)
    for path, entry in entries.leaves.items():
        names = by_path.get(path) or [n for n in (resolve_alias(path, source.notes.aliases),) if n in present]
        if not names:
            report.missing.append(path)
            continue
        known.update(names)
        name = path if path in names else names[0]
        other = next((other for other in names if not _is_same(source, other, name)), None)
        problem = None if other is None else TWO_VALUES.format(path=name, alias=other)
        problem = problem or _problem(*source.describe(name), entry, cast)
        if problem is None:
            found[path] = name
        else:
            report.mismatched[path] = (problem, _text_of_value(entry.value))
    report.unexpected = [name for name in source.names if name not in known]
    return found, report


def _is_same(source: Source, a: str, b: str) -> bool:
    if a == b:
        return True
    if source.tensor(a)[:2] != source.tensor(b)[:2]:  # dtype and shape
        return False
    # Compared as bytes, so that NaN equals itself.
    return source.read(a, verify=False).tobytes() == source.read(b, verify=False).tobytes()


def _problem(kind: str, dtype: Any, shape: tuple[int, ...], entry: Entry, cast: bool) -> str | None:
    """Describes a tensor if it cannot replace the value of an entry; None if it can."""
    value, type_name = entry
    have, want = Description(kind, str(dtype), shape), describe_value(value)
    sizes = ",".join(map(str, shape))
    if want is None:
        return f"{dtype}[{sizes}]"
    if not fits(have, want, cast or was_narrower(have, want, type_name)):
        return described_misfit(f"{dtype}[{sizes}]", have, want)
    if kind == "array" and want.kind == "array" and not cast and not isinstance(value, (np.ndarray, np.generic)):
        narrow = jax.dtypes.canonicalize_dtype(dtype)
        if narrow != dtype:
            return NEEDS_X64.format(dtype=dtype, shape=sizes, narrow=narrow)
    return None


def _text_of_value(value: Any) -> str:
    if not hasattr(value, "shape"):
        return f"the number {value!r}"
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


# Placing


def place(source: Source, name: str, old: Any, *, verify: bool) -> Any:
    """Reads a tensor as a value like `old`, which it will replace: a number, a NumPy array, or an array on devices.

    A sharded array is read part by part, so no more of it is in memory than this process needs. If a part is not
    contiguous in the file, the whole rows around it are read temporarily.
    """
    impl = source.notes.keys.get(name)
    sharding = bound_sharding(old)
    if impl is not None:
        key = jax.random.wrap_key_data(jax.device_put(source.read(name, verify=verify)), impl=impl)
        return key if sharding is None else jax.device_put(key, sharding)
    if not hasattr(old, "shape"):
        return type(old)(source.read(name, verify=verify).item())
    if isinstance(old, (np.ndarray, np.generic)):
        array = source.read(name, verify=verify).astype(old.dtype, copy=False)
        return array if isinstance(old, np.ndarray) else array[()]
    dtype = jax.dtypes.canonicalize_dtype(old.dtype)
    if sharding is None:
        return jax.device_put(source.read(name, verify=verify).astype(dtype, copy=False))
    return _place_parts(source, name, sharding, dtype, verify)


def _place_parts(source: Source, name: str, sharding: Any, dtype: Any, verify: bool) -> jax.Array:
    """Reads the parts of a tensor that belong to the devices of this process."""
    shape = source.tensor(name).shape
    devices = sorted(
        sharding.addressable_devices_indices_map(shape).items(),
        key=lambda item: (_bounds(item[1], shape), item[0].id),
    )
    arrays: list[jax.Array] = []
    rows, rows_at = np.empty(0), None
    part, part_at = np.empty(0), None
    for device, index in devices:  # sorted, so that parts of the same rows, and copies of the same part, are adjacent
        bounds = _bounds(index, shape)
        if bounds != part_at:
            if bounds[:1] != rows_at:
                del rows, part  # frees their memory before more is read
                rows, rows_at = source.read(name, *sum(bounds[:1], ()), verify=verify), bounds[:1]
            inner = (slice(None), *(slice(*bound) for bound in bounds[1:]))[: rows.ndim]
            part = rows if rows[inner].shape == rows.shape else aligned_copy(rows[inner])
            part, part_at = part.astype(dtype, copy=False), bounds
        arrays.append(jax.device_put(part, device))
    array = jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)
    # JAX copies in the background. Without waiting, the host copies of many arrays would be in memory at once.
    return array.block_until_ready()


def _bounds(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape))
