"""`nnx.load_torch_state_dict`: layers compute what PyTorch's compute with the same weights, and nothing loads halfway.

The weights and outputs of PyTorch are goldens, which `tools/make_torch_golden.py` writes.
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx

GOLDEN = pathlib.Path(__file__).parent / "golden"
CTX = nnx.context(0)


class Classifier(nnx.Module):
    def __init__(self):
        self.stem = nnx.Conv(3, 4, (3, 3), 2, padding=1, use_bias=False, ctx=CTX)
        self.blocks = [
            nnx.Sequence([nnx.BatchNorm(4, use_running_average=True), nnx.relu, nnx.Conv(4, 4, (1, 1), ctx=CTX)])
            for _ in range(2)
        ]
        self.gain = nnx.Param(jnp.zeros(4))
        self.head = nnx.Linear(4, 5, ctx=CTX)

    def __call__(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((1, 2)) * self.gain)


def lstm(inputs: int, hidden: int, **options: Any) -> nnx.RNN:
    return nnx.RNN(nnx.OptimizedLSTMCell(inputs, hidden, ctx=CTX), **options)


def gru(inputs: int, hidden: int) -> nnx.RNN:
    return nnx.RNN(nnx.GRUCell(inputs, hidden, hidden_bias=True, ctx=CTX))


def both_ways(inputs: int, hidden: int) -> nnx.Bidirectional:
    return nnx.Bidirectional(lstm(inputs, hidden), lstm(inputs, hidden))


def one_step(cell: nnx.RNNCellBase, x: jax.Array) -> jax.Array:
    return cell(cell.initialize_carry(x.shape), x)[1]


# A name followed by "/" and a variant uses the golden before the slash.
MODELS = {
    "linear": lambda: nnx.Linear(3, 4, ctx=CTX),
    "linear/general": lambda: nnx.LinearGeneral(3, (2, 2), ctx=CTX),
    "linear_no_bias": lambda: nnx.Linear(3, 4, use_bias=False, ctx=CTX),
    "conv1d": lambda: nnx.Conv(4, 6, (3,), 2, padding=1, feature_group_count=2, ctx=CTX),
    "conv2d": lambda: nnx.Conv(3, 4, (3, 2), padding=(1, 0), kernel_dilation=2, ctx=CTX),
    "conv3d": lambda: nnx.Conv(2, 3, (2, 2, 2), padding=0, ctx=CTX),
    "conv_transpose1d": lambda: nnx.ConvTranspose(3, 4, (4,), 2, padding=4 - 1 - 1, ctx=CTX),
    "conv_transpose2d": lambda: nnx.ConvTranspose(3, 2, (3, 2), 2, padding="VALID", ctx=CTX),
    "conv_transpose2d/transposed": lambda: nnx.ConvTranspose(
        3, 2, (3, 2), 2, padding="VALID", transpose_kernel=True, ctx=CTX
    ),
    "conv_transpose3d": lambda: nnx.ConvTranspose(2, 3, (2, 2, 2), padding="VALID", ctx=CTX),
    "layer_norm": lambda: nnx.LayerNorm(5, epsilon=1e-5),
    "rms_norm": lambda: nnx.RMSNorm(5),
    "group_norm": lambda: nnx.GroupNorm(6, 2, epsilon=1e-5),
    "instance_norm": lambda: nnx.InstanceNorm(3, epsilon=1e-5),
    "batch_norm1d": lambda: nnx.BatchNorm(4, use_running_average=True),
    "batch_norm2d": lambda: nnx.BatchNorm(4, use_running_average=True),
    "embedding": lambda: nnx.Embed(7, 4, ctx=CTX),
    "prelu": lambda: nnx.PReLU(),
    "attention": lambda: nnx.MultiHeadAttention(2, 8, ctx=CTX),
    "attention_other_keys": lambda: nnx.MultiHeadAttention(2, 8, in_kv_features=6, ctx=CTX),
    "rnn": lambda: nnx.RNN(nnx.SimpleCell(3, 4, ctx=CTX)),
    "lstm": lambda: lstm(3, 4),
    "lstm/separate": lambda: nnx.RNN(nnx.LSTMCell(3, 4, ctx=CTX)),
    "lstm_no_bias": lambda: lstm(3, 4),
    "lstm_deep": lambda: nnx.Sequence([both_ways(3, 2), both_ways(4, 2)]),
    "lstm_cell": lambda: nnx.OptimizedLSTMCell(3, 4, ctx=CTX),
    "gru": lambda: gru(3, 4),
    "gru_deep": lambda: nnx.Sequence([gru(3, 2), gru(2, 2)]),
    "classifier": Classifier,
}
CHANNELS_LAST = ("conv", "group_norm", "instance_norm", "batch_norm2d", "classifier")


def golden(name: str) -> tuple[dict[str, np.ndarray], list[jax.Array], np.ndarray]:
    """The state dict, the inputs and the output of a case."""
    with np.load(GOLDEN / f"{name.partition('/')[0]}.npz") as file:
        state = {key.removeprefix("state."): file[key] for key in file if key.startswith("state.")}
        inputs = [jnp.asarray(file[f"in.{i}"]) for i in range(sum(key.startswith("in.") for key in file))]
        return state, inputs, file["out"]


def run(name: str, model: Any, inputs: list[jax.Array]) -> np.ndarray:
    """The output of our model in the layout of PyTorch."""
    channels_last = name.startswith(CHANNELS_LAST)
    args = [jnp.moveaxis(x, 1, -1) if channels_last else x for x in inputs]
    out = one_step(model, args[0]) if name.endswith("_cell") else model(*args)
    out = np.asarray(out).reshape(*out.shape[:1], -1) if name == "linear/general" else np.asarray(out)
    return np.moveaxis(out, -1, 1) if channels_last else out


@pytest.mark.parametrize("name", MODELS)
def test_the_output_is_that_of_pytorch(name):
    state, inputs, expected = golden(name)
    model = MODELS[name]()
    before = model.get_module_def()
    report = nnx.load_torch_state_dict(model, state)
    assert not report and isinstance(report, nnx.LoadReport)
    assert model.get_module_def() == before  # nothing recompiles
    np.testing.assert_allclose(run(name, model, inputs), expected, rtol=1e-5, atol=2e-6)


def test_every_golden_is_used():
    assert {name.partition("/")[0] for name in MODELS} == {file.stem for file in GOLDEN.glob("*.npz")}


def test_a_gru_without_hidden_bias_takes_only_weights_that_it_can_represent():
    state, inputs, expected = golden("gru")
    model = nnx.RNN(nnx.GRUCell(3, 4, ctx=CTX))
    with pytest.raises(ValueError, match=r"'cell/dense_i/bias' is a GRU with two biases.*GRUCell without hidden_bias"):
        nnx.load_torch_state_dict(model, state)
    state["bias_hh_l0"][8:] = 0.0
    nnx.load_torch_state_dict(model, state)
    full = gru(3, 4)
    nnx.load_torch_state_dict(full, state)
    np.testing.assert_allclose(model(inputs[0]), full(inputs[0]), rtol=1e-6)
    assert not np.allclose(model(inputs[0]), expected)


def test_layers_named_separately_in_pytorch_load_by_their_own_names():
    state, inputs, expected = golden("gru_deep")
    apart = {f"{'01'['_l1' in name]}.{name.replace('_l1', '_l0')}": value for name, value in state.items()}
    model = nnx.Sequence([gru(3, 2), gru(2, 2)])
    nnx.load_torch_state_dict(model, apart)
    np.testing.assert_allclose(model(inputs[0]), expected, rtol=1e-5, atol=2e-6)

    state, inputs, expected = golden("attention")
    query, key, value = np.split(state["in_proj_weight"], 3)
    query_bias, key_bias, value_bias = np.split(state["in_proj_bias"], 3)
    apart = {"query.weight": query, "key.weight": key, "value.weight": value, "out.weight": state["out_proj.weight"]}
    apart |= {"query.bias": query_bias, "key.bias": key_bias, "value.bias": value_bias}
    attention = nnx.MultiHeadAttention(2, 8, ctx=CTX)
    nnx.load_torch_state_dict(attention, {**apart, "out.bias": state["out_proj.bias"]})
    np.testing.assert_allclose(attention(*inputs), expected, rtol=1e-5, atol=2e-6)

    state, inputs, expected = golden("lstm_cell")
    rnn = lstm(3, 4)
    nnx.load_torch_state_dict(rnn, {f"cell.{name}": value for name, value in state.items()})
    np.testing.assert_allclose(one_step(rnn.cell, inputs[0]), expected, rtol=1e-5, atol=2e-6)


# What does not fit


def values(model: nnx.Module) -> dict[str, np.ndarray]:
    return {path: np.asarray(value) for path, value in model.get_state().arrays().items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return list(a) == list(b) and all(np.array_equal(a[path], b[path]) for path in a)


def test_everything_that_does_not_fit_is_in_one_error_and_nothing_changes():
    state, _, _ = golden("classifier")
    del state["blocks.0.0.running_mean"], state["gain"]
    state["head.weight"] = state["head.weight"].T
    state["blocks.1.2.weight"] = state["blocks.1.2.weight"][..., 0]
    state["stem.bias"] = np.zeros(4)
    state["head.kernel"] = np.zeros((4, 5))  # a name of NNX is not one of PyTorch
    model = Classifier()
    before = values(model)
    with pytest.raises(ValueError) as raised:
        nnx.load_torch_state_dict(model, state)
    text = str(raised.value)
    assert same(values(model), before)
    assert "does not fit this Classifier, and nothing was changed" in text
    assert "missing from the state dict: 'blocks/0/0/mean', 'gain'" in text
    assert "looked for and not found: 'blocks.0.0.running_mean', 'gain'" in text
    assert "in the state dict, but not in the target: 'stem.bias', 'head.kernel'" in text
    assert "'head/kernel' is float32[4, 5] ('head.weight') in the state dict and float32[5, 4], in the layout" in text
    assert "'blocks/1/2/kernel' is float32[4, 4, 1] ('blocks.1.2.weight')" in text


def test_without_strict_fitting_entries_are_loaded_and_the_rest_reported():
    state, _, _ = golden("classifier")
    complete = Classifier()
    nnx.load_torch_state_dict(complete, state)
    del state["gain"]
    state["extra"] = np.zeros(1)
    model = Classifier()
    report = nnx.load_torch_state_dict(model, state, strict=False)
    assert report.missing == ["gain"] and report.unexpected == ["extra"] and not report.mismatched
    assert same(values(model), values(complete) | {"gain": np.zeros(4, np.float32)})


def test_integers_and_complex_numbers_do_not_become_weights_and_weights_no_integers():
    model = nnx.Linear(3, 4, use_bias=False, ctx=CTX)
    with pytest.raises(ValueError, match=r"complex64\[4, 3\].*float32\[4, 3\]"):
        nnx.load_torch_state_dict(model, {"weight": np.ones((4, 3), np.complex64)})
    with pytest.raises(ValueError, match=r"int64\[4, 3\].*float32\[4, 3\]"):
        nnx.load_torch_state_dict(model, {"weight": np.ones((4, 3), np.int64)})
    nnx.quantize(model)
    with pytest.raises(ValueError, match=r"float32\[4, 3\].*int8\[4, 3\]"):
        nnx.load_torch_state_dict(model, {"weight": np.ones((4, 3), np.float32)})


def test_names_with_the_prefix_of_a_wrapper_are_explained():
    state, _, _ = golden("linear")
    for prefix in ("module.", "_orig_mod."):
        with pytest.raises(ValueError, match=f"all names begin with '{prefix}'"):
            nnx.load_torch_state_dict(MODELS["linear"](), {prefix + name: value for name, value in state.items()})


def test_other_arguments_are_refused():
    model = MODELS["linear"]()
    with pytest.raises(TypeError, match="takes the Module to load into first"):
        nnx.load_torch_state_dict({}, model)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="takes a state dict"):
        nnx.load_torch_state_dict(model, [1])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="'weight' is not a tensor or an array, but 'file.bin'"):
        nnx.load_torch_state_dict(model, {"weight": "file.bin", "bias": np.zeros(4)})


# Kinds of arrays, and of models


class Tensor:
    """Behaves as a tensor of PyTorch does that requires a gradient, on another device."""

    def __init__(self, array: np.ndarray, dtype: str = "torch.float32", ready: bool = False):
        self.array, self.dtype, self.ready = array, dtype, ready

    def detach(self):
        return self

    def cpu(self):
        return Tensor(self.array, self.dtype, ready=True)

    def float(self):
        return Tensor(self.array, ready=self.ready)

    def __array__(self, dtype=None, copy=None):
        if not self.ready or self.dtype == "torch.bfloat16":
            raise TypeError("can't convert to numpy")
        return self.array


def test_tensors_are_read_from_any_device_and_in_bfloat16():
    state, inputs, expected = golden("linear")
    for dtype in ("torch.float32", "torch.bfloat16"):
        model = MODELS["linear"]()
        nnx.load_torch_state_dict(model, {name: Tensor(value, dtype) for name, value in state.items()})
        np.testing.assert_allclose(model(inputs[0]), expected, rtol=1e-5)


def test_arrays_keep_the_dtype_of_the_model():
    state, _, _ = golden("linear")
    model = nnx.Linear(3, 4, param_dtype=jnp.bfloat16, ctx=CTX)
    nnx.load_torch_state_dict(model, state)
    assert model.kernel.dtype == jnp.bfloat16
    assert (model.kernel == state["weight"].T.astype(jnp.bfloat16)).all()


class Tied(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(2, 2, ctx=CTX)
        self.second = self.first
        self.scale = nnx.Ref(nnx.Param(jnp.zeros(2)))
        self.table = jnp.zeros(3)
        self.calls = nnx.Variable(0)


def test_shared_layers_load_under_any_name_and_must_agree():
    weights = {"weight": np.ones((2, 2), np.float32), "bias": np.zeros(2, np.float32)}
    scale = {"scale": np.ones(2, np.float32)}
    both = {f"{name}.{key}": value for name in ("first", "second") for key, value in weights.items()}
    for names in (["first"], ["second"], ["first", "second"]):
        model = Tied()
        part = {name: value for name, value in both.items() if name.partition(".")[0] in names}
        nnx.load_torch_state_dict(model, part | scale)
        assert model.second is model.first and (model.first.kernel == 1).all()
    both["second.weight"] = np.zeros((2, 2), np.float32)
    with pytest.raises(ValueError, match="'second.weight', a different value from 'first/kernel'"):
        nnx.load_torch_state_dict(Tied(), both | scale)


def test_state_that_is_not_trained_is_loaded_if_it_is_there():
    weights = {"first.weight": np.ones((2, 2)), "first.bias": np.zeros(2), "scale": np.ones(2)}
    model = Tied()
    nnx.load_torch_state_dict(model, weights)
    assert model.calls == 0 and (model.table == 0).all()
    nnx.load_torch_state_dict(model, weights | {"table": np.ones(3), "calls": np.array(3)})
    assert model.calls == 3 and (model.table == 1).all()


def test_a_model_with_a_cycle_loads():
    class Child(nnx.Module):
        def __init__(self, parent):
            self.parent = parent
            self.layer = nnx.Linear(2, 2, use_bias=False, ctx=CTX)

    class Parent(nnx.Module):
        def __init__(self):
            self.child = Child(self)

    model = Parent()
    nnx.load_torch_state_dict(model, {"child.layer.weight": np.ones((2, 2))})
    assert (model.child.layer.kernel == 1).all()
