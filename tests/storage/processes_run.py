"""One of two processes that save and load together: `processes_run.py MODE ADDRESS PROCESS DIRECTORY`.

Every check returns what this process saw; the test compares it with what the other one saw. What is local to a process
(`own`) differs between the two on purpose.
"""

import io
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx
from nnx.storage import processes
from nnx.storage.checkpoints import saving
from nnx.storage.locations import Location, location

Place = Path | Location

RULES = [("row", "data"), ("col", None)]


class Sharded(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        kernel = jax.random.normal(ctx.make_rng("params"), (8, 4))
        self.kernel = nnx.Param(kernel, ("row", "col"))
        self.bias = nnx.Param(jnp.zeros(4), ("col",))


def mesh():
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def make(own: int):
    """What a run saves: sharded parameters and optimizer, and what each process has by itself."""
    model = nnx.init_sharded(lambda ctx: Sharded(ctx=ctx), mesh(), RULES, nnx.context(0))
    return {
        "optimizer": nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9)),
        "local": nnx.Dict(w=nnx.Param(jnp.full(3, float(own))), calls=nnx.var("counts", own)),
        "ctx": nnx.context(own, noise=own + 1),
        "data": {"position": own, "order": [np.arange(3) + own, own]},
        "flags": jax.device_put(jnp.arange(8.0), NamedSharding(mesh(), P())),  # a copy on every device
    }


def set_values(things, value: float):
    model = things["optimizer"].model
    model.kernel = jax.jit(lambda x: jnp.full_like(x, value) + jnp.arange(8.0)[:, None])(model.kernel)
    things["data"]["position"] = int(value)


def seen(things):
    """The values on this process, as something that can be printed and compared."""
    model = things["optimizer"].model
    shards = {
        str(shard.index[0].start or 0): np.asarray(shard.data).tolist() for shard in model.kernel.addressable_shards
    }
    return {
        "shards": shards,
        "right": all(row[0] == things["data"]["position"] + int(at) for at, rows in shards.items() for row in rows[:1]),
        "local": [np.asarray(things["local"].w).tolist(), int(things["local"].calls)],
        "position": things["data"]["position"],
        "order": [np.asarray(things["data"]["order"][0]).tolist(), things["data"]["order"][1]],
        "key": jax.random.key_data(things["ctx"].make_rng("noise")).tolist(),
        "flags": np.asarray(things["flags"].addressable_shards[0].data).tolist(),
    }


def loop(directory: Place, own: int, count: int):
    """Saves and loads at once, over and over, at one path."""
    things, target, wrong, found = make(own), make(own + 5), [], {}
    for i in range(count):
        saving.LARGE = 8 << 20 if i % 2 else 32  # bytes: parts of one pack per process, and files of their own
        set_values(things, 10 * i)
        nnx.save(directory / "loop", things)
        found = seen(nnx.load(directory / "loop", target))
        if not found["right"] or found["position"] != 10 * i:
            wrong.append(i)
    saving.LARGE = 8 << 20
    return {"wrong": wrong, **{name: found[name] for name in ("position", "local", "order", "key", "flags")}}


def managed(directory: Place, own: int):
    """Steps in the background, the last two kept, and resumed by a new manager."""
    things, found = make(own), {}
    with nnx.CheckpointManager(directory / "steps", keep_last=2, every_steps=2, every_minutes=60) as manager:
        found["saved"] = []
        for step in range(7):
            set_values(things, step)
            found["saved"].append(manager.save(np.int64(step), things, metrics={"loss": 7 - step}))
        manager.wait()
        found["steps"], found["best"], found["metrics"] = manager.steps(), manager.best_step(), manager.metrics(6)
    again, fresh = nnx.CheckpointManager(directory / "steps"), make(own + 5)
    found["resumed"] = again.resume(fresh)
    back = seen(fresh)
    found |= {"right": back["right"], "position": back["position"], "local": back["local"]}
    try:
        again.save(3, things)
    except ValueError as error:
        found["refused"] = "comes before step 6" in str(error)
    again.save(3, things, overwrite=True)
    again.wait()
    found["after going back"] = again.steps()
    return found


def failing(directory: Path, own: int):
    """What fails on one process fails on both, and changes nothing."""
    found = {}
    nnx.save(directory / "f", {"x": 1})
    bad = np.array([1], "datetime64[s]") if jax.process_index() == 1 else np.array([1])
    try:
        nnx.save(directory / "f", {"x": bad})
    except (nnx.CheckpointError, TypeError) as error:
        found["bad dtype"] = "datetime64" in str(error)
    try:
        nnx.save(directory / "f", {"x": np.zeros(2 + jax.process_index())})
    except nnx.CheckpointError as error:
        found["different objects"] = "save different things" in str(error)
    found["still there"] = nnx.load(directory / "f", {"x": 0})["x"]

    things = make(own)
    manager = nnx.CheckpointManager(directory / "damaged", asynchronous=False)
    for step in (1, 2):
        set_values(things, step)
        manager.save(step, things)
    if jax.process_index() == 0:  # in what process 1 wrote, and process 0 does not read
        file = next((directory / "damaged" / "2").glob("nnx-data-*/pack-1/c.0"))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    processes.meet("flipped a bit")
    fresh = make(own + 5)
    try:
        nnx.load(directory / "damaged" / "2", fresh)
    except nnx.CheckpointError as error:
        found["damage"] = "differs from what was saved" in str(error) and fresh["data"]["position"] == own + 5
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found["fell back to"] = manager.resume(fresh)
    found["warned"] = ["step 2" in str(warning.message) for warning in caught]
    found["right"] = seen(fresh)["right"]
    return found


