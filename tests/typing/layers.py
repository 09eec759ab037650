"""Layers as users write them: attributes, constructors and calls have types. pyright checks this file."""

from typing import Any, assert_type

import jax
import numpy as np

import nnx


class Block(nnx.Module):
    def __init__(self, features: int, *, ctx: nnx.Context) -> None:
        self.norm = nnx.LayerNorm(features, ctx=ctx)
        self.attention = nnx.MultiHeadAttention(4, features, num_kv_heads=2, ctx=ctx)
        self.mlp = nnx.MLP(features, 4 * features, features, activation=nnx.gelu, ctx=ctx)
        self.dropout = nnx.Dropout(0.1)

    def __call__(self, x: jax.Array, *, ctx: nnx.Context) -> jax.Array:
        x = x + self.attention(self.norm(x), is_causal=True, ctx=ctx)
        return x + self.dropout(self.mlp(x), ctx=ctx)


def attributes(ctx: nnx.Context) -> None:
    linear = nnx.Linear(3, 4, ctx=ctx)
    assert_type(linear.kernel, jax.Array)
    assert_type(linear.bias, jax.Array | None)
    assert_type(linear.in_features, int)
    assert_type(linear.dtype, np.dtype[Any] | None)
    assert_type(nnx.Conv(3, 8, (3, 3), ctx=ctx).kernel, jax.Array)
    assert_type(nnx.Embed(10, 4, ctx=ctx).embedding, jax.Array)
    assert_type(nnx.BatchNorm(3).mean, jax.Array)
    assert_type(nnx.LayerNorm(3).scale, jax.Array | None)
    assert_type(nnx.GRUCell(3, 4, ctx=ctx).dense_i, nnx.Linear)
    assert_type(nnx.MultiHeadAttention(2, 8, ctx=ctx).query, nnx.LinearGeneral)
    assert_type(nnx.MultiHeadAttention(2, 8, ctx=ctx).cache, nnx.KVCache | None)
    assert_type(nnx.LoRALinear(3, 4, lora_rank=2, ctx=ctx).lora.lora_a, jax.Array)
    assert_type(linear.kernel_scale, jax.Array | None)
    assert_type(nnx.quantize(linear, bits=4, group_size=32, where="layers/*"), list[str])
    assert_type(nnx.dequantize(linear, where=nnx.Linear), list[str])
    nnx.Linear(3, 4, kernel_init=nnx.he_normal(), bias_init=nnx.zeros, ctx=ctx)  # the names of 0.0.3 and 0.0.4
    nnx.quantize(linear, bits=3)  # pyright: ignore[reportArgumentType]


def calls(ctx: nnx.Context, x: jax.Array, tokens: jax.Array) -> None:
    assert_type(nnx.Linear(3, 4, ctx=ctx)(x), jax.Array)
    assert_type(nnx.Embed(10, 4, ctx=ctx).attend(x), jax.Array)
    assert_type(nnx.Identity()(tokens), jax.Array)
    assert_type(nnx.max_pool(x, (2, 2), strides=2), jax.Array)
    assert_type(nnx.combine_masks(nnx.make_causal_mask(tokens), None), jax.Array | None)
    carry, y = nnx.SimpleCell(3, 4, ctx=ctx)(x, x)
    assert_type(carry, jax.Array)
    assert_type(y, jax.Array)
    (memory, _), _ = nnx.LSTMCell(3, 4, ctx=ctx)((x, x), x)
    assert_type(memory, jax.Array)


def mistakes(ctx: nnx.Context, x: jax.Array) -> None:
    nnx.Linear(3, 4)  # pyright: ignore[reportCallIssue]
    nnx.Linear(3, 4, rngs=ctx)  # pyright: ignore[reportCallIssue]
    nnx.Linear("3", 4, ctx=ctx)  # pyright: ignore[reportArgumentType]
    nnx.Conv(3, 8, 3, ctx=ctx)  # pyright: ignore[reportArgumentType]
    _ = nnx.Linear(3, 4, ctx=ctx).weight  # pyright: ignore[reportAttributeAccessIssue]
    nnx.LayerNorm(3, eps=1e-5)  # pyright: ignore[reportCallIssue]
    nnx.dot_product_attention(x, x, x, implementation="flash")  # pyright: ignore[reportArgumentType]


def published_models(ctx: nnx.Context, tokens: jax.Array) -> None:
    model: nnx.models.Decoder = nnx.models.from_pretrained("directory", dtype="bfloat16", scan_layers=True)
    assert_type(model, nnx.models.Decoder)
    assert_type(model.config, nnx.models.DecoderConfig)
    assert_type(model.embed.embedding, jax.Array)
    assert_type(model(tokens), jax.Array)
    cache = model.init_cache(2, 16)
    assert_type(cache, nnx.DecoderCache)
    assert_type(model.decode(tokens, cache), tuple[jax.Array, nnx.DecoderCache])
    assert_type(model.unscanned().layers[0].attention, Any)
    assert_type(nnx.GatedMLP(4, 8, ctx=ctx).gate, nnx.Linear)
    assert_type(nnx.MoE(4, 8, 4, 2, scores="sigmoid", ctx=ctx).gate, jax.Array)
    assert_type(nnx.router_losses(nnx.MoE(4, 8, 4, 2, ctx=ctx)).z, jax.Array)
