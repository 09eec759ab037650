"""The tables of the README and the docs, made of stored figures."""

from typing import Any

from benchmarks.numbers import RECORDS, faster, percent, program, ratio, result, seconds, table, value, whole
from benchmarks.plan_tables import PLAN_TABLES

# On a CPU

SIZES = (3, 30, 300)
PARTITION, MERGE = "partition(), 300 Variables, against eqx.partition", "merge(), 300 Variables"
STEP = "step over {} Variables, {}"
PEERS = {
    "equinox `filter_jit`": "equinox",
    "flax `nnx.jit` + `cached_partial`": "flax cached_partial",
    "flax `nnx.jit`": "flax",
}


def step_ratio(size: int, contender: str, changes: str = "kernels and counters change") -> str:
    row = STEP.format(size, changes)
    number = value("train_step", row, contender) / value("train_step", row, "raw")
    return ratio(number) if contender == "nnx" else f"{number:.1f}"


Form = tuple[str, str, str]  # its label, its row in call_forms, and what the step by hand has to add to its name
FORMS: tuple[Form, ...] = (
    ("a static argument, 30 Variables", "a static argument", " with the same"),
    ("`stateful=False`, 30 Variables", "stateful=False", " that returns the output only"),
    ("Modules in a dict and a list, 30 Variables", "Modules in a dict", ""),
    ("a batch that is a dict, 30 Variables", "a batch that is a dict", " with the same"),
    ("tied weights, 30 Variables, 10 of them shared through a `Ref`", "tied weights (Ref)", ""),
    ("sown values that stay in the model, 40 Variables", "sown values that stay", ""),
    ("values sown and popped inside, 30 Variables", "values sown and popped inside", " that returns them"),
)


def overhead() -> str:
    """A step next to peers, and everything else in one line each."""
    step = table(
        ["", "3 Variables", "30", "300"],
        ["raw `jax.jit`", "1", "1", "1"],
        [
            "**`nnx.jit`**",
            *(f"**{step_ratio(n, 'nnx')}** ({step_ratio(n, 'nnx', 'every Variable changes')})" for n in SIZES),
        ],
        *([label, *(step_ratio(n, peer) for n in SIZES)] for label, peer in PEERS.items()),
    )
    by_hand = "raw `jax.jit`"
    lines = [
        ("donated step, 30 Variables", "train_step", "step over 30 Variables, donated", f"{by_hand}, donated"),
        (
            "step with two Modules, keyword arguments and a Context, 30 Variables",
            "train_step",
            "step with two Modules, kwargs, Context, 30 Variables",
            by_hand,
        ),
        (
            "step with a Module made between calls, 30 Variables",
            "train_step",
            "step with a Module made between calls, 30 Variables",
            by_hand,
        ),
        *(
            (f"step with {label}", "call_forms", STEP.format(30, row), f"{by_hand}{against}")
            for label, row, against in FORMS
        ),
        (
            "Adam step through `nnx.Optimizer`, 30 Variables",
            "adam_step",
            "Adam step through nnx.Optimizer, 30 Variables",
            "hand-written optax",
        ),
        (
            "Adam step, with the optax state as an attribute of your own Module",
            "adam_step",
            "Adam step, state in a user-defined Module, 30 Variables",
            "hand-written optax",
        ),
        (
            "State through `jax.jit`, 300 leaves",
            "state_through_jit",
            "State through jax.jit, 300 leaves plus one",
            "nested dicts",
        ),
        ("build a 48-layer transformer, warm", "layers", "build 48 blocks of built-in layers, warm", "flax"),
        (
            "trace its gradient, built-in layers",
            "layers",
            "trace the gradient of 48 blocks, built-in layers",
            "the same over dicts",
        ),
        (
            "trace its gradient, own Modules",
            "trace_time",
            "trace the gradient of 48 blocks, own Modules",
            "the same over dicts",
        ),
    ]
    times = [
        (
            "read a parameter",
            seconds(result("read_attribute", "read m.kernel")),
            f"{ratio(result('read_attribute', 'read m.kernel, against equinox'))} × equinox",
        ),
        (
            "`partition()`, 300 Variables",
            seconds(result("partition_merge", "partition(), 300 Variables")),
            f"{ratio(result('partition_merge', PARTITION))} × `eqx.partition`",
        ),
        (
            "`merge()`, 300 Variables",
            seconds(result("partition_merge", MERGE)),
            f"{ratio(result('partition_merge', MERGE) / value('partition_merge', MERGE, 'equinox'))} × `eqx.combine`",
        ),
        (
            "compile a scanned stack of 4, 16 and 64 layers",
            ", ".join(
                f"{value('trace_time', 'compile a scanned stack, slowest depth', f'{n} layers'):.2f}"
                for n in (4, 16, 64)
            )
            + " s",
            "each other",
        ),
    ]
    ratios = [(label, f"{ratio(result(benchmark, row))} ×", against) for label, benchmark, row, against in lines]
    return step + "\n" + table(["", "NNX", "against"], *ratios, *times)


