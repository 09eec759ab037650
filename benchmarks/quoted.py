"""The sentences of the README and the docs that quote stored figures: `figures.py` writes and checks them."""

from typing import NamedTuple

from benchmarks.numbers import RECORDS, extremes, program, ratio, result, thousands, value, version, whole
from benchmarks.tables import CALL, GROWING, GROWTH, ROWS, SPEED, against_best_torch, written

FEW_EXPERTS = "2 of 8 experts, 1024 to 4096, 8192 tokens, forward"
MANY_EXPERTS = "8 of 64 experts, 1024 to 4096, 8192 tokens, forward"


class Quote(NamedTuple):
    """A piece of a sentence with `{}` for each figure, and the figures as they should read."""

    text: str
    figures: tuple[str, ...]


class Claim(NamedTuple):
    """A piece of a sentence that says in words what the figures say, and whether they do."""

    text: str
    holds: bool


def call_against_hand(size: str) -> float:
    ours = value("scaling", CALL, "nnx" if size == "10,000" else f"nnx {size}")
    return ours / value("scaling", CALL, f"raw {size}")


def against_best_by_hand() -> list[float]:
    """The speed of `nnx.generate` as a fraction of the best loop by hand, for both models and every number of rows."""
    fractions = []
    for benchmark in ("gpu_decode_gpt2", "gpu_decode_llama"):
        for rows in ROWS:
            speeds = written(benchmark, rows)
            ours = max(speeds["nnx, scanned layers"], speeds["nnx, layers in a list"])
            fractions.append(ours / max(speeds["hand-written JAX"], speeds.get("the same, eight rows", 0.0)))
    return fractions


def bandwidths(benchmark: str) -> list[float]:
    rows = RECORDS[benchmark]["figures"]
    found = [rows.get(f"rows: {n}, part of the memory bandwidth", {"values": {}})["values"] for n in ROWS]
    return [values["nnx, layers in a list"] for values in found if values]


def moe_on_cpu(case: str) -> str:
    row = f"{case}, forward"
    return f"{value('moe_cpu', row, 'MoE') / value('moe_cpu', row, 'GatedMLP'):.1f}"


def quantized_speed(name: str) -> float:
    return value("gpu_quantize", "rows: 8", name) / value("gpu_quantize", "rows: 8", "bfloat16")


def planners_memory() -> str:
    rows = RECORDS["plan_sharded"]["figures"]
    return f"{max(max(row['values'].values()) for name, row in rows.items() if name.endswith('peak')):.2f}"


def published_speed(one: str, other: str) -> str:
    return f"{value('gpu_published_8', 'rows: 8', one) / value('gpu_published_8', 'rows: 8', other):.2f}"


def gpu_versions(benchmark: str) -> tuple[str, ...]:
    return tuple(version(benchmark, package) for package in ("jax", "torch"))


LIBRARIES = "matrix products", "attention forward", "attention backward"


def settled(row: str) -> tuple[str, ...]:
    """Two figures of the GPU while a training step runs again and again: the mean, and the most there can be."""
    return tuple(f"{value:,.0f}" for value in RECORDS["gpu_profile_gpt2"]["figures"][row]["values"].values())


def trained_mixers(layer: str) -> tuple[str, ...]:
    rows = RECORDS["gpu_mixers_train"]["figures"].values()
    return tuple(f"{row['values'][layer]:.1f}" for row in rows)


def trained(contender: str) -> float:
    return value("gpu_train_gpt2", SPEED, contender)


def advantage_left(model: str) -> float:
    """Returns which part of the advantage over PyTorch at one clock is left at the power limit."""
    at_limit, at_one_clock = against_best_torch(f"gpu_train_{model}"), against_best_torch(f"gpu_train_{model}_1200_mhz")
    return (at_limit - 1) / (at_one_clock - 1)


versions = tuple(version("train_step", package) for package in ("jax", "flax", "equinox"))
kernels = RECORDS["gpu_profile_gpt2"]["figures"]["kernels"]["values"]
first_token = RECORDS["gpu_decode_gpt2"]["figures"]["first token of a prompt of 512"]["values"]
int8_gain = f"{100 * (quantized_speed('int8') - 1):.0f}"

pretraining = program("pretrain_gpu")


def millions(figure: str) -> str:
    return whole(pretraining[figure] / 1e6)


def learned(name: str) -> tuple[str, str]:
    return f"{program(name)['before']:.1f}", f"{program(name)['after']:.1f}"


