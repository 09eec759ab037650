"""Answers every question and prints one table.

Usage:

    python -m benchmarks                            everything
    python -m benchmarks --only train_step          one question
    python -m benchmarks --quick                    a fifth of the time, less precise
    python -m benchmarks --strict                   a missed goal is an error
    python -m benchmarks --store                    keep the results in benchmarks/stored, for the docs
"""

import argparse
import importlib
import sys
import time
import traceback
from typing import Any

import jax

from benchmarks import record, store
from benchmarks.harness import OURS, Row, Settings, seconds_text

QUESTIONS = (
    "import_time",
    "cold_start",
    "read_attribute",
    "build_module",
    "partition_merge",
    "scaling",
    "state_through_jit",
    "train_step",
    "call_forms",
    "adam_step",
    "bridges",
    "dqn",
    "eager_transforms",
    "trace_time",
    "layers",
)
COLUMNS = ("measure", "ours", "result", "goal", "", "others, best time (multiple of the first)", "reproduce with")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=QUESTIONS, help="ask only this question; can be repeated")
    parser.add_argument("--quick", action="store_true", help="a fifth of the time")
    parser.add_argument("--strict", action="store_true", help="exit with an error when a goal is missed")
    parser.add_argument("--store", action="store_true", help="keep the results; not with --quick")
    args = parser.parse_args()
    if args.store and args.quick:
        parser.error("a quick run is not precise enough to be stored")
    settings = Settings(quick=args.quick)

    lines: list[tuple[str, ...]] = []
    missed = failed = 0
    for question in args.only or QUESTIONS:
        print(f"measuring {question} ...", file=sys.stderr, flush=True)
        command = f'make bench ARGS="--only {question}{" --quick" if args.quick else ""}"'
        rows: list[Row] = []
        began, whole = time.perf_counter(), not args.quick
        try:
            for row in importlib.import_module(f"benchmarks.{question}").measure(settings):
                rows.append(row)
        except Exception as error:  # a question that fails does not stop the others
            traceback.print_exc()
            failed, whole = failed + 1, False
            lines.append((question, "", "", "", "FAIL", type(error).__name__, command))
        figures = {row.measure: _figures(row) for row in rows}
        seconds = round(time.perf_counter() - began, 1)
        found = record.make_record(question, command, figures, whole=whole, seconds=seconds)
        record.write(record.RESULTS / f"{question}.json", found)
        missed += sum(not row.passed for row in rows)
        lines += [_line(row, command) for row in rows]
        jax.clear_caches()

    print(f"jax {jax.__version__}, {jax.default_backend()}; contenders interleaved in one process, best turn of many\n")
    _print_table(lines)
    print(f"\n{len(lines) - missed - failed} of {len(lines)} goals met")
    if args.store:
        problems = store.store([record.RESULTS / f"{question}.json" for question in args.only or QUESTIONS])
        print("nothing was stored: " + "; ".join(problems) if problems else "stored; now run `make figures`")
    return 1 if failed or (missed and args.strict) else 0


def _line(row: Row, command: str) -> tuple[str, ...]:
    result = f"{row.value:.3g} ×" if row.unit == "×" else seconds_text(row.value)
    first = next(iter(row.others.values()), 1.0)
    others = ", ".join(
        f"{name} {seconds_text(seconds)}" + (f" ({seconds / first:.3g}×)" if i else "")
        for i, (name, seconds) in enumerate(row.others.items())
    )
    return row.measure, seconds_text(row.ours), result, row.goal, "pass" if row.passed else "MISS", others, command


def _print_table(lines: list[tuple[str, ...]]) -> None:
    table = [COLUMNS, *lines]
    widths = [max(len(line[column]) for line in table) for column in range(len(COLUMNS))]
    rule = "|".join("-" * (width + 2) for width in widths)
    for number, line in enumerate(table):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |")
        if number == 0:
            print(f"|{rule}|")


def _figures(row: Row) -> dict[str, Any]:
    goal = {"result": row.value, "result_unit": row.unit, "goal": row.goal, "limit": row.limit, "met": row.passed}
    return record.row("s", {OURS: row.ours, **row.others}, **goal)


if __name__ == "__main__":
    sys.exit(main())