GROWING = ("build", "partition()", "partition() after a structural change", "trace a step")
GROWTH = "{}, growth from 1,000 to 10,000 Variables"
CALL, FIRST_CALL = "call a compiled step, 10,000 Variables", "first call of a step: trace and compile, 10,000 Variables"


def scaling() -> str:
    """How costs grow with the number of Variables."""

    sizes = ("100", "1,000")
    if "nnx 100" not in RECORDS["scaling"]["figures"][CALL]["values"]:
        sizes = ("1,000",)  # a record from before 100 Variables were measured

    def line(label: str, row: str, contender: str, largest: str) -> list[str]:
        times = [*(value("scaling", row, f"{contender} {size}") for size in sizes), value("scaling", row, largest)]
        return [label, *map(seconds, times), f"{times[-1] / times[-2]:.1f} ×"]

    def growing(name: str) -> list[str]:
        return line(name.replace("partition()", "`partition()`"), GROWTH.format(name), "nnx", "nnx")

    def calls(row: str, label: str) -> list[list[str]]:
        return [line(label, row, "nnx", "nnx"), line("the same by hand", row, "raw", "raw 10,000")]

    return table(
        ["", *(f"{size} Variables" for size in sizes), "10,000 Variables", "growth from 1,000"],
        *map(growing, GROWING),
        *calls(FIRST_CALL, "first call of a step (trace and compile)"),
        *calls(CALL, "call a compiled step"),
    )


def dqn() -> str:
    """Environment steps per second of a whole program."""
    row = "DQN, one environment step: act and learn"
    labels = {"raw": "hand-written JAX", "nnx": "**NNX**", "equinox": "Equinox"}
    labels |= {
        "flax cached_partial": "flax `nnx.jit` + `cached_partial`",
        "torch": "PyTorch, eager",
        "flax": "flax `nnx.jit`",
    }
    times = RECORDS["dqn"]["figures"][row]["values"]
    lines = []
    for contender, label in labels.items():
        if contender in times:
            speed, multiple = whole(round(1 / times[contender], -1)), ratio(times[contender] / times["raw"])
            multiple = "1" if contender == "raw" else multiple
            lines.append([label, *(f"**{cell}**" if contender == "nnx" else cell for cell in (speed, multiple))])
    return table(["", "environment steps per second", "time per step"], *lines)


def bridges() -> str:
    """A training step of models of other libraries, there and here."""
    labels = {
        "flax": "Flax NNX, `nnx.jit`",
        "flax cached_partial": "Flax NNX, `nnx.jit` + `cached_partial`",
        "equinox": "Equinox, `filter_jit`",
        "linen": "Flax Linen, `jax.jit`",
        "haiku": "Haiku, `jax.jit`",
        "functions": "functions over nested dicts, `jax.jit`",
    }
    lines = []
    for row in RECORDS["bridges"]["figures"].values():
        ours = row["values"]["nnx"]
        for name, native in row["values"].items():
            if name != "nnx":
                cells = [f"{1e6 * native:.0f} µs", f"{1e6 * ours:.0f} µs", f"**{ratio(ours / native)}**"]
                lines.append((list(labels).index(name), [labels[name], *cells]))
    return table(["", "in its own library", "with `nnx.bridge`", "ratio"], *[cells for _, cells in sorted(lines)])


# On a GPU

SPEED = "tokens per second, median"
TRAINED = {
    "hand-written JAX": "hand-written JAX: cuDNN attention, bfloat16 logits, hand-written cross-entropy gradient, "
    "layers unrolled, no Triton GEMMs",
    "the same, tuned": "the same, tuned as below",
    "torch.compile": "`torch.compile` (default mode), scaled-dot-product attention, bfloat16 autocast, fused AdamW",
    "torch, cuDNN": "the same with cuDNN's attention",
    "torch, autotune": "`torch.compile` with `max_autotune`",
}


