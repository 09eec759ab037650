"""How fast a published checkpoint becomes a model, and how much memory that takes, next to reading its files.

Usage:

    python -m benchmarks.load_pretrained                   2 GB in shards of 500 MB, three rounds
    python -m benchmarks.load_pretrained --size 200 --rounds 5 --dtype float32
    python -m benchmarks.load_pretrained --ways nnx        only reading and one way of loading

A Llama-shaped checkpoint with random weights is written by the `safetensors` package. Each contender runs in its own
process, taking turns with the others, on files in the page cache, and loads twice. The first load also traces the model
and pays for memory that the process never used before, which is expensive in some virtual machines. Reading is
`safetensors.numpy.load_file` on every shard. Prints both times (the best of all rounds), also as multiples of reading;
the CPU times, which other programs disturb less; and the largest peak of resident memory beyond the model itself during
the first one, in sizes of the largest tensor. Goals: 1.3 times the time of reading, and 1.2 tensors.
"""

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

from benchmarks.llamas import Sizes, published_config, tensors

READ = "safetensors read"
WAYS = (READ, "nnx", "nnx sharded", "nnx scanned", "nnx to float32")
SIZES = Sizes(vocab=32000, layers=1, width=2048, heads=16, kv_heads=8, hidden=5632, tied=True, max_length=4096)
GOALS = {"time": 1.3, "memory": 1.2}


def peak() -> int:
    """Returns the largest resident memory of this process so far, in bytes."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def write(directory: Path, megabytes: int, dtype: str) -> dict:
    """Writes the checkpoint; returns its size, that of its largest tensor, and the number of layers, in bytes."""
    import jax.numpy as jnp
    import numpy as np
    import safetensors.numpy

    kind = jnp.dtype(dtype)
    one = tensors(SIZES._replace(layers=1))
    around = kind.itemsize * sum(math.prod(one[name]) for name in one if "layers" not in name)
    size = kind.itemsize * sum(map(math.prod, one.values())) - around
    layers = max(2, round((megabytes * 10**6 - around) / size))
    sizes = SIZES._replace(layers=layers)
    shapes, config = tensors(sizes), {"model_type": "llama", **published_config(sizes)}
    (directory / "config.json").write_text(json.dumps(config))
    random, weight_map, shard, held, number = np.random.default_rng(0), {}, {}, 0, 0
    for i, (name, shape) in enumerate(shapes.items()):
        shard[name] = random.standard_normal(shape, np.float32).astype(kind)
        held += shard[name].nbytes
        if held > 5 * 10**8 or i + 1 == len(shapes):
            number += 1
            file = f"model-{number:05}-of-99999.safetensors"
            safetensors.numpy.save_file(shard, directory / file)
            weight_map |= dict.fromkeys(shard, file)
            shard, held = {}, 0
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    largest = kind.itemsize * max(map(math.prod, shapes.values()))
    return {"size": around + layers * size, "largest": largest, "layers": layers}


def child(way: str, directory: Path) -> None:
    """Loads the checkpoint twice; prints the times and CPU times of both, the peak of memory and the bytes."""
    import jax
    import numpy as np
    import safetensors.numpy

    import nnx

    options: dict = {}
    if "sharded" in way:
        options = {"mesh": jax.make_mesh((4,), ("model",)), "rules": nnx.tensor_parallel_rules()}
    if "scanned" in way:
        options["scan_layers"] = True
    if "float32" in way:
        options["dtype"] = "float32"

    def load() -> list:
        if way == READ:
            files = [safetensors.numpy.load_file(path) for path in sorted(directory.glob("*.safetensors"))]
            return [array for arrays in files for array in arrays.values()]
        leaves = jax.tree.leaves(nnx.models.from_pretrained(directory, **options).get_state())
        return [shard.data for leaf in jax.block_until_ready(leaves) for shard in leaf.addressable_shards]

    jax.device_put(np.zeros(3)).block_until_ready()
    for path in directory.glob("*.safetensors"):  # into the page cache, in case the system has dropped it
        with open(path, "rb") as file:
            while file.read(2**20):
                pass
    before = peak()
    times, arrays = timed(load)
    memory, held = peak() - before, sum(array.nbytes for array in arrays)
    del arrays
    print(json.dumps([*times, *timed(load)[0], memory, held]))


def timed(work: Callable[[], Any]) -> tuple[tuple[float, float], Any]:
    """Returns the time and the CPU time that something takes, and its result."""
    begun, worked = time.perf_counter(), time.process_time()
    result = work()
    return (time.perf_counter() - begun, time.process_time() - worked), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2000, help="the size of the checkpoint in MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ways", nargs="+", choices=WAYS[1:], default=WAYS[1:])
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], Path(options.child[1]))
        return
    flags = "--xla_force_host_platform_device_count=4"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    found: dict[str, list[tuple[float, float, float, float, int, int]]] = {way: [] for way in (READ, *options.ways)}
    with tempfile.TemporaryDirectory() as directory:
        facts = write(Path(directory), options.size, options.dtype)
        for _ in range(options.rounds):
            for way in found:
                command = [sys.executable, "-m", "benchmarks.load_pretrained", "--child", way, directory]
                run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                found[way].append(tuple(json.loads(run.stdout.splitlines()[-1])))
    size, largest = facts["size"] / 1e6, facts["largest"] / 1e6
    print(
        f"{size:.0f} MB of {options.dtype} in {facts['layers']} layers, largest tensor {largest:.0f} MB, "
        f"{os.cpu_count()} cores, best of {options.rounds}"
    )
    reading = [min(result[i] for result in found[READ]) for i in range(4)]
    for way, results in found.items():
        best = [min(result[i] for result in results) for i in range(4)]
        beyond = max((memory - held) / facts["largest"] for *_, memory, held in results)
        first, first_cpu, again, again_cpu = (
            f"{seconds:5.2f} s = {seconds / base:4.2f}" for seconds, base in zip(best, reading, strict=True)
        )
        print(
            f"{way:18} first {first} (CPU {first_cpu})   again {again} (CPU {again_cpu})   {beyond:5.2f} tensors more"
        )
    print(f"goals: {GOALS['time']} times reading, {GOALS['memory']} tensors beyond the model")


if __name__ == "__main__":
    main()
