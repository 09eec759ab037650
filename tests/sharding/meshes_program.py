"""What the library does under the mesh of a `with mesh:` block, of `jax.set_mesh` and of both, on four devices."""

import contextlib
import functools
import json
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import nnx

warnings.filterwarnings("ignore", "`with mesh:`", DeprecationWarning)  # the older form is what this is about

AXES = ("data", "model")
RULES = [("embed", "data"), ("mlp", "model")]


@functools.cache
def mesh(rows, columns, axes=AxisType.Auto):
    return jax.make_mesh((rows, columns), AXES, axis_types=(axes,) * 2)


def square():
    return mesh(2, 2)


def explicit():
    return mesh(2, 2, AxisType.Explicit)  # what jax.make_mesh makes by default


def long():
    return mesh(4, 1)


@contextlib.contextmanager
def both(outer, inner):
    with outer, inner:
        yield


FORMS = {
    "none": contextlib.nullcontext,
    "with": square,
    "with, explicit": explicit,
    "set": lambda: jax.set_mesh(square()),
    "with inside set": lambda: both(jax.set_mesh(square()), long()),
    "set inside with": lambda: both(long(), jax.set_mesh(square())),
    "with inside with": lambda: both(long(), square()),
}


def part(x):
    return list(x.addressable_shards[0].data.shape)


def constrained(x):
    return nnx.with_logical_constraint(x, ("embed", "mlp"))


compiled = nnx.jit(lambda x: constrained(x * 2))  # one function under all the meshes
initializer = nnx.with_logical_partitioning(nnx.initializers.ones, ("embed", "mlp"))


class Layer(nnx.Module):
    def __init__(self, *, ctx):
        self.w = nnx.Param(initializer(ctx.make_rng("params"), (8, 2)))

    def __call__(self, x):
        return x @ self.w


@nnx.jit
def double(layer):
    layer.w = layer.w * 2


def shapes():
    """The shape of one shard for each part of the library that asks for the mesh."""
    x = jnp.ones((8, 2))
    layer = nnx.Dict(w=nnx.Param(x, ("embed", "mlp")))
    stored, rebuilt = Layer(ctx=nnx.context(0)), Layer(ctx=nnx.context(0))
    double(rebuilt)
    stored.w = jnp.ones((8, 2))
    return {
        "constraint": part(constrained(x)),
        "nnx.jit": part(compiled(x)),
        "made": part(Layer(ctx=nnx.context(0)).w),
        "assigned": part(stored.w),
        "rebuilt": part(rebuilt.w),
        "shard": part(nnx.shard(layer).w),
        "init_sharded": part(nnx.init_sharded(lambda ctx: Layer(ctx=ctx), None, None, nnx.context(0)).w),
        "report": list(nnx.sharding_report(layer).rows[0].shard_shape),
    }


def mapped():
    """The shapes that bodies of shard_map see, and how far parallel layers are from what they compute on one device."""
    seen = []

    def body(layer, x):
        seen.append(list(x.shape))
        return layer(x)

    layer = nnx.Linear(4, 4, ctx=nnx.context(0))
    moe = nnx.MoE(4, 8, 4, 2, expert_axis="model", ctx=nnx.context(0))
    x, heads = jnp.ones((8, 4)), jax.random.normal(jax.random.key(0), (2, 8, 2, 4))
    alone = moe(x), nnx.dot_product_attention(heads, heads, heads)
    with square(), nnx.logical_axis_rules([("length", "model")]):
        nnx.shard_map(body, in_specs=({nnx.Param: P()}, P("data")), out_specs=P("data"))(layer, x)
        text = str(nnx.jit(moe).trace(x).jaxpr)
        together = moe(x), jax.jit(lambda heads: nnx.ring_attention(heads, heads, heads))(heads)
    return {
        "body": seen[-1],
        "exchanged": "all_to_all" in text,
        "differences": [float(abs(a - b).max()) for a, b in zip(alone, together)],
        "attention": part(together[1]),
    }


if __name__ == "__main__":
    found = {}
    for form, under in FORMS.items():
        with under(), nnx.logical_axis_rules(RULES):
            found[form] = shapes()
    print(json.dumps({"shapes": found, "mapped": mapped()}))
