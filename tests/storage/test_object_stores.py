"""Checkpoints in object stores: all that holds on a disk, on moto's S3 server and on a stub of Google's store."""

import random
import signal
import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from nnx.storage import locations
from nnx.storage.checkpoints import saving
from nnx.storage.locations import location
from tests.sharding.programs import environment
from tests.storage.object_store import gs_server, s3_server
from tests.storage.test_processes import finish_pair, start_pair


@pytest.fixture(scope="module", params=["s3", "gs"])
def bucket(request):
    with {"s3": s3_server, "gs": gs_server}[request.param]() as bucket:
        yield bucket


@pytest.fixture
def url(bucket, request):
    return f"{bucket}/{request.node.name.partition('[')[0]}"


def keys(url):
    return sorted(key.decode() for key in location(url)._keys().list().result())


def steps_in(url):
    return {key.partition("/")[0] for key in keys(url)}


def make(value: float = 0.0):
    return nnx.Dict(w=nnx.Param(jnp.full((5, 7), float(value))), b=nnx.Param(jnp.full(3, value, jnp.bfloat16)))


def values(model):
    return model.w.tolist(), model.b.tolist()


def test_a_checkpoint_is_replaced_and_nothing_is_left_behind(url, monkeypatch):
    monkeypatch.setattr(saving, "LARGE", 100)
    for value in (1, 2):
        nnx.save(url, {"model": make(value), "epoch": value})
    assert values(nnx.load(url, {"model": make(), "epoch": 0})["model"]) == values(make(2))
    assert nnx.load(url, only="epoch") == {"epoch": 2} and nnx.checkpoint_entries(url)["model/w"].shape == (5, 7)
    names = sorted(name.rpartition("nnx-data-")[2].partition("/")[2] or name for name in keys(url))
    assert names == ["0/c.0.0", "0/zarr.json", "manifest.json", "pack-0/c.0", "pack-0/zarr.json"]
    with pytest.raises(FileNotFoundError, match=f"no checkpoint at {url}/other"):
        nnx.load(f"{url}/other")


def test_twenty_flipped_bits_are_noticed_and_named(url, monkeypatch):
    monkeypatch.setattr(saving, "LARGE", 100)
    nnx.save(url, make(2))
    draw, place = random.Random(0), location(url)
    files = [name for name in keys(url) if not name.endswith("zarr.json")]
    for turn in range(20):
        name = files[turn % len(files)]
        whole = place.read(name).value or b""
        damaged, at = bytearray(whole), draw.randrange(8 * len(whole))
        damaged[at // 8] ^= 1 << at % 8
        place.write(name, bytes(damaged))
        target = make(1)
        with pytest.raises(nnx.CheckpointError, match=name):
            nnx.load(url, target)
        assert values(target) == values(make(1))
        place.write(name, whole)
    assert values(nnx.load(url, make(1))) == values(make(2))


def test_a_run_keeps_the_last_and_the_best_resumes_and_goes_back(url):
    with nnx.CheckpointManager(url, keep_last=2, keep_best=1) as manager:
        for step in range(5):
            manager.save(step, make(step), metrics={"loss": abs(step - 1)}, metadata={"tokens": step})
    assert steps_in(url) == {"1", "3", "4"}
    again, model = nnx.CheckpointManager(url), make()
    assert again.steps() == [1, 3, 4] and again.best_step() == 1 and again.metadata(3) == {"tokens": 3}
    (pack,) = [name for name in keys(url) if name.startswith("4/") and name.endswith("pack-0/c.0")]
    location(url).remove([pack])
    with pytest.warns(UserWarning, match="Resumed from step 3"):
        assert again.resume(model) == 3
    assert values(model) == values(make(3))
    again.save(2, make(2), overwrite=True)
    again.close()
    assert steps_in(url) == {"1", "2"} and again.steps() == [1, 2]


def test_of_two_writers_at_least_one_succeeds_and_they_never_mix(url):
    nnx.save(url, make(0))
    refused, done = [], []

    def save_often(first):
        for value in range(first, first + 4):
            try:
                nnx.save(url, make(value))
                done.append(value)
            except nnx.CheckpointError as error:
                refused.append(str(error))

    writers = [threading.Thread(target=save_often, args=(first,)) for first in (1, 101)]
    for thread in writers:
        thread.start()
    while any(thread.is_alive() for thread in writers):
        found = nnx.load(url)
        assert len(np.unique(found["w"])) == 1 and found["w"][0, 0] == found["b"][0]
    assert done and all("another job has saved there" in error for error in refused)
    assert nnx.load(url)["w"][0, 0] in done
    nnx.save(url, make(7))
    assert len(steps_in(url)) == 2  # the manifest and one folder


KILLED = """
import sys, jax.numpy as jnp, nnx
from nnx.storage.checkpoints import saving
write = saving.write_pieces
def stop(*args):
    written = write(*args)
    print("written", flush=True)
    sys.stdin.read()
    return written
saving.write_pieces = stop
nnx.CheckpointManager(sys.argv[1], asynchronous=False).save(int(sys.argv[2]), {"x": jnp.ones(3)})
"""


def test_the_rest_of_a_killed_save_does_not_count_and_is_removed_by_the_next_one(url):
    manager = nnx.CheckpointManager(url, asynchronous=False)
    manager.save(1, {"x": jnp.zeros(3)})
    command = [sys.executable, "-c", KILLED, url, "2"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment(1), **pipes) as job:
        assert job.stdout is not None and job.stdout.readline() == b"written\n"
        job.send_signal(signal.SIGKILL)
    assert any(name.startswith("2/nnx-data-") for name in keys(url)) and manager.steps() == [1]
    manager.save(3, {"x": jnp.ones(3)})
    assert steps_in(url) == {"1", "3"}


def test_a_store_that_does_not_answer_is_an_error_that_names_it(bucket, monkeypatch):
    monkeypatch.setattr(locations, "RETRIES", {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"})
    locations.context.cache_clear()  # and again when the test is over, for the usual retries
    nowhere = "http://127.0.0.1:9"
    monkeypatch.setenv("AWS_ENDPOINT_URL", nowhere)
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", nowhere)
    try:
        with pytest.raises(nnx.CheckpointError, match=f"Could not save to {bucket}/x: .*127.0.0.1"):
            nnx.save(f"{bucket}/x", make())
        with pytest.raises(nnx.CheckpointError, match=f"{bucket}/x"):
            nnx.load(f"{bucket}/x", make())
    finally:
        locations.context.cache_clear()


# With several processes


@pytest.fixture(scope="module")
def s3():
    with s3_server() as bucket:
        yield bucket


def test_two_processes_save_and_resume_together_and_one_loads_it(s3):
    first, second = finish_pair(start_pair("remote", f"{s3}/pair", 2), (0, 0))
    assert first["loop"] == second["loop"] and first["loop"]["wrong"] == [] and first["loop"]["position"] == 30
    assert first["managed"] == second["managed"] and first["managed"]["resumed"] == 6 and first["managed"]["right"]
    saved = nnx.load(f"{s3}/pair/loop")["optimizer"]["model"]["kernel"]  # the parts of four devices, on one
    np.testing.assert_array_equal(saved, 30 + np.arange(8.0)[:, None] + np.zeros(4))
