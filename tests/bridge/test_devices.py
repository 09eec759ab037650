"""Wrapped models are sharded by the axis names they came with."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent.parent


def test_linen_and_flax_models_train_on_eight_devices_as_on_one():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    program = [sys.executable, "-W", "error", "-m", "tests.bridge.devices_program"]
    run = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr
    assert "two models on eight devices" in run.stdout
