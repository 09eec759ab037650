"""Runs every example and prints its final metric, which is the last line of its output.

Usage:

    python examples/run_all.py            small settings, as in the tests
    python examples/run_all.py --full     as a reader would run them
    python examples/run_all.py 01 06      only these
"""

import argparse
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent


def run(path: pathlib.Path, full: bool) -> tuple[bool, float, str]:
    """Runs one example; returns whether it succeeded, the seconds it took, and its last line."""
    start = time.perf_counter()
    command = [sys.executable, str(path), *([] if full else ["--smoke"])]
    result = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if result.returncode:
        print(result.stdout[-2000:], result.stderr[-4000:], sep="\n", file=sys.stderr)
    lines = (result.stdout if result.returncode == 0 else result.stderr).strip().splitlines()
    return result.returncode == 0, seconds, lines[-1].strip() if lines else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="prefixes of the examples to run, such as 01")
    parser.add_argument("--full", action="store_true", help="at full settings")
    args = parser.parse_args()

    paths = [*sorted(HERE.glob("[0-9]*.py")), HERE / "demo.py", HERE / "gpt" / "train.py"]
    if args.only:
        paths = [path for path in paths if str(path.relative_to(HERE)).startswith(tuple(args.only))]
    failed = 0
    print(f"{'example':<28} {'seconds':>8}  result")
    for path in paths:
        succeeded, seconds, last_line = run(path, args.full)
        failed += not succeeded
        name = str(path.relative_to(HERE).with_suffix(""))
        print(f"{name:<28} {seconds:>8.1f}  {'' if succeeded else 'FAILED: '}{last_line}", flush=True)
    return 1 if failed or not paths else 0


if __name__ == "__main__":
    sys.exit(main())
