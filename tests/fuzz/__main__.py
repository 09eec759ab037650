"""The command line: `python -m tests.fuzz --seconds 600`, or `--seed 123` to see one program and its difference."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import argparse
import collections
import multiprocessing
import sys
import time

from tests.fuzz.graphs import Features
from tests.fuzz.runner import draw, run_program, shrunk, work


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this program alone, print it, and shrink it if it fails")
    parser.add_argument("--start", type=int, default=int(time.time()) * 1000, help="the first seed of a long run")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--count", type=int, help="stop after this many programs in each process")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--without", default="", help="features to switch off: names with dashes, separated by commas")
    parser.add_argument("--no-shrink", action="store_true")
    return parser.parse_args()


def features_of(text: str) -> Features:
    return Features.without(text.split(","))


def show(options: argparse.Namespace) -> int:
    program = draw(options.seed, features_of(options.without))
    failure = run_program(program)
    if failure is None:
        print(program.listing())
        print("\nNo difference.")
        return 0
    if not options.no_shrink:
        failure = shrunk(failure)
    print(failure.program.listing())
    print()
    print(failure.report())
    return 1


def search(options: argparse.Namespace) -> int:
    began = time.monotonic()
    jobs = [
        (options.start + number, options.processes, options.count, features_of(options.without), options.seconds)
        for number in range(options.processes)
    ]
    if options.processes == 1:
        results = [work(*jobs[0])]
    else:
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            results = pool.starmap(work, jobs)
    count, taken = sum(count for count, _ in results), time.monotonic() - began
    reports = [report for _, reports in results for report in reports]
    for _, report in reports[:50]:
        print(report, end="\n\n")
    for kind, number in collections.Counter(kind for kind, _ in reports).most_common():
        print(f"{number:6d}  {kind}")
    print(f"{count} programs in {taken:.0f} s ({count / taken:.0f} per second), {len(reports)} with a difference.")
    return 1 if reports else 0


if __name__ == "__main__":
    options = parse()
    sys.exit(show(options) if options.seed is not None else search(options))
