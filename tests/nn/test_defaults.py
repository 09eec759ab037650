"""The table of defaults in docs/cheat-sheet.md says what NNX, flax and PyTorch really do.

A default is read from the signature where it is an argument, and measured where it is not (an initial variance).
"""

import inspect
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "cheat-sheet.md"
ROW = re.compile(r"^\| (.+?) \| (.+?) \| (.+?) \| ?(.*?) ?\|$", re.MULTILINE)
X = np.arange(8, dtype=np.float32).reshape(4, 2)
NOISE = np.random.default_rng(0).normal(size=(1, 24, 24, 16)).astype(np.float32)


def default(function: Any, name: str) -> str:
    """The default of an argument, as the table writes it."""
    function = function.__init__ if inspect.isclass(function) else function
    value = inspect.signature(function).parameters[name].default
    if value is inspect.Parameter.empty:
        return "must be given"
    text = getattr(value, "__name__", None) or (f'"{value}"' if isinstance(value, str) else repr(value))
    return f"`{text}`"


def nearest(measured: float, names: dict[str, float]) -> str:
    """The name of a measured number; it may be off by 15 percent."""
    return next((name for name, value in names.items() if abs(measured - value) <= 0.15 * value), f"{measured:.3g}")


def distribution(values: Any, inputs: int) -> str:
    """Describes the initial values of a kernel or bias."""
    values = np.asarray(values)
    if not values.any():
        return "zeros"
    shape = "uniform" if abs(values).max() ** 2 <= 3.2 * values.var() else "normal"  # 3 for a uniform distribution
    return f"{shape}, variance {nearest(values.var() * inputs, {'1 / inputs': 1, '1 / (3 inputs)': 1 / 3})}"


