"""Checkpoints under torture, far longer than `make test`: `make torture`, or `python -m tests.torture.checkpoints`.

- kills: a process that saves in a loop is killed at random moments. What is there afterwards is one whole save, and not
  an older one than the last that was finished.
- exports: the same for safetensors files, sharded and whole in turns (tests/storage/killed_export.py).
- writers: two processes save to one path while a third loads. No load ever sees parts of two saves, and the last save
  that returned is there.
- disk: saves to a disk that becomes full, with limits of the file size from 0 upwards.
- bits: one bit of one file is flipped, over and over. It is always a CheckpointError.
- swaps: two data files of equal size are exchanged, as whole files and as ranges of bytes the size of a chunk.
- store: the same kills, writers and bits in an object store, moto's S3 server on loopback.
- pairs: two processes with 2 and with 4 devices each go through all checks of tests/storage/processes_run.py.

Each prints one line, and the program fails if one of them finds anything.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import nnx
from nnx.storage.checkpoints import saving, zarr
from nnx.storage.locations import Location, location
from tests.storage import killed_export
from tests.storage.test_processes import finish_pair, start_pair

Place = Path | Location
SHAPES = ((300, 100), (7,), (), (50_000,))


def make(value: float):
    return {"value": int(value), "arrays": [np.full(shape, value, np.float32) for shape in SHAPES]}


def value_of(found) -> int:
    """The one value that all parts of a checkpoint have; a mixture is an error."""
    values = {found["value"], *(float(x) for array in found["arrays"].values() for x in np.unique(array))}
    if len(values) != 1:
        raise AssertionError(f"a mixture of the saves {sorted(values)}")
    return int(values.pop())


# Kills


def save_in_place(path: Place, first: int, say: Callable[[int], None]) -> None:
    for value in range(first, first + 10_000):
        nnx.save(path / "c", make(value))
        say(value)


def save_steps(path: Path, first: int, say: Callable[[int], None], asynchronous: bool) -> None:
    manager = nnx.CheckpointManager(path, keep_last=2, asynchronous=asynchronous)
    for value in range(first, first + 10_000):
        manager.save(value, make(value))  # in the background: the one before is finished now
        if not asynchronous:
            say(value)
        elif value > first:
            say(value - 1)


def newest(path: Place) -> int:
    if not isinstance(path, Path) or (path / "c").exists():
        return value_of(nnx.load(path / "c"))
    step = nnx.CheckpointManager(path).latest_step()
    found = -1 if step is None else value_of(nnx.load(path / str(step)))
    if step is not None and found != step:
        raise AssertionError(f"step {step} holds the values of {found}")
    return found


def kill_once(path: Place, job: Callable[[Any, int, Callable[[int], None]], None], first: int, seconds: float) -> int:
    """Runs a job in a child, kills it some time after its first save, and returns the last save it finished."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)

        def say(value: int) -> None:
            os.write(write, f"{value}\n".encode())

        try:
            job(path, first, say)
        except BaseException as error:
            os.write(write, f"failed: {error!r}\n".encode())
        os._exit(1)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.readline()
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        lines = [said, *pipe.readlines()]
    if any("failed" in line for line in lines) or not said:
        raise AssertionError("".join(lines))
    return max(int(line) for line in lines)


def kills(count: int) -> None:
    jobs = {
        "overwrite": save_in_place,
        "sync": lambda path, first, say: save_steps(path, first, say, asynchronous=False),
        "async": lambda path, first, say: save_steps(path, first, say, asynchronous=True),
    }
    draw = random.Random(0)
    for name, job in jobs.items():
        with tempfile.TemporaryDirectory() as folder:
            path, last = Path(folder), -1
            for _ in range(count):
                finished = kill_once(path, job, last + 1, draw.uniform(0, 0.06))
                found = read_in_child(lambda path=path: newest(path))
                if found < finished:
                    raise AssertionError(f"{name}: save {finished} was finished, and {found} is there")
                last = max(found, finished)
            left = sum(1 for entry in path.rglob("nnx-data-*"))
            found = f"{last + 1} saves, nothing lost or mixed, {left} data folders left"
            print(f"kills, {name}: {count} kills, {found}", flush=True)


