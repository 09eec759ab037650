"""Where the time of the GPT-2 training step goes: the kernels of some steps, by what they compute.

    python -m benchmarks.gpu.profile                   GPT-2 small, batches of 32 × 1024 tokens, on a GPU
    python -m benchmarks.gpu.profile --kernels 40      also list the kernels that take longest
    python -m benchmarks.gpu.profile --out FILE.json   write a record (see benchmarks/record.py)

The step is that of `benchmarks.gpu.train`. JAX's profiler records which kernels ran on the GPU, and their names tell
what they are. While the step runs for some seconds, `nvidia-smi` reports the GPU's clock and power: a GPU that has
reached its power limit lowers its clock, and then a step takes as long as the energy it needs.
"""

import argparse
import collections
import pathlib
import re
import subprocess
import tempfile
import time
from typing import Any, NamedTuple

import jax

from benchmarks import record
from benchmarks.gpu.train import SETTINGS, Setting, make_ours

# The first pattern that occurs in the name of a kernel decides.
GROUPS = {
    "attention backward": r"sdpa.*(bprop|bwd)|(bprop|bwd).*sdpa|flash.*(bprop|bwd)|(bprop|bwd).*flash",
    "attention forward": r"sdpa|flash",
    "cross-entropy": r"^cross_entropy",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma",
    "the rest": r"",
}


def group_of(kernel: str) -> str:
    """Returns the group that a kernel belongs to."""
    return next(group for group, pattern in GROUPS.items() if re.search(pattern, kernel))


def kernel_times(step: Any, steps: int) -> dict[str, tuple[float, float]]:
    """Returns for each kernel how often it runs in a step, and the milliseconds it takes in all."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([step() for _ in range(steps)])
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    counts: collections.Counter[str] = collections.Counter()
    times: collections.Counter[str] = collections.Counter()
    for plane in profile.planes:
        for line in plane.lines if plane.name.startswith("/device:") else ():
            if line.name.startswith("Stream"):
                for event in line.events:
                    counts[event.name] += 1
                    times[event.name] += event.duration_ns / 1e6
    return {name: (counts[name] / steps, time / steps) for name, time in times.most_common()}


class Sustained(NamedTuple):
    """A step that runs again and again: its time in ms, and the means of the GPU's clock in MHz and power in W."""

    step: float
    clock: float
    highest_clock: float
    power: float
    power_limit: float


def sustained(step: Any, seconds: float) -> Sustained:
    """Runs the step for some seconds, and measures the second half of them."""
    fields = "clocks.sm,clocks.max.sm,power.draw,power.limit"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "--loop-ms=50"]
    run_for(step, seconds / 2)  # until clock and temperature have settled
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as monitor:
        milliseconds = run_for(step, seconds / 2)
        monitor.terminate()
        report, _ = monitor.communicate()
    samples = [[float(entry) for entry in line.split(",")] for line in report.splitlines() if line.count(",") == 3]
    clock, highest, power, limit = (sum(column) / len(column) for column in zip(*samples))
    return Sustained(milliseconds, clock, highest, power, limit)


def run_for(step: Any, seconds: float) -> float:
    """Runs the step for so many seconds, in groups that keep the GPU busy; returns milliseconds per step."""
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        jax.block_until_ready([step() for _ in range(5)])
        count += 5
    return 1e3 * (time.perf_counter() - start) / count


def product_operations(setting: Setting) -> float:
    """Returns the operations of a step's matrix products: two per weight and token, and twice that backward."""
    config = setting.config
    weights = config.layers * (4 * config.width**2 + 2 * config.width * setting.hidden) + config.vocab * config.width
    return 6.0 * weights * setting.batch * config.context


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=0, help="how many kernels to list")
    parser.add_argument("--steps", type=int, default=5, help="how many steps to record")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to run before that")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write a record of the run")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error("there is no GPU here")
    setting = SETTINGS["gpt2"]
    step = make_ours(setting)
    settled = sustained(step, args.seconds)
    kernels = kernel_times(step, args.steps)
    sums = dict.fromkeys(GROUPS, 0.0)
    for name, (_, milliseconds) in kernels.items():
        sums[group_of(name)] += milliseconds
    every = sum(sums.values())
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}: {settled.step:.2f} ms per step", end="; ")
    print(
        f"{settled.clock:.0f} of {settled.highest_clock:.0f} MHz, {settled.power:.0f} of {settled.power_limit:.0f} W; "
        f"{every:.2f} ms in kernels"
    )
    for group, milliseconds in sums.items():
        print(f"  {group:<20} {milliseconds:6.2f} ms")
    for name, (count, milliseconds) in list(kernels.items())[: args.kernels]:
        print(f"  {milliseconds:7.3f} ms  {count:6.1f} ×  {name[:110]}")
    if args.out:
        rate = product_operations(setting) / sums["matrix products"] / 1e9
        figures = {
            "kernels": record.row("ms", {"step": settled.step, "all": every, **sums}),
            "rate of matrix products": record.row("TFLOP/s", {"nnx": rate}),
            "clock": record.row("MHz", {"mean": settled.clock, "highest": settled.highest_clock}),
            "power": record.row("W", {"mean": settled.power, "limit": settled.power_limit}),
        }
        command = "python -m benchmarks.gpu.profile"
        record.write(args.out, record.make_record("gpu_profile_gpt2", command, figures, whole=True))


if __name__ == "__main__":
    main()
