"""Checkpoints in 4-bit floats (MXFP4): numbers with a scale per 32 of them are decoded as they are read.

Such a checkpoint says `"quant_method": "mxfp4"` in the `quantization_config` of its `config.json`. A stack of matrices
`x` of shape `[experts, inputs, outputs]` is stored *packed*, as two tensors of bytes. `x_blocks`, `[experts, outputs,
inputs / 32, 16]`, has two numbers per byte, the first one in its lower half. `x_scales`, `[experts, outputs, inputs /
32]`, has the exponent of a power of two for each block of 32 numbers, plus 127. To a reader, `x` is a bfloat16 tensor.

Every number is exact in bfloat16, with two exceptions that no sensible checkpoint has: a number of 2**128 or more
becomes infinite, as it would in float32, and a scale of 255 means NaN, as the format defines it.
"""

import contextlib
import functools
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from nnx.models.files.fp8 import reopened_files
from nnx.storage.errors import CheckpointError
from nnx.storage.safetensors.file import TensorFile
from nnx.storage.safetensors.header import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32
"""How many numbers share a scale."""

_BFLOAT16 = np.dtype(jnp.bfloat16)
_INFINITY, _NAN = 0x7F80, 0x7FC0  # the bits of these bfloat16s

WRONG_BLOCKS = (
    "{path}: {name} is {dtype}{got}, expected uint8 of shape [experts, outputs, blocks, 16]: two numbers of {what} in "
    "each byte."
)
WRONG_SCALES = "{path}: {name} is {dtype}{got}, expected uint8{expected}: one scale per block of {blocks}."


