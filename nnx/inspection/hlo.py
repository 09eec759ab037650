"""Compiled programs as text, read back: computations, their instructions, and the shapes of these.

JAX shows an optimized program as the text of XLA's HLO. A *computation* is a list of instructions; others call it, as
the body of a loop or as the inside of a fusion. An *instruction* has a result, whose parts are *shapes*, an opcode and
operands.
"""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128, "f8e8m0fnu": 8, "f4e2m1fn": 4}
_SHAPE = re.compile(r"([a-z][a-z0-9]*)\[([\d,<=]*)\](\{[^{}]*\})?")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|body|\w+_computations?)=(?:\{([^}]*)\}|(%?[\w.\-]+))")
_LAYOUT = re.compile(r"\{(?P<order>[\d,]*)(?::T\((?P<tile>[\d,]+)\))?")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


class Shape(NamedTuple):
    """One array of a result.

    Attributes:
        dtype: the dtype, as HLO names it: "bf16", "f32".
        dims: the sizes of the axes.
        memory: where it is: "" for the memory of the device, "fast" for the one next to its cores, "host".
        tiled: the sizes of the axes, padded to whole tiles where the layout has tiles.
    """

    dtype: str
    dims: tuple[int, ...]
    memory: str
    tiled: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The bytes of the array, without padding."""
        return -(-math.prod(self.dims) * _bits(self.dtype) // 8)

    @property
    def padded_bytes(self) -> int:
        """The bytes of the array with the padding of its tiles."""
        return -(-math.prod(self.tiled) * _bits(self.dtype) // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: its name.
        shapes: the arrays of its result.
        opcode: what it does.
        operands: the names of its operands.
        attributes: the rest of the line.
        is_root: whether it is the result of its computation.
    """

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def bytes(self) -> int:
        """The bytes of the result in the memory of the device."""
        return sum(shape.bytes for shape in self.shapes if not shape.memory)

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """The names of the computations that this one calls."""
        return tuple(
            name for text in _CALLED.findall(self.attributes) for name in re.findall(r"[\w.\-]+", "".join(text))
        )

    @functools.cached_property
    def source(self) -> str:
        """What JAX traced it from: named scopes and transforms, then the name of the primitive."""
        return self.attribute(r'op_name="([^"]*)"')

    def attribute(self, pattern: str) -> str:
        """Returns what a pattern with one group finds in the attributes; "" if it finds nothing."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""


class Program(NamedTuple):
    """A compiled program.

    Attributes:
        computations: the instructions of each computation, by name.
        entry: the name of the computation that runs.
    """

    computations: dict[str, dict[str, Instruction]]
    entry: str

    def trip_count(self, loop: Instruction) -> int:
        """Returns how often the body of a `while` runs; 1 if that is not known.

        Where the compiler does not say, it is the largest constant of the loop's condition, divided by what an
        iteration adds to the counter: the compiler for TPUs unrolls loops without changing their bound.
        """
        known = _TRIP_COUNT.search(loop.attributes)
        if known:
            return int(known[1])
        condition = self.computations.get(loop.attribute(r"condition=%?([\w.\-]+)"), {})
        bounds = [int(i.attributes) for i in condition.values() if i.opcode == "constant" and i.attributes.isdigit()]
        counters = [i.attribute(r"index=(\d+)") for i in condition.values() if i.opcode == "get-tuple-element"]
        added = self._added(loop, int(counters[0])) if len(counters) == 1 else 1
        return max([1, *bounds]) // added or 1

    def _added(self, loop: Instruction, counter: int) -> int:
        """Returns what one iteration adds to an element of the loop's tuple; 1 if that cannot be seen."""
        body = self.computations.get(loop.attribute(r"body=%?([\w.\-]+)"), {})
        root = next((i for i in body.values() if i.is_root and i.opcode == "tuple"), None)
        value, total = body.get(root.operands[counter]) if root is not None else None, 0
        while value is not None and value.opcode in ("add", "copy"):
            operands = [body[name] for name in value.operands if name in body]
            total += sum(int(o.attributes) for o in operands if o.opcode == "constant" and o.attributes.isdigit())
            value = next((o for o in operands if o.opcode != "constant"), None)
        return max(total, 1)


def read(text: str) -> Program:
    """Reads the text of a compiled program."""
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] = {}
    entry = ""
    for line in text.splitlines():
        if not line.startswith(" "):
            header = _HEADER.match(line)
            if header and not line.startswith("HloModule"):
                current = computations.setdefault(header[2], {})
                entry = header[2] if header[1] else entry
            continue
        begin = _INSTRUCTION.match(line)
        if begin:
            instruction = _instruction(begin[2], line[begin.end() :], bool(begin[1]))
            current[instruction.name] = instruction
    return Program(computations, entry)


def _instruction(name: str, text: str, is_root: bool) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opcode, _, rest = text[end:].lstrip().partition("(")
    close = _closing("(" + rest, 0) - 1
    inner, attributes = rest[:close], rest[close + 1 :].lstrip(", ")
    operands = tuple(_OPERAND.findall(inner))
    if opcode in ("constant", "parameter"):
        attributes = inner
    return Instruction(name, shapes_in(text[:end]), opcode, operands, attributes, is_root)


@functools.lru_cache(maxsize=4096)
def shapes_in(text: str) -> tuple[Shape, ...]:
    """Returns the shapes in the text of a type."""
    found = []
    for dtype, dims, layout in _SHAPE.findall(text):
        memory = "host" if "S(5)" in layout else "fast" if "S(" in layout else ""
        sizes = tuple(int(size.lstrip("<=")) for size in dims.split(",") if size)
        found.append(Shape(dtype, sizes, memory, _tiled(sizes, layout)))
    return tuple(found)


def _tiled(dims: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Returns the sizes of axes of which the fastest, those of a tile, are padded to whole tiles."""
    found = _LAYOUT.match(layout)
    if found is None or not found["tile"]:
        return dims
    padded = list(dims)
    for axis, size in zip(_numbers(found["order"]), reversed(_numbers(found["tile"]))):
        padded[axis] = -(-padded[axis] // size) * size
    return tuple(padded)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _closing(text: str, start: int) -> int:
    """Returns where the parenthesis that opens at `start` closes."""
    depth, at = 0, start
    for match in re.finditer(r'[()"]', text[start:]):
        at = start + match.start()
        if match[0] != '"':
            depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return at
    return at


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    number = re.match(r"(?:bf|f|s|u)(\d+)", dtype)
    return int(number[1]) if number else 32
