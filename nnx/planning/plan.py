"""`nnx.plan`: what a step needs of a machine, by the machine's own compiler, before anybody rents it."""

import dataclasses
import functools
import os
import pathlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, overload

from jax.sharding import Mesh

from nnx.inspection.hlo import read
from nnx.planning.advice import Remedy, remedies, searched
from nnx.planning.compiling import Answer, Request, compile_request
from nnx.planning.costs import Costs, costs_of
from nnx.planning.estimate import Estimate, estimate
from nnx.planning.largest import LargeArray, largest_arrays
from nnx.planning.machines import Machine, machine_named, machine_of
from nnx.planning.picture import draw
from nnx.planning.tables import html_of_plan, html_of_plans, text_of_plan, text_of_plans
from nnx.sharding.rules import Rules, RulesLike, as_rules, get_logical_axis_rules
from nnx.sharding.rulesets import fsdp_rules, fsdp_tensor_parallel_rules

MESH_GIVEN = "nnx.plan: `on` is a mesh with devices already, so leave out mesh={mesh!r}."
NO_STEP = "nnx.plan takes the step as a function, then its arguments; got {got!r} as the step."


class Traffic(NamedTuple):
    """The collectives of one kind.

    Attributes:
        kind: the operation, e.g. "all-gather".
        per_step: how many run in a step.
        per_layer: how many run in one repetition of the loops over layers.
        bytes: the bytes that one device exchanges in a step: the size of the whole result.
    """

    kind: str
    per_step: int
    per_layer: int
    bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A step, compiled for a machine; its `str` is a table. Made by `nnx.plan`.

    Sizes are bytes of one chip.

    Attributes:
        step: the name of the step.
        target: the machine.
        mesh: the mesh of its chips.
        rules: the rules by which the arguments are split.
        parts: the arguments by kind: "parameters", "optimizer state", "other state", "batch".
        arguments: the arguments, as the compiler lays them out.
        results: the results that do not take the memory of donated arguments.
        donated: the arguments whose memory the results take.
        temporary: what the step needs besides arguments and results.
        host: what is kept in the memory of the host.
        largest: the largest temporary arrays, with the submodule that makes each.
        collectives: what the chips exchange, by kind.
        flops: the floating-point operations of products and convolutions in a step, on one chip.
        estimate: the least time of a step, by what it waits for; None if nothing is known about the speed of the chip.
        compile_seconds: the time that compiling took.
        compiled: the compiled step; None if the compiler refused it because it does not fit.
        problem: what the compiler said in that case.
        notes: what deserves a look.
        advice: what was tried to make it fit.
        tried: the other plans that a search compared, best first.
    """

    step: str
    target: Machine
    mesh: Mesh
    rules: Rules
    parts: Mapping[str, int]
    arguments: int
    results: int
    donated: int
    temporary: int
    host: int
    largest: tuple[LargeArray, ...]
    collectives: tuple[Traffic, ...]
    flops: int
    estimate: Estimate | None
    compile_seconds: float
    compiled: Any
    problem: str = ""
    notes: tuple[str, ...] = ()
    advice: tuple[Remedy, ...] = ()
    tried: tuple[Any, ...] = ()

    @property
    def bytes(self) -> int:
        """All memory that the step needs on one chip."""
        return self.arguments + self.results + self.temporary

    @property
    def fits(self) -> bool:
        """Whether the step fits into the memory of a chip; True where there is no limit, as on `cpu-8`."""
        memory = self.target.memory
        return not self.problem and (memory is None or self.bytes <= memory)

    @property
    def seconds(self) -> float | None:
        """The least time of a step; None if nothing is known about the speed of the chip."""
        return None if self.estimate is None else self.estimate.seconds

    @property
    def bound_by(self) -> str | None:
        """What the step waits for most: "compute", "memory", "interconnect" or "host"."""
        return None if self.estimate is None else self.estimate.bound_by

    @property
    def mfu(self) -> float | None:
        """The part of the peak rate that the operations of the step reach in that time, recomputation left out."""
        return None if self.estimate is None else self.estimate.mfu

    def plot(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Draws memory and time as stacked bars into an image file; needs matplotlib (the extra "plot")."""
        return draw([self], path)

    def __str__(self) -> str:
        return text_of_plan(self)

    def __repr__(self) -> str:
        return f"<Plan of {self.step} on {self.target.name}: {'fits' if self.fits else 'does not fit'}>"

    def _repr_html_(self) -> str:
        return html_of_plan(self)