def jax_defaults(lib: Any, **randomness: Any) -> dict[str, Callable[[], str]]:
    """How to find each default of a library with the interface of flax.nnx."""

    def make(layer: Any, *args: Any, **options: Any) -> Any:
        return layer(*args, **options, **randomness)

    def values_of(variable: Any) -> np.ndarray:
        return np.asarray(variable if lib is nnx else variable[...])

    def normalized(momentum: float) -> Any:
        norm = make(lib.BatchNorm, 2, momentum=momentum, use_running_average=False)
        norm(X)
        return norm

    def batch_first() -> bool:
        attention = make(lib.MultiHeadAttention, 1, 4, decode=False)
        texts = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        return np.allclose(attention(texts)[:1], attention(texts[:1]), atol=1e-4)

    def unseen() -> str:
        values = jnp.asarray(X).reshape(1, 2, 1, 4)
        out = lib.dot_product_attention(values[:, :1], values, values, mask=jnp.zeros((1, 1, 1, 2), bool))
        return "zeros" if not out.any() else "the mean of the values" if (out == values.mean(1)).all() else str(out)

    modes = {"`None`": "none", "`False`": "training"}
    formulas = {"`True`": "tanh", "`False`": "exact"}
    linear = make(lib.Linear, 64, 256)
    return {
        "`Conv`: padding": lambda: default(lib.Conv, "padding"),
        "`ConvTranspose`: padding": lambda: default(lib.ConvTranspose, "padding"),
        "`max_pool`, `avg_pool`: stride": lambda: strides(lib.max_pool(jnp.ones((1, 8, 1)), (2,)).shape[1]),
        "`LayerNorm`: epsilon": lambda: default(lib.LayerNorm, "epsilon"),
        "`GroupNorm`: epsilon": lambda: default(lib.GroupNorm, "epsilon"),
        "`InstanceNorm`: epsilon": lambda: default(lib.InstanceNorm, "epsilon"),
        "`InstanceNorm`: learned scale": lambda: default(lib.InstanceNorm, "use_scale"),
        "`RMSNorm`: epsilon": lambda: default(lib.RMSNorm, "epsilon"),
        "`BatchNorm`: epsilon": lambda: default(lib.BatchNorm, "epsilon"),
        "`BatchNorm`: momentum": lambda: default(lib.BatchNorm, "momentum"),
        "`BatchNorm`: momentum is the weight of": lambda: weight_of(values_of(normalized(0.75).mean)[0]),
        "`BatchNorm`: variance in the running average": lambda: bias(values_of(normalized(0.0).var)[0]),
        "`BatchNorm`: mode of a new layer": lambda: modes[default(lib.BatchNorm, "use_running_average")],
        "`Dropout`: mode of a new layer": lambda: modes[default(lib.Dropout, "deterministic")],
        "`gelu`: formula": lambda: formulas[default(lib.gelu, "approximate")],
        "`Linear`: initial kernel": lambda: distribution(values_of(linear.kernel), 64),
        "`Linear`: initial bias": lambda: distribution(values_of(linear.bias), 64),
        "`Embed`: initial variance": lambda: nearest(
            values_of(make(lib.Embed, 256, 64).embedding).var(), {"1 / features": 1 / 64, "1": 1}
        ),
        "`ConvTranspose`, stride 2: initial variance of the output": lambda: nearest(
            np.var(make(lib.ConvTranspose, 16, 16, (4, 4), strides=(2, 2))(NOISE)[:, 4:-4, 4:-4]),
            {"1": 1, "1 / 4": 1 / 4},
        ),
        '`Einsum("...d,vd->...v")`: initial variance of the output': lambda: nearest(
            64 * values_of(make(lib.Einsum, "...d,vd->...v", (256, 64)).kernel).var(), {"1": 1, "d / v": 64 / 256}
        ),
        "attention: a query that sees no key": unseen,
        "`MultiHeadAttention`: one dropout mask for the batch": lambda: default(
            lib.MultiHeadAttention, "broadcast_dropout"
        ),
        "`MultiHeadAttention`: batch axis first": lambda: f"`{batch_first()}`",
        "`GRUCell`: bias of the recurrent product": lambda: f"`{make(lib.GRUCell, 2, 3).dense_h.bias is not None}`",
        "`SimpleCell`: computation dtype": lambda: default(lib.SimpleCell, "dtype"),
        "`Optimizer`: what it trains": lambda: default(lib.Optimizer, "wrt"),
        "AdamW: weight decay": lambda: default(optax.adamw, "weight_decay"),
    }


