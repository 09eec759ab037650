"""The memory that a compiled program holds while it runs, read from its text.

XLA's text of a compiled program lists instructions in the order in which they run, with the shapes of their results
and the name scopes of the operations that they were made from. A *buffer* is the memory of such a result. It is held
from the instruction that writes it to the last one that reads it, or to the end if the program returns it. Arguments
and constants are not counted. As in XLA's own assignment, an elementwise instruction writes over an operand that nobody
reads later, and a loop and an update of a slice write in place.
"""

import math
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<type>.+?) (?P<code>[a-z][\w-]*)\((?P<rest>.*)$"
)
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<shape>[\d,]*)\](?P<layout>\{[^}]*\})?")
_OPERAND = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w+_computations?)=\{?([^,}]+(?:, %[\w.-]+)*)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_INDEX = re.compile(r"index=(\d+)")
_LAYOUT = re.compile(r"\{(?P<order>[\d,]*)(?::T\((?P<tile>[\d,]+)\))?")
_BITS = re.compile(r"[a-z]+(\d+)")

_ALIASES = ("bitcast", "optimization-barrier")
_CALLS = frozenset("call conditional while".split())
_NO_OPERATION = frozenset("constant parameter partition-id replica-id after-all".split())
# Instructions that read an operand more than once, or elsewhere than where they write.
_HEAVY = frozenset(
    "all-gather all-to-all cholesky collective-permute concatenate convolution copy custom-call dot dynamic-slice fft "
    "gather pad reduce reduce-window reverse rng rng-bit-generator select-and-scatter slice sort transpose "
    "triangular-solve".split()
)


Buffers = frozenset[str]


class Instruction(NamedTuple):
    """A line of a computation: its result is an array, or a tuple with one part per array."""

    name: str
    code: str
    sizes: list[int]
    operands: list[str]
    called: list[str]
    op_name: str
    index: int | None
    is_root: bool


class Peaks(NamedTuple):
    """The most bytes held at a time: by the whole program, and while the operations of each scope run."""

    whole: int
    by_scope: dict[int, int]


def peaks(text: str, scopes: Callable[[str], Iterable[int]]) -> Peaks:
    """Returns the most memory that a compiled program holds besides its arguments.

    Args:
        text: the text of the program, as `compiled.as_text()` returns it.
        scopes: a function that returns the numbers of the scopes in the name of an operation.
    """
    computations, entry = _parse(text)
    return _Program(computations, entry, scopes).peaks(entry)


class _Program:
    """A compiled program: its computations by name, and the peaks of those that have been looked at."""

    def __init__(
        self, computations: dict[str, list[Instruction]], entry: str, scopes: Callable[[str], Iterable[int]]
    ) -> None:
        self.computations = computations
        self.entry = entry
        self._scopes = scopes
        self._known: dict[str, Peaks] = {}

    def peaks(self, name: str) -> Peaks:
        """Returns the peaks of a computation."""
        if name not in self._known:
            self._known[name] = self._run(name)
        return self._known[name]

    def _run(self, name: str) -> Peaks:
        lines = self.computations[name]
        parts, sizes = _buffers(lines)
        results = {buffer for line in lines if line.is_root for part in parts[line.name] for buffer in part}
        if name != self.entry:  # the results of a computation that is called are in memory of the caller
            sizes.update(dict.fromkeys(results, 0))
        last = {buffer: at for at, line in enumerate(lines) for buffer in _read(line, parts)}
        live, whole, by_scope = 0, 0, {}
        for at, line in enumerate(lines):
            own = [f"{line.name}.{part}" for part in range(len(line.sizes))]
            made = sum(sizes.get(buffer, 0) for buffer in own)
            dying = {b: sizes.get(b, 0) for b in _read(line, parts) if last[b] == at and b not in results}
            over = [b for name in self._may_write_over(line) for part in parts.get(name, ()) for b in part]
            during = live + (0 if made in (dying.get(buffer) for buffer in over) else made)
            inner = [self.peaks(called) for called in line.called if line.code in _CALLS]
            for scope in self._scopes_of(line):
                by_scope[scope] = max(by_scope.get(scope, 0), during)
            for peak in inner:
                for scope, size in peak.by_scope.items():
                    by_scope[scope] = max(by_scope.get(scope, 0), during + size)
            whole = max(whole, during + max((peak.whole for peak in inner), default=0))
            live += made - sum(dying.values()) - sum(sizes.get(b, 0) for b in own if b not in last and b not in results)
        return Peaks(whole, by_scope)

    def _fused(self, line: Instruction) -> list[Instruction]:
        """Returns an instruction, or those that have been fused into it."""
        return [line] if line.code != "fusion" else [x for name in line.called for x in self.computations.get(name, ())]

    def _may_write_over(self, line: Instruction) -> list[str]:
        """Returns the operands that an instruction reads element by element, in the order in which it writes."""
        if line.code != "fusion":
            return line.operands if line.code not in _HEAVY else []
        fused, elsewhere = self._fused(line), set()
        for each in reversed(fused):
            if each.code in _HEAVY or each.name in elsewhere:
                elsewhere.update(each.operands)
        free = {each.index for each in fused if each.code == "parameter" and each.name not in elsewhere}
        return [name for number, name in enumerate(line.operands) if number in free]

    def _scopes_of(self, line: Instruction) -> set[int]:
        return {scope for each in (line, *self._fused(line)) for scope in self._scopes(each.op_name)}