class Counter:
    """A data iterator that is somewhere else on each process."""

    def __init__(self, position: int):
        self.position = position

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


def iterators(directory: Path, own: int):
    """Each process gets back the state of its own iterator."""
    nnx.save(directory / "data", {"data": Counter(own)})
    return nnx.load(directory / "data", {"data": Counter(0)})["data"].position - own


def spread(value: float, mesh: Mesh) -> nnx.State:
    """Arrays that are spread over both processes by rows and by columns, on all devices, and on this host alone."""
    array = np.arange(32.0, dtype=np.float32).reshape(8, 4) + value
    specs = {"rows": P("x"), "columns": P(None, "x"), "everywhere": P()}
    state = {name: nnx.Param(jax.device_put(array, NamedSharding(mesh, spec))) for name, spec in specs.items()}
    return nnx.State({**state, "local": nnx.Param(jnp.full(3, value)), "host": np.full(2, value)})


def same_parts(a: nnx.State, b: nnx.State) -> bool:
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


def exports(directory: Path):
    """Safetensors and a log that both processes write."""
    directory.mkdir(exist_ok=True)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    target = spread(0.0, mesh)
    found: dict = {"equal": [], "shardings": []}
    path = directory / "model.safetensors"
    for step, size in enumerate((None, 200, None, 150, 100)):
        nnx.save_safetensors(path, spread(step + 1.0, mesh), max_shard_size=size)
        loaded = nnx.load_safetensors(path, target)
        found["equal"].append(same_parts(loaded, spread(step + 1.0, mesh)))
        found["shardings"].append(loaded["columns"].value.sharding == target["columns"].value.sharding)
    (directory / "file").write_bytes(b"")
    found["refused"] = refused(directory / "file" / "model.safetensors", target)
    stream = io.StringIO()
    with nnx.TrainLog(total=1, path=directory / "log", file=stream) as log:
        log.add_sink(lambda step, values: found.update(sink=values))
        log(0, loss=spread(1.0, mesh)["local"].value[0])
    found["shown"] = bool(stream.getvalue())
    nnx.save_safetensors(path, target)  # everybody is here again
    found["files"] = sorted(os.listdir(directory)), sorted(os.listdir(directory / "log"))
    return found


def checks(directory: Path, own: int):
    return {
        "exports": exports(directory / "exports"),
        "iterators": iterators(directory, own),
        "loop": loop(directory, own, int(os.environ.get("NNX_LOOPS", "10"))),
        "managed": managed(directory, own),
        "failing": failing(directory, own),
        "shards": sorted(seen(make(own))["shards"]),
    }


def remote(directory: str, own: int):
    """The checks in an object store."""
    place = location(directory)
    return {"loop": loop(place, own, 4), "managed": managed(place, own)}


def killed(directory: Path, own: int):
    """The other process dies while both save: an error that names it, and the old checkpoint."""
    processes.PEER_TIMEOUT, processes.BEAT = 3.0, 0.5
    things = make(own)
    set_values(things, 1)
    nnx.save(directory / "k", things)
    if jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        nnx.save(directory / "k", things)
    except nnx.CheckpointError as error:
        return {"error": str(error), "seconds": time.monotonic() - begun}


def until_terminated(directory: Path, own: int):
    """One process gets SIGTERM: both save the same step once more and end."""
    things = make(own)
    manager = nnx.CheckpointManager(directory / "t", every_steps=1000, save_on_sigterm=True)
    for step in range(1, 2000):
        if step == 5 and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        set_values(things, step)
        manager.save(step, things)
        time.sleep(0.01)


if __name__ == "__main__":
    mode, address, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
    directory = sys.argv[4] if mode == "remote" else Path(sys.argv[4])
    jax.distributed.initialize(address, num_processes=2, process_id=process, initialization_timeout=100)
    work = {"checks": checks, "killed": killed, "remote": remote}[mode]
    print(json.dumps(work(directory, own=10 * (process + 1))), flush=True)
    if mode == "killed":
        os._exit(0)  # what is left is JAX waiting for the dead process
    if mode == "remote":
        jax.distributed.shutdown()
    else:
        until_terminated(directory, own=process)
