"""The summary of a model: its parts, what each of them outputs, and what it costs. Nothing is allocated.

A *row* is one distinct Module under its canonical path. Its parameters and bytes are those of the Module and of all
Modules below it; shared ones are counted once, under their canonical path. Its FLOPs are those of all its calls,
including the calls they make in turn.
"""

import html
import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nnx.core.context import Context
from nnx.core.module.freezing import is_frozen
from nnx.core.module.module import Module
from nnx.core.repr import short
from nnx.core.sizes import size_in_bytes
from nnx.core.state.filters import Filter
from nnx.core.state.pure import Pure
from nnx.core.state.state import State
from nnx.core.variables.untied import warn_of_untied
from nnx.core.variables.variables import Param, Variable
from nnx.inspection.buffers import Peaks
from nnx.inspection.recording import Recording, record

MAX_OUTPUT = 60

NOT_A_MODULE = "nnx.summary takes a Module, got {value} of type {type}."
NOT_CALLED = "FLOPs in parentheses are those of the submodules: the Module was not called itself, as in a loop over it."
SHAPE_GIVEN = "If {shape} is the shape of an input, write jax.ShapeDtypeStruct({shape}, jnp.float32)."
NOT_COUNTABLE = """nnx.count_params takes a Module, a State or a Pure, got {value} of type {type}. For a plain pytree \
of arrays: sum(x.size for x in jax.tree.leaves(tree))."""


class ModuleRow(NamedTuple):
    """One Module in the table; `output` and `flops` are None if it was not called.

    With `backward=True`, `backward` has the FLOPs of its backward pass, and `kept` the bytes that its forward pass
    keeps for that. With `peak_memory=True`, `peak` has the most bytes that the compiled program holds while operations
    of the Module run; None if there are none.
    """

    path: str
    layer: str
    output: str | None
    parameters: int
    bytes: int
    flops: int | None
    backward: int | None = None
    kept: int | None = None
    peak: int | None = None


class Total(NamedTuple):
    """The totals of one collection."""

    arrays: int
    elements: int
    bytes: int


class Summary:
    """The table of a model; `str` is its text.

    Attributes:
        rows: the distinct Modules, one row each, the root first.
        collections: the totals by collection name; frozen Variables are listed under "params (frozen)" and the like,
            arrays outside Variables under "(none)".
        parameters: the number of elements in all `nnx.Param`s, frozen ones included.
        bytes: the size of all state.
        flops: the FLOPs of the whole call; None if no inputs were given.
        peak: the most bytes that the compiled program holds; None without `peak_memory=True`.
    """

    rows: tuple[ModuleRow, ...]
    collections: dict[str, Total]
    parameters: int
    bytes: int
    flops: int | None
    peak: int | None

    def __init__(self, rows: Sequence[ModuleRow], collections: dict[str, Total]):
        self.rows = tuple(rows)
        self.collections = collections
        self.parameters = self.rows[0].parameters
        self.bytes = self.rows[0].bytes
        self.flops = self.rows[0].flops
        self.peak = self.rows[0].peak

    def table(self, depth: int | None = None) -> str:
        """Returns the table as text; with a `depth`, only the Modules up to that depth below the root."""
        lines = _aligned(self._header(), self._cells(depth), left=3 if self.flops is not None else 2)
        totals = _aligned(("collection", "arrays", "elements", "bytes"), self._total_cells(), left=1)
        in_parentheses = any(self._flops_text(row).startswith("(") for row in self._shown(depth))
        note = ["", NOT_CALLED] if self.flops is not None and in_parentheses else []
        return "\n".join([*lines, *note, "", *totals])

    def print(self, depth: int | None = None) -> None:
        """Prints the table, in color if rich is installed."""
        if importlib.util.find_spec("rich") is None:
            print(self.table(depth))
            return
        from rich.console import Console
        from rich.table import Table

        for header, cells, left in (
            (self._header(), self._cells(depth), 3 if self.flops is not None else 2),
            (("collection", "arrays", "elements", "bytes"), self._total_cells(), 1),
        ):
            table = Table(header_style="bold")
            for i, title in enumerate(header):
                table.add_column(title, justify="left" if i < left else "right", style="cyan" if i == 0 else None)
            for row in cells:
                table.add_row(*row)
            Console().print(table)

    def _header(self) -> tuple[str, ...]:
        output, flops = (("output",), ("FLOPs",)) if self.flops is not None else ((), ())
        if self.rows[0].backward is not None:
            flops = (*flops, "backward", "kept")
        if self.peak is not None:
            flops = (*flops, "peak")
        return ("path", "layer", *output, "parameters", "bytes", *flops)

    def _shown(self, depth: int | None) -> list[ModuleRow]:
        return [row for row in self.rows if depth is None or not row.path or row.path.count("/") < depth]

    def _cells(self, depth: int | None) -> list[tuple[str, ...]]:
        cells = []
        for row in self._shown(depth):
            output, flops = (), ()
            if self.flops is not None:
                output, flops = (row.output or "",), (self._flops_text(row),)
            if row.backward is not None:
                flops = (*flops, _scaled(row.backward), _memory(row.kept or 0))
            elif self.rows[0].backward is not None:
                flops = (*flops, "", "")
            if self.peak is not None:
                flops = (*flops, "" if row.peak is None else _memory(row.peak))
            label = row.path or "(root)"
            cells.append((label, row.layer, *output, f"{row.parameters:,}", _memory(row.bytes), *flops))
        return cells

    def _flops_text(self, row: ModuleRow) -> str:
        """Returns the FLOPs of a Module; in parentheses those of its submodules, if it was not called itself."""
        if row.flops is not None:
            return _scaled(row.flops)
        total, counted = 0, ()  # rows are depth first, so what is inside a Module that was counted comes right after it
        for path, flops in ((other.path, other.flops) for other in self.rows):
            if path.startswith(f"{row.path}/") and flops is not None and not (counted and path.startswith(counted)):
                total, counted = total + flops, (f"{path}/",)
        return f"({_scaled(total)})" if counted else ""

    def _total_cells(self) -> list[tuple[str, ...]]:
        totals = {**self.collections, "total": _sum(self.collections.values())}
        return [(name, f"{t.arrays:,}", f"{t.elements:,}", _memory(t.bytes)) for name, t in totals.items()]

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
            head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
            body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
            return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

        totals = table(("collection", "arrays", "elements", "bytes"), self._total_cells())
        return table(self._header(), self._cells(None)) + totals


