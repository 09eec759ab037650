"""How long a published model takes from a disk to a GPU: NNX next to transformers and safetensors, in one run.

    python -m benchmarks.gpu.load_weights                     a Llama of 8 billion parameters, from the page cache
    python -m benchmarks.gpu.load_weights --cold              also with files that are not in the page cache
    python -m benchmarks.gpu.load_weights --layers 4 --tune   smaller, with other sizes of pieces
    python -m benchmarks.gpu.load_weights --out FILE.json     write a record (see benchmarks/record.py)

The checkpoint has random bfloat16 weights in shards of about 5 GB. Every contender runs in its own process and loads
twice: the first load also compiles and sets up memory. NNX then compares some parameters with the files, bit for bit.
"""

# PyTorch and transformers are not among the project's dependencies.
# pyright: reportMissingImports=false

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.llamas import EIGHT_BILLION, published_config, tensors

VOCAB = EIGHT_BILLION.vocab
SHARD = 5 * 10**9


def write(directory: Path, layers: int) -> None:
    """Writes the checkpoint."""
    sizes = EIGHT_BILLION._replace(layers=layers)
    config = {
        **published_config(sizes), "model_type": "llama", "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "bfloat16", "hidden_act": "silu",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    shards: list[dict[str, Any]] = [{}]
    size = 0
    for name, shape in tensors(sizes).items():
        count = 2 * int(np.prod(shape))
        if size + count > SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [size, size + count]}
        size += count
    # Bfloat16s between -2 and 2: a random sign and fraction, and one of the exponents below 2. Another start for each
    # tensor, so that no two are alike.
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**16, 2**26 + 2**25, np.uint16)
    block = ((bits & 0x80FF) | 0x3F00).astype(np.uint16)
    weight_map = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        header = json.dumps({"__metadata__": {"format": "pt"}, **shard}).encode()
        header += b" " * (-len(header) % 8)
        with open(directory / file, "wb") as opened:
            opened.write(len(header).to_bytes(8, "little") + header)
            for name, entry in shard.items():
                left, start = (entry["data_offsets"][1] - entry["data_offsets"][0]) // 2, len(weight_map) * 1000003
                while left:
                    start %= 2**25
                    part = block[start : start + left]
                    opened.write(part.data)
                    left, start = left - len(part), start + 7919
                weight_map[name] = file
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
    )


# One contender, in its own process


def by_nnx(directory: Path, options: argparse.Namespace) -> Callable[[], Any]:
    import jax

    import nnx
    from nnx.models import pretrained
    from nnx.models.files import sending

    if options.piece:
        sending.PIECE = options.piece << 20
    if options.threads:
        sending.SENDERS = options.threads
    jax.device_put(np.zeros(3)).block_until_ready()
    fill = sending.placed

    def timed(requests: Any) -> Any:
        begun = time.perf_counter()
        found = fill(requests)
        print(f"  reading and sending {time.perf_counter() - begun:.2f} s", end="")
        jax.block_until_ready(found)
        print(f", until ready {time.perf_counter() - begun:.2f} s", flush=True)
        return found

    pretrained.placed = timed

    def load() -> Any:
        model = nnx.models.from_pretrained(directory, scan_layers=options.way == "nnx scanned")
        jax.block_until_ready(jax.tree.leaves(model.get_state()))
        return model

    return load


def check(model: Any, directory: Path, scanned: bool) -> str:
    """Compares parameters with the files; returns what was compared."""
    import nnx

    files = {path.name: nnx.load_safetensors(path) for path in sorted(directory.glob("*.safetensors"))}
    tensors = {name: array for file in files.values() for name, array in file.items()}
    state = model.get_state()
    last = len([name for name in tensors if name.endswith("q_proj.weight")]) - 1
    compared = 0
    for layer in (0, last // 2, last):
        for ours, theirs in {
            "attention/query/kernel": "self_attn.q_proj", "attention/key/kernel": "self_attn.k_proj",
            "attention/out/kernel": "self_attn.o_proj", "mlp/gate/kernel": "mlp.gate_proj",
            "mlp/down/kernel": "mlp.down_proj", "attention_norm/scale": "input_layernorm",
        }.items():  # fmt: skip
            path = f"layers/scan_module/layers/0/{ours}" if scanned else f"layers/{layer}/{ours}"
            value = state[path].value[layer] if scanned else state[path].value
            compared += same(value, tensors[f"model.layers.{layer}.{theirs}.weight"])
    compared += same(state["embed/embedding"].value, tensors["model.embed_tokens.weight"])
    compared += same(state["head/kernel"].value, tensors["lm_head.weight"])
    return f"{compared} parameters equal the files"


def same(value: Any, tensor: Any) -> int:
    found = np.asarray(value).view(np.uint16)
    tensor = np.asarray(tensor)
    expected = tensor.view(np.uint16) if tensor.ndim == 1 else tensor.view(np.uint16).T.reshape(found.shape)
    if tensor.ndim == 2 and found.shape == tensor.shape and tensor.shape[0] == VOCAB:
        expected = tensor.view(np.uint16)
    assert np.array_equal(found, expected), "a parameter differs from its file"
    return 1


def by_transformers(directory: Path, options: argparse.Namespace) -> Callable[[], Any]:
    import torch
    import transformers

    torch.zeros(1, device="cuda")

    def load() -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, device_map="cuda")
        torch.cuda.synchronize()
        return model

    return load


