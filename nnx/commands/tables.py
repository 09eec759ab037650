"""Tables of the command line: in color if rich is installed and the output is a terminal, otherwise plain text."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec

STYLES = {"ok": "green", "note": "yellow", "broken": "bold red"}
"""The colors of a status, by its text."""


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Prints a table.

    Args:
        header: the titles of the columns.
        rows: the cells, as text.
        right: the titles of columns whose cells are flush right.
    """
    if find_spec("rich") is not None and sys.stdout.isatty():
        _print_rich(header, rows, right)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows)]

    def line(cells: Sequence[str]) -> str:
        padded = [c.rjust(w) if title in right else c.ljust(w) for c, w, title in zip(cells, widths, header)]
        return "  ".join(padded).rstrip()

    print("\n".join([line(header), "-" * (sum(widths) + 2 * (len(widths) - 1)), *map(line, rows)]))


def _print_rich(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold")
    for number, title in enumerate(header):
        table.add_column(
            title, justify="right" if title in right else "left", style="cyan" if number == 0 else None, overflow="fold"
        )
    for row in rows:
        table.add_row(*[Text(cell, style=STYLES.get(cell, "")) for cell in row])  # Text: brackets are no markup
    Console().print(table)


def bytes_text(size: int) -> str:
    """Returns a number of bytes with a unit, e.g. `1.25 MiB`."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):.2f} {unit}"
    return f"{size} B"
