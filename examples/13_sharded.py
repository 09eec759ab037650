"""A character-level transformer on one device, on eight, or on several hosts: one script, with the mesh as a flag.

    python examples/13_sharded.py                  one device
    python examples/13_sharded.py --mesh 8         parameters and batch split over 8 devices (FSDP)
    python examples/13_sharded.py --mesh 2x4       batch over 2, heads and hidden units over 4 (FSDP × tensor parallel)

On a machine with fewer devices, virtual CPU devices are used instead. Several processes, each with a part of the mesh,
reproduce the same losses. Start one per host (or both here), with the `--address host:port` of the first:

    python examples/13_sharded.py --mesh 2x4 --processes 2 --process-id 0
    python examples/13_sharded.py --mesh 2x4 --processes 2 --process-id 1

The text is Python's own documentation of its language, as `help()` shows it.
"""

import argparse
import math
import pydoc_data.topics

import jax
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec

import nnx

nnx.compilation_cache()  # the next run finds the programs that this one compiles

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--mesh", default="1", help="devices for data, or data×model: 1, 8, 2x4, …")
parser.add_argument("--processes", type=int, default=1)
parser.add_argument("--process-id", type=int, default=0)
parser.add_argument("--address", default="127.0.0.1:12913", help="the address of the first process")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--smoke", action="store_true", help="a few small steps, for the tests")
args = parser.parse_args()

VOCAB, LENGTH, BATCH = 128, 24 if args.smoke else 64, 32
WIDTH, HEADS, LAYERS = (32, 4, 2) if args.smoke else (128, 8, 4)
STEPS = 30 if args.smoke else args.steps


# Devices: the only part that depends on how many there are

DATA, MODEL = map(int, (args.mesh + "x1").split("x")[:2])
jax.config.update("jax_num_cpu_devices", DATA * MODEL // args.processes)
if args.processes > 1:
    jax.distributed.initialize(args.address, args.processes, args.process_id)

mesh = jax.make_mesh((DATA, MODEL), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
rules = nnx.fsdp_tensor_parallel_rules()


# The model: it names the axes of its activations, and its layers name those of their parameters

HIDDEN = ("batch", "length", "embed")


class Block(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.norm1 = nnx.LayerNorm(WIDTH, ctx=ctx)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, ctx=ctx)
        self.norm2 = nnx.LayerNorm(WIDTH, ctx=ctx)
        self.mlp = nnx.MLP(WIDTH, 4 * WIDTH, WIDTH, activation=nnx.gelu, ctx=ctx)

    def __call__(self, x, _):  # [batch, length, width]
        x = nnx.with_logical_constraint(x + self.attention(self.norm1(x), is_causal=True), HIDDEN)
        x = nnx.with_logical_constraint(x + self.mlp(self.norm2(x)), HIDDEN)
        return x, None


class LanguageModel(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.embed = nnx.Embed(VOCAB, WIDTH, ctx=ctx)
        self.position = nnx.LearnedPositionEmbed(LENGTH, WIDTH, ctx=ctx)
        self.blocks = nnx.Scan(Block, variable_axes={nnx.Param: 0}, split_rngs="params", length=LAYERS)(ctx=ctx)
        self.norm = nnx.LayerNorm(WIDTH, ctx=ctx)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, ctx=ctx)

    def __call__(self, tokens):  # [batch, length] -> [batch, length, vocab]
        x = nnx.with_logical_constraint(self.position(self.embed(tokens)), HIDDEN)
        x, _ = self.blocks(x, None)
        return self.head(self.norm(x))


@nnx.jit
def train_step(optimizer, tokens):  # [batch, length + 1]
    def loss_fn(model):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model)
    optimizer.update(grads)
    return loss


# The data: every process draws the same batch and keeps the rows of its devices

text = "\n".join(pydoc_data.topics.topics.values())
characters = np.minimum(np.frombuffer(text.encode("ascii", "replace"), np.uint8), VOCAB - 1).astype(np.int32)
batch_sharding = nnx.logical_to_mesh_sharding(PartitionSpec("batch"), mesh, rules)


def batches(count):
    draw = np.random.default_rng(0)
    for _ in range(count):
        starts = draw.integers(0, len(characters) - LENGTH - 1, BATCH)
        rows = characters[starts[:, None] + np.arange(LENGTH + 1)]
        yield jax.make_array_from_callback(rows.shape, batch_sharding, lambda index, rows=rows: rows[index])


def main():
    say = print if args.process_id == 0 else lambda *_: None
    build = lambda ctx: LanguageModel(ctx=ctx)  # noqa: E731
    say(nnx.sharding_report(nnx.eval_shape(build, nnx.context(0)), mesh, rules))

    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        model = nnx.init_sharded(build, mesh, rules, nnx.context(0))
        optimizer = nnx.Optimizer(model, optax.adam(3e-3))
        losses = []
        for step, tokens in enumerate(batches(STEPS)):
            losses.append(train_step(optimizer, tokens))
            if step % 50 == 0:
                say(f"step {step:4d}  loss {float(losses[-1]):.3f}")

    table, moment = model.embed.embedding, optimizer.opt_state.get_path("0/mu/embed/embedding")
    part = table.addressable_shards[0].data.shape
    assert math.prod(part) * mesh.size == table.size and moment.sharding.is_equivalent_to(table.sharding, 2)
    first, last = float(losses[0]), float(np.mean([float(loss) for loss in losses[-5:]]))
    assert last < (0.85 if args.smoke else 0.6) * first, (first, last)
    say(f"mesh {DATA}×{MODEL}: loss {first:.3f} -> {last:.3f}; a device has {part} of the table's {table.shape}")
    say(f"final loss: {last:.3f}")


if __name__ == "__main__":
    main()
