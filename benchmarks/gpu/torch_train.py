"""The same step in PyTorch: `torch.compile`, scaled-dot-product attention, bfloat16 autocast, fused AdamW.

The models are that of nanoGPT and a Llama, each with one matrix for queries, keys and values (and one for gate and up),
which suits PyTorch best. `cudnn` asks for cuDNN's attention; by default PyTorch chooses.
"""

# PyTorch is not among the project's dependencies.
# pyright: reportMissingImports=false

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


class Sizes(NamedTuple):
    """The sizes of a decoder; `base` is that of the rotary embedding, None for the architecture of GPT-2."""

    vocab: int
    context: int
    layers: int
    heads: int
    width: int
    hidden: int
    base: float | None


class Block(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        width, self.heads, self.gated = sizes.width, sizes.heads, sizes.base is not None
        norm, bias = (nn.RMSNorm, False) if self.gated else (nn.LayerNorm, True)
        self.norm1, self.norm2 = norm(width, eps=1e-5), norm(width, eps=1e-5)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.up = nn.Linear(width, sizes.hidden * (2 if self.gated else 1), bias=bias)
        self.down = nn.Linear(sizes.hidden, width, bias=bias)

    def forward(self, x: torch.Tensor, rotation: Any) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=2)
        query, key, value = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        h = self.up(self.norm2(x))
        if not self.gated:
            return x + self.down(F.gelu(h, approximate="tanh"))
        gate, up = h.chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Decoder(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.embed = nn.Embedding(sizes.vocab, sizes.width)
        self.position = nn.Embedding(sizes.context, sizes.width) if sizes.base is None else None
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = self.blocks[0].norm1.__class__(sizes.width, eps=1e-5)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)
        self.head.weight = self.embed.weight
        if sizes.base is not None:
            half = sizes.width // sizes.heads // 2
            angles = torch.outer(torch.arange(sizes.context), sizes.base ** -(torch.arange(half) / half))
            self.register_buffer("sin", angles.sin())
            self.register_buffer("cos", angles.cos())
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x, rotation = self.embed(tokens), None
        if self.position is None:
            rotation = self.sin, self.cos
        else:
            x = x + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, rotation)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


class Pending:
    """The result of a step that the GPU may still be working on."""

    def __init__(self, loss: torch.Tensor):
        self.loss = loss

    def __float__(self) -> float:
        return self.loss.item()

    def block_until_ready(self) -> None:
        torch.cuda.synchronize()


def make_contender(
    sizes: Sizes, batch: int, rate: float, decay: float, *, options: dict[str, Any] | None = None, cudnn: bool = False
) -> Callable[[], Any]:
    """Makes a function that runs one step on random tokens; `options` are those of `torch.compile`."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Decoder(sizes).cuda()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)
    compiled = torch.compile(model, options=options)
    tokens = torch.randint(0, sizes.vocab, (batch, sizes.context + 1), device="cuda")
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> Pending:
        attention = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if cudnn else nullcontext()
        with torch.autocast("cuda", torch.bfloat16), attention:
            loss = compiled(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return Pending(loss.detach())

    return step
