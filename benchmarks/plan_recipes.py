"""Plans of the recipes of docs/many-devices, by the real compilers: a Llama of 1.2 billion parameters on eight chips.

    python -m benchmarks.plan_recipes --on v5e-8 h100-8      the table of docs/many-devices/index.md
    python -m benchmarks.plan_recipes --on cpu-1 --tiny      to see that it runs

One row of 2,048 tokens for each chip, parameters and the moments of AdamW in float32, bfloat16 inside, layers scanned
and recomputed in the backward pass. Needs the extras `plan-tpu` and `plan-gpu`.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import nnx
from nnx.planning.machines import machine_named

FSDP, BOTH = nnx.fsdp_rules(), nnx.fsdp_tensor_parallel_rules()
RECIPES: dict[str, tuple[Callable[[int], dict[str, int]], Any, Any]] = {
    # the mesh, the rules of the model, and those of the optimizer's state
    "data parallelism": (lambda count: {"data": count}, nnx.data_parallel_rules(), None),
    "ZeRO-1": (lambda count: {"data": count}, nnx.data_parallel_rules(), FSDP),
    "FSDP": (lambda count: {"data": count}, FSDP, None),
    "tensor parallelism": (lambda count: {"data": 1, "model": count}, nnx.tensor_parallel_rules(data="data"), None),
    "FSDP × tensor parallelism": (lambda count: {"data": max(count // 2, 1), "model": min(count, 2)}, BOTH, None),
    "FSDP, moments on the host": (lambda count: {"data": count}, (nnx.on_host(nnx.OptState), *FSDP), None),
}


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


def make_plan(recipe: str, name: str, tiny: bool) -> nnx.Plan:
    make_axes, rules, for_optimizer = RECIPES[recipe]
    machine = machine_named(name)
    mesh = machine.mesh(make_axes(machine.count))
    optimizer = nnx.shard(make_optimizer(tiny), mesh, rules)
    if for_optimizer is not None:
        nnx.shard(optimizer.opt_state, mesh, for_optimizer)
    tokens = jax.ShapeDtypeStruct((machine.count, 33 if tiny else 2049), jnp.int32)
    return nnx.plan(train_step, optimizer, tokens, on=mesh, rules=rules, quick=True)


def row(recipe: str, plan: nnx.Plan) -> str:
    state = plan.parts["parameters"] + plan.parts["optimizer state"]
    per_layer = ", ".join(f"{traffic.per_layer} {traffic.kind}" for traffic in plan.collectives if traffic.per_layer)
    seconds = "–" if plan.seconds is None else f"{plan.seconds:.3f} s, {plan.bound_by}"
    fits = "" if plan.fits else " (does not fit)"
    return (
        f"| {recipe} | {plan.target.name} | {state / 2**30:.2f} | {plan.temporary / 2**30:.2f} "
        f"| {plan.bytes / 2**30:.2f}{fits} | {seconds} | {per_layer or '–'} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", nargs="+", default=["v5e-8", "h100-8"], help="the machines")
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    options = parser.parse_args()
    print(
        "| recipe | machine | state, GiB | temporary, GiB | in all, GiB | a step, at least | collectives of a layer |"
    )
    print("|---|---|---|---|---|---|---|")
    for recipe in options.recipes:
        for name in options.on:
            print(row(recipe, make_plan(recipe, name, options.tiny)), flush=True)


if __name__ == "__main__":
    main()
