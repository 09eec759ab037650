"""Every example runs at its small setting, in a process of its own, and ends by printing its final metric."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLES = [*sorted((ROOT / "examples").glob("[0-9]*.py")), ROOT / "examples" / "demo.py"]
TIME_LIMIT = 280  # seconds, on a machine that does much else; most take some ten when they have a core to themselves


@pytest.mark.timeout(TIME_LIMIT + 20)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs_and_learns(example):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(example), "--smoke"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIME_LIMIT)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    last_line = result.stdout.strip().splitlines()[-1]
    assert re.match(r"final .*: -?\d", last_line), f"the last line tells the final metric, got {last_line!r}"


def test_the_numbers_of_the_examples_have_no_gap():
    numbers = [int(path.name[:2]) for path in EXAMPLES[:-1]]
    assert numbers == list(range(1, len(numbers) + 1))
