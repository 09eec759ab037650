"""A published model at the speed of the GPU: an 8B Llama in the shape of transformers, next to transformers itself.

    python -m benchmarks.gpu.published                  every part
    python -m benchmarks.gpu.published 8                tokens per second of 8 rows: bfloat16, int8, int4, transformers
    python -m benchmarks.gpu.published 1 64             the same of one row, and of 64 rows
    python -m benchmarks.gpu.published drawn            greedy next to drawn with temperature, top_k and top_p
    python -m benchmarks.gpu.published prompts          time to the first token of prompts of 512, 2,048 and 4,096
    python -m benchmarks.gpu.published --out DIRECTORY  write a record of each part (see benchmarks/record.py)
    python -m benchmarks.gpu.published 8 --tiny         tiny sizes, to see that it runs; the default without a GPU

It takes about four minutes, most of them to compile. The two libraries compile side by side, each in a process of its
own, and take turns to measure. transformers writes with its static cache and `torch.compile`, and reads eagerly.
Records are written as figures come; one is whole when its part is complete. Nothing new is begun after `--limit`
seconds. Weights are random: the time does not depend on their values. A run reads 64 tokens and writes 256 in each row.
"Bandwidth" is the fraction of the memory bandwidth (measured first) that reading the weights, as they are stored, and
the filled part of the cache once per token would take.
"""

# PyTorch and transformers are not among the project's dependencies.
# pyright: reportMissingImports=false

import argparse
import concurrent.futures
import contextlib
import fcntl
import functools
import importlib.util
import json
import os
import pathlib
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import nnx
from benchmarks import record
from benchmarks.gpu.decode import measured_bandwidth
from benchmarks.llamas import EIGHT_BILLION, TINY, Sizes, decoder_config, published_config

READ, WRITTEN = 64, 256
ROWS = (8, 1, 64)
PROMPTS = (4096, 512, 2048)
DRAWN = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
PARTS = (*map(str, ROWS), "drawn", "prompts")
ROW = "rows: {}"
BANDWIDTH = "rows: {}, part of the memory bandwidth"
FIRST = "first token of {}"
Found = tuple[str, str, dict[str, Any]]
"""A part, a row of its figures, and what is new in this row."""


class Clock:
    """Says what has been measured, and whether there is time for more.

    Processes that share a GPU share a file: any number of them hold it while they compile, one while it measures.
    """

    def __init__(self, limit: float, shared: str | None):
        self.began, self.limit, self.complete = time.perf_counter(), limit, True
        self.shared = shared

    def seconds(self) -> float:
        return time.perf_counter() - self.began

    @contextlib.contextmanager
    def turn(self, alone: bool) -> Iterator[None]:
        """Waits until nobody else measures or, to be alone, until nobody else does anything."""
        with contextlib.ExitStack() as held:
            if self.shared:
                file = held.enter_context(open(self.shared))
                fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            yield

    def compile(self, runs: dict[str, Callable[[], Any]]) -> None:
        """Runs everything once, side by side."""
        with self.turn(alone=False):
            if len(runs) == 1:  # PyTorch keeps CUDA graphs for the main thread
                next(iter(runs.values()))()
            else:
                with concurrent.futures.ThreadPoolExecutor() as pool:
                    list(pool.map(lambda run: run(), runs.values()))
        print(f"  {', '.join(runs)}: compiled after {self.seconds():.0f} s", file=sys.stderr, flush=True)

    def measure(self, name: str, run: Callable[[], Any]) -> float | None:
        """Returns the median seconds of several runs of what is compiled; None if there is no time left."""
        if self.seconds() > self.limit:
            self.complete = False
            print(f"  {name}: left out, {self.seconds():.0f} s have passed", file=sys.stderr, flush=True)
            return None
        with self.turn(alone=True):
            times = []
            while len(times) < 3 or (len(times) < 9 and sum(times) < 1.5):
                began = time.perf_counter()
                run()
                times.append(time.perf_counter() - began)
        median = statistics.median(times)
        print(f"  {name}: {1e3 * median:.2f} ms", file=sys.stderr, flush=True)
        return median


def prompts(sizes: Sizes, rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, sizes.vocab, (rows, length)).astype(np.int32)


