"""Compiling a step for a machine, without a value in it: from a request to a program, or to why there is none."""

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from nnx.planning.arguments import Arguments, abstract, parts, place
from nnx.planning.machines import Machine, compiler_options
from nnx.sharding.rules import Rules, logical_axis_rules
from nnx.transforms.jit.jit import jit

CAPTURED = """nnx.plan: the step uses arrays that are not among its arguments (a Module, a Context or an array from \
outside), and these are on a device that is here. Pass them as arguments: nnx.plan makes abstract copies of those."""
# What XLA says of a product that it has left to Triton and that only timing on a GPU can configure.
UNTUNED = "No supported config found"
NEEDS_VALUES = "nnx.plan compiles the step for arrays that have no values, as nnx.jit does."

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be compiled.

    Attributes:
        step: the function, with or without `nnx.jit`.
        args, kwargs: its arguments, as they were given.
        machine: the machine to compile for.
        mesh: the mesh of its devices.
        rules: the rules by which arguments are placed.
        quick: whether the compiler for TPUs leaves out what takes most of its time.
        change: a function that changes the abstract arguments before they are placed.
        change_placed: a function that changes them afterward.
        wrap: a function that is applied to the step.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    machine: Machine
    mesh: Mesh
    rules: Rules
    quick: bool = False
    change: Callable[[Arguments], Arguments] | None = None
    change_placed: Callable[[Arguments, "Request"], None] | None = None
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None

    def replace(self, **changes: Any) -> "Request":
        """Returns the request with some fields replaced."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What compiling gave.

    Attributes:
        compiled: the compiled step; None if the compiler found that it needs too much memory.
        text: the program as text.
        parts: the bytes of the arguments on one device, by kind.
        host: the bytes for one device in the memory of its host.
        memory: what the compiler says: "arguments", "results", "donated", "temporary", in bytes on one device.
        seconds: the time of tracing, lowering and compiling.
        problem: what the compiler said if there is no program; "" otherwise.
        notes: what deserves a look.
    """

    compiled: Any
    text: str
    parts: Mapping[str, int]
    host: int
    memory: Mapping[str, int]
    seconds: float
    problem: str
    notes: tuple[str, ...]


def compile_request(request: Request) -> Answer:
    """Compiles a step."""
    arguments = abstract(request.args, request.kwargs)
    if request.change is not None:
        arguments = request.change(arguments)
    arguments, notes = place(arguments, request.mesh, request.rules)
    if request.change_placed is not None:
        request.change_placed(arguments, request)
    kinds, host = parts(arguments)
    start = time.perf_counter()
    problem, compiled = "", None
    try:
        compiled = _compiled(request, arguments)
    except jax.errors.JaxRuntimeError as error:
        problem = str(error)
        if "RESOURCE_EXHAUSTED" not in problem and "HbmOom" not in problem:
            raise
    seconds = time.perf_counter() - start
    if compiled is None:
        memory = _memory_of_problem(problem, sum(kinds.values()))
        return Answer(None, "", kinds, host, memory, seconds, problem, notes)
    stats = compiled.memory_analysis()
    memory = {
        "arguments": stats.argument_size_in_bytes,
        "results": stats.output_size_in_bytes,
        "donated": stats.alias_size_in_bytes,
        "temporary": stats.temp_size_in_bytes,
        "host": stats.host_temp_size_in_bytes,
    }
    return Answer(compiled, compiled.as_text(), kinds, host, memory, seconds, "", notes)


def _compiled(request: Request, arguments: Arguments) -> Any:
    step: Any = request.step if request.wrap is None else request.wrap(request.step)
    if not hasattr(step, "lower"):
        step = jit(step)
    with jax.set_mesh(request.mesh), logical_axis_rules(request.rules), _explained():
        lowered = step.lower(*arguments.args, **arguments.kwargs)
        options = compiler_options(request.machine, request.quick)
        try:
            return lowered.compile(options or None)
        except jax.errors.JaxRuntimeError as error:
            if UNTUNED not in str(error):
                raise
            return lowered.compile({**options, "xla_gpu_enable_triton_gemm": False})


@contextlib.contextmanager
def _explained() -> Any:
    """Says what went wrong where a step cannot be compiled for devices that are not here."""
    try:
        yield
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        error.add_note(NEEDS_VALUES)
        raise
    except ValueError as error:
        if "incompatible devices" in str(error):
            raise ValueError(CAPTURED) from error
        raise


def _memory_of_problem(problem: str, arguments: int) -> dict[str, int]:
    """Returns what a program would need, from the message of a compiler that refused it.

    >>> _memory_of_problem("Ran out of memory in memory space hbm. Used 16.00G of 15.75G hbm.", 2**30)["temporary"]
    16106127360
    """
    used = re.search(r"Used ([\d.]+)([KMGT]?)i?B? of", problem) or re.search(r"\(([\d.]+)([KMGT]?)i?B?\)", problem)
    total = int(float(used[1]) * _UNITS[used[2]]) if used else arguments
    temporary = max(total - arguments, 0)
    return {"arguments": arguments, "results": 0, "donated": 0, "temporary": temporary, "host": 0}