def summary(
    model: Module,
    *inputs: Any,
    ctx: Context | None = None,
    method: str | Callable[..., Any] | None = None,
    backward: bool = False,
    peak_memory: bool = False,
    **kwargs: Any,
) -> Summary:
    """Returns a table of a model: path, layer, output, parameters, bytes and FLOPs of every Module.

    With inputs, layers are in the order in which they are called; otherwise as they were assigned.

    The call is traced on abstract values. Nothing is allocated or changed, so the model can have any size or be
    abstract, and nothing is compiled unless `peak_memory` is asked for. The FLOPs are counted in the traced program:
    two for a multiply-add of a product or convolution, one for each element of other floating-point arithmetic.

    Args:
        model: a Module; its arrays may be `ShapeDtypeStruct`s.
        *inputs: the arguments to call it with: arrays or `ShapeDtypeStruct`s, of which only shape and dtype matter, or
            any other values. Without inputs the table has no output shapes and no FLOPs.
        ctx: a Context to pass to the call as `ctx`; it does not advance.
        method: the method to call instead of `__call__`: its name, or a function of the Module and the inputs.
        backward: whether to add two columns for training: the FLOPs of the backward pass, and the bytes that the
            forward pass keeps for it, besides parameters and inputs. (A compiler can keep less.)
        peak_memory: whether to compile the call for the default device, or with `backward` the gradient of all Params,
            and add a column with the peak of its memory: the most bytes that the program holds while operations of the
            Module run, those that it keeps for others included. State and inputs are not part of it, gradients are.
        **kwargs: further arguments of the call.

    Returns:
        A Summary, whose `str` is the table.

    Raises:
        TypeError: `model` is not a Module.
        ValueError: the model has no such method.

    >>> model = nnx.Sequence([nnx.Linear(2, 3, ctx=nnx.context(0)), jax.nn.relu])
    >>> print(nnx.summary(model, jnp.ones((4, 2))))
    path    layer     output        parameters  bytes  FLOPs
    --------------------------------------------------------
    (root)  Sequence  float32[4,3]           9   36 B     72
    0       Linear    float32[4,3]           9   36 B     60
    <BLANKLINE>
    collection  arrays  elements  bytes
    -----------------------------------
    params           2         9   36 B
    total            2         9   36 B
    """
    if not isinstance(model, Module):
        raise TypeError(NOT_A_MODULE.format(value=short(model), type=type(model).__name__))
    if ctx is not None:
        kwargs["ctx"] = ctx
    recording = None
    if inputs or kwargs or peak_memory or method is not None:
        try:
            recording = record(model, method or "__call__", inputs, kwargs, backward=backward)
        except (TypeError, ValueError) as error:
            shape = next((value for value in inputs if _is_shape(value)), None)
            if shape is not None:
                error.add_note(SHAPE_GIVEN.format(shape=shape))
            raise
    warn_of_untied("nnx.summary", model, Module.filter(model, Param).items())
    return summarize(model, recording, recording.peaks() if recording is not None and peak_memory else None)


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and value != () and all(type(size) is int for size in value)


def summarize(model: Module, recording: Recording | None, peaks: Peaks | None = None) -> Summary:
    """Returns the table of a model, with outputs and FLOPs from a recording, and the peaks of its compiled program."""
    parameters, sizes, collections = _held(Module.get_state(model))
    rows = []
    for number, path, module in _in_order_of_calls(model, recording):
        output, flops = _called(recording, number)
        held = (parameters.get(path, 0), sizes.get(path, 0))
        peak = None if peaks is None else peaks.by_scope.get(number) if path else peaks.whole
        rows.append(ModuleRow(path, type(module).__name__, output, *held, flops, *_trained(recording, number), peak))
    return Summary(rows, collections)


