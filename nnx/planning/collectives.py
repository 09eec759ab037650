"""Collectives: what the devices of a program exchange, with whom, and how long the links need for it."""

import math
import re
from typing import NamedTuple

import numpy as np

from nnx.inspection.hlo import Instruction
from nnx.planning.machines import Machine

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "ragged-all-to-all",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)


class Collective(NamedTuple):
    """One collective.

    Attributes:
        kind: the operation, e.g. "all-gather".
        times: how often it runs in a step.
        bytes: the size of the larger of operand and result on one device.
        group: the numbers of the devices of the first group that exchange; empty for all devices of the program.
        source: what JAX traced it from.
    """

    kind: str
    times: int
    bytes: int
    group: tuple[int, ...]
    source: str

    def received(self, devices: int) -> float:
        """Returns the bytes that one device has to receive, each time."""
        size = len(self.group) or devices
        share = (size - 1) / size
        if self.kind == "all-reduce":
            return 2 * share * self.bytes
        return self.bytes if self.kind.startswith("collective") else share * self.bytes

    def seconds(self, machine: Machine) -> float:
        """Returns the time that the links need for all runs in a step, at least."""
        size = len(self.group) or machine.count
        if size == 1:
            return 0.0
        bandwidth = machine.chip.links
        if machine.chip.platform == "tpu":
            bandwidth *= _dimensions(size, machine.sides)
        elif len({device // machine.chip.node for device in self.group or range(machine.count)}) > 1:
            bandwidth = machine.chip.network
        return self.times * self.received(machine.count) / bandwidth if bandwidth else 0.0


def collective(instruction: Instruction, times: int) -> Collective | None:
    """Returns the collective that an instruction is, or starts; None if it is none."""
    kind = next((kind for kind in COLLECTIVES if instruction.opcode in (kind, f"{kind}-start")), None)
    if kind is None:
        return None
    # The result of a start is a tuple of operands, results and numbers: of the first two, the larger counts.
    sizes = [shape.bytes for shape in instruction.shapes if shape.dims]
    half = len(sizes) // 2
    is_start = instruction.opcode.endswith("-start") and kind != "all-reduce" and half
    size = max(sum(sizes[:half]), sum(sizes[half : 2 * half])) if is_start else sum(sizes)
    if kind == "reduce-scatter" and not is_start:
        size *= max(len(group_of(instruction)), 1)
    return Collective(kind, times, size, group_of(instruction), instruction.source)


def group_of(instruction: Instruction) -> tuple[int, ...]:
    """Returns the devices of the first group of a collective; () for all of them.

    HLO writes groups in three ways: as lists, `{{0,1},{2,3}}`; as an array of numbers that is reshaped and transposed,
    `[2,2]<=[2,2]T(1,0)`; and by axes of a mesh, `mesh['a'=2,'b'=2] {'b'}`.
    """
    text = instruction.attributes
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return tuple(map(int, found[1].split(",")))
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        groups, dims = _sizes(found[1]), _sizes(found[2])
        numbers = np.arange(math.prod(dims)).reshape(dims)
        if found[3]:
            numbers = numbers.transpose(_sizes(found[3]))
        return tuple(numbers.reshape(groups)[0].tolist()) if len(groups) == 2 else ()
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\([^)]*\))? \{([^}]*)\}", text):
        axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
        chosen = re.findall(r"'(\w+)'", found[2])
        if ":" in found[2] or not set(chosen) <= axes.keys():  # a part of an axis
            return ()
        names = list(axes)
        numbers = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
        order = [names.index(name) for name in names if name not in chosen] + [names.index(name) for name in chosen]
        return tuple(numbers.transpose(order).reshape(-1, math.prod(axes[name] for name in chosen))[0].tolist())
    return ()


def _dimensions(size: int, sides: tuple[int, ...]) -> int:
    """Returns along how many dimensions of a torus a group of devices extends, at least."""
    covered = 1
    for number, side in enumerate(sides, 1):
        covered *= side
        if covered >= size:
            return number
    return len(sides)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
