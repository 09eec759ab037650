"""A checkpoint that was written by eight devices is read by one and by four, in another layout."""

import importlib.util
import subprocess
import sys
from pathlib import Path

from tests.sharding.programs import environment

SCRIPT = Path(__file__).with_name("sharded_run.py")


def run(*arguments: str, devices: int) -> None:
    command = [sys.executable, str(SCRIPT), *arguments, str(devices)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(devices), timeout=250)
    assert done.returncode == 0, done.stderr


def test_save_of_eight_devices_is_loaded_by_four_and_by_one(tmp_path):
    run("save", str(tmp_path / "c"), devices=8)
    run("load", str(tmp_path / "c"), devices=4)
    spec = importlib.util.spec_from_file_location("sharded_run", SCRIPT)
    assert spec is not None and spec.loader is not None
    here = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(here)
    here.load(str(tmp_path / "c"), 1)
