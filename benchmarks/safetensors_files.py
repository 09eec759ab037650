"""How fast safetensors files are written and read, and how much memory that takes, next to the `safetensors` package.

Usage:

    python -m benchmarks.safetensors_files                  1 GB, three rounds
    python -m benchmarks.safetensors_files --size 200 --rounds 5

Each contender runs in its own process, taking turns with the others, on a file in the page cache. Prints the best time
and the largest peak of resident memory on top of what the process had before, both as multiples of the model.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAYS = ("nnx write", "safetensors write", "nnx numpy", "safetensors numpy", "nnx jax", "safetensors jax")
WAYS += ("nnx jax, unverified", "nnx sharded by rows", "nnx sharded by columns", "nnx memory-mapped")


def peak() -> int:
    """Returns the largest resident memory of this process so far, in bytes."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def child(way: str, path: Path, megabytes: int) -> None:
    """Does one thing once and prints seconds and bytes."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import safetensors.numpy
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import nnx

    columns, count = 4096, 16
    rows = megabytes * 10**6 // count // columns // 4 // 4 * 4  # four devices
    names = [f"layers/{i:02}/kernel" for i in range(count)]
    mesh = Mesh(np.array(jax.devices()), ("x",))
    specs = {"rows": P("x"), "columns": P(None, "x")}
    sharding = next((NamedSharding(mesh, spec) for word, spec in specs.items() if way.endswith(word)), None)
    kind = jax.ShapeDtypeStruct((rows, columns), jnp.float32, sharding=sharding)
    if way.endswith("write"):
        arrays = {name: np.random.default_rng(i).random((rows, columns), np.float32) for i, name in enumerate(names)}
        os.sync()
    target = nnx.State({name: np.empty(kind.shape, np.float32) if "numpy" in way else kind for name in names})
    jax.device_put(np.zeros(3)).block_until_ready()
    before, begun = peak(), time.perf_counter()
    if way == "nnx write":
        nnx.save_safetensors(path, nnx.State(arrays))
    elif way == "safetensors write":
        safetensors.numpy.save_file(arrays, path)
        with open(path, "rb") as file:  # synced to disk, like ours
            os.fsync(file.fileno())
    elif way == "safetensors numpy":
        result = safetensors.numpy.load_file(path)
    elif way == "safetensors jax":
        result = {name: jnp.asarray(array) for name, array in safetensors.numpy.load_file(path).items()}
    elif way == "nnx memory-mapped":
        result = nnx.load_safetensors(path)
    else:
        result = nnx.load_safetensors(path, target, verify="unverified" not in way)
    if "write" not in way:
        jax.block_until_ready(result)
    print(json.dumps([time.perf_counter() - begun, peak() - before]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1000, help="the size of the model in MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], Path(options.child[1]), options.size)
        return
    flags = "--xla_force_host_platform_device_count=4"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        for _ in range(options.rounds):
            for way in WAYS:
                command = [sys.executable, "-m", "benchmarks.safetensors_files", "--size", str(options.size)]
                run = subprocess.run(
                    [*command, "--child", way, str(path if way != "safetensors write" else path.with_name("theirs"))],
                    env=environment, capture_output=True, text=True, check=True,
                )  # fmt: skip
                seconds, memory = json.loads(run.stdout.splitlines()[-1])
                found[way].append((seconds, memory / (options.size * 10**6)))
    print(f"{options.size} MB in 16 tensors, {os.cpu_count()} cores, best of {options.rounds}")
    for way, results in found.items():
        seconds = min(result[0] for result in results)
        rate = options.size / 1000 / seconds
        print(f"{way:24} {seconds:7.3f} s  {rate:6.2f} GB/s   peak {max(result[1] for result in results):.2f} models")


if __name__ == "__main__":
    main()