# NNX


def make_model(sizes: Sizes) -> Any:
    config = decoder_config(sizes)

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
    per_token = 4 * sizes.layers * sizes.of_keys
    return weights + rows * per_token * (READ + new / 2)


def ours(sizes: Sizes, clock: Clock, parts: list[str], new: int, lengths: tuple[int, ...]) -> Iterator[Found]:
    """Measures parts with the same models."""
    made = models(sizes)
    with clock.turn(alone=True):
        bandwidth = measured_bandwidth(1 << (20 if sizes is TINY else 32))
    for part in parts:
        if part == "prompts":
            yield from first_tokens(sizes, clock, made, lengths)
        elif part == "drawn":
            yield from drawn(sizes, clock, made["bfloat16"], new)
        else:
            weights = {name: bytes_per_step(sizes, model, 0, new) / 2**30 for name, model in made.items()}
            yield part, "memory bandwidth", record.row("TB/s", {"measured": bandwidth / 1e12})
            yield part, "weights of a step", record.row("GiB", weights)
            yield from written(sizes, clock, made, int(part), new, bandwidth)


def written(sizes: Sizes, clock: Clock, made: dict[str, Any], rows: int, new: int, bandwidth: float) -> Iterator[Found]:
    """Measures tokens per second."""
    runs = {name: generating(model, prompts(sizes, rows, READ), new) for name, model in made.items()}
    clock.compile({f"{name}, {rows} rows": run for name, run in runs.items()})
    for name, run in runs.items():
        took = clock.measure(f"{name}, {rows} rows", run)
        if took is not None:
            read = bytes_per_step(sizes, made[name], rows, new) * new / took
            yield str(rows), ROW.format(rows), record.row("tokens/s", {name: rows * new / took})
            yield str(rows), BANDWIDTH.format(rows), record.row("1", {name: read / bandwidth})


def drawn(sizes: Sizes, clock: Clock, model: Any, new: int) -> Iterator[Found]:
    """Measures greedy decoding next to drawing, in turns."""
    runs = {
        (rows, name): generating(model, prompts(sizes, rows, READ), new, **rules)
        for rows in ROWS
        for name, rules in (("greedy", {}), ("drawn", DRAWN))
    }
    clock.compile({f"{name}, {rows} rows": run for (rows, name), run in runs.items()})
    for (rows, name), run in runs.items():
        took = clock.measure(f"{name}, {rows} rows", run)
        yield "drawn", ROW.format(rows), record.row("tokens/s", {name: None if took is None else rows * new / took})


def first_tokens(sizes: Sizes, clock: Clock, made: dict[str, Any], lengths: tuple[int, ...]) -> Iterator[Found]:
    """Measures the time to the first token; quantized, of the longest prompt."""
    runs = {
        (length, name): generating(model, prompts(sizes, 1, length), 1)
        for name, model in made.items()
        for length in (lengths if name == "bfloat16" else lengths[:1])
    }
    clock.compile({f"{name}, {length} tokens": run for (length, name), run in runs.items()})
    for (length, name), run in runs.items():
        took = clock.measure(f"{name}, {length} tokens", run)
        yield "prompts", FIRST.format(length), record.row("ms", {name: None if took is None else 1e3 * took})


# transformers


