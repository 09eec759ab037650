"""Writes the goldens for `nnx.load_torch_state_dict`: PyTorch's layers with random weights, and what they compute.

    .venv-parity/bin/python tools/make_torch_golden.py

`tests/interop/golden/<case>.npz` then holds the state dict as `state.NAME`, the inputs as `in.0`, `in.1` … and the
output as `out`, all in float32 and in PyTorch's layout. The tests compare with these files and do not need `torch`.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

GOLDEN = pathlib.Path(__file__).parent.parent / "tests" / "interop" / "golden"
SIZE_LIMIT = 12_000  # bytes of one file


class Classifier(nn.Module):
    """A small convolutional network with the names that users give: lists, blocks, a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)
        self.blocks = nn.ModuleList([nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)) for _ in range(2)])
        self.gain = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)) * self.gain)


def images(*shape: int) -> tuple[torch.Tensor, ...]:
    """Returns one random input."""
    return (torch.randn(*shape),)


Case = tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]
CASES: dict[str, Case] = {
    "linear": (lambda: nn.Linear(3, 4), lambda: images(2, 3)),
    "linear_no_bias": (lambda: nn.Linear(3, 4, bias=False), lambda: images(2, 3)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), lambda: images(2, 4, 7)),
    "conv2d": (lambda: nn.Conv2d(3, 4, (3, 2), padding=(1, 0), dilation=2), lambda: images(2, 3, 7, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), lambda: images(1, 2, 3, 4, 3)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(3, 4, 4, stride=2, padding=1), lambda: images(2, 3, 5)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(3, 2, (3, 2), stride=2), lambda: images(2, 3, 4, 3)),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(2, 3, 2), lambda: images(1, 2, 3, 2, 3)),
    "layer_norm": (lambda: nn.LayerNorm(5), lambda: images(3, 5)),
    "rms_norm": (lambda: nn.RMSNorm(5, eps=1e-6), lambda: images(3, 5)),
    "group_norm": (lambda: nn.GroupNorm(2, 6), lambda: images(2, 6, 4)),
    "instance_norm": (lambda: nn.InstanceNorm1d(3, affine=True), lambda: images(2, 3, 5)),
    "batch_norm1d": (lambda: nn.BatchNorm1d(4), lambda: images(3, 4)),
    "batch_norm2d": (lambda: nn.BatchNorm2d(4), lambda: images(2, 4, 3, 3)),
    "embedding": (lambda: nn.Embedding(7, 4), lambda: (torch.tensor([[0, 3, 6], [1, 1, 2]]),)),
    "prelu": (lambda: nn.PReLU(), lambda: images(2, 3)),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda: (torch.randn(2, 3, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)),
    ),
    "attention_other_keys": (
        lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True),
        lambda: (torch.randn(2, 3, 8), torch.randn(2, 5, 6), torch.randn(2, 5, 6)),
    ),
    "rnn": (lambda: nn.RNN(3, 4, batch_first=True), lambda: images(2, 5, 3)),
    "lstm": (lambda: nn.LSTM(3, 4, batch_first=True), lambda: images(2, 5, 3)),
    "lstm_no_bias": (lambda: nn.LSTM(3, 4, bias=False, batch_first=True), lambda: images(2, 5, 3)),
    "lstm_deep": (lambda: nn.LSTM(3, 2, num_layers=2, bidirectional=True, batch_first=True), lambda: images(2, 4, 3)),
    "lstm_cell": (lambda: nn.LSTMCell(3, 4), lambda: images(2, 3)),
    "gru": (lambda: nn.GRU(3, 4, batch_first=True), lambda: images(2, 5, 3)),
    "gru_deep": (lambda: nn.GRU(3, 2, num_layers=2, batch_first=True), lambda: images(2, 4, 3)),
    "classifier": (Classifier, lambda: images(2, 3, 8, 8)),
}


def randomized(model: nn.Module) -> nn.Module:
    """Gives every parameter and statistic a random value: defaults such as ones and zeros would hide mistakes."""
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            value.normal_(std=0.5)
            if name.endswith("running_var"):
                value.abs_().add_(0.5)
    return model.eval()


def main() -> None:
    """Writes all cases."""
    GOLDEN.mkdir(exist_ok=True)
    for number, (name, (make, inputs)) in enumerate(CASES.items()):
        torch.manual_seed(number)
        model, args = randomized(make()), inputs()
        with torch.no_grad():
            out: Any = model(*args)
        out = out[0] if isinstance(out, tuple) else out
        arrays = {f"state.{key}": value.numpy() for key, value in model.state_dict().items()}
        arrays |= {f"in.{i}": value.numpy() for i, value in enumerate(args)}
        file = GOLDEN / f"{name}.npz"
        np.savez_compressed(file, **arrays, out=out.numpy())
        size = file.stat().st_size
        assert size < SIZE_LIMIT, f"{file} has {size} bytes"
        print(f"{name:22} {size:6} bytes")


if __name__ == "__main__":
    main()
