"""Checkpoints in 8-bit floats: weights that were divided by one scale per block are multiplied again as they are read.

Such a checkpoint says `"quant_method": "fp8"` in the `quantization_config` of its `config.json`, and the sizes of a
*scale block*, usually 128 by 128. Next to each float8 tensor `x.weight`, `x.weight_scale_inv` has a number for each of
its blocks; the last block of a row or column may be smaller. The weights become ordinary parameters.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from nnx.storage.errors import CheckpointError
from nnx.storage.safetensors.file import TensorFile
from nnx.storage.safetensors.header import Tensor

SCALE = "_scale_inv"
_FLOAT8 = np.dtype(jnp.float8_e4m3fn)
_VALUES = np.arange(256, dtype=np.uint8).view(_FLOAT8).astype(np.float32)  # looking a value up is faster than casting

NO_BLOCKS = (
    "{where}: an fp8 checkpoint is read if its `weight_block_size` is two positive numbers, such as [128, 128], and "
    "its `fmt` is 'e4m3'; got weight_block_size={got!r} and fmt={fmt!r}."
)
WRONG_SCALES = "{path}: {name} has shape {got}, expected {expected}: one number per block of {weight} {shape}."


def block_size(settings: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Returns the size of the blocks of an fp8 checkpoint, by its `quantization_config`.

    Raises:
        ValueError: the weights are quantized in some other way.
    """
    match settings.get("weight_block_size"), settings.get("fmt", "e4m3"):
        case [[int(height), int(width)], "e4m3"] if height > 0 and width > 0:
            return height, width
        case block, fmt:
            raise ValueError(NO_BLOCKS.format(where=where, got=block, fmt=fmt))


class ScaledFile:
    """A `TensorFile` whose float8 tensors are scaled as they are read; to a reader, they are float32.

    Attributes:
        path: the path of the file.
        tensors: its tensors, by name.
        chunk, has_checksums: as in `TensorFile`.

    Args:
        file: the file.
        scales: the file that holds the scales of each float8 tensor, by the name of the tensor.
        block: the rows and columns of a block.
    """

    def __init__(self, file: TensorFile, scales: Mapping[str, TensorFile], block: tuple[int, int]):
        self.path: Path = file.path
        self._file, self._scales, self._block = file, scales, block
        self._columns: dict[str, np.ndarray] = {}
        self.chunk, self.has_checksums = file.chunk, file.has_checksums
        self.tensors = {
            name: Tensor(np.dtype(np.float32), tensor.shape, tensor.start, tensor.start + 4 * tensor.nbytes)
            if name in scales
            else tensor
            for name, tensor in file.tensors.items()
        }

    def reopened(self, opened: contextlib.ExitStack) -> "ScaledFile":
        """Returns the same tensors in files that are opened again."""
        return ScaledFile(*reopened_files(self._file, self._scales, opened), self._block)

    def read(
        self,
        name: str,
        start: int = 0,
        stop: int | None = None,
        *,
        verify: bool = True,
        into: np.ndarray | None = None,
    ) -> np.ndarray:
        """Reads a tensor, or a range of its rows; the arguments are those of `TensorFile.read`."""
        if name not in self._scales:
            return self._file.read(name, start, stop, verify=verify, into=into)
        stop = self.tensors[name].shape[0] if stop is None else stop
        stored = self._file.read(name, start, stop, verify=verify)
        out = np.empty(stored.shape, np.float32)
        if into is not None:
            out = into[: out.nbytes].view(np.float32).reshape(stored.shape)
        np.take(_VALUES, stored.view(np.uint8), out=out)
        scales, height = self._scales_of_columns(name), self._block[0]
        for row in range(start // height, -(-stop // height)):  # a row of blocks has the same scales
            out[max(row * height - start, 0) : (row + 1) * height - start] *= scales[row]
        return out

    def _scales_of_columns(self, name: str) -> np.ndarray:
        """Returns the scales of a tensor, `[rows of blocks, columns]`; threads may compute them twice."""
        if name not in self._columns:
            scales = self._scales[name].read(name + SCALE).astype(np.float32)
            self._columns[name] = np.repeat(scales, self._block[1], axis=1)[:, : self.tensors[name].shape[1]]
        return self._columns[name]


def scaled_files(files: Mapping[str, TensorFile], block: tuple[int, int]) -> dict[str, ScaledFile]:
    """Returns the file of each tensor such that float8 tensors are scaled when read; the scales are not among them.

    Raises:
        CheckpointError: the scales of a tensor do not have the shape of its blocks.
    """
    scales: dict[str, TensorFile] = {}
    for name, file in files.items():
        tensor = file.tensors[name]
        if tensor.dtype != _FLOAT8 or name + SCALE not in files or len(tensor.shape) != 2:
            continue
        scales[name] = files[name + SCALE]
        expected = tuple(-(-size // of) for size, of in zip(tensor.shape, block, strict=True))
        got = scales[name].tensors[name + SCALE].shape
        if got != expected:
            text = {"name": name + SCALE, "got": list(got), "expected": list(expected), "weight": name}
            raise CheckpointError(WRONG_SCALES.format(path=file.path, shape=list(tensor.shape), **text))
    wrapped: dict[int, ScaledFile] = {}
    for file in files.values():
        if id(file) not in wrapped:
            own = {name: scales[name] for name in file.tensors if name in scales}
            wrapped[id(file)] = ScaledFile(file, own, block)
    hidden = {name + SCALE for name in scales}
    return {name: wrapped[id(file)] for name, file in files.items() if name not in hidden}


def reopened_files(
    file: TensorFile, scales: Mapping[str, TensorFile], opened: contextlib.ExitStack
) -> tuple[TensorFile, dict[str, TensorFile]]:
    """Opens a file again, and those that hold the scales of its tensors; each of them once."""
    paths = {each.path for each in (file, *scales.values())}
    files = {path: opened.enter_context(TensorFile(path)) for path in paths}
    return files[file.path], {name: files[each.path] for name, each in scales.items()}
