"""The largest arrays of a compiled program, by the submodule that makes them.

NNX runs every submodule in a named scope, so what JAX traced an instruction from has the path of the submodule in it:
`jit(step)/transpose(jvp())/while/body/checkpoint/attention/query/dot_general` is `attention/query`, backward.
"""

import re
from typing import NamedTuple

from nnx.inspection.hlo import Instruction, Program, Shape

# Names that JAX and its transforms add to a scope.
_TRANSFORMS = re.compile(
    r"jit\(.*\)|pjit|while|body|cond|branch_\d+_fun|closed_call|core_call|checkpoint|remat2?|rematted_computation|"
    r"custom_[jv][jv]p_call.*|shard_map|custom_partitioning|scan|vmap\(.*\)|named_computation|nnx|pallas_call"
)
_SILENT = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "iota"}


class LargeArray(NamedTuple):
    """An array that a program keeps for a while.

    Attributes:
        bytes: its size on one device.
        path: the submodule that makes it; "" if none does.
        phase: "forward", "backward" or "recomputed".
        made_by: the operation that makes it.
        shape: dtype and shape on one device, e.g. "bf16[8,2048,4096]".
    """

    bytes: int
    path: str
    phase: str
    made_by: str
    shape: str


def largest_arrays(program: Program, count: int = 8) -> tuple[LargeArray, ...]:
    """Returns the largest arrays that a program makes besides its results, one for each path, shape and phase."""
    found: dict[tuple[str, str, str], LargeArray] = {}
    for name in _running(program):
        instructions = program.computations[name]
        results = _results(instructions) if name == program.entry else set()
        for instruction in instructions.values():
            if instruction.opcode in _SILENT or instruction.opcode.endswith("-done"):
                continue
            shapes = list(enumerate(instruction.shapes))
            if instruction.opcode.endswith("-start"):  # a tuple of what is moved, and where it goes
                shapes = [max(shapes, key=lambda shape: shape[1].bytes)] if shapes else []
            for number, shape in shapes:
                if not shape.memory and (instruction.name, number) not in results:
                    array = _large_array(instruction, shape, instructions)
                    found.setdefault((array.path, array.shape, array.phase), array)
    return tuple(sorted(found.values(), key=lambda array: -array.bytes)[:count])


def path_of(source: str) -> tuple[str, str, str]:
    """Returns the path of the submodule that an instruction belongs to, its phase, and its operation.

    >>> path_of("jit(step)/transpose(jvp())/while/body/closed_call/checkpoint/mlp/up/jit(_contract)/dot_general")
    ('mlp/up', 'backward', 'dot_general')
    """
    phase = "recomputed" if "rematted_computation" in source else "backward" if "transpose(" in source else "forward"
    source = source.split(":/")[0]  # the first of several operations that became one
    # A scope within a transform is inside of its parentheses: transpose(jvp(head)).
    plain = re.sub(r"\b(?:transpose|jvp|vmap)\(|(?<!\w)\)+", "/", re.sub(r"jit\([^()]*\)", "", source))
    names = [part.strip("()") for part in plain.split("/")]
    names = [part for part in names if part and "->" not in part and not _TRANSFORMS.fullmatch(part)]
    return "/".join(names[:-1]), phase, names[-1] if names else ""


def _large_array(instruction: Instruction, shape: Shape, around: dict[str, Instruction]) -> LargeArray:
    path, phase, made_by = path_of(instruction.source)
    origin = instruction
    for _ in range(3):  # copies that the compiler adds say nothing; what is copied does
        if path or not origin.operands or origin.operands[0] not in around:
            break
        origin = around[origin.operands[0]]
        path, phase, _ = path_of(origin.source)
    dims = ",".join(map(str, shape.dims))
    return LargeArray(shape.bytes, path, phase, made_by or instruction.opcode, f"{shape.dtype}[{dims}]")


def _running(program: Program) -> list[str]:
    """Returns the computations that run by themselves: entry, bodies and branches, but not the inside of fusions."""
    found, waiting = [], [program.entry]
    while waiting:
        name = waiting.pop()
        if name in found or name not in program.computations:
            continue
        found.append(name)
        for instruction in program.computations[name].values():
            if instruction.opcode in ("while", "conditional", "call", "async-start"):
                waiting += instruction.called
    return found


def _results(instructions: dict[str, Instruction]) -> set[tuple[str, int]]:
    """Returns what the entry of a program returns, as names of instructions and numbers of their parts."""
    root = next((i for i in instructions.values() if i.is_root), None)
    found: set[tuple[str, int]] = set()
    waiting = list(root.operands) if root is not None and root.opcode == "tuple" else [root.name] if root else []
    while waiting:
        instruction = instructions.get(waiting.pop())
        if instruction is None:
            continue
        found.add((instruction.name, 0))
        if instruction.opcode == "get-tuple-element":
            number = instruction.attribute(r"index=(\d+)")
            found.add((instruction.operands[0], int(number or 0)))
        elif instruction.opcode in ("bitcast", "copy", "copy-done"):
            waiting += instruction.operands
    return found