def _parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    computations: dict[str, list[Instruction]] = {}
    lines: list[Instruction] = []
    entry = ""
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            lines = computations[found["name"]] = []
            entry = found["name"] if found["entry"] else entry
        elif found := _INSTRUCTION.match(line):
            lines.append(_instruction(found))
    return computations, entry


def _instruction(found: re.Match[str]) -> Instruction:
    arguments, _, attributes = found["rest"].partition("), ")
    called = [name.strip().lstrip("%") for group in _CALLED.findall(attributes) for name in group.split(",")]
    op_name, index = _OP_NAME.search(attributes), _INDEX.search(attributes)
    if found["code"] == "parameter":
        index = re.match(r"(\d+)", arguments)
    return Instruction(
        found["name"],
        found["code"],
        [_size(array) for array in _ARRAY.finditer(found["type"])],
        _OPERAND.findall(arguments),
        called,
        op_name[1] if op_name else "",
        int(index[1]) if index else None,
        bool(found["root"]),
    )


def _size(array: re.Match[str]) -> int:
    layout = array["layout"] or ""
    if re.search(r"S\([1-9]", layout):  # on the chip, or on the host
        return 0
    bits = 8 if array["dtype"] == "pred" else int(found[1]) if (found := _BITS.match(array["dtype"])) else 0
    shape = _numbers(array["shape"])
    found = _LAYOUT.match(layout)
    if found and found["tile"]:  # the fastest axes are padded to whole tiles
        for axis, size in zip(_numbers(found["order"]), reversed(_numbers(found["tile"]))):
            shape[axis] = math.ceil(shape[axis] / size) * size
    return math.prod(shape) * bits // 8


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _read(line: Instruction, parts: dict[str, list[Buffers]]) -> set[str]:
    """Returns the buffers that an instruction reads. Those that only pass values on read nothing."""
    if line.code in ("tuple", "get-tuple-element") or line.code in _ALIASES:
        return set()
    return {buffer for name in line.operands for part in parts.get(name, ()) for buffer in part}


def _buffers(lines: list[Instruction]) -> tuple[dict[str, list[Buffers]], dict[str, int]]:
    """Returns the buffers that each part of each result is in, and the sizes of the buffers."""
    parts: dict[str, list[Buffers]] = {}
    sizes: dict[str, int] = {}
    for line in lines:
        given = [parts.get(name, [frozenset()]) for name in line.operands]
        if line.code == "get-tuple-element":
            found = given[0]
            parts[line.name] = [found[line.index]] if line.index is not None and line.index < len(found) else found
        elif line.code == "tuple":
            parts[line.name] = [frozenset().union(*operand) for operand in given]
        elif line.code in _ALIASES or line.code == "while" or line.code.endswith("-done"):
            parts[line.name] = given[0]
        elif line.code == "dynamic-update-slice" or "dynamic-update-slice" in line.name:
            same = [g[0] for g in given if g and sum(sizes.get(b, 0) for b in g[0]) == sum(line.sizes)]
            parts[line.name] = [same[0]] if same else _own(line, sizes)
        elif line.code in _NO_OPERATION:
            parts[line.name] = [frozenset()] * len(line.sizes)
        else:
            parts[line.name] = _own(line, sizes)
    return parts, sizes


def _own(line: Instruction, sizes: dict[str, int]) -> list[Buffers]:
    counted = line.sizes[:1] if line.code.endswith("-start") else line.sizes
    sizes.update({f"{line.name}.{part}": size for part, size in enumerate(counted)})
    return [frozenset((f"{line.name}.{part}",)) for part in range(len(counted))]
