"""Plans next to measurements: what `nnx.plan` says about a step for an H200, and what the H200 says.

    python -m benchmarks.gpu.plans --plan FILE.json            plan all programs; needs no GPU, only its compiler
    python -m benchmarks.gpu.plans --measure NAME FILE.json    run one program on the GPU of this machine
    python -m benchmarks.gpu.plans --table PLANS MEASURED ...  the table of docs/guide/planning.md
    ... --tiny                                                 tiny models on a CPU, to see that it runs

Each measurement is a process of its own, because the peak of the memory in use is that of the process. Models are built
on the device by a compiled constructor, which needs less than a step does.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import nnx
from benchmarks.gpu import models, train

STEPS, TURNS = 8, 3
NEW = 128  # tokens that a decoding program writes


@dataclasses.dataclass(frozen=True)
class Case:
    """A step, a function that builds its Modules, and the shapes of its batch."""

    step: Callable[..., Any]
    build: Callable[[], Any]
    batch: tuple[jax.ShapeDtypeStruct, ...]
    per_step: int = 1  # repetitions within a call: tokens that are written


def train_lm(setting: train.Setting) -> Case:
    def build() -> Any:
        return nnx.Optimizer(train.make_model(setting), train.adamw(train.decayed))

    shape = (setting.batch, setting.config.context + 1)
    return Case(language_step, build, (jax.ShapeDtypeStruct(shape, jnp.int32),))


@nnx.jit(donate_argnums=0, compiler_options=train.GPU_OPTIONS)
def language_step(optimizer: Any, tokens: jax.Array) -> jax.Array:
    def loss_fn(model: Any) -> jax.Array:
        return nnx.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

    loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model)
    optimizer.update(grads)
    return loss


def billion(tiny: bool, **options: Any) -> Any:
    """Makes a Decoder with the sizes of Llama 3.2 1B, layers scanned."""
    sizes = models.TINY_SHAPES["llama"] if tiny else models.SHAPES["llama"]
    config = nnx.models.DecoderConfig(
        model_type="llama",
        vocab_size=sizes.vocab,
        features=sizes.width,
        hidden_features=sizes.hidden,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        max_length=8192,
        rotary=nnx.models.RotaryConfig(base=500000.0),
        tie_embeddings=True,
    )
    return nnx.models.Decoder(config, dtype=jnp.bfloat16, scan_layers=True, ctx=nnx.context(0), **options)


def train_billion(tiny: bool, remat: bool) -> Case:
    def build() -> Any:
        return nnx.Optimizer(billion(tiny, remat=remat), optax.adamw(3e-4))

    shape = (2, 33) if tiny else (8, 2049) if remat else (4, 2049)
    return Case(language_step, build, (jax.ShapeDtypeStruct(shape, jnp.int32),))


def decode(tiny: bool, rows: int) -> Case:
    new = 8 if tiny else NEW

    @nnx.jit
    def write(model: Any, prompts: jax.Array) -> jax.Array:
        return nnx.generate(model, prompts, max_new_tokens=new, temperature=0.0)

    def build() -> Any:
        return billion(tiny, param_dtype=jnp.bfloat16)

    return Case(write, build, (jax.ShapeDtypeStruct((rows, 8 if tiny else 64), jnp.int32),), new)


def train_resnet(tiny: bool) -> Case:
    sizes = {"stem_features": 8, "stage_features": (8, 16), "depths": (1, 1)} if tiny else {}
    config = nnx.models.ResNetConfig(task="image_classification", labels=tuple(map(str, range(1000))), **sizes)

    def build() -> Any:
        model = nnx.models.ResNetClassifier(config, dtype=jnp.bfloat16, ctx=nnx.context(0))
        return nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9))

    @nnx.jit(donate_argnums=0)
    def step(optimizer: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        def loss_fn(model: Any) -> jax.Array:
            return nnx.cross_entropy(logits_of(model, images), labels)

        loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model)
        optimizer.update(grads)
        return loss

    rows, side = (2, 32) if tiny else (256, 224)
    images = jax.ShapeDtypeStruct((rows, side, side, 3), jnp.bfloat16)
    return Case(step, build, (images, jax.ShapeDtypeStruct((rows,), jnp.int32)))


def logits_of(model: Any, images: jax.Array) -> jax.Array:
    return model(images, use_running_average=False)


def cases(tiny: bool) -> dict[str, Callable[[], Case]]:
    settings = train.TINY_SETTINGS if tiny else train.SETTINGS
    return {
        "GPT-2 124 M, training": lambda: train_lm(settings["gpt2"]),
        "Llama 341 M, training": lambda: train_lm(settings["llama"]),
        "Llama 1.2 B, training": lambda: train_billion(tiny, False),
        "Llama 1.2 B, training, recomputed": lambda: train_billion(tiny, True),
        "Llama 1.2 B, decoding, 1 row": lambda: decode(tiny, 1),
        "Llama 1.2 B, decoding, 64 rows": lambda: decode(tiny, 64),
        "ResNet-50, training": lambda: train_resnet(tiny),
    }


def plan_all(tiny: bool, on: str) -> dict[str, Any]:
    found = {}
    for name, make in cases(tiny).items():
        case = make()
        model = nnx.eval_shape(case.build)
        plan = nnx.plan(case.step, model, *case.batch, on=on)
        print(f"\n=== {name}\n{plan}", flush=True)
        found[name] = {
            "arguments": plan.arguments,
            "temporary": plan.temporary,
            "bytes": plan.bytes,
            "seconds": plan.seconds,
            "bound_by": plan.bound_by,
            "estimate": None if plan.estimate is None else plan.estimate._asdict(),
            "flops": plan.flops,
            "compile_seconds": plan.compile_seconds,
        }
    return found


def measure(name: str, tiny: bool) -> dict[str, Any]:
    case = cases(tiny)[name]()
    device = jax.devices()[0]
    model = nnx.jit(case.build)()
    batch = [jnp.zeros(shape.shape, shape.dtype) for shape in case.batch]
    jax.block_until_ready(jax.tree.leaves(nnx.Module.get_state(model)))
    built = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    begin = time.perf_counter()
    compiled = case.step.lower(model, *batch).compile()
    compile_seconds = time.perf_counter() - begin
    memory = compiled.memory_analysis()
    for _ in range(2):
        jax.block_until_ready(compiled(model, *batch))
    turns = []
    for _ in range(TURNS):
        begin = time.perf_counter()
        for _ in range(STEPS):
            out = compiled(model, *batch)
        jax.block_until_ready(out)
        turns.append((time.perf_counter() - begin) / STEPS)
    stats = device.memory_stats() or {}
    return {
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "bytes": memory.argument_size_in_bytes
        + max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)
        + memory.temp_size_in_bytes,
        "built": built,
        "peak": stats.get("peak_bytes_in_use", 0),
        "seconds": sorted(turns)[len(turns) // 2],
        "turns": turns,
        "compile_seconds": compile_seconds,
        "device": device.device_kind,
        "jax": jax.__version__,
    }


def table(plans: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    lines = [
        "| step | memory: plan | as compiled there | peak in use | error | time: plan | measured | error | bound by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, plan in plans.items():
        if name not in measured:
            continue
        real = measured[name]
        memory = plan["bytes"] / real["bytes"] - 1
        clock = plan["seconds"] / real["seconds"] - 1 if plan["seconds"] else 0.0
        planned = 1e3 * (plan["seconds"] or 0.0)
        lines.append(
            f"| {name} | {gib(plan['bytes'])} | {gib(real['bytes'])} | {gib(real['peak'])} "
            f"| {memory:+.0%} | {planned:.1f} ms | {1e3 * real['seconds']:.1f} ms | {clock:+.0%} | {plan['bound_by']} |"
        )
    return lines


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=pathlib.Path, metavar="FILE", help="plan all programs, and write them")
    parser.add_argument(
        "--measure", nargs=2, metavar=("NAME", "FILE"), help="run a program, and write what was measured"
    )
    parser.add_argument("--table", nargs="+", type=pathlib.Path, metavar="FILE", help="the plans, then measurements")
    parser.add_argument("--on", default="h200-1", help="the machine to plan for")
    parser.add_argument("--names", action="store_true", help="list the programs")
    parser.add_argument("--tiny", action="store_true", help="tiny models")
    arguments = parser.parse_args()
    if arguments.names:
        print("\n".join(cases(True)))
    if arguments.plan:
        arguments.plan.write_text(json.dumps(plan_all(arguments.tiny, arguments.on), indent=1))
    if arguments.measure:
        name, file = arguments.measure
        found = {name: measure(name, arguments.tiny)}
        print(json.dumps(found), flush=True)
        pathlib.Path(file).write_text(json.dumps(found, indent=1))
    if arguments.table:
        plans, *others = (json.loads(file.read_text()) for file in arguments.table)
        print("\n".join(table(plans, {name: entry for other in others for name, entry in other.items()})))
    return 0


if __name__ == "__main__":
    sys.exit(main())
