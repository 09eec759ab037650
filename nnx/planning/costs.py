"""Costs of a compiled program: the operations, bytes and cycles of each kernel, times how often it runs.

A *kernel* is what a device runs at once: a fusion, a product, a copy, a call of a library. It takes at least as long as
its operations at the rate of the chip, and as its bytes at the bandwidth. For TPUs, the compiler writes the cycles it
expects into the program; those of kernels with products are right within some percent, so they replace the operations.
(For other kernels they are far off, and those of collectives are 0.)
"""

import dataclasses
import math
import re
from collections import Counter
from typing import NamedTuple

from nnx.inspection.hlo import Instruction, Program, Shape
from nnx.planning.collectives import COLLECTIVES, Collective, collective

# Instructions that move nothing.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("iota", "opt-barrier", "domain", "add-dependency", "custom-call-done", "while", "conditional", "call"),
    *("async-start", "send", "recv"),
}
_SLICING = ("dynamic-slice", "slice", "gather")
_LOOKED_THROUGH = ("bitcast", "reshape", "copy", "convert", "transpose")


def _is_free(opcode: str) -> bool:
    return opcode in _FREE or opcode.endswith(("-done", "-update")) or opcode.startswith(COLLECTIVES)


class Kernel(NamedTuple):
    """One kernel.

    Attributes:
        source: what JAX traced it from.
        times: how often it runs in a step.
        flops: its floating-point operations by dtype, those of products and convolutions.
        bytes: the bytes that it reads from the memory of the device and writes to it.
        host_bytes: the bytes that it moves between the device and the host.
        cycles: the cycles that the compiler expects; 0 if it does not say.
        heads: the features of a head if this is cuDNN's attention; otherwise 0.
    """

    source: str
    times: int
    flops: dict[str, int]
    bytes: int
    host_bytes: int
    cycles: int
    heads: int = 0


class Costs(NamedTuple):
    """What a program does in one step on one device.

    Attributes:
        kernels: its kernels.
        collectives: what it exchanges with other devices.
        loops: the largest number of times that a loop repeats; 1 without loops.
    """

    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...]
    loops: int

    @property
    def flops(self) -> int:
        """The operations of a step on one device."""
        return sum(kernel.times * sum(kernel.flops.values()) for kernel in self.kernels)

    @property
    def bytes(self) -> int:
        """The bytes that a step moves through the memory of one device."""
        return sum(kernel.times * kernel.bytes for kernel in self.kernels)


def costs_of(program: Program) -> Costs:
    """Returns what a program does in one step."""
    walk = _Walk(program)
    walk.visit(program.entry, 1)
    return Costs(tuple(walk.kernels), tuple(walk.collectives), walk.loops)