def labeled(benchmark: str, contender: str, label: str) -> str:
    """Returns a label with the remark that the record has about this contender."""
    note = RECORDS[benchmark].get("notes", {}).get(contender)
    return f"{label}, {note}" if note else label


def training(benchmark: str, title: str, ours: str, labels: dict[str, str]) -> str:
    """Tokens per second in training, and by how much nnx is faster."""
    speeds = RECORDS[benchmark]["figures"][SPEED]["values"]
    return table(
        [title, "tokens/s", "nnx is faster by"],
        [ours, f"**{whole(speeds['nnx'])}**", ""],
        *(
            [labeled(benchmark, name, label), whole(speeds[name]), faster(speeds["nnx"], speeds[name])]
            for name, label in labels.items()
            if name in speeds
        ),
    )


CLOCKS = {"": "at the clocks that the power limit allows", "_1200_mhz": "both at 1,200 MHz (`--clock 1200`)"}


def against_best_torch(benchmark: str) -> float:
    """How many times as fast as PyTorch in its fastest mode nnx trains."""
    speeds = RECORDS[benchmark]["figures"][SPEED]["values"]
    return speeds["nnx"] / max(speed for name, speed in speeds.items() if name.startswith("torch"))


def training_at_one_clock() -> str:
    return table(
        ["nnx against PyTorch in its fastest mode", "GPT-2 small", "the Llama"],
        *(
            [label, *(f"{against_best_torch(f'gpu_train_{model}{clock}'):.3f} ×" for model in ("gpt2", "llama"))]
            for clock, label in CLOCKS.items()
        ),
    )


ROWS = (1, 8, 64)
WRITING = {
    "nnx, scanned layers": "**`nnx.generate`**, scanned layers",
    "nnx, layers in a list": "**`nnx.generate`**, layers in a list",
    "hand-written JAX": "hand-written JAX",
    "the same, eight rows": "hand-written JAX, one row padded to eight",
    "torch.compile": '`torch.compile(mode="reduce-overhead")`',
}


def written(benchmark: str, rows: int) -> dict[str, float]:
    return RECORDS[benchmark]["figures"].get(f"rows: {rows}", {"values": {}})["values"]


def writing(benchmark: str, title: str) -> str:
    """Tokens per second in decoding."""
    return table(
        [title, *(f"{rows} row{'s' * (rows > 1)}" for rows in ROWS)],
        *(
            [
                labeled(benchmark, name, label),
                *(whole(speeds[name]) if name in (speeds := written(benchmark, rows)) else "" for rows in ROWS),
            ]
            for name, label in WRITING.items()
        ),
    )


EXPERTS = {
    "2 of 8 experts, 1024 → 4096": "2 of 8 experts, 1024 to 4096, 8192 tokens",
    "8 of 64 experts, 1024 → 1024": "8 of 64 experts, 1024 to 1024, 8192 tokens",
    "8 of 64 experts, 1024 → 4096": "8 of 64 experts, 1024 to 4096, 8192 tokens",
}


def moe() -> str:
    """Milliseconds of mixtures of experts and of dense layers."""

    def cell(row: str) -> str:
        return f"{ratio(value('gpu_moe', row, 'MoE'))} (dense {ratio(value('gpu_moe', row, 'GatedMLP'))})"

    return table(
        ["", "forward", "forward and backward", "`ragged_dot`, one of three products"],
        *(
            [
                label,
                cell(f"{case}, forward"),
                cell(f"{case}, forward and backward"),
                ratio(value("gpu_moe", f"{case}, forward", "ragged_dot")),
            ]
            for label, case in EXPERTS.items()
        ),
    )


BANDWIDTH = "part of the memory bandwidth"


def quantized() -> str:
    """Tokens per second and memory of quantized models."""
    labels = {"bfloat16": "bfloat16", "int8": "int8", "int4": "int4, groups of 128"}
    rows = [n for n in ROWS if written("gpu_quantize", n)]
    return table(
        ["", "weights", *(f"{n} row{'s' * (n > 1)}" for n in rows), "bandwidth at 8 rows"],
        *(
            [
                label,
                f"{value('gpu_quantize', 'weights', name):.2f} GiB",
                *(whole(written("gpu_quantize", n)[name]) for n in rows),
                f"{percent(value('gpu_quantize', f'rows: 8, {BANDWIDTH}', name))} %",
            ]
            for name, label in labels.items()
        ),
    )


