"""Exports that are killed: `python -m tests.storage.killed_export --kills 100`.

A server makes the imports once and forks a child for each number it reads. The child exports one model after another to
the same path, sharded and whole in turns; all arrays of model n have the value n. It says "saving n" and "saved n". The
parent kills it at a random moment, and reads what is on the disk.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import nnx

NAMES = [f"layers/{i}/w" for i in range(6)]
ROOT = Path(__file__).parents[2]


def model(value: int) -> nnx.State:
    return nnx.State({name: np.full((50, 40), value, np.float32) for name in NAMES})


def export(path: Path, value: int) -> None:
    """Exports a model in one of three forms."""
    size = (None, 20_000, 10_000)[value % 3]
    nnx.save_safetensors(path, model(value), max_shard_size=size)


def found(path: Path) -> int:
    """The value of the model on the disk, which must be whole, by each way of reading it; -1 without one."""
    values = set()
    for source in (path, path.parent):
        try:
            state = nnx.load_safetensors(source, model(0))
        except FileNotFoundError:
            values.add(-1)
        else:
            values |= {float(x) for array in state.values() for x in np.unique(array)}
    assert len(values) == 1, f"a mixture: {sorted(values)} in {sorted(os.listdir(path.parent))}"
    return int(values.pop())


def serve(path: Path) -> None:
    """Forks a child for each first value read, and says when it is gone."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                say(os.getpid())
                for value in range(int(line), 10**9):
                    say(f"saving {value}")
                    export(path, value)
                    say(f"saved {value}")
            except BaseException as error:
                say(f"failed {type(error).__name__}: {error}")
            os._exit(0)
        os.waitpid(child, 0)
        say("gone")


def say(what: object) -> None:
    os.write(1, f"{what}\n".encode())  # in one piece: print may be killed between the text and the end of the line


def run(kills: int, directory: Path, seed: int = 0) -> tuple[int, int]:
    """Kills exports and checks after each what is on the disk.

    Returns:
        How many models were complete before the kill, and how many appeared with the kill.
    """
    draw = random.Random(seed)
    path = directory / "model.safetensors"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.storage.killed_export", "--serve", str(path)]
    start, old, new = 0, 0, 0
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        for _ in range(kills):
            print(start, file=server.stdin, flush=True)
            child = int(server.stdout.readline())
            assert server.stdout.readline().split() == ["saving", str(start)]
            time.sleep(draw.uniform(0, 0.1))
            os.kill(child, signal.SIGKILL)
            begun, finished = start, start - 1
            while (line := server.stdout.readline().split())[0] != "gone":
                assert line[0] in ("saving", "saved"), " ".join(line)
                begun = int(line[1]) if line[0] == "saving" else begun
                finished = int(line[1]) if line[0] == "saved" else finished
            value = found(path)
            assert value in (finished, begun), f"found {value} after {finished} was saved and {begun} begun"
            old, new = old + (value == finished), new + (value != finished)
            start = value + 1
        server.stdin.close()
    export(path, start)
    assert found(path) == start
    expected = {0: 1, 1: 4, 2: 7}[start % 3]  # one file; three or six shards and their index
    assert len(os.listdir(directory)) == expected, f"left behind: {sorted(os.listdir(directory))}"
    return old, new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", type=Path)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    with tempfile.TemporaryDirectory() as directory:
        old, new = run(options.kills, Path(directory), options.seed)
    print(f"{options.kills} kills: {old} left the model before, {new} the new one, no mixture, nothing behind")


if __name__ == "__main__":
    main()
