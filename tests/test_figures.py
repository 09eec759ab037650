"""Every measured figure in the README and the docs is one of `benchmarks/stored`."""

import json
import pathlib
from typing import Any

import pytest

from benchmarks import figures, programs, record, store
from benchmarks.__main__ import QUESTIONS
from benchmarks.numbers import RECORDS, ratio, seconds
from benchmarks.quoted import SENTENCES, Claim, Quote


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.relative_to(figures.ROOT).as_posix())
def test_a_page_quotes_stored_figures(page: pathlib.Path):
    assert figures.update(page, write=False) == []


def test_every_page_with_sentences_is_checked():
    assert set(SENTENCES) <= {page.relative_to(figures.ROOT).as_posix() for page in figures.pages()}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_says_where_its_figures_come_from(name: str):
    found = RECORDS[name]
    assert found["benchmark"] == name
    assert [key for key in store.REQUIRED if not found.get(key) and key != "whole"] == []
    assert {"python", "jax"} & set(found["versions"])
    for row in found["figures"].values():
        assert row["values"] and all(isinstance(value, int | float) for value in row["values"].values())


def test_records_are_those_of_known_benchmarks():
    others = {"checkpoint_io", "demo", "first_steps", "moe_cpu", "plan_sharded", "plans"}
    known = (*QUESTIONS, *others)
    assert [name for name in RECORDS if name not in known and not name.startswith(("gpu_", "program_"))] == []


# The check itself

PAGE = (
    "# Speed\n\nIt does 1,234 tokens per\nsecond.\n\n<!-- bench: one -->\n| old |\n<!-- /bench -->\n\nThat is fast.\n"
)
SPEED = Quote("It does {} tokens per second", ("2,345",))


def test_tables_and_figures_are_replaced():
    new, problems = figures.updated(PAGE, {"one": "| new |\n"}, [SPEED, Claim("That is fast", True)])
    assert problems == []
    assert new == PAGE.replace("1,234", "2,345").replace("old", "new")


def test_a_quote_with_two_figures_replaces_both():
    quote = Quote("from {} to {} ms", ("10.25", "300"))
    assert figures.updated("from 1 to 2.5 ms.", {}, [quote])[0] == "from 10.25 to 300 ms."


def test_a_missing_sentence_and_a_false_claim_are_reported():
    _, problems = figures.updated(
        PAGE, {"one": ""}, [Quote("It writes {} pages", ("2",)), Claim("That is fast", False)]
    )
    assert len(problems) == 2
    assert "'It writes {} pages' occurs 0 times" in problems[0]
    assert "'That is fast' is not what the stored figures say" in problems[1]


def test_an_unknown_table_is_reported():
    assert figures.updated(PAGE, {}, [])[1] == ["unknown table 'one'"]


def test_a_figure_that_is_not_quoted_is_reported():
    assert figures.unchecked(PAGE, [SPEED]) == []
    assert figures.unchecked(PAGE, [])[0].endswith("It does 1,234 tokens per second")
    for text in ("takes 59.4 ms", "in 34 ns", "is 6 % faster", "costs 1.13 times as much", "at 700 TFLOP/s"):
        assert figures.unchecked(text, []) == [text]
    assert figures.unchecked("30 steps of 16 tokens, three times, 5 ms-like", [Claim("5 ms-like", True)]) == []


@pytest.mark.parametrize(
    "number, text", [(34.04e-9, "34.0 ns"), (224e-6, "224 µs"), (9.996e-3, "10.0 ms"), (1.7312, "1.73 s")]
)
def test_durations_have_three_digits(number: float, text: str):
    assert seconds(number) == text


def test_ratios_have_three_digits():
    assert [ratio(number) for number in (0.0731, 0.9324, 1.1, 25.46)] == ["0.073", "0.932", "1.10", "25.5"]


# Runs of programs


def test_a_run_of_a_program_gives_the_figures_that_it_printed_last():
    run = programs.Run("one.py", {"loss": ("1", "the loss is {} now"), "speed": ("rows/s", "{} rows/s")})
    found = programs.figures_of(run, "the loss is 4.5 now\n1,234.5 rows/s\nthe  loss is 2 now\n")
    assert {name: row["values"]["nnx"] for name, row in found.items()} == {"loss": 2.0, "speed": 1234.5}
    with pytest.raises(ValueError, match=r"one.py printed nothing like '\{\} rows/s'"):
        programs.figures_of(run, "the loss is 4.5 now")


# Storing


def write_record(folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    rows = {"a step": record.row("s", {"nnx": 1.0, "raw": 2.0, "torch": None})}
    found = record.make_record("example", "make bench", rows, whole=True) | changes
    record.write(folder / "example.json", found)
    return folder / "example.json"


def test_a_whole_run_is_stored(tmp_path: pathlib.Path):
    target = tmp_path / "stored"
    assert store.store([write_record(tmp_path)], target) == []
    found = json.loads((target / "example.json").read_text())
    assert found["figures"] == {"a step": {"unit": "s", "values": {"nnx": 1.0, "raw": 2.0}}}
    assert found["date"] and found["machine"] and "jax" in found["versions"]


@pytest.mark.parametrize(
    "changes, reason", [({"whole": False}, "quick, tiny or partial"), ({"figures": {}}, "no figures")]
)
def test_a_partial_run_is_refused_and_nothing_is_stored(tmp_path: pathlib.Path, changes: dict[str, Any], reason: str):
    whole = write_record(tmp_path / "whole")
    partial = write_record(tmp_path / "partial", **changes)
    (problem,) = store.store([whole, partial], tmp_path / "stored")
    assert reason in problem
    assert not (tmp_path / "stored").exists()