def loading() -> str:
    """How long a published model takes from files to a GPU."""
    labels = {
        "nnx": "**nnx**, layers in a list",
        "nnx scanned": "**nnx**, scanned layers",
        "transformers": "transformers",
        "safetensors": "the package safetensors, tensors as they are in the files",
    }
    rows = (
        [label, *(f"{value('gpu_load_weights', f'{n} load', way):.2f} s" for n in ("first", "second"))]
        for way, label in labels.items()
    )
    return table(["", "first load", "second load"], *rows)


PUBLISHED = {
    "bfloat16": "**`nnx.generate`**, bfloat16",
    "int8": "int8",
    "int4": "int4, groups of 128",
    "transformers": "transformers, static cache, compiled, bfloat16",
}


def published() -> str:
    """Tokens per second of 8 rows of a published model."""
    found, row = "gpu_published_8", "rows: 8"
    speeds = RECORDS[found]["figures"][row]["values"]
    weights, read = (RECORDS[found]["figures"][name]["values"] for name in ("weights of a step", f"{row}, {BANDWIDTH}"))
    return table(
        ["8 rows", "tokens/s", "next to bfloat16", "weights of a step", "of the bandwidth"],
        *(
            [
                label,
                whole(speeds[name]),
                f"{ratio(speeds[name] / speeds['bfloat16'])} ×",
                f"{weights[name]:.2f} GiB" if name in weights else "",
                f"{percent(read[name])} %" if name in read else "",
            ]
            for name, label in PUBLISHED.items()
        ),
    )


CHECKPOINTS = {
    "nnx": "**nnx**, format 3",
    "earlier": "format 2, of NNX 0.2",
    "tensorstore": "TensorStore alone",
    "orbax": "Orbax",
    "safetensors": "the package safetensors",
}


def checkpoints(setting: str) -> str:
    """What saving and loading cost: files, seconds of the clock and CPU, peaks of memory, how long a save blocks."""
    figures = RECORDS["checkpoint_io"]["figures"]

    def cell(contender: str, form: str, *names: str) -> str:
        found = [figures[f"{setting}, {name}"]["values"].get(contender) for name in names]
        return "" if None in found else form.format(*found)

    cells = {
        "files": ("{:.0f}", "files"),
        "save, CPU": ("{:.2f}, {:.2f} s", "save, seconds", "save, cpu"),
        "peak": ("{:.2f} GB", "save, peak"),
        "load, CPU": ("{:.2f}, {:.2f} s", "load, seconds", "load, cpu"),
        "peak of it": ("{:.2f} GB", "load, peak"),
        "to four devices": ("{:.2f}, {:.2f} s", "other layout, seconds", "other layout, cpu"),
        "blocked": ("{:.3f} s", "blocked, seconds"),
    }
    rows = ([label, *(cell(name, *what) for what in cells.values())] for name, label in CHECKPOINTS.items())
    return table(["", *cells], *rows)


def profile() -> str:
    """Where the time of a training step goes."""
    kernels = RECORDS["gpu_profile_gpt2"]["figures"]["kernels"]["values"]
    forward, backward = kernels["attention forward"], kernels["attention backward"]
    lines = [
        (
            "matrix products (cuBLAS, some with fused bias, gelu or residual)",
            kernels["matrix products"],
            f"{value('gpu_profile_gpt2', 'rate of matrix products'):.0f} TFLOP/s",
        ),
        ("attention (cuDNN)", forward + backward, f"of which {backward:.1f} backward"),
        ("norms, residual sums, bias gradients; gelu backward; AdamW and casts", kernels["the rest"], ""),
        ("cross-entropy", kernels["cross-entropy"], ""),
    ]
    return table(
        ["", "ms", "remark"], *([label, f"{milliseconds:.1f}", remark] for label, milliseconds, remark in lines)
    )


# The first seconds

FIRST_STEPS = {"mlp": "MLP", "cnn": "CNN", "transformer": "six-layer transformer", "lstm": "LSTM"}


def first_steps() -> str:
    """Seconds of processor time until the first loss."""

    def cells(model: str, part: str) -> list[str]:
        names = ("nnx", "flax", "equinox", "raw jax")
        return [f"{value('first_steps', f'{model}, {part}', name):.1f}" for name in names]

    parts = {"build": "build", "total": "until the first loss", "total, cached": "the same with a filled cache"}
    return table(
        ["seconds of processor time", "NNX", "Flax", "Equinox", "raw JAX"],
        *(
            [f"{label}, {text}", *cells(model, part)]
            for model, label in FIRST_STEPS.items()
            for part, text in parts.items()
        ),
    )


# Plans and the demo


