# pyright: reportMissingImports=false
"""The models of `benchmarks.cold_start` in PyTorch, which compiles nothing: channels come first."""

from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.cold.batches import (
    CLASSES,
    FEATURES,
    GROUPS,
    HEADS,
    HIDDEN,
    INPUTS,
    LAYERS,
    LENGTH,
    STAGES,
    STEM,
    VOCABULARY,
    WIDTHS,
)


def mlp() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(din, dout), nn.ReLU()) for din, dout in zip(WIDTHS[:-1], WIDTHS[1:-1])]
    return nn.Sequential(*layers, nn.Linear(*WIDTHS[-2:]))


class Residual(nn.Module):
    def __init__(self, din: int, dout: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(din, dout, 3, stride=2, padding=1),
            nn.GroupNorm(GROUPS, dout),
            nn.ReLU(),
            nn.Conv2d(dout, dout, 3, padding=1),
            nn.GroupNorm(GROUPS, dout),
        )
        self.shortcut = nn.Conv2d(din, dout, 1, stride=2)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.body(x) + self.shortcut(x))


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, STEM, 3, padding=1), nn.ReLU())
        self.stages = nn.Sequential(*(Residual(din, dout) for din, dout in zip((STEM, *STAGES), STAGES)))
        self.head = nn.Linear(STAGES[-1], CLASSES)

    def forward(self, x: Any) -> Any:
        x = self.stages(self.stem(x.permute(0, 3, 1, 2)))
        return self.head(x.mean(dim=(2, 3)))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, FEATURES)
        self.positions = nn.Embedding(LENGTH, FEATURES)
        block = dict(dim_feedforward=4 * FEATURES, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(FEATURES, HEADS, **block) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(FEATURES)
        self.head = nn.Linear(FEATURES, VOCABULARY)

    def forward(self, tokens: Any) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        x = self.embed(tokens) + self.positions(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(INPUTS, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Any) -> Any:
        return self.head(self.rnn(x)[0][:, -1])


MODELS = {"mlp": mlp, "cnn": CNN, "transformer": Transformer, "lstm": LSTM}


def first_loss(model: Any, x: np.ndarray, y: np.ndarray) -> float:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    logits = model(torch.as_tensor(x))
    loss = nn.functional.cross_entropy(logits.flatten(0, -2), torch.as_tensor(y).long().flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
