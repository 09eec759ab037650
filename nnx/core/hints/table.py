"""The table of hints: for every place where a name can be written, what to write instead, by origin.

The origins have a file each. docs/migrating.md and docs/cheat-sheet.md say the same in rows, and a test compares them.
"""

from collections.abc import Mapping
from typing import TypeAlias

from nnx.core.hints import arrays, earlier, equinox, flax, pytorch, transformers

Hints: TypeAlias = Mapping[str, Mapping[str, str]]
"""What to write instead of each name, by origin."""

PACKAGE: Hints = {
    "Flax": flax.PACKAGE,
    "PyTorch": pytorch.PACKAGE,
    "PyTorch and Flax": flax.PYTORCH_TOO,
    "Equinox": equinox.PACKAGE,
    "transformers": transformers.PACKAGE,
    **earlier.PACKAGE,
}
"""What to write instead of `nnx.<name>`."""

MODELS: Hints = {"transformers": transformers.PACKAGE}
"""What to write instead of `nnx.models.<name>`."""

MODULE: Hints = {
    "PyTorch": pytorch.MODULE,
    "Flax": flax.MODULE,
    "transformers": transformers.MODULE,
    "jax.Array": arrays.MODULE,
    **earlier.MODULE,
}
"""What to write instead of `model.<name>`."""

LAYERS: Mapping[str, Hints] = {layer: {"PyTorch": names} for layer, names in pytorch.LAYERS.items()}
"""What to write instead of `layer.<name>`, by the class of the layer, which must be one of `nnx.nn`."""

OPTIMIZER: Hints = {"PyTorch": pytorch.OPTIMIZER}
"""What to write instead of `optimizer.<name>`."""

STATE: Hints = {"Flax": flax.STATE, **earlier.STATE}
"""What to write instead of `state.<name>`."""

CONTEXT: Hints = {"Flax": flax.CONTEXT}
"""What to write instead of `ctx.<name>()`, which draws a key in Flax."""

PURE: Hints = earlier.PURE
"""What to write instead of `pure.<name>`."""

TRAIN_STATE: Hints = earlier.TRAIN_STATE
"""What to write instead of `train_state.<name>`."""

SCAN_MODULE: Hints = earlier.SCAN_MODULE
"""What to write instead of `stack.<name>`, where `nnx.Scan` made the stack."""

CONSTRUCTOR: Hints = {"PyTorch": pytorch.CONSTRUCTOR, "Flax": flax.CONSTRUCTOR, "Equinox": equinox.CONSTRUCTOR}
"""What keyword arguments of constructors are called here."""

CALL: Hints = {"Flax": flax.CALL, "Equinox": equinox.CALL}
"""What keyword arguments of the call of a Module are called here."""

CHECKPOINT_MANAGER: Hints = {"Orbax": flax.MANAGER}
"""What to write instead of `manager.<name>`."""

TOKENIZER: Hints = {"transformers": transformers.TOKENIZER}
"""What to write instead of `tokenizer.<name>`."""

CONFIG: Hints = {"transformers": transformers.CONFIG}
"""What to write instead of `model.config.<name>`."""

FUNCTIONS: Mapping[str, Hints] = {
    "from_pretrained": {"transformers": transformers.FROM_PRETRAINED},
    "generate": {"transformers": transformers.GENERATE},
    "add_lora": {"PEFT": transformers.ADD_LORA},
    "CheckpointManager.__init__": {"Orbax": flax.CHECKPOINT_MANAGER},
}
"""What keyword arguments of a function are called here, by its qualified name."""

FILES: Mapping[str, str] = {**pytorch.FILES, **equinox.FILES, **flax.FILES, ".safetensors": "safetensors"}
"""Whose files have which extension, for `nnx.load`."""

READERS: Mapping[str, str] = {
    "torch": 'a file of PyTorch: nnx.load_torch_state_dict(model, torch.load("{name}", map_location="cpu"))',
    "equinox": "a file of Equinox: load it there, and take its arrays over with model.load_state(mapping)",
    "flax": 'a file of Flax: model.load_state(flax.serialization.msgpack_restore(open("{name}", "rb").read()))',
    "safetensors": 'a safetensors file: nnx.load_safetensors("{name}", model)',
}
"""How to read a file of another library, by its owner."""
