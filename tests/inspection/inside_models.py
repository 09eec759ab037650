"""Small models for looking inside: a GPT-like stack that scans over rematerialized blocks, and its parts by hand."""

import jax
import jax.numpy as jnp

import nnx

LENGTH = 3


class Block(nnx.Module):
    def __init__(self, features: int, *, ctx: nnx.Context):
        self.norm = nnx.LayerNorm(features, ctx=ctx)
        self.attention = nnx.MultiHeadAttention(2, features, decode=False, ctx=ctx)
        self.mlp = nnx.Linear(features, features, ctx=ctx)

    def __call__(self, x, _=None):
        h = self.norm(x)
        x = x + self.attention(h, mask=nnx.make_causal_mask(jnp.ones(x.shape[:2])))
        return x + nnx.gelu(self.mlp(x)), None


class GPT(nnx.Module):
    """Tokens [batch, length] to logits; the output layer is the embedding, transposed."""

    def __init__(self, features: int = 4, *, ctx: nnx.Context):
        self.embed = nnx.Embed(7, features, ctx=ctx)
        layers = nnx.Scan(nnx.Remat(Block), variable_axes={nnx.Param: 0}, split_rngs="params", length=LENGTH)
        self.blocks = layers(features, ctx=ctx)
        self.norm = nnx.LayerNorm(features, ctx=ctx)

    def __call__(self, tokens):
        x, _ = self.blocks(self.embed(tokens), None)
        return self.embed.attend(self.norm(x))


BLOCK = "blocks/scan_module/remat_module"
TOKENS = jnp.array([[1, 2, 3], [4, 5, 6]])


def block_by_hand(model: GPT, number: int) -> Block:
    """Returns one block of the stack, as a Module without a stacked axis."""
    state, moduledef = model.blocks.scan_module.remat_module.partition()
    return moduledef.merge(jax.tree.map(lambda x: x[number], state))


def mean_logit(model: GPT, tokens: jax.Array) -> jax.Array:
    return jnp.mean(model(tokens) ** 2)


class Twice(nnx.Module):
    """One layer that runs twice."""

    def __init__(self, features: int = 4, *, ctx: nnx.Context):
        self.layer = nnx.Linear(features, features, ctx=ctx)

    def __call__(self, x):
        return self.layer(nnx.tanh(self.layer(x)))

    def encode(self, x):
        return self.layer(x)