def torch_defaults(torch: Any) -> dict[str, Callable[[], str]]:
    """How to find each default of PyTorch."""
    nn = torch.nn
    torch.manual_seed(0)

    def normalized(momentum: float) -> Any:
        norm = nn.BatchNorm1d(2, momentum=momentum)
        norm(torch.tensor(X))
        return norm

    def mode(layer: Any) -> str:
        return "training" if layer.training else "evaluation"

    def unseen() -> str:
        one, hidden = torch.ones(1, 1, 1, 4), torch.zeros(1, 1, 1, 1, dtype=torch.bool)
        out = nn.functional.scaled_dot_product_attention(one, one, one, attn_mask=hidden)
        return "zeros" if not out.any() else str(out)

    def one_mask() -> bool:
        attention = nn.MultiheadAttention(16, 1, dropout=0.5, batch_first=True)
        out, _ = attention(*3 * [torch.ones(2, 32, 16)])  # two equal texts
        return bool((out[0] == out[1]).all())

    linear = nn.Linear(64, 256)
    transposed = nn.ConvTranspose2d(16, 16, 4, stride=2, bias=False)
    return {
        "`Conv`: padding": lambda: default(nn.Conv2d, "padding"),
        "`ConvTranspose`: padding": lambda: default(nn.ConvTranspose2d, "padding"),
        "`max_pool`, `avg_pool`: stride": lambda: strides(nn.MaxPool1d(2)(torch.ones(1, 1, 8)).shape[2]),
        "`LayerNorm`: epsilon": lambda: default(nn.LayerNorm, "eps"),
        "`GroupNorm`: epsilon": lambda: default(nn.GroupNorm, "eps"),
        "`InstanceNorm`: epsilon": lambda: default(nn.InstanceNorm2d, "eps"),
        "`InstanceNorm`: learned scale": lambda: default(nn.InstanceNorm2d, "affine"),
        "`RMSNorm`: epsilon": lambda: default(nn.RMSNorm, "eps"),
        "`BatchNorm`: epsilon": lambda: default(nn.BatchNorm2d, "eps"),
        "`BatchNorm`: momentum": lambda: default(nn.BatchNorm2d, "momentum"),
        "`BatchNorm`: momentum is the weight of": lambda: weight_of(float(normalized(0.75).running_mean[0])),
        "`BatchNorm`: variance in the running average": lambda: bias(float(normalized(1.0).running_var[0])),
        "`BatchNorm`: mode of a new layer": lambda: mode(nn.BatchNorm1d(2)),
        "`Dropout`: mode of a new layer": lambda: mode(nn.Dropout()),
        "`gelu`: formula": lambda: {"none": "exact", "tanh": "tanh"}[nn.GELU().approximate],
        "`Linear`: initial kernel": lambda: distribution(linear.weight.detach(), 64),
        "`Linear`: initial bias": lambda: distribution(linear.bias.detach(), 64),
        "`Embed`: initial variance": lambda: nearest(
            float(nn.Embedding(256, 64).weight.detach().var()), {"1 / features": 1 / 64, "1": 1}
        ),
        "`ConvTranspose`, stride 2: initial variance of the output": lambda: nearest(
            np.var(transposed(torch.tensor(NOISE).permute(0, 3, 1, 2)).detach().numpy()[..., 4:-4, 4:-4]),
            {"1 / 12": 1 / 12},
        ),
        '`Einsum("...d,vd->...v")`: initial variance of the output': lambda: "no such layer",
        "attention: a query that sees no key": unseen,
        "`MultiHeadAttention`: one dropout mask for the batch": lambda: f"`{one_mask()}`",
        "`MultiHeadAttention`: batch axis first": lambda: default(nn.MultiheadAttention, "batch_first"),
        "`GRUCell`: bias of the recurrent product": lambda: default(nn.GRUCell, "bias"),
        "`SimpleCell`: computation dtype": lambda: default(nn.RNNCell, "dtype"),
        "`Optimizer`: what it trains": lambda: default(torch.optim.Adam, "params"),
        "AdamW: weight decay": lambda: default(torch.optim.AdamW, "weight_decay"),
    }


def strides(length: int) -> str:
    """What moves a window of 2 over 8 entries to this many places."""
    return {7: "1", 4: "the window"}[length]


def weight_of(mean: float) -> str:
    """What a momentum of 0.75 multiplied, if the average was 0 and the mean of the batch 3."""
    return {0.75: "the old average", 2.25: "the new batch"}[float(mean)]


def bias(variance: float) -> str:
    """How the variance of `X` was estimated."""
    return nearest(variance, {"biased": 5, "unbiased": 20 / 3})


def column(number: int) -> dict[str, str]:
    """A column of the table: what it states, by setting."""
    table = PAGE.read_text().partition("<!-- defaults -->")[2].partition("<!-- /defaults -->")[0]
    rows = [match.groups() for match in ROW.finditer(table)]
    return {row[0]: row[number] for row in rows[1:]}


def test_the_table_states_the_defaults_of_nnx():
    assert column(1) == {setting: find() for setting, find in jax_defaults(nnx, ctx=nnx.context(0)).items()}


def test_the_table_states_the_defaults_of_flax():
    flax = pytest.importorskip("flax.nnx")
    assert column(2) == {setting: find() for setting, find in jax_defaults(flax, rngs=flax.Rngs(0)).items()}


def test_the_table_states_the_defaults_of_pytorch():
    torch = pytest.importorskip("torch")
    assert column(3) == {setting: find() for setting, find in torch_defaults(torch).items()}