def plans() -> str:
    """Memory and time of training steps compiled ahead of time."""

    def both(model: str, devices: int, field: str, digits: int) -> str:
        row = f"{model} on {devices} devices, {field}"
        return f"{value('plan_sharded', row):.{digits}f} / {value('plan_sharded', row, 'by hand'):.{digits}f}"

    fields = {"arguments": 2, "temporary": 2, "lowering": 1, "compiling": 1}
    return table(
        ["model", "devices", "arguments, GiB", "temporary, GiB", "lowering, s", "compiling, s"],
        *(
            [model, str(devices), *(both(model, devices, field, digits) for field, digits in fields.items())]
            for model in ("8B", "70B")
            for devices in (8, 64, 512)
        ),
    )


def demo() -> str:
    """What rounding the weights of the demo's model costs."""
    names = ("float32", "int8", "int4")

    def cells(row: str, form: str) -> list[str]:
        values: dict[str, Any] = RECORDS["demo"]["figures"][row]["values"]
        return [form.format(values[name]) if name in values else "" for name in names]

    return table(
        ["", *names],
        ["perplexity per character", *cells("perplexity per character", "{:.3f}")],
        ["bytes", *cells("size of the weights", "{:.2f} MB")],
    )


# Programs

# The program, its setting, and what came out; each `{}` is the figure of the record with this name.
PROGRAMS = {
    "pretrain": (
        "{parameters:,.0f} parameters",
        "{bits before:.2f} → {bits after:.2f} bits per byte, {speed:,.0f} tokens/s",
    ),
    "finetune": ("{parameters:,.0f} parameters", "{before:.1f} → {after:.1f}% of held-out sums"),
    "grpo": ("from an early model", "{before:.1f} → {after:.1f}% of held-out sums"),
    "diffusion": (
        "{parameters:,.0f} parameters",
        "Fréchet distance {distance:.1f} (training set {distance of the training set:.1f}, "
        "noise {distance of noise:.0f}), {read as asked:.1f}% read as asked",
    ),
    "ppo": ("{steps:,.0f} steps", "mean return {return:.1f}"),
    "ppo_compare": ("steps per second", "{in JAX:,.0f} with the environment in JAX, {in Python:,.0f} in Python"),
    "evaluate": ("500 questions", "{accuracy:.1f}% right (chance {chance:.0f}%)"),
}


def programs() -> str:
    """What each program learned, how long that took, and the command."""
    found = []
    for name, (setting, outcome) in PROGRAMS.items():
        for machine in ("", "_gpu"):
            if record := RECORDS.get(f"program_{name}{machine}"):
                figures = program(f"{name}{machine}")
                command = record["command"].replace("python examples/programs/", "").replace(" && ", "`, then `")
                cells = [
                    f"`{command}`",
                    setting.format(**figures),
                    duration(figures["time"]),
                    outcome.format(**figures),
                ]
                busy = ", busy with other programs" if "busy" in record.get("note", "") else ""
                found.append([*cells, record["machine"].partition(" (")[0] + busy])
    return table(["program", "setting", "time", "result", "machine"], *found)


def duration(seconds: float) -> str:
    """Formats the time of a program: 47 s, 8 min 5 s."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


TABLES: dict[str, str] = {
    "overhead": overhead(),
    "scaling": scaling(),
    "dqn": dqn(),
    "bridges": bridges(),
    "train-gpt2": training("gpu_train_gpt2", "GPT-2 small", "**nnx**, the model of `examples/gpt`", TRAINED),
    "train-llama": training(
        "gpu_train_llama",
        "a Llama of 341 million parameters, 16 × 1024 tokens (`--model llama`)",
        "**nnx**, `nnx.models.Decoder`",
        {
            "torch.compile": "`torch.compile` (default mode)",
            "torch, cuDNN": "the same with cuDNN's attention",
            "torch, autotune": "`torch.compile` with `max_autotune`",
        },
    ),
    "train-clock": training_at_one_clock(),
    "profile": profile(),
    "write-gpt2": writing("gpu_decode_gpt2", "GPT-2 small"),
    "write-llama": writing("gpu_decode_llama", "a Llama of 1.2 billion parameters"),
    "moe": moe(),
    "quantize": quantized(),
    "loading": loading(),
    "checkpoints": checkpoints("1.0 GB in 200 arrays"),
    "checkpoints-774": checkpoints("0.15 GB in 774 arrays"),
    "published": published(),
    "first-steps": first_steps(),
    "plans": plans(),
    "demo": demo(),
    "programs": programs(),
    **PLAN_TABLES,
}
