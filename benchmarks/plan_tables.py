"""The tables of plans in the docs: by the compilers of machines that were not there, and next to one that was."""

from typing import Any

from benchmarks.numbers import RECORDS, table
from benchmarks.plan_machines import EIGHT, FINETUNE, PLANS, RECIPES, SIZES


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}" if size < 10 * 2**30 else f"{size / 2**30:.1f}"


def _row(name: str, machine: str) -> dict[str, Any]:
    return RECORDS["plans"]["figures"][f"{name} on {machine}"]


def _step(row: dict[str, Any]) -> str:
    return f"{row['seconds']:.2f} s" if row["fits"] else "–"


def _needs(row: dict[str, Any]) -> str:
    return _gib(row["values"]["needs"]) + ("" if row["fits"] else ", does not fit")


def llamas() -> str:
    """Training steps of 8B and 70B parameters on four machines each."""
    rows = [(name, machine, _row(name, machine)) for name in SIZES for machine in PLANS[name]]
    return table(
        ["model", "machine", "mesh", "a chip has, GiB", "needs, GiB", "a step takes at least", "bound by"],
        *(
            [name, machine, row["mesh"], _gib(row["values"]["has"]), _needs(row)]
            + [_step(row), row["bound_by"] if row["fits"] else "–"]
            for name, machine, row in rows
        ),
    )


def finetune() -> str:
    """A fine-tune of 7B parameters on eight machines, of all parameters and of adapters."""
    full, adapters = FINETUNE
    return table(
        [
            "machine",
            "a chip has, GiB",
            "all parameters: needs",
            "a step, at least",
            "adapters: needs",
            "a step, at least",
        ],
        *(
            [machine, _gib(_row(full, machine)["values"]["has"])]
            + [cell for name in (full, adapters) for cell in (_needs(_row(name, machine)), _step(_row(name, machine)))]
            for machine in EIGHT
        ),
    )


def recipes() -> str:
    """The recipes of many devices."""
    rows = [(name, machine, _row(name, machine)) for name in RECIPES for machine in PLANS[name]]
    return table(
        [
            "recipe",
            "machine",
            "state",
            "temporary",
            "in all",
            "on the host",
            "a step, at least",
            "collectives of a layer",
        ],
        *(
            [name, machine, *(_gib(row["values"][part]) for part in ("state", "temporary"))]
            + [_needs(row), _gib(row["values"]["host"]) if row["values"]["host"] else "–"]
            + [f"{row['seconds']:.3f} s, {row['bound_by']}" if row["fits"] else "–", row["collectives"] or "–"]
            for name, machine, row in rows
        ),
    )


def measured() -> str:
    """Plans for an H200 next to what it took."""
    figures = RECORDS["gpu_plans"]["figures"]
    lines = []
    for name in (row.removesuffix(", time") for row in figures if row.endswith(", time")):
        memory, time = (figures[f"{name}, {kind}"]["values"] for kind in ("memory", "time"))
        peak = memory.get("peak in use", memory["compiled there"])
        lines.append(
            [name, f"{_gib(memory['plan'])} GiB", f"{_gib(peak)} GiB", _error(memory["plan"], peak)]
            + [f"{1e3 * time[side]:.1f} ms" for side in ("plan", "measured")]
            + [_error(time["plan"], time["measured"]), figures[f"{name}, time"]["bound_by"]]
        )
    return table(["step", "memory: plan", "in use", "error", "time: plan", "measured", "error", "bound by"], *lines)


def _error(plan: float, real: float) -> str:
    """Formats how far a plan is off, in percent."""
    percent = round(100 * (plan / real - 1))
    return f"{'+' if percent > 0 else '−' if percent < 0 else ''}{abs(percent)} %"


PLAN_TABLES = {
    "plan-llamas": llamas(),
    "plan-finetune": finetune(),
    "plan-recipes": recipes(),
    "plan-measured": measured(),
}
