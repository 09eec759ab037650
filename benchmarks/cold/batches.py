"""The sizes that the four models share, and a batch for each.

- `mlp`: four dense layers.
- `cnn`: a residual network of four stages with group normalization; 13 convolutions.
- `transformer`: six layers of causal attention over characters.
- `lstm`: one layer of LSTM over a sequence of features.
"""

import numpy as np

NAMES = ("mlp", "cnn", "transformer", "lstm")

WIDTHS = (784, 512, 256, 128, 10)
STEM, STAGES, GROUPS = 16, (32, 64, 128, 256), 8
VOCABULARY, LENGTH, FEATURES, HEADS, LAYERS = 96, 64, 128, 4, 6
INPUTS, HIDDEN, STEPS = 24, 128, 40
CLASSES = 10


def batch(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the inputs and the labels of a model. Channels come last."""
    rng = np.random.default_rng(0)
    if name == "transformer":
        tokens = rng.integers(0, VOCABULARY, (8, LENGTH + 1)).astype(np.int32)
        return tokens[:, :-1], tokens[:, 1:]
    shape = {"mlp": (32, WIDTHS[0]), "cnn": (8, 32, 32, 3), "lstm": (16, STEPS, INPUTS)}[name]
    return rng.normal(size=shape).astype(np.float32), rng.integers(0, CLASSES, shape[0]).astype(np.int32)
