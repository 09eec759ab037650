"""How optimizers and averages lie on eight devices, in whatever order things were built; run by devices_program."""

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import nnx
from tests.sharding.transformer import mesh_of

RULES = nnx.fsdp_rules()


LECUN = nnx.initializers.lecun_normal()


class Layers(nnx.Module):
    """Every array of it can be split by eight; the names are the defaults of the layers."""

    def __init__(self, *, init: Any = LECUN, ctx: nnx.Context):
        self.embed = nnx.Embed(64, 64, embedding_init=init, ctx=ctx)
        self.mlp = nnx.MLP(64, 128, 64, kernel_init=init, ctx=ctx)
        self.conv = nnx.Conv(64, 32, (3,), kernel_init=init, ctx=ctx)


def label(params: Any) -> Any:
    return params.map(lambda path, leaf: leaf.replace(value="frozen" if path.startswith("embed") else "trained"))


def is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


TRANSFORMATIONS = {
    "adam": lambda: optax.adam(1e-3),
    "a chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-3))),
    "a mask": lambda: optax.masked(optax.adam(1e-3), is_matrix),
    "several": lambda: optax.multi_transform({"trained": optax.adam(1e-3), "frozen": optax.sgd(0.1, 0.9)}, label),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "accumulation": lambda: optax.MultiSteps(optax.adam(1e-3), 2),
    "a history": lambda: optax.scale_by_lbfgs(memory_size=3),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=8),
    "muon": lambda: optax.contrib.muon(1e-3),
}
IN_EVERY_ORDER = ("adam", "adafactor", "muon", "accumulation", "an average")


def bytes_on_each(tree: Any) -> tuple[int, int]:
    """Bytes of the arrays of a Module or record: those on the fullest device, and an eighth of all."""
    held: dict[Any, int] = {}
    total = 0
    for x in jax.tree.leaves(tree.get_state() if isinstance(tree, nnx.Module) else tree):
        total += x.nbytes
        for shard in x.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values()), total // 8


def net(ctx: nnx.Context) -> Layers:
    """Only its shapes are looked at; drawing numbers would take long to compile."""
    return Layers(init=nnx.initializers.ones, ctx=ctx)


def built_together(mesh: Any, make: Any) -> Any:
    return nnx.init_sharded(lambda ctx: make(net(ctx)), mesh, RULES, nnx.context(0))


def model_first(mesh: Any, make: Any) -> Any:
    return make(nnx.init_sharded(net, mesh, RULES, nnx.context(0)))


def placed_afterwards(mesh: Any, make: Any) -> Any:
    return nnx.shard(make(net(nnx.context(0))), mesh, RULES)


def loaded(mesh: Any, make: Any) -> Any:
    target = nnx.shard(make(nnx.eval_shape(Layers, ctx=nnx.context(0))), mesh, RULES)
    with tempfile.TemporaryDirectory() as folder:
        nnx.save(Path(folder) / "saved", make(net(nnx.context(0))))
        return nnx.load(Path(folder) / "saved", target)


def record(ctx: nnx.Context) -> Any:
    """A TrainState whose factored moments have fewer axes than their parameters, one of which is square."""
    params, moduledef = net(ctx).partition()
    return nnx.TrainState(moduledef, params=params, tx=TRANSFORMATIONS["adafactor"]())


def optimizer_state() -> dict[str, Any]:
    """Bytes on one device and an eighth of all, by what is built and in which order."""
    mesh = mesh_of(("data", 8))
    makers = {name: lambda model, tx=tx: nnx.Optimizer(model, tx()) for name, tx in TRANSFORMATIONS.items()}
    makers["an average"] = lambda model: nnx.Dict(model=model, ema=nnx.EMA(model))
    every_order = (built_together, model_first, placed_afterwards, loaded)
    records = {
        "a record, built_together": nnx.init_sharded(record, mesh, RULES, nnx.context(0)),
        "a record, placed_afterwards": nnx.shard(record(nnx.context(0)), mesh, RULES),
    }
    return {name: bytes_on_each(state) for name, state in records.items()} | {
        f"{name}, {order.__name__}": bytes_on_each(order(mesh, make))
        for name, make in makers.items()
        for order in (every_order if name in IN_EVERY_ORDER else (placed_afterwards,))
    }


