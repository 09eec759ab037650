"""What a jitted step does to the placement of its state on eight devices; run by devices_program."""

from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import nnx
from tests.sharding.transformer import mesh_of

compilations: list[str] = []


def listen(event: str, _: float, **__: Any) -> None:
    if "backend_compile" in event:
        compilations.append(event)


jax.monitoring.register_event_duration_secs_listener(listen)


def part(x: Any) -> list[int]:
    return list(x.addressable_shards[0].data.shape)


def net(ctx: nnx.Context) -> nnx.MLP:
    """Only its placement is looked at; drawing numbers would take long to compile."""
    return nnx.MLP(16, 32, 16, kernel_init=nnx.initializers.ones, ctx=ctx)


def optimizer(ctx: nnx.Context) -> nnx.Optimizer:
    return nnx.Optimizer(net(ctx), optax.adam(1e-3))


def step(optimizer: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(optimizer.model)
    optimizer.update(grads)
    return loss


def zero_1(mesh: Any) -> Any:
    built = nnx.init_sharded(optimizer, mesh, nnx.data_parallel_rules(), nnx.context(0))
    nnx.shard(built.opt_state, mesh, nnx.fsdp_rules())
    return built


def made_after_the_model(mesh: Any) -> Any:
    return nnx.Optimizer(nnx.init_sharded(net, mesh, nnx.fsdp_rules(), nnx.context(0)), optax.adam(1e-3))


def with_shardings(mesh: Any) -> Any:
    return nnx.init_sharded(optimizer, mesh, nnx.fsdp_rules(), nnx.context(0))


def run(mesh: Any, built: Any, **options: Any) -> dict[str, Any]:
    """The compilations of each of three steps, the traces, and how a kernel and its moment are split in the end."""
    x = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P("data")))
    jitted, counts = nnx.jit(step, **options), []
    with jax.set_mesh(mesh):
        for _ in range(3):
            before = len(compilations)
            jitted(built, x)
            counts.append(len(compilations) - before)
    arrays = (built.model.layers[0].kernel, built.opt_state.get_path("0/mu/layers/0/kernel"))
    return {
        "compilations": counts,
        "traces": jitted.trace_count,
        "parts": [part(array) for array in arrays],
    }


def steps() -> dict[str, Any]:
    """Steps of optimizers that were built and placed in several ways, with and without donation."""
    mesh, found = mesh_of(("data", 8)), {}
    for make in (zero_1, made_after_the_model):
        for donated in ({}, {"donate_argnums": 0}):
            found[f"{make.__name__} {len(donated)}"] = run(mesh, make(mesh), **donated)
    abstract = nnx.eval_shape(optimizer, nnx.context(0))
    shardings = nnx.logical_to_mesh_sharding(abstract, mesh, nnx.fsdp_rules())
    rows = NamedSharding(mesh, P("data"))
    for donated in ({}, {"donate_argnums": 0}):
        options = {"in_shardings": (shardings, rows), **donated}
        found[f"in_shardings {len(donated)}"] = run(mesh, with_shardings(mesh), **options)
    mesh, rules = mesh_of(("data", 8), ("model", 1)), nnx.fsdp_tensor_parallel_rules()
    found["one device along an axis 0"] = run(mesh, nnx.init_sharded(optimizer, mesh, rules, nnx.context(0)))
    return found


def moved() -> dict[str, Any]:
    """One function, and a model that is moved between its calls; it stays where it was put."""
    mesh = mesh_of(("data", 8))
    double = nnx.jit(lambda model: setattr(model, "w", model.w * 2))
    model, parts = nnx.Dict(w=nnx.Param(jnp.ones(8), ("embed",))), []
    for rules in ([], [("embed", "data")], []):
        nnx.shard(model, mesh, rules)
        for _ in range(2):
            double(model)
        parts.append(part(model.w))
    return {"parts": parts, "values": model.w.tolist(), "traces": double.trace_count}


def given_shardings() -> dict[str, Any]:
    """A Module, a record and arrays that `in_shardings` and `out_shardings` place."""
    mesh, rules = mesh_of(("data", 8)), nnx.fsdp_rules()
    rows = NamedSharding(mesh, P("data"))
    shardings = nnx.logical_to_mesh_sharding(nnx.eval_shape(net, nnx.context(0)), mesh, rules)
    built = nnx.jit(net, out_shardings=shardings)(nnx.context(0))

    params, moduledef = net(nnx.context(0)).partition()
    state = nnx.TrainState(moduledef, params=params, tx=optax.adam(1e-3))
    by_record = nnx.logical_to_mesh_sharding(state, mesh, rules)
    kept = nnx.jit(lambda state, x: (state, x), in_shardings=(by_record, rows))(state, jnp.ones(8))

    donating = nnx.jit(lambda model, x: setattr(model, "w", model.w + x), donate_argnums=0, in_shardings=(rows, rows))
    text = donating.lower(nnx.Dict(w=nnx.Param(jnp.ones(8))), jnp.ones(8)).as_text()
    return {
        "built": part(built.layers[0].kernel),
        "record": [part(kept[0].params["layers/0/kernel"].value), part(kept[1])],
        "donated": text.split("->")[0].count('{"data"}'),
    }
