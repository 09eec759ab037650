"""Writes the figures of `benchmarks/stored` into the README and the docs.

    make figures                     brings every page up to date
    make figures ARGS=--check        only lists what differs; the tests do the same

`tables.py` and `quoted.py` say which figure appears where. There are three forms:

- A *table* is everything between `<!-- bench: name -->` and `<!-- /bench -->`; it is generated.
- A *quote* is a piece of a sentence with `{}` for each figure: "trained at {} tokens per second". It has to occur
  exactly once in its page, with any numbers (and any line breaks), and its numbers are replaced.
- A *claim* is a piece of a sentence in words: "faster than PyTorch everywhere". It has to occur, and to be true.

Measured figures that are in none of these are reported as well: see `unchecked`.
"""

import argparse
import pathlib
import re
import sys

from benchmarks.quoted import SENTENCES, Claim, Quote
from benchmarks.tables import TABLES

ROOT = pathlib.Path(__file__).parent.parent
TABLE = re.compile(r"<!-- bench: (?P<name>[\w-]+) -->\n(?P<rows>.*?)<!-- /bench -->", re.DOTALL)
NUMBER = r"(\d[\d.,]*\d|\d)"
# What looks like a measurement: a number with a unit of speed or time, a ratio of times, a percentage of speed.
MEASURED = re.compile(
    r"\d[\d.,]*\s?(?:tokens\s(?:per|a)\ssecond|tokens/s|[mµn]s\b|TFLOP/s|[TG]B/s"
    r"|%\s(?:faster|slower|longer|of\sthe\smemory\sbandwidth)|times\s(?:as\s(?:long|fast|much)|faster|slower))"
)
# Decisions keep what was measured when they were made, each with its command.
UNCHECKED_PAGES = ("docs/decisions",)
# The page on planning shows the output of commands, and has figures of a comparison in words. Its tables are checked.
OWN_FIGURES = ("docs/guide/planning.md",)


def pattern(text: str) -> re.Pattern[str]:
    """Returns what finds a piece of a sentence in a page, whatever its figures and line breaks."""
    parts = [r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in text.split("{}")]
    return re.compile(NUMBER.join(parts))


def updated(text: str, tables: dict[str, str], sentences: list[Quote | Claim]) -> tuple[str, list[str]]:
    """Returns a page with today's figures, and what is wrong with it beyond its figures."""
    problems = [f"unknown table {match['name']!r}" for match in TABLE.finditer(text) if match["name"] not in tables]

    def table(match: re.Match[str]) -> str:
        return f"<!-- bench: {match['name']} -->\n{tables.get(match['name'], match['rows'])}<!-- /bench -->"

    text = TABLE.sub(table, text)
    for sentence in sentences:
        matches = list(pattern(sentence.text).finditer(text))
        if len(matches) != 1:
            problems.append(f"{sentence.text!r} occurs {len(matches)} times, not once")
        elif isinstance(sentence, Claim):
            if not sentence.holds:
                problems.append(f"{sentence.text!r} is not what the stored figures say")
        else:
            text = _with_figures(text, matches[0], sentence.figures)
    return text, problems


def _with_figures(text: str, match: re.Match[str], figures: tuple[str, ...]) -> str:
    for group in range(len(figures), 0, -1):  # from the end, so that earlier positions stay as they are
        text = text[: match.start(group)] + figures[group - 1] + text[match.end(group) :]
    return text


def unchecked(text: str, sentences: list[Quote | Claim]) -> list[str]:
    """Returns what looks like a measured figure but is in no table and in no quote."""
    spans = [match.span() for match in TABLE.finditer(text)]
    spans += [match.span() for sentence in sentences for match in pattern(sentence.text).finditer(text)]
    return [
        " ".join(text[max(0, match.start() - 40) : match.end()].split())
        for match in MEASURED.finditer(text)
        if not any(start < match.end() and match.start() < end for start, end in spans)
    ]


def pages() -> list[pathlib.Path]:
    """Returns the pages whose figures are checked."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if not page.relative_to(ROOT).as_posix().startswith(UNCHECKED_PAGES)]


def update(page: pathlib.Path, *, write: bool) -> list[str]:
    """Brings a page up to date, or only says what differs; returns all that is wrong with it."""
    name, text = page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")
    sentences = SENTENCES.get(name, [])
    new, problems = updated(text, TABLES, sentences)
    if name not in OWN_FIGURES:
        problems += [f"no stored figure is known for {figure!r}" for figure in unchecked(new, sentences)]
    if new != text and write:
        page.write_text(new, encoding="utf-8")
    elif new != text:
        changed = [line for line in new.splitlines() if line not in text.splitlines()]
        problems += [f"`make figures` would write: {line}" for line in changed]
    return [f"{name}: {problem}" for problem in problems]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, list what differs")
    write = not parser.parse_args().check
    problems = [problem for page in pages() for problem in update(page, write=write)]
    print("\n".join(problems) or "every figure is that of benchmarks/stored")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
