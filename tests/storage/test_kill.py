"""A run that is killed at any moment resumes from its last finished checkpoint as if nothing had happened."""

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import nnx

SCRIPT = Path(__file__).with_name("killed_run.py")
STEPS = 4000
KILLS = 8  # `make torture` goes on for longer


def load_script():
    spec = importlib.util.spec_from_file_location("killed_run", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(900)
def test_kills_while_saving_change_nothing(tmp_path):
    draw = random.Random(0)
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONWARNINGS": "ignore",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),  # many processes, one compilation
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, str(SCRIPT), str(tmp_path / "run"), str(STEPS)]
    steps_seen: list[int] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdin is not None and server.stdout is not None
        for _ in range(KILLS):
            print(draw.randint(1, 3), file=server.stdin, flush=True)
            child = int(server.stdout.readline())
            said, _, seconds = server.stdout.readline().strip().partition(" ")
            assert said == "saving", f"{said} {seconds}"
            time.sleep(draw.uniform(0, min(float(seconds), 1)))
            os.kill(child, signal.SIGKILL)
            assert server.stdout.readline().strip() == "gone"
            manager = nnx.CheckpointManager(tmp_path / "run")
            steps_seen.append(-1 if manager.latest_step() is None else manager.latest_step())
        server.stdin.close()
    assert steps_seen == sorted(steps_seen)  # no finished checkpoint was ever lost
    assert len(set(steps_seen)) > KILLS // 3  # and the run went on

    last = steps_seen[-1] + 1
    run = {"position": 0, "losses": np.zeros(STEPS, np.float32)}
    report = nnx.LoadReport()
    nnx.CheckpointManager(tmp_path / "run").load(run, strict=False, report=report)
    assert run["position"] == last and not report.missing
    uninterrupted = load_script().train(None, last)
    assert uninterrupted.tolist() == run["losses"][:last].tolist()
