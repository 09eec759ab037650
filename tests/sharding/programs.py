"""Programs that need devices of their own, run in processes of their own."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NO_CACHE = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
"""Keeps examples from writing to the user's cache folder."""


def environment(devices: int | None = None) -> dict[str, str]:
    """Returns the environment of a program on the CPU, with so many virtual devices if it does not make them itself."""
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **NO_CACHE}
    if devices is not None:
        flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={devices}"]
        variables["XLA_FLAGS"] = " ".join(flags).strip()
    return variables


def start(program: Path, *arguments: str, devices: int | None = None) -> subprocess.Popen:
    """Starts a Python program, with so many virtual devices if it does not make them itself."""
    command = [sys.executable, str(program), *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(devices)
    )


def finish(processes: Sequence[subprocess.Popen], limit: float, codes: Iterable[int] | None = None) -> list[str]:
    """Returns what the processes print within `limit` seconds, ending with these codes; none is left running."""
    deadline = time.monotonic() + limit
    try:
        outputs = [process.communicate(timeout=max(1.0, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    expected = [0] * len(processes) if codes is None else codes
    for process, code, (_, errors) in zip(processes, expected, outputs, strict=True):
        assert process.returncode == code, errors[-3000:]
    return [output for output, _ in outputs]
