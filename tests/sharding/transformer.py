"""A small language model and its training, the same on any mesh; shared by the programs that run on several devices."""

import re
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import nnx

VOCAB, LENGTH, BATCH, WIDTH, HEADS, LAYERS = 64, 12, 16, 32, 4, 2
ACTIVATION = ("batch", "length", "embed")


class Block(nnx.Module):
    def __init__(self, width, *, ctx):
        self.norm1 = nnx.LayerNorm(width, ctx=ctx)
        self.attention = nnx.MultiHeadAttention(HEADS, width, ctx=ctx)
        self.norm2 = nnx.LayerNorm(width, ctx=ctx)
        self.mlp = nnx.MLP(width, 4 * width, width, activation=nnx.gelu, ctx=ctx)

    def __call__(self, x, _):
        x = x + self.attention(self.norm1(x), is_causal=True)
        x = nnx.with_logical_constraint(x, ACTIVATION)
        x = x + self.mlp(self.norm2(x))
        return nnx.with_logical_constraint(x, ACTIVATION), None


class LanguageModel(nnx.Module):
    def __init__(self, *, ctx):
        stack = nnx.Scan(
            Block,
            variable_axes={nnx.Param: 0},
            split_rngs="params",
            length=LAYERS,
            metadata_params={nnx.PARTITION_NAME: "layers"},
        )
        self.embed = nnx.Embed(VOCAB, WIDTH, ctx=ctx)
        self.blocks = stack(WIDTH, ctx=ctx)
        self.norm = nnx.LayerNorm(WIDTH, ctx=ctx)
        init = nnx.with_logical_partitioning(nnx.initializers.lecun_normal(), ("embed", "vocab"))
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, kernel_init=init, ctx=ctx)

    def __call__(self, tokens):  # [batch, length] -> [batch, length, vocab]
        x = nnx.with_logical_constraint(self.embed(tokens), ACTIVATION)
        x, _ = self.blocks(x, None)
        return self.head(self.norm(x))


def mesh_of(*axes: tuple[str, int], type: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    """The first devices as a mesh with the given axes."""
    names, sizes = zip(*axes)
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, axis_types=(type,) * len(sizes), devices=devices)


def loss_fn(model, tokens):
    logits = model(tokens[:, :-1])  # split over the vocabulary, perhaps: nothing is looked up in them
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(tokens[:, 1:], VOCAB)).mean()


@nnx.jit
def train_step(optimizer, tokens):
    loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model, tokens)
    optimizer.update(grads)
    return loss


def make(mesh: Any, rules: Any) -> tuple[Any, Any]:
    """An optimizer around a model, and a batch, all on the mesh."""
    model = nnx.init_sharded(lambda ctx: LanguageModel(ctx=ctx), mesh, rules, nnx.context(0))
    sharding = nnx.logical_to_mesh_sharding(P("batch", None), mesh, rules)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (BATCH, LENGTH + 1))
    batch = jax.make_array_from_callback(tokens.shape, sharding, lambda index: tokens[index])
    return nnx.Optimizer(model, optax.adam(1e-2)), batch


def run(optimizer: Any, batch: Any, steps: int = 20) -> list[float]:
    """The losses of some steps."""
    losses = [train_step(optimizer, batch) for _ in range(steps)]
    return [float(loss) for loss in losses]


def collectives(hlo: str) -> list[tuple[str, int]]:
    """Every collective in a compiled program, with the number of elements of its (largest) result."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = []
    for line in hlo.splitlines():
        match = re.search(rf"= (.*?) ({kinds})(?:-start)?\(", line)
        if match:
            shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
            sizes = [int(np.prod([int(size) for size in shape.split(",") if size])) for shape in shapes]
            found.append((match[2], max(sizes, default=1)))
    return found
