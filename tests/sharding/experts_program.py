"""What test_experts looks at: run with eight virtual devices, prints one JSON object."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import nnx
from tests.sharding.transformer import collectives, mesh_of

EXPERTS, TOKENS = 16, 64
RULES = [("expert", "expert"), *nnx.fsdp_rules("expert")]


def make(ctx, **options):
    biases = {"use_bias": True, "use_router_bias": True, "bias_init": nnx.initializers.normal(0.1)}
    return nnx.MoE(8, 12, EXPERTS, 2, num_shared=1, ctx=ctx, **biases, **options)


def loss(layer, x, y):
    error = jnp.mean((layer(x) - y) ** 2)
    losses = nnx.router_losses(layer)
    return error + 0.1 * losses.load_balancing + 0.01 * losses.z


step = nnx.jit(nnx.value_and_grad(loss))


def data():
    random = np.random.default_rng(0)
    return [jnp.asarray(np.abs(random.standard_normal((8, TOKENS // 8, 8))), jnp.float32) for _ in range(2)]


def one_sided(layer):
    """Makes all tokens choose two experts of one device."""
    layer.router = layer.router.at[:, 4].set(3.0).at[:, 5].set(2.0)


def difference(found, expected):
    """The largest difference of the loss and of any gradient, relative to the largest value of each."""
    found, expected = jax.tree.map(np.asarray, (found, expected))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def distributed():
    """Loss and gradients against those of one device, the parts on a device, and the collectives."""
    mesh, found = mesh_of(("expert", 8)), {}
    for name, change in {"random": lambda layer: None, "one-sided": one_sided}.items():
        whole = make(nnx.context(0))
        change(whole)
        expected = step(whole, *data())
        with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
            layer = make(nnx.context(0), expert_axis="expert")
            change(layer)
            nnx.shard(layer, mesh, RULES)
            batch = [jax.device_put(x, jax.NamedSharding(mesh, P("expert"))) for x in data()]
            found[name] = difference(step(layer, *batch), expected)
            found[f"{name} losses"] = difference(nnx.router_losses(layer), nnx.router_losses(whole))
    with jax.set_mesh(mesh):
        found["parts"] = [list(x.addressable_shards[0].data.shape) for x in (layer.gate, layer.down)]
        forward = nnx.jit(lambda layer, x: layer(x, update_stats=False))
        found["collectives"] = collectives(forward.lower(layer, batch[0]).compile().as_text())
        few = data()[0][0, :3]  # cannot be divided by eight devices
        found["few tokens"] = difference(forward(layer, few), forward(whole, few))
    return found


def with_tensor_parallelism():
    """The same on a mesh whose other axis is left to the partitioner."""
    mesh = mesh_of(("expert", 4), ("model", 2))
    rules = [("expert", "expert"), *nnx.tensor_parallel_rules("model", "expert")]
    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        layer = make(nnx.context(0), expert_axis="expert")
        nnx.shard(layer, mesh, rules)
        found = step(layer, *data())
    part = list(layer.gate.addressable_shards[0].data.shape)
    return {"difference": difference(found, step(make(nnx.context(0)), *data())), "part": part}


def inside_shard_map():
    """The layer inside of the user's own shard_map."""
    mesh = mesh_of(("expert", 8))
    layer = make(nnx.context(0), expert_axis="expert", update_stats=False)
    split = {_is_expert: P("expert"), ...: P()}
    run = nnx.shard_map(lambda layer, x: layer(x), mesh=mesh, in_specs=(split, P("expert")), out_specs=P("expert"))
    x, _ = data()
    return difference(nnx.jit(run)(layer, x), layer(x))


def _is_expert(path, leaf):
    return path in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


def errors():
    """What goes wrong on a real mesh, in words."""
    layer = nnx.MoE(8, 12, 6, 2, expert_axis="expert", ctx=nnx.context(0))
    with jax.set_mesh(mesh_of(("expert", 4))):
        try:
            layer(data()[0])
        except ValueError as error:
            return str(error)


def on_explicit_axes():
    """Loss and gradients on explicit axes, under rules that do not say how experts are split."""
    found = {}
    whole = make(nnx.context(0))
    expected = step(whole, *data())
    cases = {
        "FSDP": ([("data", 8)], "data", nnx.fsdp_rules()),
        "data parallelism": ([("data", 8)], "data", nnx.data_parallel_rules()),
    }
    for name, (axes, expert_axis, rules) in cases.items():
        mesh = mesh_of(*axes, type=AxisType.Explicit)
        with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
            layer = nnx.shard(make(nnx.context(0), expert_axis=expert_axis), mesh, rules)
            batch = [jax.device_put(x, jax.NamedSharding(mesh, P("data"))) for x in data()]
            found[name] = difference(step(layer, *batch), expected)
    return found


if __name__ == "__main__":
    checks = (distributed, with_tensor_parallelism, inside_shard_map, on_explicit_axes, errors)
    print(json.dumps({check.__name__: check() for check in checks}))
