"""Copies records of whole runs to `benchmarks/stored`, from where `make figures` takes the figures of the docs.

    python -m benchmarks.store                     what the last `make bench` wrote to benchmarks/results
    python -m benchmarks.store FILE.json ...       records that GPU benchmarks wrote with --out

Records of quick, tiny or partial runs are refused, and then nothing is stored.
"""

import argparse
import pathlib
import sys
from typing import Any

from benchmarks import record

REQUIRED = ("benchmark", "command", "date", "machine", "versions", "whole", "figures")


def problem_with(found: dict[str, Any]) -> str:
    """Returns why a record cannot be stored; nothing if it can."""
    missing = [key for key in REQUIRED if key not in found]
    if missing:
        return f"lacks {', '.join(missing)}"
    if not found["figures"]:
        return "has no figures"
    if not found["whole"]:
        return "is of a quick, tiny or partial run"
    return ""


def store(paths: list[pathlib.Path], target: pathlib.Path = record.STORED) -> list[str]:
    """Stores all of the records, or none of them; returns what is wrong with them."""
    records = {path: record.read(path) for path in paths}
    problems = [f"{path} {problem}" for path, found in records.items() if (problem := problem_with(found))]
    if not problems:
        for found in records.values():
            record.write(target / f"{found['benchmark']}.json", found)
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=pathlib.Path, help="records; those of `make bench` by default")
    paths = parser.parse_args().files or sorted(record.RESULTS.glob("*.json"))
    problems = store(paths) if paths else [f"there are no records in {record.RESULTS}"]
    if problems:
        print("nothing was stored:\n  " + "\n  ".join(problems), file=sys.stderr)
        return 1
    print(f"stored {len(paths)} records in {record.STORED.name}; `make figures` brings the docs up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
