"""Running the programs of the project inside the test's own process, where everything they import is already loaded."""

import contextlib
import io
import pathlib
import runpy
import shutil
import sys
from collections.abc import Iterator
from unittest import mock

import nnx

ROOT = pathlib.Path(__file__).parent.parent


def copy_examples(folder: pathlib.Path) -> pathlib.Path:
    """Copies the examples into a folder, because they write their output next to themselves."""
    ignored = shutil.ignore_patterns("output", "__pycache__")
    return shutil.copytree(ROOT / "examples", folder / "examples", ignore=ignored)


def run_script(script: pathlib.Path, *arguments: str, standard_input: str = "") -> str:
    """Returns what `python script arguments` prints."""
    with _as_a_program(str(script), arguments, standard_input) as output, _imports_next_to(script):
        runpy.run_path(str(script), run_name="__main__")
    return output.getvalue()


def run_module(name: str, *arguments: str) -> str:
    """Returns what `python -m name arguments` prints."""
    with _as_a_program(name, arguments) as output:
        runpy.run_module(name, run_name="__main__")
    return output.getvalue()


@contextlib.contextmanager
def _as_a_program(name: str, arguments: tuple[str, ...], standard_input: str = "") -> Iterator[io.StringIO]:
    with (
        mock.patch.object(sys, "argv", [name, *arguments]),
        mock.patch.object(sys, "stdin", io.StringIO(standard_input)),
        mock.patch.object(nnx, "compilation_cache"),  # its settings would hold for all tests of this process
        contextlib.redirect_stdout(io.StringIO()) as output,
    ):
        try:
            yield output
        except SystemExit as end:
            assert not end.code, f"{name} ended with {end.code!r} after printing\n{output.getvalue()[-2000:]}"


@contextlib.contextmanager
def _imports_next_to(script: pathlib.Path) -> Iterator[None]:
    """Lets a script import the files next to it, and forgets them afterwards: another script may mean other files."""
    before = set(sys.modules)
    with mock.patch.object(sys, "path", [str(script.parent), *sys.path]):
        try:
            yield
        finally:
            for name in set(sys.modules) - before:
                if str(getattr(sys.modules[name], "__file__", None)).startswith(str(script.parent)):
                    del sys.modules[name]
