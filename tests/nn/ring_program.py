"""What test_ring_attention looks at: run with eight virtual devices, prints one JSON object.

Every case is one call of attention, with a ring and without. All cases of one mesh are compiled together.
"""

import json
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import nnx
from nnx.nn.attention import blocks

BATCH, LENGTH, HEADS, FEATURES = 2, 16, 4, 8
MASK = jax.random.bernoulli(jax.random.key(9), 0.3, (BATCH, HEADS, LENGTH, LENGTH)).at[0, :, 3].set(False)

CASES = {
    "everything visible": {},
    "causal": {"is_causal": True},
    "causal, large logits": {"is_causal": True, "scale": 60.0},
    "mask with an unseen key": {"mask": MASK},
    "mask that broadcasts, causal": {"mask": MASK[:, :1, :1], "is_causal": True},
    "ragged rows": {"key_value_seq_lengths": jnp.array([0, 9]), "is_causal": True},
    "window": {"is_causal": True, "local_window_size": (3, 0), "logits_soft_cap": 2.0},
    "window on both sides": {"local_window_size": 5},
}


def mesh_of(sizes, names, type=AxisType.Auto):
    return jax.make_mesh(sizes, names, axis_types=(type,) * len(names))


ALL_AXES = (2, 2, 2), ("data", "sequence", "model")


# Functions, because this file is also imported where there is one device: by pytest, which looks for doctests.
def ring():
    return mesh_of((8,), ("sequence",)), [("length", "sequence")]


def meshes():
    rules = [("batch", "data"), ("length", "sequence"), ("heads", "model")]
    return {
        "a ring of eight": ring(),
        "with data and tensor parallelism": (mesh_of(*ALL_AXES), rules),
        "explicit axes": (mesh_of(*ALL_AXES, type=AxisType.Explicit), rules),
        "a ring over two axes": (mesh_of(*ALL_AXES), [("batch", "data"), ("length", ("sequence", "model"))]),
    }


def arrays(dtype=jnp.float32):
    query, key, value, weights = jax.random.split(jax.random.key(0), 4)
    draw = lambda key, heads: jax.random.normal(key, (BATCH, LENGTH, heads, FEATURES), dtype)  # noqa: E731
    return (draw(query, HEADS), draw(key, 2), draw(value, 2)), draw(weights, HEADS)


def values_and_gradients(attention, cases, weights, **options):
    def run(*inputs):
        found = {}
        for name, case in cases.items():

            def weighted_sum(*inputs, case=case):
                out = attention(*inputs, **case, **options)
                return (out * weights).sum(), out

            (_, out), grads = jax.value_and_grad(weighted_sum, argnums=(0, 1, 2), has_aux=True)(*inputs)
            found[name] = (out, *grads)
        return found

    return jax.jit(run)


def differences(mesh, rules, cases=CASES):
    """Per case, the largest absolute difference of the output and of the three gradients."""
    inputs, weights = arrays()
    expected = values_and_gradients(nnx.dot_product_attention, cases, weights)(*inputs)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        found = values_and_gradients(nnx.ring_attention, cases, weights)(*inputs)
    return {
        name: [float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(found[name], expected[name])]
        for name in cases
    }


def in_blocks(mesh, rules, cases):
    """The same with each device's part of the text in blocks of one query."""
    with mock.patch.multiple(blocks, LONG=1, SMALLEST=1, LARGEST=1):
        return differences(mesh, rules, cases)


def inside_shard_map():
    mesh, rules = ring()
    (x, *_), _ = arrays()
    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        local = lambda x: nnx.ring_attention(x, x, x, is_causal=True)  # noqa: E731
        mapped = jax.shard_map(local, in_specs=P(None, "sequence"), out_specs=P(None, "sequence"))
        return float(jnp.abs(mapped(x) - nnx.dot_product_attention(x, x, x, is_causal=True)).max())


def in_bfloat16():
    (inputs, weights), (mesh, rules) = arrays(jnp.bfloat16), ring()
    run = lambda attention: values_and_gradients(attention, {"causal": CASES["causal"]}, weights)(*inputs)  # noqa: E731
    expected = run(nnx.dot_product_attention)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        found = run(nnx.ring_attention)
    worst = lambda a, b: float(np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32)).max())  # noqa: E731
    pairs = list(zip(found["causal"], expected["causal"]))
    return [str(found["causal"][0].dtype), max(worst(a, b) for a, b in pairs)]


def compiled(length, **options):
    """The collectives and temporary bytes of a forward and backward pass on one device."""
    mesh, rules = ring()
    split = jax.NamedSharding(mesh, P(None, "sequence"))
    x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32, sharding=split)

    def loss(x):
        return nnx.ring_attention(x, x, x, is_causal=True, **options).sum()

    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        program = jax.jit(jax.grad(loss), out_shardings=split).lower(x).compile()
    kinds = re.findall(r"(all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(", program.as_text())
    loops = [int(n) for n in re.findall(r'"known_trip_count":\{"n":"(\d+)"', program.as_text())]
    return {"kinds": sorted(set(kinds)), "bytes": program.memory_analysis().temp_size_in_bytes, "loops": loops}


def refusals():
    mesh, rules = ring()
    x, texts = jnp.ones((2, 16, 4, 8)), {}
    calls = {
        "bias": lambda: nnx.ring_attention(x, x, x, bias=jnp.ones((16, 16))),
        "dropout": lambda: nnx.ring_attention(x, x, x, dropout_rate=0.1),
        "weights": lambda: nnx.ring_attention(x, x, x, module=nnx.Dict()),
        "sinks": lambda: nnx.ring_attention(x, x, x, sinks=jnp.zeros(4)),
        "length": lambda: nnx.ring_attention(x[:, :10], x[:, :10], x[:, :10]),
        "two lengths": lambda: nnx.ring_attention(x[:, :4], x, x),
    }
    for name, call in calls.items():
        with jax.set_mesh(mesh), nnx.logical_axis_rules([*rules, *([("length", None)] if name[0] == "t" else [])]):
            try:
                call()
            except ValueError as error:
                texts[name] = str(error)
    return texts


if __name__ == "__main__":
    few = {name: CASES[name] for name in ("causal", "mask with an unseen key")}
    found = {
        "differences": {
            "a ring of eight": differences(*ring()),
            **{name: differences(*mesh, few) for name, mesh in meshes().items() if name != "a ring of eight"},
            "a ring in blocks": in_blocks(*ring(), few),
            "explicit axes in blocks": in_blocks(*meshes()["explicit axes"], few),
        },
        "inside shard_map": inside_shard_map(),
        "bfloat16": in_bfloat16(),
        "long": compiled(4096),
        "window": compiled(4096, local_window_size=(600, 0)),
        "refusals": refusals(),
    }
    print(json.dumps(found))