class PackedFile:
    """A `TensorFile` with packed tensors, which it presents as bfloat16 tensors of the shape they represent.

    Attributes:
        path: the path of the file.
        tensors: its tensors, by name; a packed one has the name without "_blocks".
        chunk, has_checksums: as in `TensorFile`.

    Args:
        file: the file.
        scales: the file that holds the scales of each packed tensor, by the name of the tensor.
    """

    def __init__(self, file: TensorFile, scales: Mapping[str, TensorFile]):
        self.path: Path = file.path
        self._file, self._scales = file, scales
        self.chunk, self.has_checksums = file.chunk, file.has_checksums
        parts = {name + BLOCKS for name in scales}
        self.tensors = {name: tensor for name, tensor in file.tensors.items() if name not in parts}
        for name in scales:
            blocks = file.tensors[name + BLOCKS]
            experts, outputs, count, _ = blocks.shape
            size = experts * outputs * count * BLOCK * _BFLOAT16.itemsize
            shape = (experts, count * BLOCK, outputs)
            self.tensors[name] = Tensor(_BFLOAT16, shape, blocks.start, blocks.start + size)

    def is_packed(self, name: str) -> bool:
        """Whether a tensor is read with `packed` and decoded with `unpacked`, rather than with `read`."""
        return name in self._scales

    def packed(self, name: str, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns one matrix of a packed tensor: its blocks `[outputs, blocks, 16]` and scales `[outputs, blocks]`."""
        blocks = self._file.read(name + BLOCKS, index, index + 1)
        return blocks[0], self._scales[name].read(name + SCALES, index, index + 1)[0]

    def read(
        self,
        name: str,
        start: int = 0,
        stop: int | None = None,
        *,
        verify: bool = True,
        into: np.ndarray | None = None,
    ) -> np.ndarray:
        """Reads a tensor that is not packed, or a range of its rows, as `TensorFile.read` does."""
        return self._file.read(name, start, stop, verify=verify, into=into)

    def reopened(self, opened: contextlib.ExitStack) -> "PackedFile":
        """Returns the same tensors in files that are opened again."""
        return PackedFile(*reopened_files(self._file, self._scales, opened))


def unpacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decodes rows of packed numbers.

    Args:
        blocks: uint8 `[rows, blocks, 16]`.
        scales: uint8 `[rows, blocks]`.

    Returns:
        A bfloat16 array `[rows, 32 * blocks]`.
    """
    # One lookup decodes a byte with its scale to two numbers. A checkpoint uses few scales, so the part of the table
    # that it needs stays in the cache of a core.
    index = blocks | scales[..., None].astype(np.uint16) << 8
    return np.take(_pairs(), index).view(_BFLOAT16).reshape(len(blocks), -1)


@functools.cache
def _pairs() -> np.ndarray:
    """Returns the two bfloat16 numbers of every scale and byte, at `256 * scale + byte`, as one uint32."""
    bits = _bits_of_numbers()  # [256, 16]
    pairs = np.stack([np.tile(bits, 16), np.repeat(bits, 16, axis=1)], axis=-1)  # [256, 256, 2], the lower half first
    return pairs.view(np.uint32).reshape(-1)


def _bits_of_numbers() -> np.ndarray:
    """Returns the bits of the bfloat16 that each scale and number stand for, uint16 `[256, 16]`.

    Made from integers: a thread of XLA, which reads the files if the caller is compiled, turns subnormal numbers into
    zeros in any arithmetic with floats.
    """
    scale, number = np.arange(256)[:, None], np.arange(16)
    # A number has a sign, two bits of exponent, and one bit of fraction. Its two smallest magnitudes are 0 and 0.5.
    exponent, half = number >> 1 & 3, number & 1
    is_smallest = exponent == 0
    exponent = scale + np.where(is_smallest, -1, exponent - 1)  # of a bfloat16, which has the same bias as a scale
    fraction = np.where(is_smallest, 0, half << 6)
    normal = (exponent << 7) + fraction
    subnormal = (128 + fraction) >> np.clip(1 - exponent, 0, 15)  # no bit that is shifted out is set
    bits = np.where(exponent > 0, np.minimum(normal, _INFINITY), subnormal)
    bits = np.where(is_smallest & (half == 0), 0, bits)
    bits[255] = _NAN
    return (bits | (number >> 3) << 15).astype(np.uint16)


def packed_files(files: Mapping[str, TensorFile]) -> dict[str, TensorFile | PackedFile]:
    """Returns the file of each tensor such that packed tensors are decoded when read; their parts are not among them.

    Raises:
        CheckpointError: blocks or scales do not have the shapes or the dtype of the format.
    """
    scales: dict[str, TensorFile] = {}
    for blocks in files:
        name = blocks.removesuffix(BLOCKS)
        if name != blocks and name + SCALES in files:
            scales[name] = files[name + SCALES]
            _check(name, files[blocks], scales[name])
    wrapped = {
        id(file): PackedFile(file, {name: scales[name] for name in scales if name + BLOCKS in file.tensors})
        for file in files.values()
    }
    hidden = {name + part for name in scales for part in (BLOCKS, SCALES)}
    found: dict[str, TensorFile | PackedFile] = {
        name: wrapped[id(file)] for name, file in files.items() if name not in hidden
    }
    return found | {name: wrapped[id(files[name + BLOCKS])] for name in scales}


def _check(name: str, blocks_file: TensorFile, scales_file: TensorFile) -> None:
    blocks, scales = blocks_file.tensors[name + BLOCKS], scales_file.tensors[name + SCALES]
    if blocks.dtype != np.uint8 or len(blocks.shape) != 4 or blocks.shape[-1] != BLOCK // 2:
        text = {"path": blocks_file.path, "name": name + BLOCKS, "dtype": blocks.dtype, "got": list(blocks.shape)}
        raise CheckpointError(WRONG_BLOCKS.format(what=name, **text))
    if scales.dtype != np.uint8 or scales.shape != blocks.shape[:-1]:
        text = {"path": scales_file.path, "name": name + SCALES, "dtype": scales.dtype, "got": list(scales.shape)}
        raise CheckpointError(WRONG_SCALES.format(expected=list(blocks.shape[:-1]), blocks=name + BLOCKS, **text))
