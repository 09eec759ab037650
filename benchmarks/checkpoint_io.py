"""What checkpoints cost: checksums, memory, and the same arrays saved and loaded by Orbax.

    python -m benchmarks.checkpoint_io                     one gigabyte, five rounds
    python -m benchmarks.checkpoint_io --gigabytes 0.1
    python -m benchmarks.checkpoint_io --cold              files come from the disk, as when a run is resumed

All measurements alternate within a round, and the lowest of the rounds counts: on a busy machine, that is the one that
was disturbed least. The CPU time of the whole process is given as well, since a busy machine changes it less. By
default, files are read from the page cache, where a checksum costs the most relative to reading.
"""

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as orbax

import nnx

ARRAYS = 16


def make(gigabytes: float, value: float | None) -> nnx.Dict:
    """Makes a model of sixteen equal matrices: random numbers, or one value."""
    rows = int(gigabytes * 1e9 / 4 / 1000 / ARRAYS)
    draw = np.random.default_rng(0)

    def array() -> jax.Array:
        if value is None:
            return jnp.asarray(draw.standard_normal((rows, 1000), np.float32))
        return jnp.full((rows, 1000), value)

    return nnx.Dict(**{f"w{i}": nnx.Param(array()) for i in range(ARRAYS)})


def memory() -> float:
    """Returns the gigabytes that this process has allocated."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1e6 for line in file if line.startswith("RssAnon"))


def measured(work: Callable[[], Any]) -> tuple[float, float, float]:
    """Returns the seconds it takes, those of the CPU, and the gigabytes allocated at the peak on top of before."""
    before, peak, done = memory(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, memory())

    thread = threading.Thread(target=watch)
    thread.start()
    begun, begun_cpu = time.perf_counter(), time.process_time()
    try:
        work()
    finally:
        seconds, cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
        done.set()
        thread.join()
    return seconds, cpu, peak - before


def arrays_of(model: nnx.Dict) -> dict[str, Any]:
    return {path: leaf.value for path, leaf in model.get_state().items()}


def orbax_save(path: Path, model: nnx.Dict) -> None:
    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=orbax.args.PyTreeSave(arrays_of(model)))


def orbax_load(path: Path, model: nnx.Dict) -> None:
    arrays = arrays_of(model)
    restore = {name: orbax.ArrayRestoreArgs(sharding=array.sharding) for name, array in arrays.items()}
    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
        request = orbax.args.PyTreeRestore(item=dict.fromkeys(restore, 0), restore_args=restore)
        jax.block_until_ready(checkpointer.restore(path, args=request))


def drop_from_page_cache(folder: Path) -> None:
    """Makes the next read of all files in a folder go to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())  # only clean pages can be dropped
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def no_checksums() -> Any:
    return mock.patch("nnx.storage.checkpoints.chunk_writer.checksum", lambda data: 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="read from the disk instead of the page cache")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    model = make(options.gigabytes, None)
    target = make(options.gigabytes, 0.0)
    jax.block_until_ready([*arrays_of(model).values(), *arrays_of(target).values()])

    def save_without() -> None:
        with no_checksums():
            nnx.save(folder / "without", model)

    def load_abstract() -> None:
        nnx.load(folder / "ours", nnx.eval_shape(lambda: make(options.gigabytes, 0.0)))

    def load_abstract_without() -> None:
        nnx.load(folder / "ours", nnx.eval_shape(lambda: make(options.gigabytes, 0.0)), verify=False)

    def sync_orbax() -> None:
        shutil.rmtree(folder / "orbax", ignore_errors=True)
        orbax_save(folder / "orbax", model)

    measures: dict[str, Callable[[], Any]] = {
        "save, nnx": lambda: nnx.save(folder / "ours", model),
        "save, nnx without checksums": save_without,
        "save, Orbax": sync_orbax,
        "load, nnx": lambda: nnx.load(folder / "ours", target),
        "load, nnx with verify=False": lambda: nnx.load(folder / "ours", target, verify=False),
        "load, nnx, abstract target": load_abstract,
        "load, nnx, abstract, verify=False": load_abstract_without,
        "load, Orbax": lambda: orbax_load(folder / "orbax", target),
    }
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    cpus: dict[str, list[float]] = {name: [] for name in measures}
    peaks: dict[str, list[float]] = {name: [] for name in measures}
    for round_number in range(options.rounds):
        for name, work in list(measures.items())[:: -1 if round_number % 2 else 1]:  # no measure always comes first
            if options.cold:
                drop_from_page_cache(folder)
            taken, cpu, more = measured(work)
            seconds[name].append(taken)
            cpus[name].append(cpu)
            peaks[name].append(more)
    source = "from the disk" if options.cold else "from the page cache"
    print(f"{options.gigabytes} GB in {ARRAYS} arrays, {source}, the least of {options.rounds} rounds")
    for name in measures:
        times = f"{min(seconds[name]):6.2f} s  {min(cpus[name]):6.2f} s of the CPU"
        print(f"{name:36} {times}   at most {max(peaks[name]):5.2f} GB more memory")
    pairs = (
        ("save, nnx", "save, nnx without checksums"),
        ("load, nnx", "load, nnx with verify=False"),
        ("load, nnx, abstract target", "load, nnx, abstract, verify=False"),
    )
    for name, plain in pairs:
        for unit, times in (("time", seconds), ("CPU time", cpus)):
            ratio = min(times[name]) / min(times[plain])
            against = min(times[name]) / min(times[f"{name[:4]}, Orbax"])
            print(f"{name}: checksums take {100 * (ratio - 1):.0f} % more {unit}; {against:.2f} of the {unit} of Orbax")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
