"""Plans by the real compilers, for the tables of the docs: published models, recipes of many devices, a fine-tune.

    python -m benchmarks.plan_machines --out FILE.json                     every plan that is not in the file yet
    python -m benchmarks.plan_machines --only 8B --on v5e-64 --out ...     some of them, even if they are there
    python -m benchmarks.plan_machines --tiny --only FSDP --on cpu-1       to see that it runs

It needs the extras `plan-tpu` and `plan-gpu`, or two environments that have one of them each and write to the same
file: plans without a compiler are left out and named. The record is whole once it has all of them. Compilers for TPUs
are asked to be quick. `benchmarks.store` keeps the record, and `make figures` writes the tables.

- *8B*, *70B*: a training step of Llama 3.1 with 64 rows of 4,096 tokens, as `python -m nnx plan DIRECTORY --train`.
- *7B*: the steps of docs/recipes/choose-machines.md, with all 32 layers.
- The rest: the recipes of docs/many-devices, for a Llama of 1.2 billion parameters. One row of 2,048 tokens for each
  chip, parameters and moments of AdamW in float32, layers scanned and recomputed in the backward pass.
"""

import argparse
import json
import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import nnx
from benchmarks import record
from nnx.planning.machines import machine_named
from nnx.planning.published import training_step

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "recipes" / "choose-machines.md"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
SIZES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
FINETUNE = {"7B, all parameters": "full", "7B, adapters": "adapters"}  # functions of the page
FSDP, BOTH = nnx.fsdp_rules(), nnx.fsdp_tensor_parallel_rules()


class Recipe(NamedTuple):
    """A recipe of docs/many-devices: chips along the axis "model", rules of the model, and of the optimizer's state."""

    model: int
    rules: Any
    for_optimizer: Any = None


RECIPES = {
    "data parallelism": Recipe(0, nnx.data_parallel_rules()),
    "ZeRO-1": Recipe(0, nnx.data_parallel_rules(), FSDP),
    "FSDP": Recipe(0, FSDP),
    "tensor parallelism": Recipe(8, nnx.tensor_parallel_rules(data="data")),
    "FSDP × tensor parallelism": Recipe(2, BOTH),
    "FSDP, moments on the host": Recipe(0, (nnx.on_host(nnx.OptState), *FSDP)),
}
EIGHT = ("h100-1", "h100-2", "h100-4", "h200-1", "a100-4", "v5e-16", "v5p-4", "v6e-8")
# JAX knows no memory of the host for GPUs that are not here.
PLANS: dict[str, tuple[str, ...]] = {
    "8B": ("h100-8", "h200-8", "v5e-64", "v5p-16"),
    "70B": ("h100-64", "h200-64", "v6e-64", "v5p-64"),
    **dict.fromkeys(FINETUNE, EIGHT),
    **{name: ("v5e-8",) if "host" in name else ("v5e-8", "h100-8") for name in RECIPES},
}


def plan_of(name: str, machine: str, tiny: bool) -> nnx.Plan:
    """Makes one plan."""
    if name in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "config.json").write_text(json.dumps({**LLAMA, **SIZES[name]}))
            question = training_step(pathlib.Path(folder), 64, 4096)
        mesh = {"data": 16, "model": 4} if name == "70B" else None
        return nnx.plan(*question, on=[machine], mesh=mesh, quick=True)[0]  # a list: no advice
    if name in FINETUNE:
        return nnx.plan(*_finetune(FINETUNE[name]), on=[machine], quick=True)[0]
    return _recipe(RECIPES[name], machine, tiny)


def _finetune(function: str) -> tuple[Any, ...]:
    """Returns the step of the page and its arguments, without values."""
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None and "LAYERS = 1 " in found[1]
    module: dict[str, Any] = {}
    exec(found[1].replace("LAYERS = 1 ", "LAYERS = 32 "), module)
    return module["train_step"], *nnx.eval_shape(lambda: module[function]()[1:])


