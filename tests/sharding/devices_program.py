"""What test_devices looks at: run with eight virtual devices, prints one JSON object."""

import json
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import nnx

sys.path.insert(0, str(Path(__file__).parent))
from transformer import collectives, mesh_of, train, train_step  # noqa: E402

SETTINGS = {
    "one device": ([("data", 1), ("model", 1)], nnx.fsdp_tensor_parallel_rules()),
    "data parallel": ([("data", 8)], nnx.data_parallel_rules()),
    "fsdp": ([("data", 8)], nnx.fsdp_rules()),
    "tensor parallel": ([("model", 4)], nnx.tensor_parallel_rules()),
    "fsdp and tensor parallel": ([("data", 2), ("model", 4)], nnx.fsdp_tensor_parallel_rules()),
}


def part(x):
    return list(x.addressable_shards[0].data.shape)


def training():
    """Losses, shard shapes of everything, and the collectives of the compiled step, per setting."""
    found = {}
    for name, (axes, rules) in SETTINGS.items():
        mesh = mesh_of(*axes)
        losses, optimizer, batch = train(mesh, rules)
        parts = {path: [list(leaf.value.shape), part(leaf.value)] for path, leaf in optimizer.get_state().items()}
        found[name] = {"losses": losses, "parts": parts}
        if "tensor" in name or name == "fsdp":
            with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
                found[name]["collectives"] = collectives(train_step.lower(optimizer, batch).compile().as_text())
    return found


def explicit_axes():
    """Data parallelism over a mesh whose axes have the explicit type, with the sharding of an activation on the way."""
    mesh = mesh_of(("data", 8), type=AxisType.Explicit)
    rules = nnx.data_parallel_rules()
    seen = []

    def loss_fn(model, x):
        y = nnx.with_logical_constraint(jnp.tanh(model(x)), ("batch", "embed"))
        seen.append(str(jax.typeof(y)))
        return jnp.mean(y**2)

    def losses(model, x):
        step = nnx.jit(lambda model, x: nnx.value_and_grad(loss_fn)(model, x))
        for _ in range(3):
            loss, grads = step(model, x)
            model.update_state(jax.tree.map(lambda w, g: w - g, model.filter(nnx.Param), grads))
            yield float(loss)

    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    plain = list(losses(nnx.Linear(8, 4, ctx=nnx.context(0).fork()), jnp.asarray(x)))
    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        model = nnx.init_sharded(lambda ctx: nnx.Linear(8, 4, ctx=ctx), mesh, rules, nnx.context(0))
        placed = jax.device_put(x, nnx.logical_to_mesh_sharding(P("batch", None), mesh, rules))
        sharded = list(losses(model, placed))
        fsdp = nnx.init_sharded(lambda ctx: nnx.Linear(8, 4, ctx=ctx), mesh, nnx.fsdp_rules(), nnx.context(0))
    return {"plain": plain, "sharded": sharded, "type": seen[-1], "kernel": str(jax.typeof(fsdp.kernel))}


def constraints():
    """What a Variable with a constraint of its own does under nnx.jit and on assignment, on three kinds of mesh."""
    rules = [("embed", "data"), ("mlp", "model")]
    init = nnx.with_logical_partitioning(jax.nn.initializers.ones, ("embed", "mlp"))
    kinds = {
        "automatic": (AxisType.Auto, AxisType.Auto),
        "explicit": (AxisType.Explicit, AxisType.Explicit),
        "mixed": (AxisType.Explicit, AxisType.Auto),
    }
    found = {}
    for name, types in kinds.items():
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=types)
        model = nnx.Dict(w=nnx.Param(init(jax.random.key(0), (8, 4))))

        @nnx.jit
        def double(model):
            model.w = model.w * 2

        before = part(model.w)
        with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
            double(model)
            jitted = part(model.w)
            model.w = jnp.zeros((8, 4))
            found[name] = [before, jitted, part(model.w)]
    return found


def errors():
    """What goes wrong on a real mesh, in words."""
    mesh = mesh_of(("data", 4), ("model", 2))
    model = nnx.Dict(layer=nnx.Linear(8, 6, ctx=nnx.context(0)))
    texts = []
    for call in (
        lambda: nnx.shard(model, mesh, [("out", "data")]),
        lambda: nnx.init_sharded(lambda ctx: nnx.Linear(6, 8, ctx=ctx), mesh, [("in", "data")], nnx.context(0)),
    ):
        try:
            call()
            texts.append("")
        except ValueError as error:
            texts.append(str(error))
    return texts


def peak_of_initialisation():
    """How many bytes the process grew by, at most, while a large sharded table was made; and the size of the table."""
    mesh = mesh_of(("data", 8))
    process, peak, done = psutil.Process(), [0], threading.Event()

    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], process.memory_info().rss)
            time.sleep(0.002)

    def build(rows):
        return nnx.init_sharded(lambda ctx: nnx.Embed(rows, 4096, ctx=ctx), mesh, nnx.fsdp_rules(), nnx.context(0))

    build(8)  # whatever is loaded once
    before = process.memory_info().rss
    watcher = threading.Thread(target=watch)
    watcher.start()
    table = build(4096).embedding
    table.block_until_ready()
    done.set()
    watcher.join()
    return {"grown": peak[0] - before, "bytes": table.nbytes, "part": part(table)}


if __name__ == "__main__":
    checks = (peak_of_initialisation, training, explicit_axes, constraints, errors)
    print(json.dumps({check.__name__: check() for check in checks}))
