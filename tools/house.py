"""Counts what makes the package easy or hard to read, so that anyone can watch it.

    make house                               # this tree
    make house ARGS="--against e498a74"      # before and after
    make house ARGS="--static"               # only what is counted without running anything

What the rows mean:

- A noun is an italic or bold term before the colon of a vocabulary item (`- *Cell*, *flat form*: ...`) of a README in
  the package. The terms that the rest of such an item introduces are counted in a row of their own.
- The length of a function is counted without its docstring.
- A class name is shared if classes in several files have it, with or without an underscore.
- A file is named if the README of its folder has its name in backticks, or its suffix, as in `…_format`.
- A test file imports internals if it imports any module below `nnx`.
- A call is counted as the functions of NNX it enters, the files they are in, and how often a function of another file
  is entered (`tools/house_calls.py`). Python 3.12 and later enter no function for a comprehension, so only figures of
  one version of Python can be compared.
"""

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CALLS = Path(__file__).with_name("house_calls.py")
LONG = 40  # lines

Figures = dict[str, str]

VOCABULARY_ITEM = re.compile(r"^- (\*.*?)(?=^- |^\s*$|\Z)", re.MULTILINE | re.DOTALL)
EMPHASIZED = re.compile(r"\*\*?([^*]+)\*\*?")


def main() -> int:
    """Prints the table that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REF", help="a commit or branch to compare this tree with")
    parser.add_argument("--static", action="store_true", help="leave out the calls, which need JAX")
    arguments = parser.parse_args()
    columns = [(f"this tree, {revision('HEAD')}", figures(ROOT, arguments.static))]
    if arguments.against:
        with tempfile.TemporaryDirectory() as folder:
            extract(arguments.against, Path(folder))
            columns.insert(0, (revision(arguments.against), figures(Path(folder), arguments.static)))
    print(table(columns))
    return 0


def revision(ref: str) -> str:
    """Returns the short name of a commit, or the ref itself where there is no repository."""
    run = subprocess.run(["git", "rev-parse", "--short", ref], cwd=ROOT, capture_output=True, text=True)
    return run.stdout.strip() or ref


def extract(ref: str, folder: Path) -> None:
    """Writes the package and the tests of a commit into a folder."""
    run = subprocess.run(["git", "archive", ref, "nnx", "tests"], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(run.stdout)) as archive:
        archive.extractall(folder, filter="data")


def figures(root: Path, static: bool) -> Figures:
    """Returns everything that is counted about one tree."""
    found = source_figures(root / "nnx") | readme_figures(root / "nnx") | test_figures(root / "tests")
    return found if static else found | call_figures(root)


def source_figures(package: Path) -> Figures:
    """Counts files, lines, functions and comments of the package."""
    texts = {file: file.read_text(encoding="utf-8") for file in sorted(package.rglob("*.py"))}
    lines = [line.strip() for text in texts.values() for line in text.splitlines()]
    nodes = [node for text in texts.values() for node in ast.walk(ast.parse(text))]
    lengths = [function_length(node) for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    folder, fullest = fullest_folder(package)
    return {
        "files": f"{len(texts)}",
        "lines": f"{len(lines)}",
        "folders": f"{len(folders(package))}",
        "files in the fullest folder": f"{fullest} ({folder.relative_to(package.parent)})",
        f"functions over {LONG} lines": f"{sum(length > LONG for length in lengths)} of {len(lengths)}",
        "uses of exec and eval": f"{sum(map(runs_text, nodes))}",
        "shared class names": f"{len(shared_class_names(package))}",
        "full-line comments": f"{sum(line.startswith('#') for line in lines) / len(lines):.1%}",
    }


def folders(package: Path) -> list[Path]:
    """Returns the folders of the package that hold Python files, the package itself included."""
    return sorted({file.parent for file in package.rglob("*.py")})


def shared_class_names(package: Path) -> dict[str, list[Path]]:
    """Returns the files of classes that have the same name, by name; an underscore before it does not count."""
    files: dict[str, list[Path]] = {}
    for file in sorted(package.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for name in {node.name.lstrip("_") for node in tree.body if isinstance(node, ast.ClassDef)}:
            files.setdefault(name, []).append(file)
    return {name: found for name, found in sorted(files.items()) if len(found) > 1}


def fullest_folder(package: Path) -> tuple[Path, int]:
    """Returns the folder with the most Python files directly in it, and how many they are."""
    return Counter(file.parent for file in sorted(package.rglob("*.py"))).most_common(1)[0]


def function_length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Returns the lines of a function from `def` to its end, less its docstring."""
    first = function.body[0]
    documented = ast.get_docstring(function, clean=False) is not None
    return lines_of(function) - (lines_of(first) if documented else 0)


