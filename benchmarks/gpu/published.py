"""A published model at the speed of the GPU: an 8B Llama in the shape of transformers, next to transformers itself.

    python -m benchmarks.gpu.published 8             tokens per second of 8 rows: bfloat16 (greedy, drawn), int8, int4
    python -m benchmarks.gpu.published 1             the same of one row
    python -m benchmarks.gpu.published 64            the same of 64 rows
    python -m benchmarks.gpu.published prompts       time to the first token of prompts of 512, 2,048 and 4,096
    python -m benchmarks.gpu.published transformers  both with transformers, its static cache and torch.compile
    python -m benchmarks.gpu.published 8 --out FILE.json    write a record (see benchmarks/record.py)
    python -m benchmarks.gpu.published 8 --tiny             tiny sizes, to see that it runs; the default on a CPU

Each part takes one to two minutes, most of it to compile, and has a record of its own. It begins nothing new after
`--limit` seconds. Weights are random: the time does not depend on their values. A run reads 64 tokens and writes 256 in
each row. "Bandwidth" is the fraction of the memory bandwidth (measured first) that reading the weights, as they are
stored, and the filled part of the cache once per token would take.
"""

# PyTorch and transformers are not among the project's dependencies.
# pyright: reportMissingImports=false

import argparse
import concurrent.futures
import functools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import nnx
from benchmarks import record
from benchmarks.gpu.decode import measured_bandwidth

READ, WRITTEN = 64, 256
ROWS = (1, 8, 64)
PROMPTS = (4096, 512, 2048)
DRAWN = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
ROW = "rows: {}"
FIRST = "first token of {}"


class Sizes(NamedTuple):
    """The sizes of the model, named as in a config.json."""

    vocab_size: int = 128256
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False


TINY = Sizes(256, 64, 128, 2, 4, 2, 8192)


class Clock:
    """Says what has been measured, and whether there is time for more."""

    def __init__(self, limit: float):
        self.began, self.limit, self.complete = time.perf_counter(), limit, True

    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def measure(self, name: str, run: Callable[[], Any]) -> float | None:
        """Returns the median seconds of several runs after the first one; None if there is no time left."""
        if self.seconds() > self.limit:
            self.complete = False
            print(f"  {name}: left out, {self.seconds():.0f} s have passed", flush=True)
            return None
        began = time.perf_counter()
        run()
        first, times = time.perf_counter() - began, []
        while len(times) < 3 or (len(times) < 9 and sum(times) < 1.5):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        median = statistics.median(times)
        print(f"  {name}: {1e3 * median:.2f} ms; the first call took {first:.0f} s", file=sys.stderr, flush=True)
        return median


def prompts(sizes: Sizes, rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, sizes.vocab_size, (rows, length)).astype(np.int32)


# NNX


def make_model(sizes: Sizes) -> Any:
    config = nnx.models.DecoderConfig(
        model_type="llama",
        vocab_size=sizes.vocab_size,
        features=sizes.hidden_size,
        hidden_features=sizes.intermediate_size,
        num_layers=sizes.num_hidden_layers,
        num_heads=sizes.num_attention_heads,
        num_kv_heads=sizes.num_key_value_heads,
        max_length=sizes.max_position_embeddings,
        norm_epsilon=sizes.rms_norm_eps,
        rotary=nnx.models.RotaryConfig(base=500000.0),
        tie_embeddings=sizes.tie_word_embeddings,
    )

    @nnx.jit
    def make() -> Any:
        dtype = jnp.bfloat16
        return nnx.models.Decoder(config, dtype=dtype, param_dtype=dtype, scan_layers=True, ctx=nnx.context(0))

    return nnx.jit(lambda model: model.unscanned())(make())