def theirs(sizes: Sizes, clock: Clock, parts: list[str], new: int, lengths: tuple[int, ...]) -> Iterator[Found]:
    """Measures the same with transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**published_config(sizes), attn_implementation="sdpa")).eval()
    torch.set_default_dtype(torch.float32)

    def ids(rows: int, length: int) -> Any:
        return torch.tensor(prompts(sizes, rows, length), dtype=torch.int64, device=device)

    @torch.no_grad()
    def forward(tokens: Any) -> None:
        model(tokens, logits_to_keep=1).logits.argmax(-1).cpu()

    @torch.no_grad()
    def generate(tokens: Any) -> None:
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        model.generate(tokens, cache_implementation="static", pad_token_id=0, **options).cpu()

    def measured(name: str, run: Callable[[], Any]) -> float | None:
        if clock.seconds() < clock.limit:
            clock.compile({name: run})
        return clock.measure(name, run)

    for part in parts:
        if part.isdigit():
            rows = int(part)
            took = measured(f"transformers, {rows} rows", functools.partial(generate, ids(rows, READ)))
            speed = None if took is None else rows * new / took
            yield part, ROW.format(rows), record.row("tokens/s", {"transformers": speed})
        for length in lengths if part == "prompts" else ():
            took = measured(f"transformers, eager, {length} tokens", functools.partial(forward, ids(1, length)))
            yield part, FIRST.format(length), record.row("ms", {"transformers": None if took is None else 1e3 * took})


# Processes


LIBRARIES: dict[str, Callable[..., Iterator[Found]]] = {"nnx": ours, "transformers": theirs}


def child(library: str, parts: list[str], clock: Clock, tiny: bool) -> None:
    """Measures in this process; prints what is found, one JSON array per line."""
    sizes, new = (TINY, 8) if tiny else (EIGHT_BILLION, WRITTEN)
    lengths = tuple(length // 64 for length in PROMPTS) if tiny else PROMPTS
    for found in LIBRARIES[library](sizes, clock, parts, new, lengths):
        print(json.dumps(found), flush=True)


def lines_of(command: list[str], found: queue.Queue[Any]) -> None:
    """Runs a process, and hands on what it finds; in the end, None."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("["):
            found.put(json.loads(line))
    process.wait()
    found.put(None)


def is_whole(part: str, figures: record.Figures) -> bool:
    """Whether a part has a figure of every contender."""
    if part == "drawn":
        return all(len(figures.get(ROW.format(rows), {"values": {}})["values"]) == 2 for rows in ROWS)
    forms = {"bfloat16", "int8", "int4"}
    longest = FIRST.format(PROMPTS[0]) if part == "prompts" else ROW.format(part)
    others = [FIRST.format(length) for length in PROMPTS[1:]] if part == "prompts" else []
    expected = {longest: forms, **dict.fromkeys(others, {"bfloat16"})}
    return all(
        {*wanted, "transformers"} <= {*figures.get(row, {"values": {}})["values"]} for row, wanted in expected.items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes; the default without a GPU")
    parser.add_argument("--limit", type=float, default=400.0, help="begin nothing new after so many seconds")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIRECTORY", help="write a record of each part")
    parser.add_argument("--alone", nargs=2, metavar=("LIBRARY", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    parts = args.parts or list(PARTS)
    if not {*parts} <= {*PARTS}:
        parser.error(f"the parts are {', '.join(PARTS)}")
    if args.alone:
        library, shared = args.alone
        child(library, parts, Clock(args.limit, shared), args.tiny)
        return 0
    tiny = args.tiny or shutil.which("nvidia-smi") is None
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # processes share the GPU, and this one only names it
    has_peer = all(importlib.util.find_spec(package) for package in ("torch", "transformers"))
    running = ["nnx", *["transformers"] * has_peer]
    figures: dict[str, record.Figures] = {part: {} for part in parts}
    found: queue.Queue[Any] = queue.Queue()
    with tempfile.NamedTemporaryFile() as shared:
        for library in running:
            options = ["--alone", library, shared.name, "--limit", str(args.limit), *["--tiny"] * tiny]
            command = [sys.executable, "-m", "benchmarks.gpu.published", *options, *parts]
            threading.Thread(target=lines_of, args=(command, found)).start()
        while running:
            news = found.get()
            if news is None:
                running.pop()
                continue
            part, name, row = news
            figures[part].setdefault(name, {**row, "values": {}})["values"] |= row["values"]
            values = ", ".join(f"{label} {value:,.3g}" for label, value in row["values"].items())
            print(f"  {name}: {values} {row['unit']}", flush=True)
            if args.out:
                write(args.out, part, figures[part], tiny)
    return 0


def write(out: pathlib.Path, part: str, figures: record.Figures, tiny: bool) -> None:
    name, command = f"gpu_published_{part}", f"python -m benchmarks.gpu.published {part}"
    whole = not tiny and is_whole(part, figures)
    record.write(out / f"{name}.json", record.make_record(name, command, figures, whole=whole))


if __name__ == "__main__":
    sys.exit(main())
