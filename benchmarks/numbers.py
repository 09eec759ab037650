"""The stored figures, by name, and how they read in a sentence or a table."""

from collections.abc import Iterable

from benchmarks import record

RECORDS = {path.stem: record.read(path) for path in sorted(record.STORED.glob("*.json"))}


def value(benchmark: str, row: str, contender: str = "nnx") -> float:
    """Returns one stored figure."""
    return RECORDS[benchmark]["figures"][row]["values"][contender]


def result(benchmark: str, row: str) -> float:
    """Returns what the goal of a row of `make bench` is about: a ratio, or a time."""
    return RECORDS[benchmark]["figures"][row]["result"]


def program(name: str) -> dict[str, float]:
    """Returns the figures of a program of the examples, by name."""
    return {key: row["values"]["nnx"] for key, row in RECORDS[f"program_{name}"]["figures"].items()}


def version(benchmark: str, package: str) -> str:
    """Returns the version of a package that took part, without what follows a plus sign (`2.11.0+cu128`)."""
    return RECORDS[benchmark]["versions"][package].partition("+")[0]


# How figures read


def ratio(number: float) -> str:
    """Formats a multiple with three digits: 1.08, 0.932, 25.5."""
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}" if number >= 1 else f"{number:.3f}"


def seconds(number: float) -> str:
    """Formats a duration with three digits: 34.0 ns, 224 µs, 1.73 s."""
    for unit, scale in (("ns", 1e9), ("µs", 1e6), ("ms", 1e3), ("s", 1.0)):
        if number * scale < 999.5 or unit == "s":
            scaled = number * scale
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {unit}"
    raise AssertionError


def whole(number: float) -> str:
    """Formats a whole number: 539,086."""
    return f"{number:,.0f}"


def thousands(number: float) -> str:
    """Formats a whole number rounded to thousands: 539,000."""
    return f"{round(number, -3):,.0f}"


def percent(number: float) -> str:
    """Formats a fraction in percent: 57."""
    return f"{100 * number:.0f}"


def faster(ours: float, theirs: float) -> str:
    """Formats by how many percent one speed exceeds another: 5.4%."""
    return f"{100 * (ours / theirs - 1):.1f}%"


def extremes(numbers: Iterable[float]) -> tuple[str, str]:
    """Formats the smallest and the largest of some fractions, in percent."""
    sequence = list(numbers)
    return percent(min(sequence)), percent(max(sequence))


def table(*rows: Iterable[str]) -> str:
    """Formats rows of cells, the first of which is the header."""
    header, *body = [list(row) for row in rows]
    lines = [header, ["---"] * len(header), *body]
    return "".join(
        "|" + "|".join(f" {cell} " if cell.strip("-") else cell or " " for cell in line) + "|\n" for line in lines
    )
