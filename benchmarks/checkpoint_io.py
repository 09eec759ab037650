"""What checkpoints cost: NNX next to its earlier format, TensorStore alone, Orbax and safetensors.

    python -m benchmarks.checkpoint_io                        one gigabyte in 200 arrays, three rounds; then the 774
                                                              arrays of a model with 48 layers
    python -m benchmarks.checkpoint_io --arrays 200 --gigabytes 1
    python -m benchmarks.checkpoint_io --arrays 100000 --gigabytes 0.002 --only nnx
    python -m benchmarks.checkpoint_io --earlier ../nnx-0.2   also version 0.2, which is in that directory
    python -m benchmarks.checkpoint_io --out FILE.json        write a record (see benchmarks/record.py)

Each contender runs in a process of its own, and they take turns; the lowest of the rounds counts. The seconds of the
CPU are those of all threads: a busy machine changes them less. Files are read from the page cache, where checksums cost
the most relative to reading. TensorStore alone writes one zarr array per array, with the checksums that NNX asks for.
"""

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CONTENDERS = ("nnx", "earlier", "tensorstore", "orbax", "safetensors")
COLUMNS = ("save", "load", "other layout", "blocked")
UNITS = {"seconds": "s", "cpu": "s of the CPU", "peak": "GB on top"}
SIZES = ((200, 1.0), (774, 0.15))


def make(arrays: int, gigabytes: float, empty: bool = False) -> dict[str, jax.Array]:
    """Makes equal matrices of random numbers, or of zeros."""
    size = int(gigabytes * 1e9 / 4 / arrays)
    shape = (size // 1000, 1000) if size >= 1000 else (size,)
    draw = np.random.default_rng(0)
    if empty:
        return {f"w{i}": jnp.zeros(shape) for i in range(arrays)}
    return {f"w{i}": jnp.asarray(draw.standard_normal(shape, np.float32)) for i in range(arrays)}


def abstract(arrays: dict[str, jax.Array]) -> dict[str, jax.ShapeDtypeStruct]:
    """Describes the arrays, split by rows over all devices where that is possible."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def split(x: jax.Array) -> jax.ShapeDtypeStruct:
        spec = jax.sharding.PartitionSpec("x" if x.shape[0] % mesh.size == 0 else None)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))

    return {name: split(x) for name, x in arrays.items()}


# Measuring, in the process of one contender


def memory() -> float:
    """Returns the gigabytes that this process has allocated."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1e6 for line in file if line.startswith("RssAnon"))


def measured(work: Callable[[], Any]) -> dict[str, float]:
    """Returns the seconds it takes, those of the CPU, and the gigabytes at the peak on top of before."""
    before, peak, done = memory(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, memory())

    thread = threading.Thread(target=watch)
    thread.start()
    begun, begun_cpu = time.perf_counter(), time.process_time()
    try:
        result = work()
        jax.block_until_ready([x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)])
    finally:
        seconds, cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
        done.set()
        thread.join()
    return {"seconds": seconds, "cpu": cpu, "peak": max(peak - before, 0.0)}


