"""The sharded example runs unchanged on any mesh; on one device it runs with the other examples."""

import re

import pytest

from tests.sharding.programs import ROOT, finish, start

LIMIT = 240  # seconds


def first_and_last_loss(output):
    found = re.search(r"loss (\S+) -> (\S+);", output)
    assert found, output
    return float(found[1]), float(found[2])


@pytest.mark.timeout(LIMIT + 30)
def test_the_example_gives_the_same_losses_on_eight_devices_and_on_two_by_four():
    example = ROOT / "examples" / "13_sharded.py"
    outputs = finish([start(example, "--smoke", "--mesh", mesh) for mesh in ("8", "2x4")], LIMIT)
    eight, two_by_four = map(first_and_last_loss, outputs)
    assert eight == pytest.approx(two_by_four, abs=0.002)