def by_safetensors(directory: Path, options: argparse.Namespace) -> Callable[[], Any]:
    import torch
    from safetensors.torch import load_file

    torch.zeros(1, device="cuda")

    def load() -> Any:
        found = [load_file(path, device="cuda") for path in sorted(directory.glob("*.safetensors"))]
        torch.cuda.synchronize()
        return found

    return load


WAYS = {"nnx": by_nnx, "nnx scanned": by_nnx, "transformers": by_transformers, "safetensors": by_safetensors}


def child(options: argparse.Namespace) -> None:
    directory = Path(options.directory)
    load = WAYS[options.way](directory, options)
    if options.cold:
        for path in directory.glob("*.safetensors"):
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)
    seconds, texts, result = [], [], None
    for _ in range(1 if options.cold else 2):
        del result
        begun, worked = time.perf_counter(), time.process_time()
        result = load()
        seconds.append(time.perf_counter() - begun)
        texts.append(f"{seconds[-1]:.2f} s (CPU {time.process_time() - worked:.1f})")
    checked = ""
    if options.check:
        checked = "; " + check(result, directory, options.way == "nnx scanned")
    label = " ".join([options.way, *(["cold"] if options.cold else [])])
    settings = f" piece {options.piece} MB, {options.threads} threads" if options.piece else ""
    print(f"{label}{settings}: {', then '.join(texts)}{checked}", flush=True)
    if options.seconds:
        options.seconds.write_text(json.dumps(seconds))


def transfers() -> None:
    """Prints how fast this machine copies from the host to the GPU, for arrays of several sizes sent at once."""
    import jax

    for megabytes in (32, 128):
        for count in (1, 8):
            arrays = [np.ones(megabytes << 20, np.uint8) for _ in range(count)]
            jax.block_until_ready([jax.device_put(array) for array in arrays])
            begun = time.perf_counter()
            for _ in range(3):
                jax.block_until_ready([jax.device_put(array) for array in arrays])
            rate = 3 * count * (megabytes << 20) / (time.perf_counter() - begun) / 1e9
            print(f"  {count} transfers of {megabytes} MB at once: {rate:.1f} GB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--piece", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--directory", default=None)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--way", choices=WAYS, default=None)
    parser.add_argument("--transfers", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a record of the run")
    parser.add_argument("--seconds", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.transfers:
        transfers()
        return
    if options.way:
        child(options)
        return
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        write(Path(folder), options.layers)
        print(f"written in {time.perf_counter() - begun:.1f} s, {os.cpu_count()} cores", flush=True)
        runs = [["--way", way, *(["--check"] if way.startswith("nnx") else [])] for way in options.ways]
        if options.cold:
            runs += [["--way", way, "--cold"] for way in ("nnx", "transformers") if way in options.ways]
        if options.tune:
            settings = (("128", "8"), ("32", "16"))
            runs.append(["--transfers"])
            runs += [["--way", "nnx", "--piece", piece, "--threads", threads] for piece, threads in settings]
        for run in runs:
            command = [sys.executable, "-m", "benchmarks.gpu.load_weights", "--directory", folder, *run]
            seconds = Path(folder) / f"{len(found)}.seconds"
            if subprocess.run([*command, "--seconds", str(seconds)], check=False).returncode == 0 and seconds.exists():
                found[" ".join([run[1], *(["cold"] if "--cold" in run else [])])] = json.loads(seconds.read_text())
    if options.out:
        figures: record.Figures = {
            row: record.row("s", {way: times[number] for way, times in found.items() if number < len(times)})
            for number, row in enumerate(("first load", "second load"))
        }
        whole = options.layers == 32 and not options.tune
        command = "python -m benchmarks.gpu.load_weights" + (" --cold" if options.cold else "")
        gigabytes = 2 * sum(map(math.prod, tensors(EIGHT_BILLION._replace(layers=options.layers)).values())) / 1e9
        made = record.make_record("gpu_load_weights", command, figures, whole=whole, gigabytes=gigabytes)
        record.write(options.out, made)


if __name__ == "__main__":
    main()
