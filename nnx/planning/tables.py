"""Plans as text and as HTML."""

import html
from collections.abc import Sequence
from typing import Any

from nnx.sharding.findings import size_text

_WIDTH = 24  # of the bars


def text_of_plan(plan: Any) -> str:
    """Returns a plan as the table that people read."""
    lines = [_headline(plan), _verdict(plan), "", *_memory(plan)]
    if plan.estimate is not None:
        lines += ["", *_time(plan)]
    if plan.collectives:
        rows = [(t.kind, f"{t.per_step:,}", f"{t.per_layer:,}", size_text(t.bytes)) for t in plan.collectives]
        lines += ["", *_aligned([("collectives", "in a step", "in a layer", "bytes in a step"), *rows])]
    if plan.largest:
        rows = [(_place(b), b.phase, b.made_by, b.shape, size_text(b.bytes)) for b in plan.largest[:6]]
        lines += ["", *_aligned([("largest temporary arrays", "", "", "", ""), *rows], left=4)]
    if plan.advice:
        lines += ["", "What would help (each was compiled):", *_remedies(plan)]
    if plan.tried:
        lines += ["", "Also tried:", *_aligned([_row(other)[1:] for other in plan.tried])]
    return "\n".join([*lines, *(["", *(f"? {note}" for note in plan.notes)] if plan.notes else [])])


def text_of_plans(plans: Sequence[Any]) -> str:
    """Returns several plans as a table with a row for each."""
    return "\n".join(_aligned([_HEADER, *map(_row, plans)]))


def html_of_plan(plan: Any) -> str:
    """Returns a plan as HTML, for notebooks."""
    return f"<pre>{html.escape(text_of_plan(plan))}</pre>"


def html_of_plans(plans: Sequence[Any]) -> str:
    """Returns several plans as an HTML table."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in _HEADER)
    rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in _row(plan)) for plan in plans)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"


_HEADER = (
    "machine",
    "mesh",
    "fits",
    "a chip has",
    "needs",
    "at least",
    "bound by",
    "MFU",
    "FLOPs a chip",
    "compiled in",
)


def _row(plan: Any) -> tuple[str, ...]:
    return (
        plan.target.name,
        _axes(plan),
        "yes" if plan.fits else "no",
        "–" if plan.target.memory is None else size_text(plan.target.memory),
        size_text(plan.bytes),
        seconds_text(plan.seconds),
        plan.bound_by or "–",
        "–" if plan.mfu is None else f"{plan.mfu:.0%}",
        count_text(plan.flops) if plan.flops else "–",
        f"{plan.compile_seconds:.1f} s",
    )


def _headline(plan: Any) -> str:
    count, chip = plan.target.count, plan.target.chip
    chips = f"{count} chip{'s' if count > 1 else ''} of {chip.kind}"
    return f"{plan.step} on {plan.target.name}: {chips}, {_axes(plan)}, compiled in {plan.compile_seconds:.1f} s"


def _axes(plan: Any) -> str:
    return " × ".join(f"{name}={size}" for name, size in plan.mesh.shape.items())


def _verdict(plan: Any) -> str:
    memory = plan.target.memory
    if memory is None:
        return f"needs {size_text(plan.bytes)} on each device"
    share = f"{size_text(plan.bytes)} of {size_text(memory)} on each chip, {plan.bytes / memory:.0%}"
    if not plan.fits:
        return f"DOES NOT FIT: {share}"
    preallocated = plan.target.preallocated
    if preallocated is not None and plan.bytes > preallocated:
        return f"fits with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95: {share}"
    return f"fits: {share}"


def _memory(plan: Any) -> list[str]:
    padding = max(plan.arguments - sum(plan.parts.values()), 0)
    sizes = {**plan.parts, "padding of these": padding, "results": plan.results, "temporary": plan.temporary}
    total = max(plan.target.memory or 0, plan.bytes, 1)
    rows = [(f"  {name}", size_text(size), _bar(size / total)) for name, size in sizes.items() if size]
    if plan.target.memory is not None and plan.fits:
        rows.append(("  free", size_text(plan.target.memory - plan.bytes), ""))
    if plan.host:
        rows.append(("  in the host's memory", size_text(plan.host), ""))
    if not plan.problem:  # otherwise it is not known
        hint = "" if plan.donated else "nothing: nnx.jit(step, donate_argnums=0)"
        rows.append(("  donated", size_text(plan.donated), hint))
    return _aligned([("memory of a chip", "", ""), *rows], right=(1,))


def _time(plan: Any) -> list[str]:
    found = plan.estimate
    values = {name: getattr(found, name) for name in ("compute", "memory", "interconnect", "host")}
    rows = [
        (f"  {name}", seconds_text(value), _bar(value / found.seconds) if found.seconds else "")
        for name, value in values.items()
        if value
    ]
    title = f"time of a step: at least {seconds_text(found.seconds)}, bound by {found.bound_by}"
    per_chip = f"  {count_text(plan.flops)} FLOPs on each chip, MFU {found.mfu:.0%} at that time"
    return [title, *_aligned(rows, right=(1,)), per_chip]


def _remedies(plan: Any) -> list[str]:
    rows = []
    for remedy in plan.advice:
        verdict = "fits" if remedy.fits else "does not fit"
        rows.append((f"  {remedy.change}", verdict, size_text(remedy.bytes), seconds_text(remedy.seconds)))
    return _aligned(rows, right=(2, 3))


def _place(array: Any) -> str:
    return f"  {array.path or '(the step itself)'}"


def _bar(share: float) -> str:
    return "█" * round(_WIDTH * share) or "▏"


def seconds_text(seconds: float | None) -> str:
    """Returns a time with a unit that fits."""
    if seconds is None:
        return "–"
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{1e3 * seconds:.1f} ms"
        if seconds >= 1e-3
        else f"{1e6 * seconds:.0f} µs"
    )


def count_text(count: float) -> str:
    """Returns a large number with a letter, e.g. "1.25 T"."""
    for power, letter in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {letter}"
    return f"{count:,}"


def _aligned(rows: Sequence[Sequence[str]], left: int = 1, right: Sequence[int] = ()) -> list[str]:
    """Returns rows as lines: columns from `left` on flush right, unless `right` names those that are."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    flush = set(right) if right else set(range(left, len(widths)))

    def line(row: Sequence[str]) -> str:
        cells = [c.rjust(w) if i in flush else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))]
        return "  ".join(cells).rstrip()

    return [line(row) for row in rows]