def read_in_child(question: Callable[[], int]) -> int:
    """Loads in a child: this process forks, and must not start the threads of JAX."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = str(question())
        except BaseException as error:
            answer = repr(error)
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    try:
        return int(answer)
    except ValueError:
        raise AssertionError(answer) from None


# Exports


def exports(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        old, new = killed_export.run(count, Path(folder))
    print(f"exports: {count} kills, {old} left the model before, {new} the new one, no mixture", flush=True)


# Writers


def writers(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c"
        write_and_load(path, count)
        names = sorted(name[:8] for name in os.listdir(path))
        if names != ["manifest", "nnx-data"]:
            raise AssertionError(f"left behind: {names}")


def write_and_load(path: Place, count: int) -> None:
    """Saves in two children to one path, while others load it, and says how often each was refused."""
    read_in_child(lambda: nnx.save(path, make(0)) or 0)
    read, write = os.pipe()

    def save_often(first: int) -> None:
        refused, last = 0, 0
        for value in range(first, first + count):
            try:
                nnx.save(path, make(value))
                last = value
            except nnx.CheckpointError as error:
                if "another job has saved there" not in str(error):
                    raise
                refused += 1
        os.write(write, f"{last} {refused}\n".encode())

    alive = {in_child(lambda first=first: save_often(first)) for first in (1_000_000, 2_000_000)}
    loads = 0
    while alive:
        read_in_child(lambda: value_of(nnx.load(path)))
        loads += 1
        for child in list(alive):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                alive.discard(child)
                if status:
                    raise AssertionError(f"a writer failed with status {status}")
    os.close(write)
    with os.fdopen(read) as pipe:
        ends = [tuple(map(int, line.split())) for line in pipe]
    found = read_in_child(lambda: value_of(nnx.load(path)))
    if found not in {last for last, _ in ends}:
        raise AssertionError(f"the last finished save was lost: found {found}, {ends}")
    read_in_child(lambda: nnx.save(path, make(3)) or 0)
    refused = sum(count for _, count in ends)
    print(f"writers: 2 x {count} saves, {refused} refused, {loads} loads without a mixture", flush=True)


def in_child(work: Callable[[], None]) -> int:
    """Does some work in a child; returns its id."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return child


# Disk


def disk(count: int) -> None:
    """Limits the size of files, as a full disk does: the save fails, and the earlier checkpoint is there."""

    def save_with_little_room(path: Path, limit: int) -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        try:
            nnx.save(path, make(4))
        except nnx.CheckpointError as error:
            if "are intact" not in str(error):
                raise
            return 1
        return 0

    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c"
        for turn in range(count):
            read_in_child(lambda: nnx.save(path, make(3)) or 0)
            limit = turn * 400_000 // count
            refused = read_in_child(lambda limit=limit: save_with_little_room(path, limit))
            failed += refused
            if read_in_child(lambda: value_of(nnx.load(path))) != (3 if refused else 4):
                raise AssertionError(f"with files of {limit} bytes")
    print(f"disk: {count} limits, {failed} saves failed, and each time the earlier checkpoint was there", flush=True)


# Bits