def run(contender: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one contender once."""
    arrays = make(options.arrays, options.gigabytes)
    jax.block_until_ready(list(arrays.values()))
    save, load, blocked = WORK[contender](folder, arrays)
    found: dict[str, Any] = {"save": measured(save)}
    found["files"] = sum(len(names) for _, _, names in os.walk(folder))
    found["load"] = measured(functools.partial(load, make(options.arrays, options.gigabytes, empty=True)))
    split = abstract(arrays)
    if contender != "safetensors":  # the package reads whole arrays only
        found["other layout"] = measured(lambda: load(split))
    if blocked is not None:
        finish: list[Callable[[], None]] = []
        found["blocked"] = measured(lambda: finish.append(blocked()))
        finish[0]()
    return found


# How to save, how to load into or like arrays, and how to begin an asynchronous save, which returns how to wait for it.
Work = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[], Callable[[], None]] | None]


def nnx_work(folder: Path, arrays: dict[str, jax.Array]) -> Work:
    import nnx

    model = nnx.Dict(**{name: nnx.Param(x) for name, x in arrays.items()})

    def load(target: dict[str, Any]) -> Any:
        filled = nnx.Dict(**{name: nnx.Param(x) for name, x in target.items()})
        target.clear()
        return nnx.load(folder / "c", filled).get_state()

    def blocked() -> Callable[[], None]:
        manager = nnx.CheckpointManager(folder / "run")
        manager.save(0, model)
        return manager.wait

    return lambda: nnx.save(folder / "c", model), load, blocked


def tensorstore_work(folder: Path, arrays: dict[str, jax.Array]) -> Work:
    import tensorstore as ts

    checked = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]

    def spec(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
        rows = max(n for n in range(1, shape[0] + 1) if shape[0] % n == 0 and n * 4000 <= 8 << 20)
        sharding = {"chunk_shape": [rows, *shape[1:]], "codecs": checked, "index_codecs": checked}
        grid = {"name": "regular", "configuration": {"chunk_shape": shape}}
        codecs = [{"name": "sharding_indexed", "configuration": sharding}]
        metadata = {"shape": shape, "data_type": "float32", "chunk_grid": grid, "codecs": codecs}
        store = {"driver": "file", "path": f"{folder}/{name}/"}
        return {"driver": "zarr3", "kvstore": store, "metadata": metadata}

    def save() -> None:
        opened = [ts.open(spec(name, x.shape), create=True, open=True) for name, x in arrays.items()]
        writes = [t.result().write(np.asarray(x)) for t, x in zip(opened, arrays.values(), strict=True)]
        for write in writes:
            write.result()

    def load(target: dict[str, Any]) -> list[jax.Array]:
        opened = [ts.open(spec(name, x.shape), open=True) for name, x in target.items()]
        found = []
        for t, x in zip(opened, target.values(), strict=True):
            parts = t.result()
            found.append(
                jax.make_array_from_callback(x.shape, x.sharding, lambda at, parts=parts: parts[at].read().result())
            )
        return found

    return save, load, None


def orbax_work(folder: Path, arrays: dict[str, jax.Array]) -> Work:
    import orbax.checkpoint as orbax

    def load(target: dict[str, Any]) -> Any:
        restore = {name: orbax.ArrayRestoreArgs(sharding=x.sharding) for name, x in target.items()}
        request = orbax.args.PyTreeRestore(item=dict.fromkeys(restore, 0), restore_args=restore)
        with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(folder / "c", args=request)

    def save() -> None:
        with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(folder / "c", args=orbax.args.PyTreeSave(arrays))

    def blocked() -> Callable[[], None]:
        checkpointer = orbax.AsyncCheckpointer(orbax.PyTreeCheckpointHandler())
        checkpointer.save(folder / "later", args=orbax.args.PyTreeSave(arrays))
        return checkpointer.close

    return save, load, blocked


def safetensors_work(folder: Path, arrays: dict[str, jax.Array]) -> Work:
    import safetensors.flax

    def save() -> None:
        safetensors.flax.save_file(arrays, folder / "model.safetensors")
        with open(folder / "model.safetensors", "rb") as file:
            os.fsync(file.fileno())  # as the others do

    return save, lambda target: safetensors.flax.load_file(folder / "model.safetensors"), None


WORK = {
    "nnx": nnx_work,
    "earlier": nnx_work,
    "tensorstore": tensorstore_work,
    "orbax": orbax_work,
    "safetensors": safetensors_work,
}


# Taking turns


def in_a_process(contender: str, options: argparse.Namespace) -> dict[str, Any]:
    folder = tempfile.mkdtemp()
    sizes = ["--arrays", str(options.arrays), "--gigabytes", str(options.gigabytes), "--devices", str(options.devices)]
    here = Path(__file__).resolve().parents[1]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={options.devices}"
    path = str(options.earlier if contender == "earlier" else here)
    environment = {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    # -P: the folder of this file has modules that are named like others.
    command = [sys.executable, "-P", __file__, "--contender", contender, "--folder", folder, *sizes]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=path)
        if done.returncode:
            raise SystemExit(done.stderr)
        return json.loads(done.stdout.splitlines()[-1])
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arrays", type=int, help="the number of arrays; by default, one setting after the other")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="their size, together with --arrays")
    parser.add_argument("--devices", type=int, default=4, help="virtual devices, for the other layout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--earlier", type=Path, help="the directory of an earlier version, to compare with")
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a record of the run")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        print(json.dumps(run(options.contender, options.folder, options)), flush=True)
        return
    figures: dict[str, dict[str, Any]] = {}
    settings = SIZES if options.arrays is None else [(options.arrays, options.gigabytes)]
    for arrays, gigabytes in settings:
        options.arrays, options.gigabytes = arrays, gigabytes
        figures |= take_turns(options)
    if options.out:
        from benchmarks import record  # which contenders, of other versions, cannot import

        command = "python -m benchmarks.checkpoint_io --earlier ../nnx-0.2"
        whole = settings == SIZES and options.only == CONTENDERS and options.earlier is not None and options.rounds > 1
        record.write(options.out, record.make_record("checkpoint_io", command, figures, whole=whole))


def take_turns(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measures all contenders at one setting, prints the least of the rounds and returns them as rows of a record."""
    contenders = [name for name in CONTENDERS if name in options.only and (name != "earlier" or options.earlier)]
    rounds = [
        {name: in_a_process(name, options) for name in contenders[:: -1 if number % 2 else 1]}
        for number in range(options.rounds)
    ]
    setting = f"{options.gigabytes} GB in {options.arrays} arrays"
    print(f"{setting}, the least of {options.rounds} rounds:")
    print(f"{'':12} {'files':>6} " + " ".join(f"{name + ': s, CPU s, GB':>28}" for name in COLUMNS), flush=True)
    rows = {f"{setting}, files": {"unit": "files", "values": {name: rounds[0][name]["files"] for name in contenders}}}
    for name in contenders:
        cells = []
        for column in COLUMNS:
            found = [measures[name][column] for measures in rounds if column in measures[name]]
            least = {unit: min(each[unit] for each in found) for unit in UNITS} if found else {}
            for unit, number in least.items():
                row = rows.setdefault(f"{setting}, {column}, {unit}", {"unit": UNITS[unit], "values": {}})
                row["values"][name] = number
            cells.append("{:6.3f} {:6.3f} {:6.2f}".format(*least.values()) if found else "-")
        print(f"{name:12} {rounds[0][name]['files']:6} " + " ".join(f"{cell:>28}" for cell in cells), flush=True)
    return rows


if __name__ == "__main__":
    main()
