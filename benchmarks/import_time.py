"""How long does `import nnx` take beyond what JAX and optax take by themselves?"""

import os
import subprocess
import sys

from benchmarks.harness import Row, Settings

PROGRAM = """
import time
import jax, jax.numpy, optax
begun = time.perf_counter()
import {package}
print(time.perf_counter() - begun)
"""
LIMIT = 0.15


def measure(settings: Settings) -> list[Row]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    times: dict[str, list[float]] = {package: [] for package in ("nnx", "equinox", "flax.nnx")}
    for _ in range(4 if settings.quick else 10):  # the first round writes the bytecode
        for package, values in times.items():
            command = [sys.executable, "-c", PROGRAM.format(package=package)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            values.append(float(done.stdout))
    best = {package: min(values) for package, values in times.items()}
    ours = best.pop("nnx")
    return [Row("import nnx, after jax and optax", ours, ours, LIMIT, "≤ 150 ms", "s", best)]