class _Walk:
    """The way through a program, from its entry into the bodies of loops and branches."""

    def __init__(self, program: Program):
        self.program = program
        self.kernels: list[Kernel] = []
        self.collectives: list[Collective] = []
        self.loops = 1
        self._flops: dict[str, Counter[str]] = {}

    def visit(self, name: str, times: int) -> None:
        """Adds what a computation does, which runs so many times in a step."""
        instructions = self.program.computations.get(name, {})
        channels = set[str]()
        for instruction in instructions.values():
            self._collect(instruction, times, channels)
            if instruction.opcode == "while":
                count = self.program.trip_count(instruction)
                self.loops = max(self.loops, count)
                self.visit(instruction.attribute(r"body=%?([\w.\-]+)"), times * count)
            elif instruction.opcode == "conditional":
                branches = [_Walk(self.program) for _ in instruction.called]
                for branch, called in zip(branches, instruction.called):
                    branch.visit(called, times)
                most = max(branches, key=lambda branch: sum(k.bytes + sum(k.flops.values()) for k in branch.kernels))
                self.kernels += most.kernels
                self.collectives += most.collectives
            elif instruction.opcode in ("call", "async-start"):
                for called in instruction.called:
                    self.visit(called, times)
            elif not _is_free(instruction.opcode):
                self.kernels.append(self._kernel(self._started(instruction), instructions, times))

    def _started(self, instruction: Instruction) -> Instruction:
        """Returns the fusion that an instruction starts, with the result of the fusion; otherwise itself."""
        if instruction.opcode != "fusion-start" or not instruction.called:
            return instruction
        inner = self.program.computations.get(instruction.called[0], {})
        root = next((i for i in inner.values() if i.is_root), instruction)
        return dataclasses.replace(instruction, opcode="fusion", shapes=root.shapes)

    def _collect(self, instruction: Instruction, times: int, channels: set[str]) -> None:
        """Notes the collectives of an instruction, also those inside of a fusion. Parts of one have one channel."""
        found = collective(instruction, times)
        if found is not None:
            channel = instruction.attribute(r"channel_id=(\d+)") or instruction.name
            if channel not in channels:
                channels.add(channel)
                self.collectives.append(found)
        elif instruction.opcode == "fusion":
            for called in instruction.called:
                for inner in self.program.computations.get(called, {}).values():
                    self._collect(inner, times, channels)

    def _kernel(self, instruction: Instruction, around: dict[str, Instruction], times: int) -> Kernel:
        flops = Counter(self._flops_of(instruction, around))
        moved, host = self._bytes_of(instruction, around)
        cycles = instruction.attribute(r'"estimated_cycles":"(\d+)"')
        heads = _features_of_heads(instruction, around)
        return Kernel(instruction.source, times, dict(flops), moved, host, int(cycles or 0), heads)

    # Operations

    def _flops_of(self, instruction: Instruction, around: dict[str, Instruction]) -> Counter[str]:
        found: Counter[str] = Counter()
        if instruction.opcode == "dot":
            found[_dtype(instruction, around)] = _of_dot(instruction, around)
        elif instruction.opcode == "convolution":
            found[_dtype(instruction, around)] = _of_convolution(instruction, around, "Forward")
        elif instruction.opcode == "custom-call":
            dtype, flops = _of_library(instruction, around)
            found[dtype] = flops
        elif instruction.opcode == "fusion":
            for called in instruction.called:
                found += self._inside(called)
        return +found

    def _inside(self, name: str) -> Counter[str]:
        if name not in self._flops:
            inner = self.program.computations.get(name, {})
            self._flops[name] = sum((self._flops_of(i, inner) for i in inner.values()), Counter())
        return self._flops[name]

    # Bytes

    def _bytes_of(self, instruction: Instruction, around: dict[str, Instruction]) -> tuple[int, int]:
        """Returns the bytes that an instruction moves in the memory of the device, and to or from the host."""
        shapes = [*instruction.shapes, *_shapes_of(instruction.operands, around)]
        host = max((shape.bytes for shape in shapes if shape.memory == "host"), default=0)
        if instruction.opcode == "fusion" and instruction.called:
            return self._bytes_of_fusion(instruction, around), host
        if instruction.opcode in _SLICING:
            return 2 * instruction.bytes, host
        if instruction.opcode == "dynamic-update-slice":
            return 2 * _in_memory(_shapes_of(instruction.operands[1:2], around)), host
        if instruction.opcode.endswith("-start"):  # its result is a tuple of both sides
            return 2 * min(map(_in_memory, (instruction.shapes[:1], instruction.shapes[1:2]))), host
        return instruction.bytes + _in_memory(_shapes_of(instruction.operands, around)), host

    def _bytes_of_fusion(self, fusion: Instruction, around: dict[str, Instruction]) -> int:
        inner = self.program.computations.get(fusion.called[0], {})
        users: dict[str, list[Instruction]] = {}
        for instruction in inner.values():
            for operand in instruction.operands:
                users.setdefault(operand, []).append(instruction)
        parameters = {i.attributes: i for i in inner.values() if i.opcode == "parameter"}
        read = 0
        for number, operand in enumerate(fusion.operands):
            whole = _in_memory(_shapes_of((operand,), around))
            parameter = parameters.get(str(number))
            read += whole if parameter is None else min(whole, _read_of(parameter, users, inner, whole))
        root = next((i for i in inner.values() if i.is_root), None)
        return read + _written(root, inner, fusion.bytes)


