"""Every notebook runs, and the outputs stored in it are those of its code."""

import json
import pathlib
import warnings

import pytest

from tests.sharding.programs import finish, start
from tools.notebooks import NOTEBOOKS, ROOT, check, form, run_cell

NAMES = ["fine-tuning", "first-model", "looking-inside", "sharding", "transforms"]
OWN_PROCESS = {"sharding"}  # it sets the number of devices, which has to happen before JAX starts


def notebook(name: str) -> dict:
    return json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())


def test_all_notebooks_are_tested():
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OWN_PROCESS])
def test_the_notebook_runs_and_shows_what_is_stored(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    check(notebook(name), name)


@pytest.mark.parametrize("name", sorted(OWN_PROCESS))
def test_the_notebook_runs_in_its_own_process(name: str):
    finish([start(ROOT / "tools" / "notebooks.py", "--check", name)], 120)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_stored(name: str):
    cells = [cell for cell in notebook(name)["cells"] if cell["cell_type"] == "code"]
    shown = [form(cell["outputs"]) for cell in cells]
    assert sum("image" in outputs for outputs in shown) >= 1
    assert sum(any(text != "image" for text in outputs) for outputs in shown) >= 4
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))


def test_other_outputs_than_the_stored_ones_are_found():
    stored = run_cell("print('one', 2)", "cell", {})
    code = {"cell_type": "code", "metadata": {}, "source": ["print('one', 1)"], "outputs": stored}
    check({"cells": [code]}, "numbers may differ")
    changed = {**code, "source": ["print('two', 1)"]}
    check({"cells": [{**changed, "metadata": {"tags": ["varies"]}}]}, "words may differ with a tag")
    with pytest.raises(AssertionError, match="Run `make notebooks`"):
        check({"cells": [changed]}, "words may not")


def test_a_cell_shows_prints_the_last_value_and_figures():
    source = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nprint('a')\n[3]"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert form(run_cell(source, "cell", {})) == ["a", "[ ]", "image"]
    assert run_cell("3;", "cell", {}) == []
