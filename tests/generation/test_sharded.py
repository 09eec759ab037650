"""A model that is split over devices writes what it writes on one, and its cache is split as well."""

import json
from pathlib import Path

import pytest

from tests.sharding.programs import finish, start

LIMIT = 280  # seconds for the program


@pytest.fixture(scope="module")
def seen():
    """The findings of the program, which runs once."""
    (output,) = finish([start(Path(__file__).parent / "sharded_program.py", devices=8)], LIMIT)
    return json.loads(output.splitlines()[-1])


@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("layers", ["in a list", "scanned"])
@pytest.mark.parametrize("setting", ["tensor parallel", "fsdp and tensor parallel"])
def test_a_split_model_writes_what_it_writes_on_one_device(seen, setting, layers):
    expected = seen["one device" if layers == "in a list" else "one device, scanned"]
    found = seen[f"{setting}, {layers}"]
    for way in ("greedy", "drawn", "streamed"):
        assert found[way] == expected[way], way
    assert expected["streamed"] == expected["greedy"]


@pytest.mark.parametrize(("setting", "ways"), [("tensor parallel", 8), ("fsdp and tensor parallel", 4)])
def test_weights_and_cache_are_really_split_by_heads(seen, setting, ways):
    found = seen[f"{setting}, in a list"]
    assert found["kernel"][1][1] == 8 // ways
    assert found["cache"][1][2] == 8 // ways, found["cache"]
    assert seen[f"{setting}, scanned"]["kernel"] == found["kernel"]  # unstacked, they are still split
