"""What test_devices looks at: run with eight virtual devices, prints one JSON object."""

import contextlib
import json
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

import nnx
from tests.sharding.optimizer_checks import experts, factored_moments, optimizer_state, outer_names, skipped_updates
from tests.sharding.step_checks import given_shardings, moved, steps
from tests.sharding.transformer import Block, collectives, make, mesh_of, run, train_step

SETTINGS = {
    "one device": ([("data", 1), ("model", 1)], nnx.fsdp_tensor_parallel_rules()),
    "fsdp": ([("data", 8)], nnx.fsdp_rules()),
    "tensor parallel": ([("model", 4)], nnx.tensor_parallel_rules()),
    "fsdp and tensor parallel": ([("data", 2), ("model", 4)], nnx.fsdp_tensor_parallel_rules()),
}


def part(x):
    return list(x.addressable_shards[0].data.shape)


@contextlib.contextmanager
def compiled_memory():
    """Collects what the compiler says of the memory, on each device, of programs whose results are sharded."""
    jit, found = jax.jit, []

    def recording_jit(*function, **options):
        if "out_shardings" not in options:
            return jit(*function, **options)

        def call(*arguments):
            program = jit(*function, **options).lower(*arguments).compile()
            found.append(program.memory_analysis())
            return program(*arguments)

        return call

    with mock.patch.object(jax, "jit", recording_jit):
        yield found


def size(memory, model):
    """Bytes that building a model takes on one device at most, those of the parts that stay there, and of the whole."""
    arrays = jax.tree.leaves(model.get_state())
    parts = sum(x.addressable_shards[0].data.nbytes for x in arrays)
    peak = memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return {"peak": peak, "parts": parts, "whole": sum(x.nbytes for x in arrays)}


def training():
    """Losses, shard shapes of everything, the peak of building it, and the collectives of the compiled step."""
    found = {}
    for name, (axes, rules) in SETTINGS.items():
        mesh = mesh_of(*axes)
        with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
            with compiled_memory() as memory:
                optimizer, batch = make(mesh, rules)
            found[name] = {"size": size(memory[0], optimizer.model), "losses": run(optimizer, batch)}
            parts = {path: [list(leaf.value.shape), part(leaf.value)] for path, leaf in optimizer.get_state().items()}
            found[name]["parts"] = parts
            if "tensor" in name or name == "fsdp":
                found[name]["collectives"] = collectives(train_step.lower(optimizer, batch).compile().as_text())
    return found


def explicit_axes():
    """Losses on mesh axes of the explicit type, and the types of a parameter, of its moment and of the logits."""
    axes, rules = SETTINGS["fsdp and tensor parallel"]
    mesh = mesh_of(*axes, type=AxisType.Explicit)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        optimizer, batch = make(mesh, rules)
        losses = run(optimizer, batch)
        model, path = optimizer.model, "blocks/scan_module/mlp/layers/0/kernel"
        arrays = (model.get_path(path), optimizer.opt_state.get_path(f"0/mu/{path}"), model(batch))
    return {"losses": losses, "types": [str(jax.typeof(array)) for array in arrays]}


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


def donation():
    """The cells of a donated Module that share the buffers of sharded arrays, or of one shard, after two steps."""
    axis = jax.NamedSharding(mesh_of(("data", 8)), jax.P("data"))
    x = jax.device_put(jnp.zeros(8), axis)
    same = jax.make_array_from_single_device_arrays(x.shape, axis, [shard.data for shard in x.addressable_shards])
    model = nnx.Dict(a=nnx.Param(x), b=nnx.Param(same), c=nnx.Param(x.addressable_shards[0].data))

    @nnx.jit(donate_argnums=0)
    def step(model):
        model.a = model.a + 1

    step(model)
    model.b = jax.device_put(model.a, axis)
    step(model)
    return [value.tolist() for value in (model.a, model.b, model.c)]


def unrolled():
    """The peak of building a deep model, layer by layer."""

    def build(ctx):
        return nnx.Dict(embed=nnx.Embed(256, 64, ctx=ctx), blocks=nnx.Sequence(Block(64, ctx=ctx) for _ in range(6)))

    axes, rules = SETTINGS["fsdp and tensor parallel"]
    with compiled_memory() as memory:
        model = nnx.init_sharded(build, mesh_of(*axes), rules, nnx.context(0))
    return size(memory[0], model)


if __name__ == "__main__":
    warnings.simplefilter("error", UserWarning)
    checks = (training, unrolled, explicit_axes, constraints, errors, donation)
    checks += (optimizer_state, factored_moments, outer_names, skipped_updates, experts)
    checks += (steps, moved, given_shardings)
    print(json.dumps({check.__name__: check() for check in checks}))
