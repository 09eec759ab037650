"""Runs the tests on every supported combination of Python and JAX that this machine can make.

    make matrix                                       # every combination
    make matrix ARGS="--only 3.12/0.12 -- tests/core"  # one of them, some tests
    make matrix ARGS="--envs /tmp/envs -- -n 0"        # other environments, one process

Each combination has its own environment, in `.matrix` unless `--envs` names another folder, and leaves what pytest
printed there as report.txt. What was not run is listed, with the reason, and only a failing test makes the exit status
1. docs/versions.md lists what has been tested.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# JAX 0.11 and later need Python 3.12.
COMBINATIONS = [("3.11", "0.10")] + [(python, jax) for python in ("3.12", "3.13") for jax in ("0.10", "0.11", "0.12")]
DEFAULT_TESTS = ["-q", "-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]


class Outcome(NamedTuple):
    """What one line of the table says."""

    python: str
    jax: str
    result: str
    seconds: float
    failed: bool


def main() -> int:
    """Runs the combinations asked for and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PYTHON/JAX", action="append", help="for example 3.12/0.12; may be repeated")
    parser.add_argument("--envs", metavar="FOLDER", type=Path, default=ROOT / ".matrix", help="where environments are")
    parser.add_argument("tests", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    known = [f"{python}/{jax}" for python, jax in COMBINATIONS]
    unknown = sorted(set(options.only or ()) - set(known))
    if unknown:
        parser.error(f"{', '.join(unknown)} is not supported; the combinations are {', '.join(known)}")
    outcomes = []
    for python, jax in COMBINATIONS:
        if options.only and f"{python}/{jax}" not in options.only:
            outcomes.append(Outcome(python, jax, "not run: not asked for", 0.0, False))
        else:
            outcomes.append(_run(python, jax, options.envs, options.tests))
    print("\n| Python | JAX | result | time |\n|---|---|---|---|")
    for outcome in outcomes:
        minutes, seconds = divmod(round(outcome.seconds), 60)
        print(f"| {outcome.python} | {outcome.jax} | {outcome.result} | {minutes}:{seconds:02} |")
    return int(any(outcome.failed for outcome in outcomes))


def _run(python: str, jax: str, envs: Path, tests: list[str]) -> Outcome:
    """Makes the environment of one combination if need be, and runs the tests in it."""
    interpreter = _interpreter(python)
    if interpreter is None:
        return Outcome(python, jax, f"not run: there is no Python {python} here", 0.0, False)
    folder = envs.resolve() / f"matrix-python{python}-jax{jax}"
    binary = folder / "bin" / "python"
    ready = folder / ".ready"
    if not ready.exists() or ready.stat().st_mtime < (ROOT / "pyproject.toml").stat().st_mtime:
        print(f"installing nnx[test,docs] with JAX {jax} for Python {python} ...", flush=True)
        if not binary.exists():
            subprocess.run([interpreter, "-m", "venv", folder], check=True)
        install = [binary, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        made = subprocess.run([*install, "--editable", f"{ROOT}[test,docs]", f"jax=={jax}.*"], text=True, stderr=-1)
        if made.returncode:
            lines = [line for line in made.stderr.splitlines() if line.startswith("ERROR")]
            return Outcome(python, jax, f"not run: {lines[-1] if lines else 'pip failed'}", 0.0, False)
        ready.touch()
    versions = "import sys, jax; print('.'.join(map(str, sys.version_info[:3])), jax.__version__)"
    exact = subprocess.run([binary, "-c", versions], check=True, capture_output=True, text=True).stdout.split()
    print(f"testing Python {exact[0]} with JAX {exact[1]} ...", flush=True)
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "0", **os.environ}
    start = time.perf_counter()
    command = [binary, "-m", "pytest", *DEFAULT_TESTS, *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=-1, stderr=-2, text=True)
    seconds = time.perf_counter() - start
    report = folder / "report.txt"
    report.write_text(done.stdout)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "pytest printed nothing"
    summary = re.sub(r"^=+ | in [\d.]+s.*$", "", last)
    if done.returncode:
        summary += f" (see {report})"
    return Outcome(*exact, summary, seconds, done.returncode != 0)


def _interpreter(version: str) -> str | None:
    """Returns a working Python of this version: one on the path, or one that pyenv has installed."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *sorted(versions.glob(f"{version}.*/bin/python"), reverse=True)]
    for candidate in filter(None, candidates):
        # pyenv leaves names on the path that only say that this version is not active.
        if subprocess.run([candidate, "-c", "import venv"], capture_output=True).returncode == 0:
            return str(candidate)
    return None


if __name__ == "__main__":
    sys.exit(main())
