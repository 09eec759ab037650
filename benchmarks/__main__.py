"""Answers every question and prints one table.

Usage:

    python -m benchmarks                            everything
    python -m benchmarks --only train_step          one question
    python -m benchmarks --quick                    a fifth of the time, less precise
    python -m benchmarks --strict                   a missed goal is an error
"""

import argparse
import dataclasses
import importlib
import json
import pathlib
import sys
import traceback

import jax

from benchmarks.harness import Row, Settings, seconds_text

QUESTIONS = (
    "import_time",
    "read_attribute",
    "build_module",
    "partition_merge",
    "scaling",
    "state_through_jit",
    "train_step",
    "call_forms",
    "adam_step",
    "dqn",
    "eager_transforms",
    "trace_time",
    "layers",
)
RESULTS = pathlib.Path(__file__).parent / "results"
COLUMNS = ("measure", "ours", "result", "goal", "", "others, best time (multiple of the first)", "reproduce with")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=QUESTIONS, help="ask only this question; can be repeated")
    parser.add_argument("--quick", action="store_true", help="a fifth of the time")
    parser.add_argument("--strict", action="store_true", help="exit with an error when a goal is missed")
    args = parser.parse_args()
    settings = Settings(quick=args.quick)

    lines: list[tuple[str, ...]] = []
    missed = failed = 0
    for question in args.only or QUESTIONS:
        print(f"measuring {question} ...", file=sys.stderr, flush=True)
        command = f'make bench ARGS="--only {question}{" --quick" if args.quick else ""}"'
        rows: list[Row] = []
        try:
            for row in importlib.import_module(f"benchmarks.{question}").measure(settings):
                rows.append(row)
        except Exception as error:  # a question that fails does not stop the others
            traceback.print_exc()
            failed += 1
            lines.append((question, "", "", "", "FAIL", type(error).__name__, command))
        _save(question, rows)
        missed += sum(not row.passed for row in rows)
        lines += [_line(row, command) for row in rows]
        jax.clear_caches()

    print(f"jax {jax.__version__}, {jax.default_backend()}; contenders interleaved in one process, best turn of many\n")
    _print_table(lines)
    print(f"\n{len(lines) - missed - failed} of {len(lines)} goals met")
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


def _save(question: str, rows: list[Row]) -> None:
    RESULTS.mkdir(exist_ok=True)
    content = {
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "rows": [{**dataclasses.asdict(row), "passed": row.passed} for row in rows],
    }
    (RESULTS / f"{question}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