def count_params(model: Module | State | Pure[Any], where: Filter = Param) -> int:
    """Returns the number of elements in the part of a model's state that a filter selects.

    Args:
        model: a Module, State or Pure; its arrays may be abstract.
        where: a filter, e.g. `nnx.BatchStat`, `...`, or `nnx.PathMatches("encoder/**")`.

    Raises:
        TypeError: `model` is none of these.

    >>> nnx.count_params(nnx.Linear(2, 3, ctx=nnx.context(0)))
    9
    """
    if not isinstance(model, (Module, State, Pure)):
        raise TypeError(NOT_COUNTABLE.format(value=short(model), type=type(model).__name__))
    chosen = Module.filter(model, where) if isinstance(model, Module) else model.filter(where)
    return sum(math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(chosen))


def _in_order_of_calls(model: Module, recording: Recording | None) -> list[tuple[int, str, Module]]:
    """Returns every Module with its number and path: depth first, those on one level as they were first called.

    Modules that were not called, nor any inside them, come last, in the order of the attributes.
    """
    modules = [(number, path, module) for number, (path, module) in enumerate(Module.named_modules(model))]
    numbers = {path: number for number, path, _ in modules}
    calls = {} if recording is None else {number: place for place, number in enumerate(recording.outputs)}
    first = dict.fromkeys(numbers, len(modules))  # by path: the first call of the Module there, or of one inside it
    for number, path, _ in modules:
        for above in _prefixes(path):
            first[above] = min(first[above], calls.get(number, len(modules)))
    return sorted(modules, key=lambda item: [(first[above], numbers[above]) for above in _prefixes(item[1])])


def _prefixes(path: str) -> list[str]:
    """Returns the paths of the Modules that one is in, from the root down to itself."""
    segments = path.split("/") if path else []
    return ["/".join(segments[:count]) for count in range(len(segments) + 1)]


def _called(recording: Recording | None, number: int) -> tuple[str | None, int | None]:
    if recording is None or number not in recording.outputs:
        return None, None
    return " | ".join(map(_output_text, recording.outputs[number])), recording.flops[number]


def _trained(recording: Recording | None, number: int) -> tuple[int | None, int | None]:
    if recording is None or recording.training is None or number not in recording.outputs:
        return None, None
    return recording.training.flops[number], recording.training.kept[number]


def _held(state: State) -> tuple[dict[str, int], dict[str, int], dict[str, Total]]:
    """Returns parameters and bytes by the path of every Module above them, and the totals by collection."""
    parameters: dict[str, int] = {}
    sizes: dict[str, int] = {}
    collections: dict[str, Total] = {}
    for path, leaf in state.items():
        total = _sum(map(_array_total, jax.tree.leaves(leaf)))
        name = type(leaf).collection if isinstance(leaf, Variable) else "(none)"
        name = f"{name} (frozen)" if is_frozen(leaf) else name
        collections[name] = _sum((collections.get(name, Total(0, 0, 0)), total))
        above = path
        while above:
            above = above.rpartition("/")[0]
            sizes[above] = sizes.get(above, 0) + total.bytes
            if isinstance(leaf, Param):
                parameters[above] = parameters.get(above, 0) + total.elements
    return parameters, sizes, dict(sorted(collections.items(), key=lambda item: -item[1].bytes))


def _array_total(leaf: Any) -> Total:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return Total(1, math.prod(np.shape(leaf)), size_in_bytes(np.shape(leaf), dtype))


def _sum(totals: Iterable[Total]) -> Total:
    arrays, elements, size = 0, 0, 0
    for total in totals:
        arrays, elements, size = arrays + total.arrays, elements + total.elements, size + total.bytes
    return Total(arrays, elements, size)


def _output_text(out: Any) -> str:
    if isinstance(out, jax.ShapeDtypeStruct):
        return f"{out.dtype}[{','.join(map(str, out.shape))}]"
    if out is None or isinstance(out, (bool, int, float, str)):
        return repr(out)
    if type(out) in (tuple, list):
        inner = ", ".join(map(_output_text, out))
        text = f"({inner})" if type(out) is tuple else f"[{inner}]"
    elif type(out) is dict:
        text = "{" + ", ".join(f"{key}: {_output_text(value)}" for key, value in out.items()) + "}"
    elif isinstance(out, Module) or len(jax.tree.leaves(out)) == 1:
        text = type(out).__name__
    else:
        text = f"{type(out).__name__}({', '.join(map(_output_text, jax.tree.leaves(out)))})"
    return text if len(text) <= MAX_OUTPUT else f"{text[: MAX_OUTPUT - 1]}…"


def _scaled(number: int) -> str:
    for power, unit in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.2f} {unit}"
    return str(number)


def _memory(size: int) -> str:
    for power, unit in ((50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):.2f} {unit}"
    return f"{size} B"


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Returns the lines of a table whose columns fit their widest cell, the first `left` of them flush left."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(padded).rstrip()

    return [line(header), "-" * (sum(widths) + 2 * (len(widths) - 1)), *map(line, rows)]
