"""Checkpoints whose weights are stored in a few bits: which formats can be read, and the files that decode them.

`fp8` and `mxfp4` decode one format each. A reader sees ordinary tensors, and the weights become ordinary parameters.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from nnx.models.files.fp8 import ScaledFile, block_size, scaled_files
from nnx.models.files.mxfp4 import PackedFile, packed_files
from nnx.storage.safetensors.file import TensorFile

OTHER_METHOD = (
    "{where}: the checkpoint is quantized ({method}), which cannot be read. Use the original, unquantized one, and "
    "`nnx.quantize` after loading it."
)

AnyFile = TensorFile | ScaledFile | PackedFile
Decoding = Callable[[Mapping[str, TensorFile]], Mapping[str, AnyFile]]
"""A function from the file of each tensor to files that decode what they read."""


def decoding(fields: Mapping[str, Any], where: str) -> Decoding:
    """Returns how the files of a checkpoint are decoded, by the entries of its `config.json`.

    Raises:
        ValueError: the weights are quantized in a way that cannot be read.
    """
    settings = fields.get("quantization_config")
    if not settings:
        return lambda files: files
    settings = settings if isinstance(settings, Mapping) else {"quant_method": f"{settings!r}"}
    method = settings.get("quant_method", "unknown method")
    if method == "mxfp4":
        return packed_files
    if method != "fp8":
        raise ValueError(OTHER_METHOD.format(where=where, method=method))
    block = block_size(settings, where)
    return lambda files: scaled_files(files, block)


def reopened(file: AnyFile, opened: contextlib.ExitStack) -> AnyFile:
    """Opens the same file again, for a reader that runs later."""
    return opened.enter_context(TensorFile(file.path)) if isinstance(file, TensorFile) else file.reopened(opened)
