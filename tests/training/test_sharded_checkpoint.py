"""A checkpoint that was written by eight devices is read by one and by four, in another layout."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("sharded_run.py")


def run(*arguments: str, devices: int) -> None:
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, str(SCRIPT), *arguments, str(devices)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250)
    assert done.returncode == 0, done.stderr


def test_what_eight_devices_saved_is_loaded_by_four_and_by_one(tmp_path):
    run("save", str(tmp_path / "c"), devices=8)
    run("load", str(tmp_path / "c"), devices=4)
    spec = importlib.util.spec_from_file_location("sharded_run", SCRIPT)
    assert spec is not None and spec.loader is not None
    here = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(here)
    here.load(str(tmp_path / "c"), 1)
