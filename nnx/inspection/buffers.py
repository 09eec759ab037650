"""The memory that a compiled program holds while it runs, read from its text.

XLA's text of a compiled program lists instructions in the order in which they run, with the shapes of their results
and the name scopes of the operations that they were made from. A *buffer* is the memory of such a result. It is held
from the instruction that writes it to the last one that reads it, or to the end if the program returns it. Arguments
and constants are not counted. As in XLA's own assignment, an elementwise instruction writes over an operand that nobody
reads later, and a loop and an update of a slice write in place.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from nnx.inspection.hlo import Instruction, Program, read

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
    program = read(text)
    return _PeakSearch(program, scopes).peaks(program.entry)


class _PeakSearch:
    """A run of a compiled program: the peaks of the computations that have been looked at."""

    def __init__(self, program: Program, scopes: Callable[[str], Iterable[int]]) -> None:
        self._program = program
        self._scopes = scopes
        self._known: dict[str, Peaks] = {}

    def peaks(self, name: str) -> Peaks:
        """Returns the peaks of a computation."""
        if name not in self._known:
            self._known[name] = self._run(name)
        return self._known[name]

    def _run(self, name: str) -> Peaks:
        lines = list(self._program.computations[name].values())
        parts, sizes = _buffers(lines)
        results = {buffer for line in lines if line.is_root for part in parts[line.name] for buffer in part}
        if name != self._program.entry:  # the results of a computation that is called are in memory of the caller
            sizes.update(dict.fromkeys(results, 0))
        last = {buffer: at for at, line in enumerate(lines) for buffer in _read(line, parts)}
        live, whole, by_scope = 0, 0, {}
        for at, line in enumerate(lines):
            own = [f"{line.name}.{part}" for part in range(len(line.shapes))]
            made = sum(sizes.get(buffer, 0) for buffer in own)
            dying = {b: sizes.get(b, 0) for b in _read(line, parts) if last[b] == at and b not in results}
            over = [b for name in self._may_write_over(line) for part in parts.get(name, ()) for b in part]
            during = live + (0 if made in (dying.get(buffer) for buffer in over) else made)
            inner = [self.peaks(called) for called in line.called if line.opcode in _CALLS]
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
        if line.opcode != "fusion":
            return [line]
        return [each for name in line.called for each in self._program.computations.get(name, {}).values()]

    def _may_write_over(self, line: Instruction) -> list[str]:
        """Returns the operands that an instruction reads element by element, in the order in which it writes."""
        if line.opcode != "fusion":
            return [] if line.opcode in _HEAVY else list(line.operands)
        fused, elsewhere = self._fused(line), set()
        for each in reversed(fused):
            if each.opcode in _HEAVY or each.name in elsewhere:
                elsewhere.update(each.operands)
        free = {int(each.attributes) for each in fused if each.opcode == "parameter" and each.name not in elsewhere}
        return [name for number, name in enumerate(line.operands) if number in free]

    def _scopes_of(self, line: Instruction) -> set[int]:
        return {scope for each in (line, *self._fused(line)) for scope in self._scopes(each.source)}


def _sizes(line: Instruction) -> list[int]:
    """Returns the bytes of each part of a result in the memory of the device."""
    return [0 if shape.memory else shape.padded_bytes for shape in line.shapes]


def _read(line: Instruction, parts: dict[str, list[Buffers]]) -> set[str]:
    """Returns the buffers that an instruction reads. Those that only pass values on read nothing."""
    if line.opcode in ("tuple", "get-tuple-element") or line.opcode in _ALIASES:
        return set()
    return {buffer for name in line.operands for part in parts.get(name, ()) for buffer in part}


def _buffers(lines: list[Instruction]) -> tuple[dict[str, list[Buffers]], dict[str, int]]:
    """Returns the buffers that each part of each result is in, and the sizes of the buffers."""
    parts: dict[str, list[Buffers]] = {}
    sizes: dict[str, int] = {}
    for line in lines:
        given = [parts.get(name, [frozenset()]) for name in line.operands]
        if line.opcode == "get-tuple-element":
            found, index = given[0], int(line.attribute(r"index=(\d+)") or 0)
            parts[line.name] = [found[index]] if index < len(found) else found
        elif line.opcode == "tuple":
            parts[line.name] = [frozenset().union(*operand) for operand in given]
        elif line.opcode in _ALIASES or line.opcode == "while" or line.opcode.endswith("-done"):
            parts[line.name] = given[0]
        elif line.opcode == "dynamic-update-slice" or "dynamic-update-slice" in line.name:
            same = [g[0] for g in given if g and sum(sizes.get(b, 0) for b in g[0]) == sum(_sizes(line))]
            parts[line.name] = [same[0]] if same else _own(line, sizes)
        elif line.opcode in _NO_OPERATION:
            parts[line.name] = [frozenset()] * len(line.shapes)
        else:
            parts[line.name] = _own(line, sizes)
    return parts, sizes


def _own(line: Instruction, sizes: dict[str, int]) -> list[Buffers]:
    counted = _sizes(line)[:1] if line.opcode.endswith("-start") else _sizes(line)
    sizes.update({f"{line.name}.{part}": size for part, size in enumerate(counted)})
    return [frozenset((f"{line.name}.{part}",)) for part in range(len(counted))]
