"""Every `python` block in the README and the docs runs, the blocks of a file one after the other in one namespace.

A block below the comment `<!-- needs: torch -->` runs only where that package can be imported: it is not among the
dependencies of the tests.
"""

import importlib.util
import pathlib
import re
import sys
import textwrap
import types

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# The pages on many devices need eight of them; they run in tests/sharding/test_recipes.py.
PAGES = [ROOT / "README.md", *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.parent.name != "many-devices")]
# A fence may be indented (inside a list or a tab); it ends at a fence of the same indentation.
FENCE = re.compile(
    r"^(?:<!-- needs: (?P<needs>\w+) -->\n)?(?P<indent>[ \t]*)```python[^\n]*\n(?P<code>.*?)^(?P=indent)```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)


def python_blocks(text: str) -> list[tuple[int, str]]:
    """The line each block starts at, and its code, for the blocks that can run here."""
    return [
        (text.count("\n", 0, match.start("code")), textwrap.dedent(match["code"]))
        for match in FENCE.finditer(text)
        if match["needs"] is None or importlib.util.find_spec(match["needs"]) is not None
    ]


PAGES_WITH_CODE = [page for page in PAGES if python_blocks(page.read_text())]


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run(page: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # what a block saves does not end up in the project
    module = types.ModuleType("page_" + re.sub(r"\W", "_", str(page.relative_to(ROOT))))
    monkeypatch.setitem(sys.modules, module.__name__, module)  # so that its classes can be pickled
    for line, code in python_blocks(page.read_text()):
        padded = "\n" * line + code  # a traceback then names the line of the page
        exec(compile(padded, str(page), "exec"), module.__dict__)


def test_the_readme_has_code():
    assert ROOT / "README.md" in PAGES_WITH_CODE


def test_blocks_are_found_with_their_lines_and_without_indentation():
    page = "a\n\n```python\nx = 1\n```\n- b\n    ```python\n    y = 2\n    if y:\n        x = y\n    ```\n```sh\n```\n"
    assert python_blocks(page) == [(3, "x = 1\n"), (7, "y = 2\nif y:\n    x = y\n")]


def test_a_block_that_needs_a_missing_package_is_left_out():
    page = "<!-- needs: no_such_package -->\n```python\nx = 1\n```\n<!-- needs: json -->\n```python\nx = 2\n```\n"
    assert python_blocks(page) == [(6, "x = 2\n")]