def bits(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        flip_bits(location(Path(folder) / "c"), count)


def flip_bits(place: Location, count: int) -> None:
    draw, large = random.Random(0), saving.LARGE
    saving.LARGE = 1000  # some arrays have files of their own, and the others are packed
    nnx.save(place, make(3))
    saving.LARGE = large
    data = next(name for name in place.names() if name.startswith("nnx-data"))
    folders = (place / data).names()
    chunks = {name: f"{name}/c.0" + ".0" * (name == "0") for name in folders}
    files = ["manifest.json", *(f"{data}/{name}" for name in chunks.values() if (place / data).read(name).value)]
    for file in files:
        whole = place.read(file).value or b""
        for _ in range(count):
            at = draw.randrange(8 * len(whole))
            damaged = bytearray(whole)
            damaged[at // 8] ^= 1 << at % 8
            place.write(file, bytes(damaged))
            try:
                nnx.load(place)
            except nnx.CheckpointError:
                continue
            raise AssertionError(f"bit {at} of {file} was not noticed")
        place.write(file, whole)
    print(f"bits: {count} flips in each of {len(files)} files, all noticed", flush=True)


# Swaps


def swaps(count: int) -> None:
    draw = random.Random(0)
    before = saving.LARGE, zarr.CHUNK, zarr.FILE
    saving.LARGE, zarr.CHUNK, zarr.FILE = 1000, 1000, 4000
    try:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "c"
            arrays = {f"w{i}": np.random.default_rng(i).standard_normal((50, 125), np.float32) for i in range(4)}
            nnx.save(place, arrays)
            files = sorted(place.glob("nnx-data*/*/c*"))
            done = 0
            while done < count:
                one, other = draw.sample(files, 2)
                first, second = one.read_bytes(), other.read_bytes()
                start, length = (0, len(first)) if draw.random() < 0.5 else (1004 * draw.randrange(4), 1004)
                part = slice(start, start + length)
                if len(first) != len(second) or first[part] == second[part]:
                    continue
                one.write_bytes(first[:start] + second[part] + first[part.stop :])
                other.write_bytes(second[:start] + first[part] + second[part.stop :])
                try:
                    nnx.load(place)
                except nnx.CheckpointError:
                    done += 1
                else:
                    raise AssertionError(f"bytes {part} of {one} and {other} were exchanged, which was not noticed")
                finally:
                    one.write_bytes(first)
                    other.write_bytes(second)
            nnx.load(place)
    finally:
        saving.LARGE, zarr.CHUNK, zarr.FILE = before
    print(f"swaps: {count} exchanges among {len(files)} files, all noticed", flush=True)


# An object store


def store(count: int) -> None:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    server = subprocess.Popen([sys.executable, "-c", SERVER], **pipes)
    assert server.stdout is not None
    try:
        os.environ.update(json.loads(server.stdout.readline()))
        place, draw, last = location("s3://checkpoints/torture"), random.Random(0), -1
        for _ in range(count):
            finished = kill_once(place, save_in_place, last + 1, draw.uniform(0, 0.2))
            found = read_in_child(lambda: newest(place))
            if found < finished:
                raise AssertionError(f"save {finished} was finished, and {found} is there")
            last = max(found, finished)
        print(f"store, kills: {count} kills, {last + 1} saves, nothing lost or mixed", flush=True)
        write_and_load(place / "race", count)
        if read_in_child(lambda: len((place / "race").names())) != 2:
            raise AssertionError("something was left behind")
        read_in_child(lambda: flip_bits(place / "bits", count) or 0)
    finally:
        server.kill()
        server.wait()


SERVER = """
import json, os, time
from tests.storage.object_store import s3_server
with s3_server():
    print(json.dumps({name: value for name, value in os.environ.items() if name.startswith("AWS_")}), flush=True)
    time.sleep(100_000)
"""


# Pairs


def pairs(count: int) -> None:
    for run in range(count):
        devices = 2 if run % 2 == 0 else 4
        folder = Path(tempfile.mkdtemp())
        first, second = finish_pair(start_pair("checks", folder, devices), (143, 143))
        shutil.rmtree(folder)
        for name in ("loop", "managed", "failing"):
            if first[name] != second[name] or first["loop"]["wrong"]:
                raise AssertionError(f"run {run}, {devices} devices each: {first[name]} and {second[name]}")
        print(f"pairs: run {run + 1} of {count}, 2 x {devices} devices: equal steps and values", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="kills of each kind of save")
    parser.add_argument("--exports", type=int, default=100, help="kills of safetensors exports, sharded and whole")
    parser.add_argument("--writers", type=int, default=40, help="saves of each of two writers")
    parser.add_argument("--disk", type=int, default=40, help="limits of the file size")
    parser.add_argument(
        "--store", type=int, default=30, help="kills, saves of each writer, and flips in an object store"
    )
    parser.add_argument("--bits", type=int, default=500, help="flips in each file")
    parser.add_argument("--swaps", type=int, default=300, help="exchanges of files and of parts of them")
    parser.add_argument("--pairs", type=int, default=20, help="runs of two processes")
    options = parser.parse_args()
    # kills first, then the others: until then this process must not have started the threads of JAX
    parts = {"kills": kills, "writers": writers, "disk": disk, "store": store, "exports": exports}
    parts |= {"bits": bits, "swaps": swaps, "pairs": pairs}
    for part, work in parts.items():
        if getattr(options, part):
            work(getattr(options, part))


if __name__ == "__main__":
    main()
