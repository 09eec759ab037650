"""How much processor time does a program take until its first loss?

    python -m benchmarks.cold_start                             four models, all libraries that are installed
    python -m benchmarks.cold_start --model cnn --rounds 1      a part of it
    python -m benchmarks.cold_start --out first_steps.json      a record for `python -m benchmarks.store`

Every contender runs in a fresh process, and they take turns. The first table starts without any compiled programs, the
second one with a compilation cache that an earlier run has filled. Times are in seconds of processor time, of all
threads, because compiling uses several and waits for nothing; the best of the rounds counts. "Step" includes the
optimizer. `make bench` asks for one part: the time it takes to build the CNN, next to Flax.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks import record
from benchmarks.cold.batches import NAMES
from benchmarks.harness import OURS, Row, Settings

LIBRARIES = {OURS: "nnx", "flax": "flax", "equinox": "equinox", "raw jax": "jax", "torch": "torch"}
"""The contenders, and the package that each needs."""
PARTS = ("import", "build", "step", "total")
ROUNDS = 2
LIMIT = 0.4

Seconds = dict[str, float]
CACHE_EVERYTHING = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def measure(settings: Settings) -> list[Row]:
    rounds = [
        {library: run(library, "cnn", "--build")["build"] for library in (OURS, "flax")}
        for _ in range(1 if settings.quick else ROUNDS)
    ]
    best = {library: min(seconds[library] for seconds in rounds) for library in rounds[0]}
    ours, flax = best[OURS], best["flax"]
    return [Row("build a CNN in a new process", ours, ours / flax, LIMIT, f"≤ {LIMIT:g} × flax", "×", {"flax": flax})]


def run(library: str, name: str, *options: str, cache: str | None = None) -> Seconds:
    """Runs one contender in a process of its own; returns the processor time of its parts."""
    settings = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_COMPILATION_", "JAX_PERS"))}
    if cache is not None:
        settings |= {"JAX_COMPILATION_CACHE_DIR": cache, **CACHE_EVERYTHING}
    module = "raw" if library == "raw jax" else library
    command = [sys.executable, "-m", "benchmarks.cold.run", module, name, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=settings)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def compare(name: str, libraries: list[str], rounds: int, *, cached: bool) -> dict[str, Seconds]:
    """Returns the best seconds of each part for each library, from rounds in which they take turns."""
    taken: dict[str, list[Seconds]] = {library: [] for library in libraries}
    with tempfile.TemporaryDirectory() as folder:
        caches = {library: os.path.join(folder, library) if cached else None for library in libraries}
        if cached:
            for library in libraries:
                run(library, name, cache=caches[library])
        for _ in range(rounds):
            for library in random.sample(libraries, len(libraries)):
                taken[library].append(run(library, name, cache=caches[library]))
    return {library: {part: min(one[part] for one in all_) for part in PARTS} for library, all_ in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=NAMES, help="only this model; can be repeated")
    parser.add_argument("--library", action="append", choices=LIBRARIES, help="only this library; can be repeated")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"turns of each contender ({ROUNDS})")
    parser.add_argument("--out", type=pathlib.Path, help="where to write a record")
    args = parser.parse_args()
    installed = [library for library, package in LIBRARIES.items() if importlib.util.find_spec(package)]
    libraries = args.library or installed
    figures: dict[str, Any] = {}
    for cached in (False, True):
        print(f"\n{'with' if cached else 'without'} a compilation cache; seconds of processor time")
        print(f"{'':24}" + "".join(f"{part:>9}" for part in PARTS), flush=True)
        for name in args.model or NAMES:
            found = compare(name, [x for x in libraries if not (cached and x == "torch")], args.rounds, cached=cached)
            for library, seconds in found.items():
                print(f"{name:12}{library:12}" + "".join(f"{seconds[part]:9.2f}" for part in PARTS), flush=True)
            for part in PARTS:
                values = {library: seconds[part] for library, seconds in found.items()}
                figures[f"{name}, {part}{', cached' * cached}"] = record.row("s", values)
    if args.out:
        whole = not args.model and not args.library and args.rounds >= ROUNDS
        record.write(
            args.out, record.make_record("first_steps", "python -m benchmarks.cold_start", figures, whole=whole)
        )


if __name__ == "__main__":
    main()
