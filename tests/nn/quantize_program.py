"""What test_quantize looks at: run with eight virtual devices, prints one JSON object."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import nnx

X = np.random.default_rng(0).standard_normal((4, 3, 64)).astype(np.float32)


class Model(nnx.Module):
    def __init__(self, ctx):
        self.attention = nnx.MultiHeadAttention(4, 64, ctx=ctx)
        self.mlp = nnx.MLP(64, 128, 64, ctx=ctx)
        self.embed = nnx.Embed(16, 64, ctx=ctx)

    def __call__(self, x):
        return self.embed.attend(self.mlp(self.attention(x)))


def splits(model):
    layers = {"up": model.mlp.layers[0], "out": model.attention.out}
    found = {name: (layer.kernel, layer.kernel_scale) for name, layer in layers.items()}
    found["embed"] = model.embed.embedding, model.embed.embedding_scale
    return {name: [str(tuple(array.sharding.spec)) for array in arrays] for name, arrays in found.items()}


def run(axis_type, bits, group_size, shard_first):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis_type,) * 2)
    alone, model = Model(nnx.context(0)), Model(nnx.context(0))
    nnx.quantize(alone, bits, group_size)
    steps = [
        lambda: nnx.quantize(model, bits, group_size),
        lambda: nnx.shard(model, mesh, nnx.fsdp_tensor_parallel_rules()),
    ]
    with jax.set_mesh(mesh):
        for step in steps[::-1] if shard_first else steps:
            step()
        x = jax.device_put(X, jax.NamedSharding(mesh, P("data")))
        y = nnx.jit(lambda model, x: model(x))(model, x)
        difference = float(np.abs(np.asarray(y) - np.asarray(alone(jnp.asarray(X)))).max())
        found = splits(model)
        nnx.dequantize(model)
    return {"difference": difference, "splits": found, "after": str(tuple(model.mlp.layers[0].kernel.sharding.spec))}


def main():
    found = {
        "per channel, automatic axes": run(AxisType.Auto, 8, None, True),
        "groups, automatic axes": run(AxisType.Auto, 4, 16, False),
        "groups, explicit axes": run(AxisType.Explicit, 4, 16, True),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