def _read_of(value: Instruction, users: dict[str, list[Instruction]], inner: dict[str, Instruction], whole: int) -> int:
    """Returns the bytes of a fusion's operand that it reads: the slices, if it only takes slices."""
    total = 0
    for user in users.get(value.name, ()):
        if user.opcode in _SLICING and user.operands[0] == value.name:
            total += sum(shape.bytes for shape in user.shapes)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            continue  # written in place
        elif user.opcode in _LOOKED_THROUGH:
            total += _read_of(user, users, inner, whole)
        else:
            return whole
    return total


def _written(root: Instruction | None, inner: dict[str, Instruction], whole: int) -> int:
    """Returns the bytes that a fusion writes: those of the update, if its result is an update in place."""
    while root is not None and root.opcode in _LOOKED_THROUGH and root.operands:
        root = inner.get(root.operands[0])
    if root is None:
        return whole
    if root.opcode == "tuple":
        parts = [inner[name] for name in root.operands if name in inner]
        return min(whole, sum(_written(part, inner, part.bytes) for part in parts))
    if root.opcode == "dynamic-update-slice":
        return min(whole, sum(shape.bytes for shape in _shapes_of(root.operands[1:2], inner)))
    return whole


def _in_memory(shapes: list[Shape] | tuple[Shape, ...]) -> int:
    return sum(shape.bytes for shape in shapes if not shape.memory)


def _shapes_of(names: tuple[str, ...], around: dict[str, Instruction]) -> list[Shape]:
    return [shape for name in names if name in around for shape in around[name].shapes]


# Operations of products, convolutions and libraries


def _dtype(instruction: Instruction, around: dict[str, Instruction]) -> str:
    """Returns the dtype at whose rate a product runs: that of its operands. On GPUs, float32 means TF32 by default."""
    dtypes = [shape.dtype for shape in _shapes_of(instruction.operands[:2], around)] or ["f32"]
    precise = "highest" in instruction.attributes or '"HIGHEST"' in instruction.attributes
    return "tf32" if dtypes[0] == "f32" and not precise else dtypes[0]


def _of_dot(instruction: Instruction, around: dict[str, Instruction]) -> int:
    left = _shapes_of(instruction.operands[:1], around)
    axes = _numbers(instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}"))
    contracted = math.prod(left[0].dims[axis] for axis in axes) if left else 1
    return 2 * math.prod(instruction.shapes[0].dims) * contracted


def _of_convolution(instruction: Instruction, around: dict[str, Instruction], kind: str) -> int:
    """Returns the operations of a convolution, without those with padding and with the holes of a dilation.

    The compiler for TPUs writes products as convolutions, where a batch becomes an axis of a window. `kind` says what
    the operands are: for "Forward" image and kernel, for the others what cuDNN's backward passes take.
    """
    image, kernel, out = _sides(instruction, around, kind)
    labels = re.match(r"(\w+)_(\w+)->(\w+)", instruction.attribute(r"dim_labels=([\w?]+->[\w?]+)"))
    if labels is None or image is None or kernel is None:
        return 0
    features = kernel.dims[labels[2].index("i")] * kernel.dims[labels[2].index("o")]
    taps = 1
    for axis in (label for label in labels[1] if label.isdigit()):
        at = labels[1].index(axis), labels[2].index(axis), labels[3].index(axis)
        taps *= _taps(image.dims[at[0]], kernel.dims[at[1]], out.dims[at[2]], _window(instruction, int(axis)))
    rows = out.dims[labels[3].index("b")] if kind == "Forward" else image.dims[labels[1].index("b")]
    batches = max(int(instruction.attribute(r"batch_group_count=(\d+)") or 1), 1)
    return 2 * rows * features * taps // (1 if batches == 1 else batches)