def phases(name: str) -> tuple[str, ...]:
    return tuple(whole(program(name)[phase]) for phase in ("sampling", "scoring", "learning"))


SENTENCES: dict[str, list[Quote | Claim]] = {
    "README.md": [
        Quote("trained at {} tokens per second", (thousands(trained("nnx")),)),
        Quote("hand-written JAX reached {} (", (thousands(trained("hand-written JAX")),)),
        Quote("({} with the same optimizations)", (thousands(trained("the same, tuned")),)),
        Quote("`torch.compile` {} with `max_autotune`", (thousands(trained("torch, autotune")),)),
    ],
    "docs/programs/diffusion.md": [
        Quote(
            "After 4,000 steps the distance is {}, that of the training set {}, and that of noise {}",
            (
                f"{program('diffusion')['distance']:.1f}",
                f"{program('diffusion')['distance of the training set']:.1f}",
                whole(program("diffusion")["distance of noise"]),
            ),
        ),
        Quote("reads {}% of the drawings", (f"{program('diffusion')['read as asked']:.1f}",)),
        Quote("{}% with guidance", (f"{program('diffusion')['read as asked, guided']:.0f}",)),
    ],
    "docs/programs/evaluate.md": [
        Quote("This took {} seconds", (whole(program("evaluate")["time"]),)),
        Quote("likeliest {}% of 500", (f"{program('evaluate')['accuracy']:.1f}",)),
        Quote("by chance {}%", (f"{program('evaluate')['chance']:.1f}",)),
    ],
    "docs/programs/finetune.md": [
        Quote("answers {}% of the held-out sums after 300 steps", (f"{program('finetune')['after']:.1f}",)),
        Quote("on an H200, the same 300 steps end at {}%", (f"{program('finetune_gpu')['after']:.1f}",)),
    ],
    "docs/programs/grpo.md": [
        Quote("gets from {}% to {}% of the held-out sums", learned("grpo")),
        Quote("samples for {} ms, scores for {} ms and learns for {} ms", phases("grpo")),
        Quote("answers {}%, and 160 steps of GRPO bring it to no more than {}%", learned("grpo_gpu")),
        Quote("A step takes {} ms of learning there", phases("grpo_gpu")[2:]),
    ],
    "docs/programs/pretrain.md": [
        Quote("{} million parameters, at {} tokens/s", (millions("parameters"), whole(pretraining["speed"]))),
        Quote("The text here is {} million characters", (millions("characters"),)),
        Quote(
            "the tokenizer is trained in {} seconds, the text turned into tokens in {}, and",
            (f"{pretraining['tokenizer']:.1f}", f"{pretraining['tokens']:.1f}"),
        ),
        Quote(
            "takes {} bits instead of {}. The whole run took {} seconds",
            (f"{pretraining['bits after']:.2f}", f"{pretraining['bits before']:.2f}", whole(pretraining["time"])),
        ),
    ],
    "docs/performance.md": [
        Quote("Two CPU cores, jax {}, flax {}, equinox {}.", versions),
        Quote(
            "the step costs {} times as much as the one by hand at 1,000 Variables, and {} times as much at 10,000",
            (ratio(call_against_hand("1,000")), ratio(call_against_hand("10,000"))),
        ),
        Claim(
            "take ten to twelve times as long",
            all(9.5 < result("scaling", GROWTH.format(name)) < 12.5 for name in GROWING),
        ),
        Claim(
            "and then the two are nearly equal",
            abs(trained("nnx") / trained("the same, tuned") - 1) < 0.03,
        ),
        Quote(
            "({} ms of kernels in {} ms, so Python is not what it waits for)",
            (f"{kernels['all']:.1f}", f"{kernels['step']:.1f}"),
        ),
        Claim(
            "Almost three quarters of the time is spent in cuBLAS and cuDNN",
            0.70 < sum(kernels[name] for name in LIBRARIES) / kernels["all"] < 0.75,
        ),
        Quote("draws {} of its {} W and runs at {} instead of {} MHz", (*settled("power"), *settled("clock"))),
        Claim(
            "the power limit takes back about half of the advantage",
            all(0.4 < 1 - left < 0.67 for left in map(advantage_left, ("gpt2", "llama"))),
        ),
        Quote("One NVIDIA H200, jax {}, torch {}; vocabulary", gpu_versions("gpu_train_gpt2")),
        Quote("NVIDIA H200, jax {}, torch {}, weights and caches", gpu_versions("gpu_decode_gpt2")),
        Quote("one NVIDIA H200, jax {}, the best turn", gpu_versions("gpu_moe")[:1]),
        Quote("{} GB of bfloat16 in the page cache", (f"{RECORDS['gpu_load_weights']['gigabytes']:.1f}",)),
        Quote("onto one NVIDIA H200 with jax {} and torch {}", gpu_versions("gpu_load_weights")),
        Quote("on one NVIDIA H200 with jax {}; tokens", gpu_versions("gpu_quantize")[:1]),
        Quote(
            "with the layers of DeepSeek-V3 writes {} tokens per second",
            (whole(value("gpu_mixers_latent", "rows: 1")),),
        ),
        Quote(
            "NVIDIA H200 with jax {}; the same sizes in `transformers` with torch {}", gpu_versions("gpu_mixers_latent")
        ),
        Quote("write {}, by `generate` as it comes", (whole(value("gpu_mixers_latent", "rows: 1", "transformers")),)),
        Quote("take it {} ms in texts of 2,048 and {} ms in texts of 16,384", trained_mixers("gated delta")),
        Quote("attention takes {} and {} ms", trained_mixers("attention")),
        Quote("NNX writes {} to {} % as fast as the best loop by hand", extremes(against_best_by_hand())),
        Claim(
            "and faster than PyTorch everywhere",
            all(
                max(v for name, v in speeds.items() if name.startswith("nnx, ") and "drawing" not in name)
                > speeds["torch.compile"]
                for benchmark in ("gpu_decode_gpt2", "gpu_decode_llama")
                for speeds in (written(benchmark, rows) for rows in ROWS)
            ),
        ),
        Quote(
            "the first token of a prompt of 512 takes {} ms at best, and {} ms by hand",
            (f"{first_token['nnx, layers in a list']:.1f}", f"{first_token['hand-written JAX']:.1f}"),
        ),
        Quote("reaches {} to {} % of the memory bandwidth", extremes(bandwidths("gpu_decode_llama"))),
        Quote(
            "the operations are {} and {} times those of the dense layer",
            (
                f"{value('gpu_moe', f'{FEW_EXPERTS}, operations', 'MoE'):.2f}",
                f"{value('gpu_moe', f'{MANY_EXPERTS}, operations', 'MoE'):.2f}",
            ),
        ),
        Quote(
            "its {} GiB of temporary memory",
            (f"{value('gpu_moe', f'{MANY_EXPERTS}, temporary memory', 'ragged_dot'):.0f}",),
        ),
        Quote(
            "the layer with 2 of 8 experts took {} times as long as the dense one (forward), the layer with 8 of 64 "
            "small experts {} times",
            (
                moe_on_cpu("2 of 8 experts, 256 to 512, 2048 tokens"),
                moe_on_cpu("8 of 64 experts, 256 to 256, 1024 tokens"),
            ),
        ),
        Quote("int8 saves half of the memory and is {} % faster", (int8_gain,)),
        Quote("decoding 8 rows takes {} times as long as in bfloat16", (f"{1 / quantized_speed('int4'):.2f}",)),
        Quote(
            "int8 and int4 write 8 rows {} and {} times as fast as bfloat16",
            (published_speed("int8", "bfloat16"), published_speed("int4", "bfloat16")),
        ),
        Quote("bfloat16 itself {} times as fast as transformers", (published_speed("bfloat16", "transformers"),)),
        Quote(
            "one NVIDIA H200 with jax {} and torch {}, which reads {} TB/s",
            (*gpu_versions("gpu_published_8"), f"{value('gpu_published_8', 'memory bandwidth', 'measured'):.2f}"),
        ),
    ],
    "docs/guide/generation.md": [
        Quote(
            "{} times as fast with int8, and {} times with int4",
            (published_speed("int8", "bfloat16"), published_speed("int4", "bfloat16")),
        )
    ],
    "docs/guide/sharding.md": [
        Quote("as the compiler of JAX {} states it", (version("plan_sharded", "jax"),)),
        Quote("planning took at most {} GiB", (planners_memory(),)),
    ],
    "docs/guide/transforms.md": [
        Quote(
            "is compiled in that call: {} ms instead of {} for a small scan",
            (
                f"{1e3 * value('eager_transforms', 'eager scan, a body made per call'):.0f}",
                f"{1e3 * value('eager_transforms', 'eager scan, repeated call'):.1f}",
            ),
        ),
    ],
}
