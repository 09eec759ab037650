"""Several writers at one path, what killed ones leave behind, and how much memory a load needs."""

import multiprocessing
import os
import pathlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from nnx.storage.checkpoints import loading, saving, workers
from nnx.storage.writer_lock import WriterLock
from tests.sharding.programs import environment

SIZES = (5, 1000, 3)


def make(value: float):
    return nnx.Dict(**{f"w{i}": nnx.Param(jnp.full(size, float(value))) for i, size in enumerate(SIZES)})


def _save_often(path, first, count, errors):
    try:
        for i in range(count):
            nnx.save(path, make(first + i))
    except BaseException as error:
        errors.put(repr(error))


def test_two_jobs_that_save_to_one_path_never_mix(tmp_path):
    nnx.save(tmp_path / "c", make(0))
    start = multiprocessing.get_context("spawn")
    errors = start.Queue()
    other = start.Process(target=_save_often, args=(tmp_path / "c", 1000, 10, errors))
    here = threading.Thread(target=_save_often, args=(tmp_path / "c", 2000, 10, errors))
    other.start()
    here.start()
    seen = set()
    while other.is_alive() or here.is_alive():
        try:
            found = nnx.load(tmp_path / "c")
        except nnx.CheckpointError:  # replaced between two of its files: an error, never a mixture
            continue
        (value,) = {number for array in found.values() for number in array.tolist()}
        seen.add(value)
    other.join()
    here.join()
    assert errors.empty(), errors.get()
    assert seen and {value // 1000 for value in seen} <= {0, 1, 2}
    last = set(np.concatenate(list(nnx.load(tmp_path / "c").values())).tolist())
    assert last in ({1009.0}, {2009.0})
    assert len(os.listdir(tmp_path / "c")) == 2  # no folder and no lock is left


def test_a_file_that_another_job_removes_after_it_was_seen_is_an_error_of_the_checkpoint(tmp_path, monkeypatch):
    nnx.save(tmp_path / "c", make(0))
    next((tmp_path / "c").glob("nnx-data-*/*.bin")).unlink()
    monkeypatch.setattr(pathlib.Path, "is_file", lambda path: True)  # it was there a moment ago
    with pytest.raises(nnx.CheckpointError, match="is missing"):
        nnx.load(tmp_path / "c")


def test_a_second_writer_is_refused_with_the_name_of_the_first(tmp_path, monkeypatch):
    nnx.save(tmp_path / "c", make(1))
    monkeypatch.setattr("nnx.storage.writer_lock.WAIT", 0.05)
    with WriterLock(tmp_path / "c" / ".lock", tmp_path / "c"):
        with pytest.raises(
            nnx.CheckpointError, match=f"Could not save to .*another job: process {os.getpid()} on host"
        ):
            nnx.save(tmp_path / "c", make(2))
    assert (nnx.load(tmp_path / "c", make(0)).w0 == 1).all()


def test_a_writer_that_lost_its_lock_does_not_replace_the_checkpoint(tmp_path, monkeypatch):
    nnx.save(tmp_path / "c", make(1))
    write = saving.write_pieces

    def stopped_for_long(*args):
        (tmp_path / "c" / ".lock").unlink()  # somebody thought it was dead
        nnx.save(tmp_path / "c", {"epoch": 3})
        return write(*args)

    monkeypatch.setattr(saving, "write_pieces", stopped_for_long)
    with pytest.raises(nnx.CheckpointError, match="Could not save to"):
        nnx.save(tmp_path / "c", make(2))
    assert nnx.load(tmp_path / "c") == {"epoch": 3}


def test_next_save_removes_leftovers_of_killed_ones(tmp_path):
    nnx.save(tmp_path / "c", make(1))
    for name in ("nnx-data-0123456789abcdef", "nnx-data-7.orbax-checkpoint-tmp-3"):
        (tmp_path / "c" / name).mkdir()
        (tmp_path / "c" / name / "0.bin").write_bytes(b"half")
    (tmp_path / "c" / ".manifest.json.0123456789abcdef.tmp").write_text("{")
    nnx.save(tmp_path / "c", make(2))
    assert sorted(name[:8] for name in os.listdir(tmp_path / "c")) == ["manifest", "nnx-data"]


def test_workers_without_threads_do_the_work_themselves(monkeypatch):
    def no_thread(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with workers.Workers(3) as pool:
        futures = [pool.submit(pow, 2, n) for n in range(4)] + [pool.submit(int, "x")]
    assert [future.result() for future in futures[:4]] == [1, 2, 4, 8]
    with pytest.raises(ValueError, match="invalid literal"):
        futures[4].result()


MEMORY = """
import sys, threading, time
import jax, jax.numpy as jnp, nnx
path = sys.argv[1]

class Large(nnx.Module):
    def __init__(self, value, *, ctx=None):
        for i in range(12):
            setattr(self, f"w{i}", nnx.Param(jnp.full(2_000_000, float(value)), ("row",)))  # 8 MB each, 96 MB in all

def used():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1000 for line in file if line.startswith("RssAnon"))

mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
MAKE = {
    "uncommitted": Large,
    "init_sharded": lambda value: nnx.init_sharded(
        lambda ctx: Large(value, ctx=ctx), mesh, [("row", "data")], nnx.context(0)
    ),
    "abstract": lambda value: nnx.eval_shape(lambda: Large(value)),
}

def measure(make):
    target = make(0)
    jax.block_until_ready([x for x in jax.tree.leaves(target.get_state()) if isinstance(x, jax.Array)])
    before, peak, done = used(), 0.0, threading.Event()
    def watch():
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, used())
    thread = threading.Thread(target=watch)
    thread.start()
    nnx.load(path, target)
    done.set()
    thread.join()
    assert all((getattr(target, f"w{i}") == 3).all() for i in range(12))
    return peak - before

nnx.save(path, Large(3))
measure(Large)
for kind, make in MAKE.items():
    print(kind, measure(make))
"""


def test_a_load_needs_no_more_than_the_model_and_its_largest_array(tmp_path):
    # by default glibc keeps freed blocks of this size for later; models have larger arrays, which it gives back
    variables = {**environment(devices=2), "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "c")]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=250)
    assert done.returncode == 0, done.stderr
    more = {kind: float(megabytes) for kind, megabytes in map(str.split, done.stdout.splitlines())}
    # What comes on top of the target: two arrays that are read together, and, where the parts on the devices are not
    # those in the file, one chunk for each of four threads. Without freeing the old arrays it would be 96 MB more.
    assert more["uncommitted"] < 40 and more["init_sharded"] < 70, more
    assert more["abstract"] < 96 + 40, more  # here the load makes the arrays


def test_a_disk_that_the_processes_do_not_share_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "VISIBLE_WITHIN", 0.05)
    monkeypatch.setattr(jax, "process_index", lambda: 1)  # process 0 has saved, and this one does not see it
    with pytest.raises(
        nnx.CheckpointError, match="Process 1 does not see what process 0 wrote to .*all processes share"
    ):
        nnx.save(tmp_path / "c", {"epoch": 1})


def test_processes_that_read_different_checkpoints_load_nothing(tmp_path, monkeypatch):
    class OtherProcess:
        def __init__(self, label):
            pass

        def together(self, work):
            return [work(), loading._Outcome(123)]

    nnx.save(tmp_path / "c", {"epoch": 1})
    monkeypatch.setattr(loading, "Exchange", OtherProcess)
    monkeypatch.setattr(loading, "_ATTEMPTS", 2)
    target = {"epoch": 0}
    with pytest.raises(nnx.CheckpointError, match="Process 1 and process 0 read different checkpoints at .*Nothing"):
        nnx.load(tmp_path / "c", target)
    assert target == {"epoch": 0}
