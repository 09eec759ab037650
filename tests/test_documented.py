"""Every public name has a docstring and one place in the API pages, and the pages name nothing else."""

import ast
import importlib
import inspect
import pathlib
import re
import types
from collections import Counter
from typing import Any

import jax
import pytest

import nnx

ROOT = pathlib.Path(__file__).parent.parent
PAGES = {page.stem: page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md"))}
ROOMS = ["bridge", "core", "generation", "inspection", "interop", "models", "nn", "planning"]
ROOMS += ["sharding", "storage", "training", "transforms"]

# A name is documented by a block that mkdocstrings fills (`::: nnx.Linear`) or by a row of a table.
ENTRY = re.compile(r"^::: (?P<block>nnx\.\S+)$|^\| `(?P<row>nnx\.[\w.]+)` \| *(?P<text>\S.*?) *\|$", re.MULTILINE)


def public_names(module: types.ModuleType) -> list[str]:
    """The names of a module that are no submodules and not private."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    ]


def entries(text: str) -> list[str]:
    """The names that a page documents, in order."""
    return [match["block"] or match["row"] for match in ENTRY.finditer(text)]


def look_up(path: str) -> Any:
    """What a dotted path such as `nnx.initializers.zeros` leads to."""
    _, *names = path.split(".")
    value: Any = nnx
    for name in names:
        value = getattr(value, name)
    return value


def missing(names: list[str], pages: dict[str, str]) -> list[str]:
    """The names that no page documents."""
    documented = {entry for text in pages.values() for entry in entries(text)}
    return [name for name in names if f"nnx.{name}" not in documented]


def is_of_jax(value: Any, name: str) -> bool:
    """Whether a name is that of `jax.nn` handed on; its documentation is JAX's."""
    return value is getattr(jax.nn, name, None)


def defining_module(name: str) -> str:
    """The file that `nnx/__init__.py` takes a name from, as the name of a module."""
    for node in ast.parse(inspect.getsource(nnx)).body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return str(node.module)
    raise LookupError(name)


def constant_docstring(name: str) -> str:
    """The string that stands below the assignment of a constant."""
    body = ast.parse(inspect.getsource(importlib.import_module(defining_module(name)))).body
    for statement, below in zip(body, body[1:]):
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                return inspect.cleandoc(str(below.value.value))
    return ""


def docstring(name: str) -> str:
    """A public name's own docstring: not one it inherits."""
    value = getattr(nnx, name)
    if isinstance(value, type) or callable(value):
        own = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
        return inspect.cleandoc(own or "")
    return constant_docstring(name)


def problem_with(text: str) -> str:
    """What is wrong with a docstring; nothing, if its first line is a sentence by itself."""
    first, _, rest = text.partition("\n")
    if not first:
        return "has no docstring of its own"
    if not first.endswith("."):
        return f"does not begin with a sentence on one line: {first!r}"
    if rest and rest.partition("\n")[0]:
        return f"has no empty line after its first sentence: {first!r}"
    return ""


NAMES = public_names(nnx)


def test_every_room_has_a_page():
    assert sorted(PAGES) == ROOMS


def test_every_public_name_has_a_docstring_that_begins_with_a_sentence():
    checked = [name for name in NAMES if not is_of_jax(getattr(nnx, name), name)]
    problems = {f"nnx.{name}": problem_with(docstring(name)) for name in checked}
    assert {name: problem for name, problem in problems.items() if problem} == {}


def test_every_public_name_is_on_an_api_page():
    assert missing(NAMES, PAGES) == []


@pytest.mark.parametrize("room", ["bridge", "models"])
def test_every_public_name_of_a_room_with_a_name_is_on_its_page(room: str):
    assert sorted(entries(PAGES[room])) == sorted(f"nnx.{room}.{name}" for name in public_names(getattr(nnx, room)))


@pytest.mark.parametrize("room", ["bridge", "models"])
def test_every_public_name_of_a_room_with_a_name_has_a_docstring_that_begins_with_a_sentence(room: str):
    functions_and_classes = {name: getattr(getattr(nnx, room), name) for name in public_names(getattr(nnx, room))}
    texts = {name: value.__doc__ for name, value in functions_and_classes.items() if callable(value)}
    problems = {name: problem_with(inspect.cleandoc(text or "")) for name, text in texts.items()}
    assert {name: problem for name, problem in problems.items() if problem} == {}


def test_every_name_is_on_one_page_only_and_once():
    counts = Counter(entry for text in PAGES.values() for entry in entries(text))
    assert [name for name, count in counts.items() if count > 1] == []


def test_every_name_of_the_pages_can_be_imported():
    unknown = []
    for entry in [entry for text in PAGES.values() for entry in entries(text)]:
        try:
            look_up(entry)
        except AttributeError:
            unknown.append(entry)
    assert unknown == []


def test_every_name_is_on_the_page_of_its_room():
    own = [(room, entry) for room in ROOMS for entry in entries(PAGES[room]) if entry.count(".") == 1]
    assert [(room, entry) for room, entry in own if defining_module(entry[len("nnx.") :]).split(".")[1] != room] == []


def test_the_initialisers_are_those_of_jax_and_our_own():
    listed = {entry.rpartition(".")[2] for entry in entries(PAGES["nn"]) if entry.startswith("nnx.initializers.")}
    assert listed == {*public_names(jax.nn.initializers), "zeros_init", "ones_init"}


def test_every_recipe_begins_with_its_code_and_is_in_the_overview():
    overview = (ROOT / "docs" / "recipes" / "index.md").read_text()
    recipes = [page for page in sorted((ROOT / "docs" / "recipes").glob("*.md")) if page.stem != "index"]
    assert [page.name for page in recipes if f"]({page.name})" not in overview] == []
    for page in recipes:
        front, _, text = page.read_text().removeprefix("---\n").partition("\n---\n")
        assert "boost: 2" in front, page.name
        assert 0 < text.find("```python") < (text + "\n## ").index("\n## "), page.name


def test_a_missing_name_is_found():
    pages = {"nn": "# Layers\n\n::: nnx.Linear\n\n| function | what |\n|---|---|\n| `nnx.relu` | a ramp |\n"}
    assert entries(pages["nn"]) == ["nnx.Linear", "nnx.relu"]
    assert missing(["Linear", "Conv", "relu", "gelu"], pages) == ["Conv", "gelu"]


def test_a_row_without_a_text_does_not_count():
    assert entries("| `nnx.relu` |  |\n") == []


def test_poor_docstrings_are_found():
    assert "no docstring" in problem_with("")
    assert "no empty line" in problem_with("A layer.\nAnd more.")
    assert "sentence on one line" in problem_with("A layer that\nis linear.")
    assert problem_with("A layer.\n\nAnd more.") == ""


def test_an_inherited_docstring_does_not_count(monkeypatch: pytest.MonkeyPatch):
    class Undocumented(nnx.Linear):
        pass

    monkeypatch.setattr(nnx, "Undocumented", Undocumented, raising=False)
    assert docstring("Undocumented") == ""
    assert docstring("PARTITION_NAME").startswith("The key of")
