"""The sizes that layers are built with: whatever is no size is an error that names the layer and the argument."""

import inspect

import numpy as np
import pytest

import nnx

SIZES = (int, "int | collections.abc.Sequence[int]", "int | tuple[int, ...]")
OTHERS = {
    "rotary": nnx.RotaryEmbedding(4),
    "kernel_size": (3,),
    "einsum_str": "ab,bc->ac",
    "kernel_shape": (4, 4),
    "batch_shape": 2,
}


def required(layer):
    parameters = inspect.signature(layer.__init__).parameters.values()
    return [p for p in parameters if p.default is p.empty and p.name not in ("self", "ctx", "args", "kwargs")]


def is_size(parameter):
    return parameter.annotation is int or (str(parameter.annotation) in SIZES[1:] and parameter.name not in OTHERS)


LAYERS = [
    value
    for value in vars(nnx).values()
    if isinstance(value, type) and issubclass(value, nnx.Module) and any(map(is_size, required(value)))
]
CASES = [(layer, p.name) for layer in LAYERS for p in required(layer) if is_size(p)]


def build(layer, **changes):
    arguments = {p.name: 4 if is_size(p) else OTHERS[p.name] for p in required(layer)}
    takes_ctx = "ctx" in inspect.signature(layer.__init__).parameters
    return layer(**{**arguments, **changes}, **({"ctx": nnx.context(0)} if takes_ctx else {}))


def test_layers_to_test_are_found():
    assert {nnx.Linear, nnx.Conv, nnx.LayerNorm, nnx.LSTMCell, nnx.MoE} <= set(LAYERS)


@pytest.mark.parametrize("layer, argument", CASES, ids=[f"{layer.__name__}-{name}" for layer, name in CASES])
def test_invalid_size_raises_with_its_argument(layer, argument):
    for got, error in ((None, TypeError), ("3", TypeError), (2.5, TypeError), (True, TypeError), (-1, ValueError)):
        with pytest.raises(error) as info:
            build(layer, **{argument: got})
        start = f"{layer.__name__}: `{argument}` is a size, an int of at least 1, got {got!r}."
        assert str(info.value).startswith(start)


def test_size_left_to_be_inferred_raises_with_advice():
    with pytest.raises(TypeError, match=r"not inferred from the first input.* such as `in_features=x\.shape\[-1\]`\.$"):
        nnx.Linear(None, 4, ctx=nnx.context(0))
    with pytest.raises(TypeError, match=r"Write the size\.$"):
        nnx.Linear(4, None, ctx=nnx.context(0))


def test_sizes_within_a_sequence_are_checked():
    with pytest.raises(TypeError, match=r"LinearGeneral: `out_features` is a size.*got \(2, None\)"):
        nnx.LinearGeneral(3, (2, None), ctx=nnx.context(0))
    with pytest.raises(TypeError, match=r"Einsum: `kernel_shape`.*got \(2, 2.0\)"):
        nnx.Einsum("ab,bc->ac", (2, 2.0), ctx=nnx.context(0))
    with pytest.raises(ValueError, match=r"MLP: `hidden_features`.*got \[8, 0\]"):
        nnx.MLP(2, [8, 0], 2, ctx=nnx.context(0))
    with pytest.raises(TypeError, match=r"Linear: `in_features` is a size.*got array\(\[2, 2\]\)"):
        nnx.Linear(np.array([2, 2]), 3, ctx=nnx.context(0))


def test_numpy_integers_are_sizes():
    size = np.arange(5)[3]
    assert nnx.Linear(size, size, ctx=nnx.context(0)).kernel.shape == (3, 3)
    assert nnx.LinearGeneral(size, size, ctx=nnx.context(0)).kernel.shape == (3, 3)
    assert nnx.MLP(size, size, size, ctx=nnx.context(0)).layers[0].kernel.shape == (3, 3)