def factored_moments() -> list[Any]:
    """The parts of the moments of adafactor, which have fewer axes than their parameters."""
    make = lambda model: nnx.Optimizer(model, TRANSFORMATIONS["adafactor"]())  # noqa: E731
    found = placed_afterwards(mesh_of(("data", 8)), make).opt_state["0"].get_state()
    paths = [f"{name}/{path}" for path in ("mlp/layers/0/kernel", "embed/embedding") for name in ("v_row", "v_col")]
    return [[str(found[path].sharding), list(found[path].value.addressable_shards[0].data.shape)] for path in paths]


def outer_names() -> list[str]:
    """The names of a moment whose parameter was named by a class around the model that the optimizer was made for."""

    class Whole(nnx.Module):
        logical_axes = {"head/kernel": ("embed", "vocab")}

        def __init__(self, *, ctx):
            self.head = nnx.Linear(8, 16, ctx=ctx)
            self.optimizer = nnx.Optimizer(self.head, optax.adam(1e-3))

    whole = nnx.init_sharded(lambda ctx: Whole(ctx=ctx), mesh_of(("data", 8)), RULES, nnx.context(0))
    moment = whole.optimizer.opt_state["0"]["mu"].variable("kernel")
    return [str(moment.sharding), str(moment.value.sharding.spec)]


def skipped_updates() -> dict[str, Any]:
    """A sharded step whose gradient is not finite in one element, between two that are."""
    mesh = mesh_of(("data", 8))
    build = lambda ctx: nnx.Optimizer(Layers(ctx=ctx), optax.adam(1e-2), skip_nonfinite=True)  # noqa: E731
    optimizer = nnx.init_sharded(build, mesh, RULES, nnx.context(0))

    @nnx.jit
    def step(optimizer, bad):
        grads = jax.tree.map(jnp.ones_like, optimizer.model.filter(nnx.Param))
        kernel = grads["mlp/layers/0/kernel"]
        kernel = kernel.replace(value=kernel.value.at[-1, -1].set(jnp.where(bad, jnp.nan, 1.0)))
        optimizer.update(grads | nnx.State({"mlp/layers/0/kernel": kernel}))

    values = []
    for bad in (False, True, False):
        step(optimizer, bad)
        values.append(
            [np.asarray(x) for x in jax.tree.leaves((optimizer.model.get_state(), optimizer.opt_state.get_state()))]
        )
    same = [all((a == b).all() for a, b in zip(one, other)) for one, other in zip(values, values[1:])]
    return {
        "changed": [not x for x in same],
        "counts": [int(optimizer.step), int(optimizer.skipped), int(optimizer.opt_state["0"].count)],
        "finite": all(np.isfinite(x).all() for x in values[-1]),
        "part": list(optimizer.opt_state.get_path("0/mu/embed/embedding").addressable_shards[0].data.shape),
        "traces": step.trace_count,
    }


def experts() -> dict[str, Any]:
    """The parts of layers that are stacked along an axis with a rule of its own."""
    mesh, rules = mesh_of(("data", 8)), [("expert", "data"), *nnx.fsdp_rules()]
    options = {"variable_axes": {nnx.Param: 0}, "split_rngs": "params"}
    options["metadata_params"] = {nnx.PARTITION_NAME: "expert"}
    make = nnx.Vmap(nnx.MLP, axis_size=16, in_axes=None, **options)
    build = lambda ctx: nnx.Optimizer(make(24, 40, 24, ctx=ctx), optax.adam(1e-3))  # noqa: E731
    optimizer = nnx.init_sharded(build, mesh, rules, nnx.context(0))
    path = "vmap_module/layers/0/kernel"
    arrays = (optimizer.model.get_path(path), optimizer.opt_state.get_path(f"0/mu/{path}"))
    return {"parts": [list(x.addressable_shards[0].data.shape) for x in arrays]}