@nnx.jit(donate_argnums=0)
def train_step(optimizer: Any, tokens: jax.Array) -> jax.Array:
    def loss_fn(model: Any) -> jax.Array:
        return nnx.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

    loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model)
    optimizer.update(grads)
    return loss


def make_optimizer(tiny: bool) -> Any:
    sizes: dict[str, Any] = {"features": 2048, "hidden_features": 8192, "num_layers": 16, "num_heads": 32}
    if tiny:
        sizes = {"features": 64, "hidden_features": 128, "num_layers": 2, "num_heads": 8}
    config = nnx.models.DecoderConfig(
        model_type="llama",
        vocab_size=512 if tiny else 128256,
        num_kv_heads=8,
        max_length=8192,
        rotary=nnx.models.RotaryConfig(base=500000.0),
        tie_embeddings=True,
        **sizes,
    )
    model = nnx.eval_shape(
        lambda: nnx.models.Decoder(config, dtype=jnp.bfloat16, scan_layers=True, remat=True, ctx=nnx.context(0))
    )
    return nnx.Optimizer(model, optax.adamw(3e-4))


def _recipe(recipe: Recipe, name: str, tiny: bool) -> nnx.Plan:
    machine = machine_named(name)
    split = min(recipe.model, machine.count)
    axes = {"data": machine.count // split, "model": split} if split else {"data": machine.count}
    mesh = machine.mesh(axes)
    optimizer = nnx.shard(make_optimizer(tiny), mesh, recipe.rules)
    if recipe.for_optimizer is not None:
        nnx.shard(optimizer.opt_state, mesh, recipe.for_optimizer)
    tokens = jax.ShapeDtypeStruct((machine.count, 33 if tiny else 2049), jnp.int32)
    return nnx.plan(train_step, optimizer, tokens, on=[mesh], rules=recipe.rules, quick=True)[0]


def row_of(plan: nnx.Plan) -> dict[str, Any]:
    """Returns the row of a record for a plan: bytes on one chip, and what the table says besides."""
    values = {
        "state": plan.parts["parameters"] + plan.parts["optimizer state"],
        "host": plan.host,
        "temporary": plan.temporary,
        "needs": plan.bytes,
        "has": plan.target.memory,
    }
    collectives = ", ".join(f"{traffic.per_layer} {traffic.kind}" for traffic in plan.collectives if traffic.per_layer)
    return record.row(
        "bytes",
        values,
        fits=plan.fits,
        mesh=" × ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items()),
        seconds=plan.seconds,
        bound_by=plan.bound_by,
        collectives=collectives,
        jax=jax.__version__,
    )


def wanted(only: list[str], machines: list[str], known: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Iterates over the plans to make: those that are asked for, or all that are missing."""
    for name in only or PLANS:
        for machine in machines or PLANS[name]:
            if only or machines or f"{name} on {machine}" not in known:
                yield name, machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PLANS), default=[], help="what to plan")
    parser.add_argument("--on", nargs="+", default=[], metavar="MACHINE", help="the machines")
    parser.add_argument("--tiny", action="store_true", help="a tiny model for the recipes")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="the record to continue")
    options = parser.parse_args()
    figures = record.read(options.out)["figures"] if options.out and options.out.exists() else {}
    for name, machine in wanted(options.only, options.on, figures):
        try:
            plan = plan_of(name, machine, options.tiny)
        except ImportError as error:
            print(f"{name} on {machine}: left out. {error}")
            continue
        print(f"=== {name} on {machine}\n{plan}", flush=True)
        if options.out and not options.tiny:
            if options.out.exists():  # another process may have added to it
                figures = record.read(options.out)["figures"]
            figures[f"{name} on {machine}"] = row_of(plan)
            whole = all(f"{name} on {machine}" in figures for name, on in PLANS.items() for machine in on)
            made = record.make_record("plans", "python -m benchmarks.plan_machines", figures, whole=whole)
            record.write(options.out, made)


if __name__ == "__main__":
    main()
