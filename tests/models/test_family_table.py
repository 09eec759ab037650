"""The table of families in the guide is that of the families, and of what was measured."""

from nnx.models.families.families import FAMILIES
from tools import family_table


def test_the_table_of_families_is_up_to_date():
    text = family_table.PAGE.read_text()
    assert family_table.updated(text) == text, "run `python tools/family_table.py`"


def test_every_stored_comparison_is_of_a_family_and_agrees():
    stored = family_table.stored()
    assert stored and stored.keys() <= FAMILIES.keys()
    for family, found in stored.items():
        same, compared = found["greedy"].split(" of ")
        assert same == compared and found["write"] == 0, family
        assert max(found["read"], found["fresh"], found["scanned"]) <= 1e-4, family
        assert found.get("DIFFERS", 0) == 0, family
