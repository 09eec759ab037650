"""How recurrent layers store what PyTorch's `LSTM`, `GRU`, `RNN` and their cells hold.

A layer of PyTorch can have several levels and directions; the *suffix* of a name says which one a tensor belongs to:
`weight_ih_l0` is that of the first level, `weight_ih_l1_reverse` that of the second one, backward. Here, each of them
is an `RNN` with its own cell. A tensor of a cell has no suffix.
"""

from typing import Any

import numpy as np

from nnx.core.module.dict_sequence import Sequence
from nnx.core.state.paths import join
from nnx.interop.torch_layers import Conversion, Has, Mismatch, Rule, Shape
from nnx.nn.recurrent.recurrent import RNN, Bidirectional
from nnx.nn.recurrent.rnn_cells import GRUCell, LSTMCell, OptimizedLSTMCell, SimpleCell

_CELLS = (GRUCell, LSTMCell, OptimizedLSTMCell, SimpleCell)

HIDDEN_BIAS = "a GRUCell without hidden_bias=True, which adds no bias to the hidden state"


def recurrent_rule(layer: Any, has: Has) -> Rule | None:
    """Returns the rule of a cell, an RNN, a Bidirectional or a Sequence of these; None if it has none.

    An RNN has none if the state dict has its cell as a layer, nor does a Sequence of networks that are separate layers.
    """
    cells = _cells(layer)
    if cells is None or (has("cell.weight_ih") and isinstance(layer, RNN)):
        return None
    if isinstance(layer, (Sequence, Bidirectional)) and not has("weight_ih_l0"):
        if isinstance(layer, Sequence) or has("forward_rnn.weight_ih_l0"):
            return None
    conversions = [
        Conversion(join(path, conversion.path), conversion.tensors, conversion.convert)
        for path, cell, suffix in cells
        for conversion in _cell_conversions(cell, suffix, has)
    ]
    return Rule(conversions, tuple({conversion.path.split("/")[0] for conversion in conversions}))


def _cells(layer: Any) -> list[tuple[str, Any, str]] | None:
    """Returns the cells of a recurrent layer with their paths and suffixes; None for anything else."""
    if isinstance(layer, _CELLS):
        return [("", layer, "")]
    if isinstance(layer, RNN) and isinstance(layer.cell, _CELLS):
        return [("cell", layer.cell, "_l0")]
    if isinstance(layer, Bidirectional):
        pair = _cells(layer.forward_rnn), _cells(layer.backward_rnn)
        if pair[0] is None or pair[1] is None:
            return None
        (path, forward, suffix), (_, backward, _) = pair[0][0], pair[1][0]
        return [(f"forward_rnn/{path}", forward, suffix), (f"backward_rnn/{path}", backward, f"{suffix}_reverse")]
    if isinstance(layer, Sequence) and len(layer) and all(isinstance(item, (RNN, Bidirectional)) for item in layer):
        levels = [_cells(item) for item in layer]
        if None not in levels:
            return [
                (f"{number}/{path}", cell, suffix.replace("_l0", f"_l{number}"))
                for number, level in enumerate(levels)
                for path, cell, suffix in level or ()
            ]
    return None


def _cell_conversions(cell: Any, suffix: str, has: Has) -> list[Conversion]:
    inputs, hidden = cell.in_features, cell.hidden_features
    gates = {GRUCell: 3, SimpleCell: 1}.get(next(t for t in _CELLS if isinstance(cell, t)), 4)
    from_input: dict[str, Shape] = {f"weight_ih{suffix}": (gates * hidden, inputs)}
    from_hidden: dict[str, Shape] = {f"weight_hh{suffix}": (gates * hidden, hidden)}
    # Of a layer with bias=False, PyTorch saves no biases at all; then they are zeros.
    names = [f"bias_ih{suffix}", f"bias_hh{suffix}"]
    with_bias = any(map(has, names)) or not has(f"weight_ih{suffix}")
    biases: dict[str, Shape] = {name: (gates * hidden,) for name in names} if with_bias else {}

    def added(*both: np.ndarray) -> np.ndarray:
        return sum(both, np.zeros(gates * hidden, np.float32))

    if isinstance(cell, LSTMCell):
        return _separate_gates(hidden, from_input, from_hidden, biases, added)
    conversions = [
        Conversion("dense_i/kernel", from_input, np.transpose),
        Conversion("dense_h/kernel", from_hidden, np.transpose),
    ]
    if isinstance(cell, OptimizedLSTMCell):
        return [*conversions, Conversion("dense_h/bias", biases, added)]
    if isinstance(cell, SimpleCell):
        return [*conversions, Conversion("dense_i/bias", biases, added)]
    if cell.dense_h.bias is None:
        return [*conversions, Conversion("dense_i/bias", biases, lambda *both: _one_gru_bias(added, *both))]
    each = [{name: shape} for name, shape in biases.items()] or [{}, {}]
    return [*conversions, Conversion("dense_i/bias", each[0], added), Conversion("dense_h/bias", each[1], added)]


def _separate_gates(hidden: int, from_input: Any, from_hidden: Any, biases: Any, added: Any) -> list[Conversion]:
    conversions = []
    for i, gate in enumerate("ifgo"):
        rows = slice(i * hidden, (i + 1) * hidden)
        conversions += [
            Conversion(f"{'if_' if gate == 'f' else 'i' + gate}/kernel", from_input, lambda w, rows=rows: w[rows].T),
            Conversion(f"h{gate}/kernel", from_hidden, lambda w, rows=rows: w[rows].T),
            Conversion(f"h{gate}/bias", biases, lambda *both, rows=rows: added(*both)[rows]),
        ]
    return conversions


def _one_gru_bias(added: Any, *both: np.ndarray) -> np.ndarray:
    """Adds the biases of a GRU, which is possible for its gates alone: the reset gate multiplies that of the update."""
    if both and both[1][-len(both[1]) // 3 :].any():
        raise Mismatch("a GRU with two biases", HIDDEN_BIAS)
    return added(*both)
