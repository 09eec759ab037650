"""The sharded example runs unchanged on any mesh; on one device it runs with the other examples."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def first_and_last_loss(mesh):
    flags = "--xla_backend_optimization_level=0"  # quick to compile
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / "13_sharded.py"), "--smoke", "--mesh", mesh]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=140)
    assert run.returncode == 0, run.stderr
    found = re.search(r"loss (\S+) -> (\S+);", run.stdout)
    assert found, run.stdout
    return float(found[1]), float(found[2])


def test_the_example_gives_the_same_losses_on_eight_devices_and_on_two_by_four():
    assert first_and_last_loss("8") == pytest.approx(first_and_last_loss("2x4"), abs=0.002)
