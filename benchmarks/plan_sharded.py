"""Plans the training of Llama models on many devices: compiles a donated Adam step ahead of time, without any memory.

    python -m benchmarks.plan_sharded                                   both models on 8, 64 and 512 devices
    python -m benchmarks.plan_sharded --models 8b --devices 8           one line
    python -m benchmarks.plan_sharded --out FILE.json                   write a record (see benchmarks/record.py)

Each step is compiled in its own process with that many virtual devices: once from `nnx.models.Decoder`, abstract, with
an abstract `nnx.Optimizer`, and once from the same model written by hand in JAX (`plan_sharded_by_hand`). Parameters
are float32 and split by FSDP × tensor parallelism, the computation is in bfloat16, layers are scanned and recomputed in
the backward pass. Memory is what the compiler says for one device; the collectives are those of one layer, forward and
backward, as they appear in the bodies of the compiled loops. Times are processor time, over all threads.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import record

LENGTH = 2048  # tokens of a row; the batch has one row per part of the data axis
MODEL_PARTS = 8  # as many as key and value heads
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"features": 4096, "hidden_features": 14336, "num_layers": 32, "num_heads": 32},
    "70b": {"features": 8192, "hidden_features": 28672, "num_layers": 80, "num_heads": 64},
    "tiny": {"features": 64, "hidden_features": 128, "num_layers": 2, "num_heads": 8},  # for the tests
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known about one compiled step; sizes are in bytes on one device, times in seconds of the processor."""

    arguments: int
    temporary: int
    lowering: float
    compiling: float
    collectives: list[dict[str, int]]  # of one layer: in the forward pass, and in the backward pass
    peak: int  # of the process that made the plan


def config_of(model: str) -> Any:
    import nnx

    return nnx.models.DecoderConfig(
        model_type="llama",
        vocab_size=512 if model == "tiny" else 128256,
        num_kv_heads=8,
        max_length=8192,
        norm_epsilon=1e-5,
        rotary=nnx.models.RotaryConfig(base=500000.0),
        **SHAPES[model],
    )


def cross_entropy(logits: Any, labels: Any) -> Any:
    """The loss without an index into the logits, which are split over the vocabulary."""
    import jax
    import jax.numpy as jnp

    is_label = labels[..., None] == jnp.arange(logits.shape[-1])
    picked = jnp.where(is_label, logits, 0).sum(-1)
    return (jax.nn.logsumexp(logits, axis=-1) - picked).mean()


def lower_nnx(model: str, mesh: Any, tokens: Any) -> Callable[[], Any]:
    """Returns a function that lowers the step of an abstract `nnx.Optimizer`."""
    import jax.numpy as jnp
    import optax

    import nnx

    rules = nnx.fsdp_tensor_parallel_rules()

    def build(ctx: nnx.Context) -> Any:
        return nnx.models.Decoder(config_of(model), dtype=jnp.bfloat16, scan_layers=True, remat=True, ctx=ctx)

    abstract = nnx.eval_shape(build, nnx.context(0))
    optimizer = nnx.shard(nnx.Optimizer(abstract, optax.adam(1e-4)), mesh, rules)

    @nnx.jit(donate_argnums=0)
    def train_step(optimizer: Any, tokens: Any) -> Any:
        def loss_fn(model: Any) -> Any:
            return cross_entropy(model(tokens[:, :-1]).astype(jnp.float32), tokens[:, 1:])

        loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model)
        optimizer.update(grads)
        return loss

    def lower() -> Any:
        with nnx.logical_axis_rules(rules):
            return train_step.lower(optimizer, tokens)

    return lower


def make_plan(model: str, devices: int, by_hand: bool) -> Plan:
    """Compiles one step; runs in a process with that many virtual devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from benchmarks.plan_sharded_by_hand import lower_by_hand

    parts = 4 if model == "tiny" else MODEL_PARTS
    data = devices // parts
    mesh = jax.make_mesh((data, parts), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("data", None))
    length = 32 if model == "tiny" else LENGTH
    tokens = jax.ShapeDtypeStruct((data, length + 1), jnp.int32, sharding=sharding)
    with jax.set_mesh(mesh):
        lower = (lower_by_hand if by_hand else lower_nnx)(model, mesh, tokens)
        start = time.process_time()
        lowered = lower()
        between = time.process_time()
        compiled = lowered.compile()
        end = time.process_time()
    memory = compiled.memory_analysis()
    return Plan(
        arguments=memory.argument_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        lowering=between - start,
        compiling=end - between,
        collectives=collectives_of_loops(compiled.as_text()),
        peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def collectives_of_loops(hlo: str) -> list[dict[str, int]]:
    """Returns the collectives in each loop body of a compiled program, forward first."""
    bodies = set(re.findall(r"body=%?([\w.-]+)", hlo))
    found, name = {}, ""
    for line in hlo.splitlines():
        if opened := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = opened[1]
            if name in bodies:
                found[name] = Counter[str]()
        elif name in found and (match := re.search(rf" ({'|'.join(KINDS)})(?:-start)?\(", line)):
            found[name][match[1]] += 1
    return sorted((dict(counts) for counts in found.values() if counts), key=lambda counts: sum(counts.values()))


def measured(model: str, devices: int, by_hand: bool) -> Plan:
    """Makes a plan in its own process."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    command = [sys.executable, "-m", "benchmarks.plan_sharded", "--child", model, str(devices), str(int(by_hand))]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Plan(**json.loads(output.splitlines()[-1]))


def cells(model: str, devices: int, nnx: Plan, by_hand: Plan) -> list[str]:
    def both(text: Callable[[Plan], str]) -> str:
        return f"{text(nnx)} / {text(by_hand)}"

    return [
        model.upper(),
        str(devices),
        both(lambda plan: gigabytes(plan.arguments)),
        both(lambda plan: gigabytes(plan.temporary)),
        both(lambda plan: f"{plan.lowering:.1f} s"),
        both(lambda plan: f"{plan.compiling:.1f} s"),
        both(lambda plan: " + ".join(map(counts_text, plan.collectives))),
        gigabytes(max(nnx.peak, by_hand.peak)),
    ]


def gigabytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def counts_text(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


COLUMNS = (
    "model", "devices", "arguments", "temporary", "lowering", "compiling", "collectives per layer", "planner's memory"
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["8b", "70b"])
    parser.add_argument("--devices", nargs="+", type=int, default=[8, 64, 512])
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write a record of the run")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        model, devices, by_hand = options.child
        print(json.dumps(dataclasses.asdict(make_plan(model, int(devices), by_hand == "1"))))
        return
    print("Each cell: NNX / by hand. Memory is per device.\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    figures: record.Figures = {}
    for model in options.models:
        for devices in options.devices:
            plans = [measured(model, devices, by_hand) for by_hand in (False, True)]
            print(f"| {' | '.join(cells(model, devices, *plans))} |", flush=True)
            for field, unit in (
                ("arguments", 2**30),
                ("temporary", 2**30),
                ("lowering", 1),
                ("compiling", 1),
                ("peak", 2**30),
            ):
                values = [getattr(plan, field) / unit for plan in plans]
                name = f"{model.upper()} on {devices} devices, {field}"
                figures[name] = record.row("s" if unit == 1 else "GiB", dict(zip(("nnx", "by hand"), values)))
    if options.out:
        whole = options.models == parser.get_default("models") and options.devices == parser.get_default("devices")
        command = "python -m benchmarks.plan_sharded"
        record.write(options.out, record.make_record("plan_sharded", command, figures, whole=whole))


if __name__ == "__main__":
    main()
