"""Two processes on loopback, four virtual devices each: the losses of one device again."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT = 240  # seconds, for everything


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(program, *arguments, devices):
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, *arguments] if "\n" in program else [sys.executable, program, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(processes):
    """The JSON objects that the processes print; none is left running, whatever happens."""
    deadline = time.monotonic() + LIMIT
    try:
        outputs = [process.communicate(timeout=max(1.0, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    for process, (_, errors) in zip(processes, outputs):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


ONE_DEVICE = f"""
import json, sys
sys.path.insert(0, {str(HERE)!r})
import nnx
from transformer import mesh_of, train
losses, _, _ = train(mesh_of(("data", 1), ("model", 1)), nnx.fsdp_tensor_parallel_rules())
print(json.dumps({{"losses": losses}}))
"""


@pytest.mark.timeout(LIMIT + 30)
def test_two_processes_train_as_one_device_does():
    program, address = str(HERE / "processes_program.py"), f"127.0.0.1:{free_port()}"
    *pair, alone = finish(
        [start(program, address, str(i), devices=4) for i in range(2)] + [start(ONE_DEVICE, devices=1)]
    )
    for i, seen in enumerate(pair):
        assert seen["devices"] == [8, 4]
        assert seen["part"] == [16, 16] and seen["parts here"] == 4
        assert seen["batch here"] == [8 * i]  # each process has its own half of the batch
        np.testing.assert_allclose(seen["losses"], alone["losses"], rtol=1e-4, atol=1e-5)
