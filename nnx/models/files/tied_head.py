"""Whether the output layer in a file is the transposed embedding, as its config says.

A config that says `tie_word_embeddings` means that there is one matrix. Some files have two all the same: usually equal
ones, but fine-tuned models exist whose output layer was trained on its own.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from nnx.models.files.quantized_files import AnyFile

_ROWS = 4096  # that are compared at a time


def with_own_head(architecture: Any, config: Any, files: Mapping[str, AnyFile]) -> Any:
    """Returns the config with `tie_embeddings=False` if the files hold an output layer that is not the embedding.

    Args:
        architecture: the `Architecture` of the model.
        config: the config, as the file says.
        files: the file of each tensor, by name.
    """
    if not getattr(config, "tie_embeddings", False) or getattr(config, "head", "tokens") != "tokens":
        return config
    untied = config.replace(tie_embeddings=False)
    pair = {path: architecture.links(untied, [path], files) for path in ("head/kernel", "embed/embedding")}
    names = [found[0].name for found in pair.values() if found and found[0].name in files]
    return config if len(names) < 2 or _are_equal(files, *names) else untied


def _are_equal(files: Mapping[str, AnyFile], head: str, embedding: str) -> bool:
    shape = files[head].tensors[head].shape
    if shape != files[embedding].tensors[embedding].shape:
        return False
    for start in range(0, shape[0], _ROWS):
        stop = min(start + _ROWS, shape[0])
        ours, theirs = (files[name].read(name, start, stop) for name in (head, embedding))
        if not np.array_equal(ours, theirs):
            return False
    return True
