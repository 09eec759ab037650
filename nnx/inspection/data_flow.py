"""Which Modules a Module gets its input from, found in the jaxpr of one abstract call.

Every operation knows the numbered scopes that it was traced under (see flops), so it belongs to the innermost Module of
a picture. A value *comes from* the Modules whose operations made it last; operations between Modules, such as the sum
of a residual connection, hand on where their operands come from.
"""

from collections.abc import Callable, Sequence
from typing import Any

from nnx.inspection.flops import scopes_in
from nnx.inspection.recording import Recording
from nnx.transforms.engine.programs import programs_in

INPUT = -1  # the number of the input of the model

Origins = frozenset[int]
NOTHING: Origins = frozenset()


def edges_of(recording: Recording, box_of: Callable[[int], int | None]) -> tuple[set[tuple[int, int]], Origins]:
    """Returns the pairs of boxes between which values go, and where the outputs come from.

    Args:
        recording: the recording of a call.
        box_of: a function from the number of a Module to that of the box that its operations are drawn in, or None if
            they are between boxes.
    """
    flow = _Flow(box_of)
    origins = [frozenset({INPUT}) if given else NOTHING for given in recording.inputs]
    outs = flow.run(recording.program.jaxpr, origins, None)
    return flow.edges, frozenset().union(*outs[: recording.outputs_count])


class _Flow:
    """The walk through a jaxpr and those in it."""

    def __init__(self, box_of: Callable[[int], int | None]):
        self.box_of = box_of
        self.edges: set[tuple[int, int]] = set()

    def run(self, jaxpr: Any, origins: Sequence[Origins], outer: int | None) -> list[Origins]:
        """Returns the origins of the outputs of a jaxpr, given those of its inputs and the box around it."""
        known: dict[Any, Origins] = dict(zip(jaxpr.invars, origins))
        for equation in jaxpr.eqns:
            given = [NOTHING if hasattr(v, "val") else known.get(v, NOTHING) for v in equation.invars]
            box = self._box(equation, outer)
            outs = self._outputs(equation, given, box)
            known.update(zip(equation.outvars, outs))
        return [NOTHING if hasattr(v, "val") else known.get(v, NOTHING) for v in jaxpr.outvars]

    def _box(self, equation: Any, outer: int | None) -> int | None:
        for number in reversed(scopes_in(str(equation.source_info.name_stack))):
            box = self.box_of(number)
            if box is not None:
                return box
        return outer

    def _outputs(self, equation: Any, given: list[Origins], box: int | None) -> list[Origins]:
        together = frozenset().union(*given)
        if box is not None:
            self.edges |= {(origin, box) for origin in together if origin != box}
            # What a box makes of constants and parameters alone, such as a mask, comes from nowhere.
            return [frozenset({box}) if together else NOTHING for _ in equation.outvars]
        inner = [getattr(program, "jaxpr", program) for program in programs_in(equation)]
        # Of a while loop the body, not the condition. Its inputs, like those of a branch, are the last of the equation.
        bodies = [b for b in inner if len(b.outvars) == len(equation.outvars) and len(b.invars) <= len(given)]
        if bodies:
            results = [self.run(body, given[len(given) - len(body.invars) :], box) for body in bodies]
            return [frozenset().union(*origins) for origins in zip(*results)]
        return [together for _ in equation.outvars]
