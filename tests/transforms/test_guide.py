"""The page on adding a transform shows the code of `nnx.checkify`, all of it and in order."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "guide" / "adding-a-transform.md"
SOURCE = ROOT / "nnx" / "transforms" / "control" / "checkify.py"


def code_without_docstrings(source: str) -> str:
    """Returns a source without its docstrings and blank lines."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            first = node.body[0]
            for number in range(first.lineno - 1, first.end_lineno or first.lineno):
                lines[number] = ""
    return "\n".join(line for line in lines if line.strip())


def test_the_page_shows_the_code_of_checkify():
    excerpts = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    shown = "\n".join(line for excerpt in excerpts for line in excerpt.splitlines() if line.strip())
    standard = "from collections.abc import Callable, Collection\nfrom typing import Any, overload\n"
    assert standard + shown == code_without_docstrings(SOURCE.read_text())
