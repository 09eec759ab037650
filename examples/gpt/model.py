"""GPT: a decoder-only Transformer with the shape of GPT-2, made of built-in layers.

The blocks are one Module whose parameters are stacked along a leading axis of layers, and `nnx.Scan` runs over it: the
block is traced and compiled once, however deep the model. The token table also serves as the output layer.

`init_cache`, `decode` and `unscanned` are for `nnx.generate`, which writes text: the keys and values of earlier tokens
come from a cache, so a new token costs one position instead of the whole text.
"""

import dataclasses
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp

import nnx


@dataclasses.dataclass(frozen=True)
class Config:
    """The size of a GPT; the defaults are those of GPT-2 small."""

    vocab: int = 50257
    context: int = 1024  # the longest text
    layers: int = 12
    heads: int = 12
    width: int = 768
    dropout: float = 0.0
    dtype: Any = None  # the computation dtype: jnp.bfloat16 on a GPU. Parameters are float32
    unroll: int = 1  # blocks per iteration of the compiled loop; more of them compile longer and may run faster


GPU_OPTIONS = {  # for XLA's compiler, which ignores them elsewhere
    "xla_gpu_enable_triton_gemm": False,  # cuBLAS is faster at these sizes
    "xla_gpu_dot_merger_threshold_mb": 0,  # queries, keys and values as three products: nothing to split afterwards
}

gelu = jax.checkpoint(nnx.gelu)  # recomputed for its gradient, which is cheaper than storing and reading intermediates


class Block(nnx.Module):
    def __init__(self, config: Config, *, ctx: nnx.Context):
        std = 0.55 / math.sqrt(config.width)  # the 0.02 of GPT-2, at its width
        init = nnx.initializers.normal(std)
        init_out = nnx.initializers.normal(std / math.sqrt(2 * config.layers))  # two residual branches per block
        width, dtype = config.width, config.dtype
        self.norm1 = nnx.LayerNorm(width, epsilon=1e-5, dtype=dtype, ctx=ctx)
        self.attention = nnx.MultiHeadAttention(
            config.heads,
            width,
            dropout_rate=config.dropout,
            dtype=dtype,
            kernel_init=init,
            out_kernel_init=init_out,
            ctx=ctx,
        )
        self.norm2 = nnx.LayerNorm(width, epsilon=1e-5, dtype=dtype, ctx=ctx)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, kernel_init=init, ctx=ctx)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, kernel_init=init_out, ctx=ctx)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x, _, *, ctx: nnx.Context | None = None):  # [batch, length, width]
        x = x + self.dropout(self.attention(self.norm1(x), is_causal=True, ctx=ctx), ctx=ctx)
        x = x + self.dropout(self.down(gelu(self.up(self.norm2(x)))), ctx=ctx)
        return x, None

    def decode(self, x, cache: nnx.LayerCache, held, added):  # [batch, length, width], _, [batch], [batch] or None
        attended, cache = self.attention.decode_step(self.norm1(x), cache, held, added)
        x = x + attended
        return x + self.down(nnx.gelu(self.up(self.norm2(x)))), cache


class GPT(nnx.Module):
    def __init__(self, config: Config, *, ctx: nnx.Context):
        self.config = config
        init = nnx.initializers.normal(0.55 / math.sqrt(config.width))
        dtype = config.dtype
        self.embed = nnx.Embed(config.vocab, config.width, dtype=dtype, embedding_init=init, ctx=ctx)
        self.position = nnx.LearnedPositionEmbed(
            config.context, config.width, dtype=dtype, embedding_init=init, ctx=ctx
        )
        self.blocks = nnx.Scan(
            Block,
            variable_axes={...: 0},  # every layer has its own weights
            split_rngs=("params", "dropout"),
            length=config.layers,
            unroll=config.unroll,
        )(config, ctx=ctx)
        self.norm = nnx.LayerNorm(config.width, epsilon=1e-5, dtype=dtype, ctx=ctx)

    def __call__(self, tokens: jax.Array, *, ctx: nnx.Context | None = None) -> jax.Array:
        """Returns the logits of the token after each one."""
        x = self.position(self.embed(tokens))  # [batch, length, width]
        x, _ = self.blocks(x, None, ctx=ctx)
        return self.embed.attend(self.norm(x))  # [batch, length, vocab]

    @property
    def max_length(self) -> int:
        return self.config.context

    def init_cache(self, batch: int, length: int, dtype=None) -> nnx.DecoderCache:
        """Returns an empty cache for `batch` texts of up to `length` tokens."""
        heads = [(self.config.heads, self.config.width // self.config.heads)] * self.config.layers
        return nnx.DecoderCache.empty(batch, length, heads, dtype=dtype or self.config.dtype or jnp.float32)

    def decode(self, tokens: jax.Array, cache: nnx.DecoderCache, lengths: jax.Array | None = None):
        """Returns logits, and the cache with `lengths` of the tokens in each row appended; all of them by default."""
        length = tokens.shape[1]
        x = self.position(self.embed(tokens), cache.lengths[:, None] + jnp.arange(length))
        blocks: Any = self.unscanned().blocks  # a list by now
        layers = []
        for block, layer in zip(blocks, cache.layers, strict=True):
            x, layer = block.decode(x, layer, cache.lengths, lengths)
            layers.append(layer)
        return self.embed.attend(self.norm(x)), cache.advanced(layers, length if lengths is None else lengths)

    def unscanned(self) -> "GPT":
        """Returns the same model with its blocks in a list."""
        if isinstance(self.blocks, nnx.Sequence):
            return self
        stacked, block = self.blocks.scan_module.partition()
        model = self.clone()
        model.blocks = [block.merge(jax.tree.map(operator.itemgetter(i), stacked)) for i in range(self.config.layers)]
        return model


def decayed(params: nnx.State) -> nnx.State:
    """Returns what weight decay applies to: true for matrices, false for biases and norms."""
    return params.map(lambda path, _: path.endswith(("kernel", "embedding")))