def _sides(
    instruction: Instruction, around: dict[str, Instruction], kind: str
) -> tuple[Shape | None, Shape | None, Shape]:
    given = _shapes_of(instruction.operands[:2], around)
    result = instruction.shapes[0]
    if len(given) < 2:
        return None, None, result
    if kind == "BackwardInput":  # of the gradient of the output and the kernel
        return result, given[1], given[0]
    if kind == "BackwardFilter":  # of the input and the gradient of the output
        return given[0], result, given[1]
    return given[0], given[1], result


def _window(instruction: Instruction, axis: int) -> tuple[int, int, int, int]:
    """Returns stride, padding in front, dilation of the image and dilation of the kernel along an axis."""
    text = instruction.attribute(r"window=\{([^}]*)\}")

    def value(name: str, default: str) -> str:
        found = re.search(rf"\b{name}=([\w\-]+)", text)
        return found[1].split("x")[axis] if found else default

    pad = value("pad", "0_0").split("_")[0]
    return int(value("stride", "1")), int(pad), int(value("lhs_dilate", "1")), int(value("rhs_dilate", "1"))


def _taps(image: int, kernel: int, out: int, window: tuple[int, int, int, int]) -> int:
    """Returns how many pairs of an output and an entry of the kernel meet an entry of the image, along one axis."""
    stride, pad, image_dilation, kernel_dilation = window
    extent, count = (image - 1) * image_dilation + 1, 0
    for k in range(kernel):
        first = k * kernel_dilation - pad
        count += sum(
            1 for o in range(out) if 0 <= first + o * stride < extent and (first + o * stride) % image_dilation == 0
        )
    return count


def _of_library(instruction: Instruction, around: dict[str, Instruction]) -> tuple[str, int]:
    """Returns dtype and operations of a call of a library: cuBLAS, cuDNN, or a kernel for TPUs."""
    target = instruction.attribute(r'custom_call_target="([^"]*)"')
    dtype = _dtype(instruction, around)
    if "gemm" in target or "matmul" in target:
        return dtype, _of_gemm(instruction, around)
    if target.startswith("__cudnn$conv"):
        kind = next((kind for kind in ("BackwardInput", "BackwardFilter") if kind in target), "Forward")
        return dtype, _of_convolution(instruction, around, kind)
    if target.startswith("__cudnn$fmha"):
        return dtype, _of_attention(instruction, around, "Backward" in target)
    claimed = instruction.attribute(r'"flops":\s*"?(\d+)')  # what the author of a kernel says
    return dtype, int(claimed or 0)


def _of_gemm(instruction: Instruction, around: dict[str, Instruction]) -> int:
    left = _shapes_of(instruction.operands[:1], around)
    axes = _numbers(instruction.attribute(r'"lhs_contracting_dimensions":\[([^\]]*)\]'))
    contracted = math.prod(left[0].dims[axis] for axis in axes) if left else 1
    return 2 * math.prod(instruction.shapes[0].dims) * contracted


def _features_of_heads(instruction: Instruction, around: dict[str, Instruction]) -> int:
    if "__cudnn$fmha" not in instruction.attributes:
        return 0
    query = _shapes_of(instruction.operands[:1], around)[0]
    return query.dims[-1] if query.dims else 0


def _of_attention(instruction: Instruction, around: dict[str, Instruction], backward: bool) -> int:
    """Returns the operations of cuDNN's attention: two products forward, five backward, half of them if causal."""
    query, key = _shapes_of(instruction.operands[:2], around)[:2]
    if len(query.dims) != 4:
        return 0
    batch, length, heads, features = query.dims
    products = 5 if backward else 2
    masked = 2 if "CAUSAL" in instruction.attributes else 1
    return products * 2 * batch * heads * length * key.dims[1] * features // masked


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
