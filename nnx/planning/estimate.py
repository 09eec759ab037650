"""The estimate of a step's time: a lower bound, and what bounds it.

Kernels run one after the other, so their times add up. Each takes the longer of two times: that of its operations at
the rate which long products reach (or fused attention), and that of its bytes at the bandwidth which long copies reach.
Links and the way to the host work at the same time, so they count only if they need longer than all kernels together.
"""

from typing import NamedTuple

from nnx.planning.costs import Costs, Kernel
from nnx.planning.machines import Machine

RESOURCES = ("compute", "memory", "interconnect", "host")


class Estimate(NamedTuple):
    """The least time of a step.

    Attributes:
        compute: the seconds of kernels that wait for arithmetic.
        memory: the seconds of kernels that wait for the memory of the device.
        interconnect: the seconds that the links between devices need.
        host: the seconds that the way to the host needs.
        mfu: the part of the peak rate of the chip that the operations of the step reach in this time, without those
            that `nnx.remat` repeats.
    """

    compute: float
    memory: float
    interconnect: float
    host: float
    mfu: float

    @property
    def seconds(self) -> float:
        """The bound."""
        return max(self.compute + self.memory, self.interconnect, self.host)

    @property
    def bound_by(self) -> str:
        """What the step waits for most: one of `RESOURCES`."""
        if self.seconds > self.compute + self.memory:
            return "interconnect" if self.interconnect >= self.host else "host"
        return "compute" if self.compute >= self.memory else "memory"


def estimate(costs: Costs, machine: Machine, quick: bool = False) -> Estimate | None:
    """Returns the estimate for a program; None for machines of which no rates are known.

    Args:
        costs: what the program does.
        machine: the machine.
        quick: whether the program was compiled quickly. The cycles in it are then far above those of the program that
            would run, so the estimate uses operations instead.
    """
    chip = machine.chip
    if not chip.bandwidth:
        return None
    compute = memory = host = peak = 0.0
    for kernel in costs.kernels:
        arithmetic, moving = _seconds(kernel, machine, quick)
        if arithmetic >= moving:
            compute += kernel.times * arithmetic
        else:
            memory += kernel.times * moving
        host += kernel.times * kernel.host_bytes / chip.host
        if "rematted_computation" not in kernel.source:
            peak += kernel.times * sum(flops / chip.rate(dtype) for dtype, flops in kernel.flops.items())
    links = sum(found.seconds(machine) for found in costs.collectives)
    found = Estimate(compute, memory, links, host, 0.0)
    return found._replace(mfu=peak / found.seconds if found.seconds else 0.0)


def _seconds(kernel: Kernel, machine: Machine, quick: bool) -> tuple[float, float]:
    """Returns the seconds that a kernel needs for its operations, and for its bytes."""
    chip = machine.chip
    reached, part = chip.attainable
    if kernel.heads:
        reached = chip.attention[kernel.heads > 64]
    arithmetic = sum(flops / (reached * chip.rate(dtype)) for dtype, flops in kernel.flops.items())
    if kernel.flops and kernel.cycles and not quick:
        arithmetic = kernel.cycles / chip.clock
    return arithmetic, kernel.bytes / (part * chip.bandwidth)