def device_bytes(tree: Any) -> int:
    """Returns the bytes that the arrays of a tree take on a device, where two 4-bit numbers share a byte."""
    return sum(leaf.nbytes // (2 if leaf.dtype == jnp.int4 else 1) for leaf in jax.tree.leaves(tree))


def generating(model: Any, tokens: np.ndarray, new: int, **rules: Any) -> Callable[[], Any]:
    ctx = nnx.context(sample=0)
    rules = rules or {"temperature": 0}
    return lambda: nnx.generate(model, tokens, max_new_tokens=new, ctx=ctx, **rules).block_until_ready()


def models(sizes: Sizes) -> dict[str, Any]:
    """Returns the same model in bfloat16, int8 and int4."""
    made = {"bfloat16": make_model(sizes)}
    forms: dict[str, Literal[8, 4]] = {"int8": 8, "int4": 4}
    for name, bits in forms.items():
        made[name] = made["bfloat16"].clone()
        nnx.quantize(made[name], bits)
    return made


def bytes_per_step(sizes: Sizes, model: Any, rows: int, new: int) -> float:
    """Returns the bytes of weights and, on average over the run, filled cache that one step has to read."""
    weights = device_bytes(model.get_state()) - device_bytes(model.embed.get_state())  # of which a step reads a row
    per_token = 4 * sizes.num_hidden_layers * sizes.num_key_value_heads * sizes.hidden_size // sizes.num_attention_heads
    return weights + rows * per_token * (READ + new / 2)


def written(sizes: Sizes, clock: Clock, rows: int, new: int) -> record.Figures:
    """Measures tokens per second."""
    bandwidth = measured_bandwidth(1 << (20 if sizes is TINY else 32))
    tokens, made, runs = prompts(sizes, rows, READ), models(sizes), {}
    for name, model in made.items():
        runs[name] = generating(model, tokens, new)
    runs["bfloat16, drawn"] = generating(made["bfloat16"], tokens, new, **DRAWN)
    runs["bfloat16"]()  # alone, because XLA times its products while it compiles them; the others have kernels of ours
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda run: run(), runs.values()))
    print(f"  compiled after {clock.seconds():.0f} s", file=sys.stderr, flush=True)
    times = {name: clock.measure(f"{name}, {rows} rows", run) for name, run in runs.items()}
    speeds = {name: rows * new / took for name, took in times.items() if took is not None}
    fractions = {
        name: bytes_per_step(sizes, made[name.partition(",")[0]], rows, new) * new / took / bandwidth
        for name, took in times.items()
        if took is not None
    }
    weights = {name: bytes_per_step(sizes, model, 0, new) / 2**30 for name, model in made.items()}
    return {
        "memory bandwidth": record.row("TB/s", {"measured": bandwidth / 1e12}),
        "weights of a step": record.row("GiB", weights),
        ROW.format(rows): record.row("tokens/s", speeds),
        f"{ROW.format(rows)}, part of the memory bandwidth": record.row("1", fractions),
    }


def first_tokens(sizes: Sizes, clock: Clock, lengths: tuple[int, ...]) -> record.Figures:
    """Measures the time to the first token; quantized, of the longest prompt."""
    times: dict[int, dict[str, float | None]] = {length: {} for length in sorted(lengths)}
    for name, model in models(sizes).items():
        for length in lengths if name == "bfloat16" else lengths[:1]:
            took = clock.measure(f"{name}, {length} tokens", generating(model, prompts(sizes, 1, length), 1))
            times[length][name] = None if took is None else 1e3 * took
    return {FIRST.format(length): record.row("ms", times[length]) for length in sorted(lengths)}


# transformers


def with_transformers(sizes: Sizes, clock: Clock, new: int, lengths: tuple[int, ...]) -> record.Figures:
    """Measures the same with transformers: the first token eagerly, and the others with its static cache, compiled."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**sizes._asdict(), rope_theta=500000.0, attn_implementation="sdpa")).eval()
    torch.set_default_dtype(torch.float32)
    figures: record.Figures = {}

    def ids(rows: int, length: int) -> Any:
        return torch.tensor(prompts(sizes, rows, length), dtype=torch.int64, device=device)

    @torch.no_grad()
    def forward(tokens: Any) -> None:
        model(tokens, logits_to_keep=1).logits.argmax(-1).cpu()

    for length in lengths:
        took = clock.measure(f"transformers, eager, {length} tokens", functools.partial(forward, ids(1, length)))
        figures[FIRST.format(length)] = record.row("ms", {"transformers": None if took is None else 1e3 * took})

    @torch.no_grad()
    def generate(tokens: Any) -> None:
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        model.generate(tokens, cache_implementation="static", pad_token_id=0, **options).cpu()

    for rows in ROWS:
        took = clock.measure(f"transformers, {rows} rows", functools.partial(generate, ids(rows, READ)))
        figures[ROW.format(rows)] = record.row(
            "tokens/s", {"transformers": None if took is None else rows * new / took}
        )
    return figures


def measure(part: str, sizes: Sizes, clock: Clock) -> record.Figures:
    lengths = tuple(length // 64 for length in PROMPTS) if sizes is TINY else PROMPTS
    new = 8 if sizes is TINY else WRITTEN
    if part == "prompts":
        return first_tokens(sizes, clock, lengths)
    if part == "transformers":
        return with_transformers(sizes, clock, new, lengths)
    return written(sizes, clock, int(part), new)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=(*map(str, ROWS), "prompts", "transformers"))
    parser.add_argument("--tiny", action="store_true", help="tiny sizes; the default without a GPU")
    parser.add_argument("--limit", type=float, default=400.0, help="begin nothing new after so many seconds")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write a record of the run")
    args = parser.parse_args()
    tiny = args.tiny or jax.default_backend() != "gpu"
    clock = Clock(args.limit)
    figures = measure(args.part, TINY if tiny else Sizes(), clock)
    print(f"{args.part}, after {clock.seconds():.0f} s:")
    for name, row in figures.items():
        print(f"  {name}: " + ", ".join(f"{label} {value:,.3g}" for label, value in row["values"].items()), row["unit"])
    if args.out:
        command = f"python -m benchmarks.gpu.published {args.part}"
        whole = clock.complete and not tiny
        record.write(args.out, record.make_record(f"gpu_published_{args.part}", command, figures, whole=whole))
    return 0


if __name__ == "__main__":
    sys.exit(main())