def lines_of(node: ast.stmt) -> int:
    """Returns how many lines a statement takes."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def runs_text(node: ast.AST) -> bool:
    """Whether a node calls `exec` or `eval`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("exec", "eval")


def readme_figures(package: Path) -> Figures:
    """Counts the READMEs of the package and the nouns they define."""
    readmes = {file: vocabulary(file.read_text(encoding="utf-8")) for file in sorted(package.rglob("README.md"))}
    counts = [(file, sum(opening), sum(rest)) for file, (opening, rest) in readmes.items()]
    return {
        "folders without a README": f"{len(folders_without_readme(package))}",
        "files that no README names": f"{len(unnamed_files(package))}",
        "nouns in all READMEs": f"{sum(nouns for _, nouns, _ in counts)}",
        "further terms in their definitions": f"{sum(terms for *_, terms in counts)}",
        "nouns that several READMEs define": f"{len(shared_nouns(package))}",
    } | {f"nouns in {file.relative_to(package.parent)}": f"{nouns}" for file, nouns, _ in counts}


def vocabulary(text: str) -> tuple[list[int], list[int]]:
    """Counts, for every vocabulary item of a README, the terms before its colon and those after it."""
    split = [item.partition(":") for item in VOCABULARY_ITEM.findall(text)]
    return [len(EMPHASIZED.findall(head)) for head, *_ in split], [len(EMPHASIZED.findall(rest)) for *_, rest in split]


def shared_nouns(package: Path) -> dict[str, list[Path]]:
    """Returns the READMEs that define the same noun, by noun."""
    files: dict[str, list[Path]] = {}
    for file in sorted(package.rglob("README.md")):
        heads = [item.partition(":")[0] for item in VOCABULARY_ITEM.findall(file.read_text(encoding="utf-8"))]
        for noun in {noun.lower() for head in heads for noun in EMPHASIZED.findall(head)}:
            files.setdefault(noun, []).append(file)
    return {noun: found for noun, found in sorted(files.items()) if len(found) > 1}


def folders_without_readme(package: Path) -> list[str]:
    """Returns the folders that do not explain themselves; the package itself has the README of the repository."""
    return [
        str(folder.relative_to(package.parent))
        for folder in folders(package)
        if folder != package and not (folder / "README.md").exists()
    ]


def unnamed_files(package: Path) -> list[str]:
    """Returns the files that the README of their folder does not name."""
    texts = {file.parent: file.read_text(encoding="utf-8") for file in package.rglob("README.md")}
    return [
        str(file.relative_to(package.parent))
        for file in sorted(package.rglob("*.py"))
        if file.parent in texts and file.stem != "__init__" and not is_named(file.stem, texts[file.parent])
    ]


def is_named(name: str, text: str) -> bool:
    """Whether a README names a file: `name`, `name.function`, or `…_suffix` for all files that end so."""
    suffix = f"`…_{name.rpartition('_')[2]}`"
    return suffix in text or re.search(rf"`(?:[\w/.]+[/.])?{name}(?:\.\w+)?`", text) is not None


def test_figures(tests: Path) -> Figures:
    """Counts the test files and those among them that import internals."""
    files = sorted(tests.rglob("*.py"))
    return {
        "test files": f"{len(files)}",
        "test files that import internals": f"{sum(map(imports_internals, files))}",
    }


def imports_internals(file: Path) -> bool:
    """Whether a file imports a module below `nnx`, at whatever level of indentation."""
    modules = imported_modules(ast.parse(file.read_text(encoding="utf-8")))
    return any(module.startswith("nnx.") for module in modules)


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Yields the name of every module that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def call_figures(root: Path) -> Figures:
    """Runs common calls with the package of a tree and returns what each went through."""
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "0"}
    # -P keeps this folder out of sys.path, so `import nnx` finds the tree on PYTHONPATH and nothing else.
    run = subprocess.run(
        [sys.executable, "-P", str(CALLS)], cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    counts = json.loads(run.stdout)
    return {
        name: f"{frames} frames, {files} files, {switches} switches"
        for name, (frames, files, switches) in counts.items()
    }


def table(columns: list[tuple[str, Figures]]) -> str:
    """Returns the figures of one or two trees as text, one row per name, in the order of the last tree."""
    heads = ["", *(head for head, _ in columns)]
    names = list(dict.fromkeys(name for _, found in reversed(columns) for name in found))
    rows = [heads, *([name, *(found.get(name, "-") for _, found in columns)] for name in names)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(heads))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


if __name__ == "__main__":
    sys.exit(main())
