"""One of the two processes of test_safetensors_processes: exports, imports and logs with the other, prints one JSON."""

import io
import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx


def make(value: float, mesh: Mesh) -> nnx.State:
    """Arrays that are spread over both processes by rows and by columns, on all devices, and on this host alone."""
    array = np.arange(32.0, dtype=np.float32).reshape(8, 4) + value
    specs = {"rows": P("x"), "columns": P(None, "x"), "everywhere": P()}
    state = {name: nnx.Param(jax.device_put(array, NamedSharding(mesh, spec))) for name, spec in specs.items()}
    return nnx.State({**state, "local": nnx.Param(jnp.full(3, value)), "host": np.full(2, value)})


def same(a: nnx.State, b: nnx.State) -> bool:
    """Whether the parts that are here agree."""
    parts = [
        [np.asarray(s.data) for s in x.addressable_shards] if isinstance(x, jax.Array) else [x]
        for state in (a, b)
        for x in jax.tree.leaves(state)
    ]
    half = len(parts) // 2
    return all(np.array_equal(p, q) for left, right in zip(parts[:half], parts[half:]) for p, q in zip(left, right))


def refused(path: Path, state: nnx.State) -> str:
    try:
        nnx.save_safetensors(path, state)
    except nnx.CheckpointError as error:
        return str(error)
    return "saved"


def main() -> None:
    address, process, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    jax.distributed.initialize(address, num_processes=2, process_id=process, initialization_timeout=100)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    target = make(0.0, mesh)
    found: dict = {"equal": [], "shardings": []}
    path = directory / "model.safetensors"
    for step, size in enumerate((None, 200, None, 150, 100)):
        nnx.save_safetensors(path, make(step + 1.0, mesh), max_shard_size=size)
        loaded = nnx.load_safetensors(path, target)
        found["equal"].append(same(loaded, make(step + 1.0, mesh)))
        found["shardings"].append(loaded["columns"].value.sharding == target["columns"].value.sharding)
    (directory / "file").write_bytes(b"")
    found["refused"] = refused(directory / "file" / "model.safetensors", target)
    stream = io.StringIO()
    with nnx.TrainLog(total=1, path=directory / "log", file=stream) as log:
        log.add_sink(lambda step, values: found.update(sink=values))
        log(0, loss=make(1.0, mesh)["local"].value[0])
    found["shown"] = bool(stream.getvalue())
    nnx.save_safetensors(path, target)  # everybody is here again
    found["files"] = sorted(os.listdir(directory)), sorted(os.listdir(directory / "log"))
    print(json.dumps(found), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
