"""A picture of attention weights: one panel per head, with the tokens as labels."""

import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from nnx.core.extras import require
from nnx.core.repr import short
from nnx.core.state.state import State
from nnx.inspection.plots import label_text
from nnx.storage.files import atomic_file, local_path

MAX_LABELS = 40  # along an axis; with more, only every n-th is written

NOT_WEIGHTS = """nnx.plot_attention takes attention weights of shape (queries, keys), (heads, queries, keys) or \
(batch, heads, queries, keys), got {got}. A MultiHeadAttention sows them: call it with sow_weights=True, then \
model.pop_state(nnx.Intermediate) has them as "attention_weights"."""
NO_SUCH_EXAMPLE = "nnx.plot_attention: there is no example {example} in a batch of {count}."
OTHER_COUNT = "nnx.plot_attention: {count} {what} were given for {expected} of the weights."


def plot_attention(
    weights: Any,
    path: str | os.PathLike[str],
    *,
    tokens: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    example: int = 0,
    title: str | None = None,
) -> pathlib.Path:
    """Draws attention weights into an image file: a panel per head, queries down, keys across.

    Needs matplotlib (the extra "plot").

    Args:
        weights: an array `(queries, keys)`, `(heads, queries, keys)` or `(batch, heads, queries, keys)`, or a State
            with one such entry, as `model.pop_state(nnx.Intermediate)` returns it after a call with `sow_weights=True`.
        path: the image file to write; its extension selects the format, e.g. ".png" or ".svg".
        tokens: the text of each query, and of each key if there are as many.
        keys: the text of each key.
        example: the example of the batch to draw.
        title: a title above the panels.

    Returns:
        The path of the image.

    Raises:
        ValueError: the weights or texts do not fit.

    >>> import tempfile
    >>> weights = nnx.softmax(jnp.arange(18.0).reshape(2, 3, 3))
    >>> nnx.plot_attention(weights, tempfile.mkdtemp() + "/heads.png", tokens=["the", "cat", "sat"]).name
    'heads.png'
    """
    heads = _heads(weights, example)
    count, queries, width = heads.shape
    keys = tokens if keys is None and tokens is not None and len(tokens) == width else keys
    for what, texts, expected in (("tokens", tokens, queries), ("keys", keys, width)):
        if texts is not None and len(texts) != expected:
            raise ValueError(OTHER_COUNT.format(count=len(texts), what=what, expected=expected))
    figure_module = require("matplotlib.figure", "plot", "nnx.plot_attention")
    columns = min(4, count)
    rows = math.ceil(count / columns)
    figure = figure_module.Figure(figsize=(3.2 * columns + 0.8, 3.2 * rows), layout="constrained")
    image: Any = None
    for head in range(count):
        axes = figure.add_subplot(rows, columns, head + 1)
        image = axes.imshow(heads[head], cmap="Blues", vmin=0, vmax=heads.max() or 1, aspect="auto")
        axes.set_title(f"head {head}" if count > 1 else "", fontsize=9)
        _write_labels(axes.xaxis, keys, width)
        _write_labels(axes.yaxis, tokens, queries)
        axes.tick_params(axis="x", rotation=90 if keys is not None else 0)
        axes.set_xlabel("key", fontsize=8)
        axes.set_ylabel("query", fontsize=8)
    figure.colorbar(image, ax=figure.axes, shrink=0.8, label="weight")
    if title:
        figure.suptitle(label_text(title))
    file = local_path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as stream:
        figure.savefig(stream, dpi=120, format=file.suffix.removeprefix(".") or None)
    return file


def _heads(weights: Any, example: int) -> np.ndarray:
    """Returns the weights of one example, `(heads, queries, keys)`."""
    if isinstance(weights, State):
        values = [value for path, value in weights.arrays().items() if "attention_weights" in path]
        weights = values[0] if len(values) == 1 else weights
    while isinstance(weights, (tuple, list)) and len(weights) == 1:  # what one call has sown
        weights = weights[0]
    if not 2 <= getattr(weights, "ndim", 0) <= 4:
        raise ValueError(NOT_WEIGHTS.format(got=short(weights)))
    array = np.asarray(weights, np.float32)
    if array.ndim == 4:
        if not -len(array) <= example < len(array):
            raise ValueError(NO_SUCH_EXAMPLE.format(example=example, count=len(array)))
        array = array[example]
    return array[None] if array.ndim == 2 else array


def _write_labels(axis: Any, texts: Sequence[str] | None, count: int) -> None:
    places = list(range(0, count, math.ceil(count / MAX_LABELS)))
    if texts is not None:
        axis.set_ticks(places, [label_text(texts[place]) for place in places], fontsize=7)
