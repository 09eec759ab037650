"""The safetensors file format: a JSON header of names, dtypes, shapes and offsets, then the bytes of the tensors.

Written here in full, for it is small: files are read through a memory map, one tensor (or a slice of one) at a time,
and written one tensor at a time, so that no second copy of a model is ever in memory.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from nnx.training.manifest import CheckpointError

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_HEADER = 100_000_000

DAMAGED = "{path} is no whole safetensors file: {reason}."
NO_DTYPE = "Cannot save {name!r} as safetensors: the format has no {dtype}. Convert it first, e.g. to {instead}."


class Tensor(NamedTuple):
    """Where a tensor is in a file, and what it is."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class TensorFile:
    """A safetensors file opened for reading; its header has been checked.

    Attributes:
        tensors: what is in it, by name.
        metadata: the free text that came with it.
    """

    def __init__(self, path: Path):
        self.path = path
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise CheckpointError(DAMAGED.format(path=path, reason=f"its {size} bytes do not hold a header"))
            header = _parse(path, file.read(length))
        self._begin = 8 + length
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self.tensors = {name: _tensor(path, name, entry) for name, entry in header.items()}
        expected = self._begin + max((tensor.end for tensor in self.tensors.values()), default=0)
        if size != expected:
            reason = f"it has {size} bytes, and its header speaks of {expected}"
            raise CheckpointError(DAMAGED.format(path=path, reason=reason))
        self._bytes = np.memmap(path, np.uint8, "r") if size > self._begin else np.zeros(size, np.uint8)

    def array(self, name: str) -> np.ndarray:
        """A tensor as a view of the file."""
        tensor = self.tensors[name]
        data = self._bytes[self._begin + tensor.start : self._begin + tensor.end]
        return data.view(tensor.dtype).reshape(tensor.shape)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except ValueError as error:
        raise CheckpointError(DAMAGED.format(path=path, reason=f"its header is not JSON ({error})")) from error
    if not isinstance(header, dict):
        raise CheckpointError(DAMAGED.format(path=path, reason="its header is no JSON object"))
    return header


def _tensor(path: Path, name: str, entry: Any) -> Tensor:
    try:
        dtype = jnp.dtype(DTYPES[entry["dtype"]])
        shape = tuple([int(n) for n in entry["shape"]])
        start, end = map(int, entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        reason = f"the entry of {name!r} in its header cannot be read: {entry!r}"
        raise CheckpointError(DAMAGED.format(path=path, reason=reason)) from error
    if min((start, *shape)) < 0 or end - start != math.prod(shape) * dtype.itemsize:
        reason = f"{name!r} ({entry['dtype']} of shape {list(shape)}) has {end - start} bytes"
        raise CheckpointError(DAMAGED.format(path=path, reason=reason))
    return Tensor(dtype, shape, start, end)


def dtype_name(name: str, dtype: Any) -> str:
    """What the format calls a dtype.

    Raises:
        ValueError: it has no such dtype.
    """
    try:
        return NAMES[str(dtype)]
    except KeyError:
        instead = "int8" if jnp.issubdtype(dtype, jnp.integer) else "float32"
        raise ValueError(NO_DTYPE.format(name=name, dtype=dtype, instead=instead)) from None


class Pending(NamedTuple):
    """A tensor that is about to be written; its data are asked for when its turn comes."""

    dtype: Any
    shape: tuple[int, ...]
    data: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_file(path: Path, tensors: Mapping[str, Pending], metadata: Mapping[str, str]) -> None:
    """Writes a file, and puts it in its place when it is complete."""
    # the largest items first, so that every tensor is aligned to its items
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name in names:
        tensor = tensors[name]
        offsets = [position, position + tensor.nbytes]
        header[name] = {"dtype": dtype_name(name, tensor.dtype), "shape": list(tensor.shape), "data_offsets": offsets}
        position = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for name in names:
                file.write(np.ascontiguousarray(tensors[name].data()).reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
