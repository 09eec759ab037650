"""Every public name of an earlier version is here, or asking for it says what to write; the docs say the same."""

import re

import pytest

import nnx
from tests.lineage.names import ALL_NAMES, BEGIN, END, HINTS, INITIALIZERS, PAGE, PUBLIC_NAMES, table, versions_of

PAGE_TEXT = PAGE.read_text(encoding="utf-8")


def test_the_lists_of_names_are_complete():
    counts = {version: len(set(names)) for version, names in PUBLIC_NAMES.items()}
    assert counts == {"0.0.2": 49, "0.0.3": 86, "0.0.4": 72, "0.0.6": 70, "0.0.7": 78, "0.0.8": 78}


def test_versions_are_listed_as_a_reader_would_say_them():
    assert versions_of("Scope") == "0.0.2"
    assert versions_of("Partition") == "0.0.2 and 0.0.3"
    assert versions_of("RngStream") == "0.0.2 to 0.0.6"
    assert versions_of("dataclass") == "0.0.2, 0.0.3 and 0.0.6 to 0.0.8"


@pytest.mark.parametrize("name", HINTS)
def test_removed_name_raises_with_its_versions_and_replacement(name):
    with pytest.raises(AttributeError) as raised:
        getattr(nnx, name)
    text = str(raised.value)
    assert re.search(rf"That name is from NNX {re.escape(versions_of(name))}(, and from \w+)?\. Here: ", text), text
    assert text.endswith(f"{HINTS[name]}.")


def test_the_page_shows_the_table():
    shown = PAGE_TEXT.partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == table().strip(), "run python -m tests.lineage.names"


def test_the_table_has_every_name_once():
    first_cells = [line.split(" | ")[0] for line in table().splitlines()[2:]]
    assert sorted(re.findall(r"`(\w+)`", " ".join(first_cells))) == sorted(ALL_NAMES)


def test_initializers_are_found_at_the_top_but_are_not_on_offer():
    for name in INITIALIZERS:
        assert getattr(nnx, name) is getattr(nnx.initializers, name)
    assert not set(INITIALIZERS) & set(dir(nnx)) and not set(INITIALIZERS) & set(nnx.__all__)


def test_initializers_work_as_they_did():
    for zeros in (nnx.zeros, nnx.zeros()):
        linear = nnx.Linear(2, 3, kernel_init=nnx.he_normal(), bias_init=zeros, ctx=nnx.context(0))
        assert linear.kernel.any() and not linear.bias.any()


def test_the_page_recommends_only_names_that_exist():
    last_cells = re.findall(r"^\|.*\| (.*) \|$", PAGE_TEXT, re.MULTILINE)
    names = {name for cell in last_cells for name in re.findall(r"(?<![.\w])nnx\.(\w+)", cell)}
    assert len(names) > 50
    assert [name for name in sorted(names) if not hasattr(nnx, name)] == []