class Plans(tuple[Plan, ...]):
    """Plans of one step for several machines; its `str` is a table with a row for each."""

    def plot(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Draws memory and time into an image file, with a bar for each plan."""
        return draw(list(self), path)

    def __str__(self) -> str:
        return text_of_plans(self)

    def __repr__(self) -> str:
        return f"<Plans for {', '.join(plan.target.name for plan in self)}>"

    def _repr_html_(self) -> str:
        return html_of_plans(self)


@overload
def plan(
    step: Callable[..., Any],
    *args: Any,
    on: list[str] | list[Mesh] | tuple[str | Mesh, ...],
    mesh: Mapping[str, int] | None = None,
    rules: RulesLike = None,
    search: bool = False,
    quick: bool = False,
    progress: bool = False,
    **kwargs: Any,
) -> Plans: ...
@overload
def plan(
    step: Callable[..., Any],
    *args: Any,
    on: str | Mesh,
    mesh: Mapping[str, int] | None = None,
    rules: RulesLike = None,
    search: bool = False,
    quick: bool = False,
    progress: bool = False,
    **kwargs: Any,
) -> Plan: ...
def plan(
    step: Callable[..., Any],
    *args: Any,
    on: str | list[str] | list[Mesh] | tuple[str | Mesh, ...] | Mesh,
    mesh: Mapping[str, int] | None = None,
    rules: RulesLike = None,
    search: bool = False,
    quick: bool = False,
    progress: bool = False,
    **kwargs: Any,
) -> Any:
    """Compiles a step for a machine that need not be here, and returns what it needs there: memory, time, traffic.

    Nothing is allocated: arguments are replaced by abstract copies, which are placed by the rules. The compiler is that
    of the machine: libtpu for TPUs (`pip install 'nnx[plan-tpu]'`), XLA's for NVIDIA GPUs
    (`pip install 'nnx[plan-gpu]'`).

    Args:
        step: the function, or a function of `nnx.jit`, which keeps its options, such as what it donates.
        *args: its arguments. Modules may be abstract (`nnx.eval_shape`) or real; they do not change. Arrays outside of
            Modules are the batch, which is split as the rules say for "batch". What is already placed on the mesh that
            `on` is (`nnx.shard`) stays as it is.
        on: a machine, as chip and number of chips: `v4-N`, `v5e-N`, `v5p-N`, `v6e-N`, `a100-N`, `h100-N`, `h200-N`, or
            `cpu-N` for virtual devices; a mesh of devices; or a list of either. (Google's names count the cores of v4
            and v5p, two for each chip.)
        mesh: the axes of the mesh and their sizes, e.g. `{"data": 4, "model": 4}`; by default `{"data": N}`.
        rules: the rules by which arguments are split; by default those of `nnx.logical_axis_rules`, or else
            `nnx.fsdp_rules()`, with tensor parallelism if the mesh has an axis "model".
        search: whether to try other meshes and policies of `nnx.remat`, and to return the fastest plan that fits.
        quick: whether the compiler for TPUs leaves out the optimizations that take most of its time, about ten times
            less. Memory then differs by up to a fifth, and time is estimated from operations instead of the compiler's
            cycles. What a search or advice compiles is always quick.
        progress: whether to print what is being compiled.
        **kwargs: further arguments of the step.

    Returns:
        A `Plan`, whose `str` is a table; `Plans` for a list of machines.

    Raises:
        ValueError: the machine is unknown, the mesh does not have as many devices as it has chips, or the model cannot
            be split as the rules say.
        ImportError: the compiler is not installed, or does not belong to this version of JAX.

    >>> def step(model, x):
    ...     return model(x).sum()
    >>> model = nnx.eval_shape(nnx.Linear, 256, 512, ctx=nnx.context(0))
    >>> found = nnx.plan(step, model, jax.ShapeDtypeStruct((8, 256), jnp.float32), on="cpu-1")
    >>> found.fits, found.parts["parameters"], found.flops
    (True, 526336, 2097152)
    """
    if not callable(step):
        raise TypeError(NO_STEP.format(got=type(step).__name__))
    make = functools.partial(_request, step, args, kwargs, mesh, rules, quick or search)
    if isinstance(on, (list, tuple)):
        requests = [make(name) for name in on]  # errors first: compiling takes time
        return Plans(_best(request, search, False, progress) for request in requests)
    return _best(make(on), search, True, progress)


def _request(
    step: Callable[..., Any],
    args: Any,
    kwargs: Any,
    axes: Mapping[str, int] | None,
    rules: RulesLike,
    quick: bool,
    on: Any,
) -> Request:
    if isinstance(on, Mesh):
        if axes is not None:
            raise TypeError(MESH_GIVEN.format(mesh=axes))
        machine, mesh = machine_of(on), on
    else:
        machine = machine_named(on)
        mesh = machine.mesh(axes)
    chosen = get_logical_axis_rules() if rules is None else as_rules(rules)
    if not chosen:
        chosen = fsdp_tensor_parallel_rules() if "model" in mesh.shape else fsdp_rules(mesh.axis_names[0])
    return Request(step, args, kwargs, machine, mesh, chosen, quick)


def _best(request: Request, search: bool, advise: bool, progress: bool) -> Plan:
    """Returns the plan of a request, or the best that a search finds; with advice if it does not fit."""

    def make(request: Request, what: str = "") -> Plan:
        if progress:
            print(f"compiling for {request.machine.name}, {_axes(request.mesh)}{what} ...", file=sys.stderr, flush=True)
        return plan_of(request)

    first = make(request)
    if search:
        found = [first, *searched(request, make)]
        best, *others = sorted(found, key=lambda p: (not p.fits, p.seconds or 0.0 if p.fits else p.bytes))
        return dataclasses.replace(best, tried=tuple(others))
    if first.fits or not advise:
        return first
    return dataclasses.replace(first, advice=remedies(request.replace(quick=True), first, make))


def plan_of(request: Request) -> Plan:
    """Compiles a request and reads the program."""
    answer = compile_request(request)
    costs, largest = _read(answer)
    memory = answer.memory
    return Plan(
        step=getattr(request.step, "__name__", type(request.step).__name__),
        target=request.machine,
        mesh=request.mesh,
        rules=request.rules,
        parts=answer.parts,
        arguments=memory["arguments"],
        results=max(memory["results"] - memory["donated"], 0),
        donated=memory["donated"],
        temporary=memory["temporary"],
        host=answer.host + memory["host"],
        largest=largest,
        collectives=_traffic(costs),
        flops=costs.flops,
        estimate=estimate(costs, request.machine, request.quick) if answer.compiled is not None else None,
        compile_seconds=answer.seconds,
        compiled=answer.compiled,
        problem=answer.problem,
        notes=answer.notes,
    )


def _read(answer: Answer) -> tuple[Costs, tuple[LargeArray, ...]]:
    if answer.compiled is None:
        return Costs((), (), 1), ()
    program = read(answer.text)
    return costs_of(program), largest_arrays(program)


def _traffic(costs: Costs) -> tuple[Traffic, ...]:
    steps, layers, sizes = Counter[str](), Counter[str](), Counter[str]()
    for found in costs.collectives:
        steps[found.kind] += found.times
        sizes[found.kind] += found.times * found.bytes
        layers[found.kind] += found.times > 1
    return tuple(Traffic(kind, steps[kind], layers[kind], sizes[kind]) for kind in steps)


def _axes(mesh: Mesh) -> str:
    return " × ".join(f"{name}={size}" for name, size in mesh.shape.items())
