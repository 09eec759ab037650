"""Plans next to measurements: what `nnx.plan` says about a step for an H200, and what the H200 says.

    python -m benchmarks.gpu.plans --plan FILE.json         plan all programs; needs no GPU, only its compiler
    python -m benchmarks.gpu.plans --measure FILE.json      run them on the GPU of this machine
    python -m benchmarks.gpu.plans --join PLANS MEASURED FILE.json   write a record (see benchmarks/record.py)
    ... --tiny                                              tiny models on a CPU, to see that it runs

Programs that need more memory are measured later, because JAX keeps the highest use of a process. A file of
measurements is continued.
"""

import argparse
import dataclasses
import gc
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import nnx
from benchmarks import record
from benchmarks.gpu import models, train
from benchmarks.llamas import decoder_config

STEPS, TURNS = 8, 3
NEW = 128  # tokens that a decoding program writes


@dataclasses.dataclass(frozen=True)
class Case:
    """A step, a function that builds its Modules, and the shapes of its batch."""

    step: Callable[..., Any]
    build: Callable[[], Any]
    batch: tuple[jax.ShapeDtypeStruct, ...]


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
    config = decoder_config(models.llama(sizes))
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

    return Case(write, build, (jax.ShapeDtypeStruct((rows, 8 if tiny else 64), jnp.int32),))


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
    """Returns the programs, those that need least memory first."""
    settings = train.TINY_SETTINGS if tiny else train.SETTINGS
    return {
        "Llama 1.2 B, writing 128 tokens, 1 row": lambda: decode(tiny, 1),
        "Llama 1.2 B, writing 128 tokens, 64 rows": lambda: decode(tiny, 64),
        "ResNet-50, training, 256 images": lambda: train_resnet(tiny),
        "GPT-2 124 M, training, 32 × 1,024": lambda: train_lm(settings["gpt2"]),
        "Llama 341 M, training, 16 × 1,024": lambda: train_lm(settings["llama"]),
        "Llama 1.2 B, training, recomputed, 8 × 2,048": lambda: train_billion(tiny, True),
        "Llama 1.2 B, training, 4 × 2,048": lambda: train_billion(tiny, False),
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


def numbers_like(path: str, variable: Any) -> Any:
    """Returns numbers for a Variable without values, which compile faster than those that a model starts with."""
    shape, dtype = variable.value.shape, variable.value.dtype
    if path.startswith("opt_state") or not jnp.issubdtype(dtype, jnp.floating):
        return variable.replace(jnp.zeros(shape, dtype))
    if len(shape) < 2:  # scales, variances
        return variable.replace(jnp.ones(shape, dtype))
    # The time of a step depends on its numbers, because zeros take less power: these are uniform.
    hashed = jax.lax.iota(jnp.uint32, math.prod(shape)) * jnp.uint32(2654435761) >> 8
    return variable.replace((0.07 * (hashed / 2**24 - 0.5)).astype(dtype).reshape(shape))


def measure(case: Case) -> dict[str, Any]:
    """Runs a program: what its compiler says here, what it takes, and the highest use of memory so far."""
    device = jax.devices()[0]
    model = nnx.eval_shape(case.build)
    shapes = model.get_state()
    model.update_state(jax.jit(lambda: shapes.map(numbers_like))())
    batch = [jnp.zeros(shape.shape, shape.dtype) for shape in case.batch]
    jax.block_until_ready(jax.tree.leaves(nnx.Module.get_state(model)))
    begin = time.perf_counter()
    compiled = case.step.lower(model, *batch).compile()
    compile_seconds = time.perf_counter() - begin
    memory = compiled.memory_analysis()
    out = None
    for _ in range(2):
        out = jax.block_until_ready(compiled(model, *batch))
    turns = []
    for _ in range(TURNS):
        begin = time.perf_counter()
        for _ in range(STEPS):
            out = compiled(model, *batch)
        jax.block_until_ready(out)
        turns.append((time.perf_counter() - begin) / STEPS)
    return {
        "bytes": memory.argument_size_in_bytes
        + max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)
        + memory.temp_size_in_bytes,
        "peak": (device.memory_stats() or {}).get("peak_bytes_in_use", 0),
        "seconds": sorted(turns)[len(turns) // 2],
        "turns": turns,
        "compile_seconds": compile_seconds,
    }


def measure_all(tiny: bool, file: pathlib.Path) -> None:
    """Runs the programs that are not in the file yet, and writes what was measured so far after each."""
    found: dict[str, Any] = {"machine": record.machine(), "versions": record.versions(), "programs": {}}
    if file.exists():
        found["programs"] = json.loads(file.read_text())["programs"]
    highest = 0
    for name, make in cases(tiny).items():
        if name in found["programs"]:
            continue
        measured = measure(make())
        gc.collect()
        if measured["peak"] <= highest:  # of an earlier program
            measured["peak"] = None
        highest = max(highest, measured["peak"] or 0)
        found["programs"][name] = measured
        print(json.dumps({name: measured}), flush=True)
        file.write_text(json.dumps(found, indent=1))


def joined(plans: dict[str, Any], measured: dict[str, Any], tiny: bool) -> dict[str, Any]:
    """Returns the record of plans and measurements."""
    figures: record.Figures = {}
    for name, real in measured["programs"].items():
        plan = plans[name]
        in_use = {"plan": plan["bytes"], "compiled there": real["bytes"], "peak in use": real["peak"]}
        figures[f"{name}, memory"] = record.row("bytes", in_use)
        times = {"plan": plan["seconds"], "measured": real["seconds"]}
        figures[f"{name}, time"] = record.row("s", times, bound_by=plan["bound_by"])
    whole = not tiny and set(measured["programs"]) == set(cases(tiny))
    made = record.make_record("gpu_plans", "python -m benchmarks.gpu.plans", figures, whole=whole)
    return {**made, "machine": measured["machine"], "versions": {**made["versions"], **measured["versions"]}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=pathlib.Path, metavar="FILE", help="plan all programs, and write the plans")
    parser.add_argument("--measure", type=pathlib.Path, metavar="FILE", help="run them, and write what was measured")
    parser.add_argument("--join", nargs=3, type=pathlib.Path, metavar=("PLANS", "MEASURED", "FILE"), help="the record")
    parser.add_argument("--on", default="h200-1", help="the machine to plan for")
    parser.add_argument("--tiny", action="store_true", help="tiny models")
    arguments = parser.parse_args()
    if arguments.plan:
        arguments.plan.write_text(json.dumps(plan_all(arguments.tiny, arguments.on), indent=1))
    if arguments.measure:
        measure_all(arguments.tiny, arguments.measure)
    if arguments.join:
        *files, out = arguments.join
        plans, measured = (json.loads(file.read_text()) for file in files)
        record.write(out, joined(plans, measured, arguments.tiny))
    return 0


if __name__ == "__main__":
    sys.exit(main())
