"""The same in PyTorch: `torch.compile(mode="reduce-overhead")`, so CUDA graphs, over a static cache held in buffers.

Attention is scaled-dot-product attention over the whole cache with a mask, which is what a static cache allows. One
matrix computes queries, keys and values, which suits PyTorch best.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class Shape(NamedTuple):
    """The sizes of a decoder; `base` is that of the rotary embedding, None for a table of positions."""

    vocab: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    base: float | None


class Block(nn.Module):
    def __init__(self, shape: Shape, rows: int, length: int):
        super().__init__()
        self.shape = shape
        bias = shape.base is None
        norm = nn.LayerNorm if bias else nn.RMSNorm
        head = shape.width // shape.heads
        self.norm1, self.norm2 = norm(shape.width, eps=1e-5), norm(shape.width, eps=1e-5)
        self.qkv = nn.Linear(shape.width, (shape.heads + 2 * shape.kv_heads) * head, bias=bias)
        self.out = nn.Linear(shape.width, shape.width, bias=bias)
        self.up = nn.Linear(shape.width, shape.hidden * (1 if bias else 2), bias=bias)  # gate and up in one
        self.down = nn.Linear(shape.hidden, shape.width, bias=bias)
        self.register_buffer("keys", torch.zeros(rows, shape.kv_heads, length, head))
        self.register_buffer("values", torch.zeros(rows, shape.kv_heads, length, head))

    def forward(self, x: Any, positions: Any, mask: Any, rotation: Any) -> Any:
        rows, length, width = x.shape
        head = width // self.shape.heads
        qkv = self.qkv(self.norm1(x)).view(rows, length, -1, head).transpose(1, 2)
        query, key, value = qkv.split([self.shape.heads, self.shape.kv_heads, self.shape.kv_heads], dim=1)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        self.keys.index_copy_(2, positions, key)
        self.values.index_copy_(2, positions, value)
        grouped = self.shape.heads != self.shape.kv_heads
        y = F.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=mask, enable_gqa=grouped)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        h = self.up(self.norm2(x))
        if self.shape.base is None:
            return x + self.down(F.gelu(h, approximate="tanh"))
        gate, up = h.chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: Any, sin: Any, cos: Any) -> Any:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Decoder(nn.Module):
    def __init__(self, shape: Shape, rows: int, length: int):
        super().__init__()
        self.shape, self.length = shape, length
        self.embed = nn.Embedding(shape.vocab, shape.width)
        self.position = nn.Embedding(length, shape.width) if shape.base is None else None
        self.blocks = nn.ModuleList(Block(shape, rows, length) for _ in range(shape.layers))
        self.norm = (nn.LayerNorm if shape.base is None else nn.RMSNorm)(shape.width, eps=1e-5)
        self.register_buffer("slots", torch.arange(length), persistent=False)

    def forward(self, tokens: Any, positions: Any) -> Any:
        """Returns the most likely next token of each row, `[rows, 1]`."""
        x = self.embed(tokens)
        rotation = None
        if self.position is not None:
            x = x + self.position(positions)
        else:
            half = self.shape.width // self.shape.heads // 2
            angles = positions[:, None] / self.shape.base ** (torch.arange(half, device=x.device) / half)
            rotation = (angles.sin().to(x.dtype), angles.cos().to(x.dtype))
        mask = self.slots <= positions[:, None]
        for block in self.blocks:
            x = block(x, positions, mask, rotation)
        logits = F.linear(self.norm(x[:, -1:]), self.embed.weight)
        return logits.argmax(-1)


class Tokens:
    """Written tokens that the GPU may still be working on."""

    def __init__(self, tokens: Any):
        self.tokens = tokens

    def block_until_ready(self) -> None:
        torch.cuda.synchronize()


def make_contender(shape: Shape, rows: int, read: int, new: int, length: int) -> Callable[[], Tokens]:
    """Makes a function that reads `read` tokens and writes `new` in each of `rows` rows."""
    torch.manual_seed(0)
    torch._dynamo.reset()  # each setting is compiled with its own shapes
    model = Decoder(shape, rows, length).to("cuda", torch.bfloat16)
    prefill = torch.compile(model, dynamic=False)
    step = torch.compile(model, mode="reduce-overhead", fullgraph=True, dynamic=False)
    prompts = torch.randint(0, shape.vocab, (rows, read), device="cuda")
    prompt_positions = torch.arange(read, device="cuda")

    @torch.no_grad()
    def run() -> Tokens:
        token = prefill(prompts, prompt_positions)
        position = torch.full((1,), read, device="cuda")
        tokens = [token]
        for _ in range(new - 1):
            torch.compiler.cudagraph_mark_step_begin()
            token = step(token, position).clone()  # the graph writes its next result to the same memory
            position = position + 1
            tokens.append(token)
        return Tokens(torch.cat(tokens, dim=1))

    return run
