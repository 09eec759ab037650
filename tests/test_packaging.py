"""What the package says about itself: its version, its extras, what it was tested with, and its long description."""

import ast
import importlib.util
import pathlib
import re
import tomllib
from typing import Any

import pytest

import nnx

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
FOR_WORK = {"all", "examples", "bench", "test", "lint", "docs", "dev", "parity"}  # what working on NNX needs
# For users, but too large for `all`: extras of JAX, and the module of the compiler that they bring along.
COMPILERS = {"jax[tpu]": "libtpu", "jax[cuda13]": "jax_cuda13_plugin"}
MODULES = {"orbax-checkpoint": "orbax"} | COMPILERS  # packages whose modules have another name


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def tool(name: str) -> Any:
    """Imports a file of tools/, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The version


def test_the_version_is_the_same_everywhere():
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "nnx/__init__.py"
    assert re.findall(r"^## (\d\S*)", text_of("CHANGELOG.md"), re.MULTILINE)[0] == nnx.__version__
    assert re.findall(r"^version: (\S+)$", text_of("CITATION.cff"), re.MULTILINE) == [nnx.__version__]


def test_the_readme_begins_with_what_the_package_is_not():
    beginning = "\n\n".join(text_of("README.md").split("\n\n")[:3])
    assert "not `flax.nnx`" in beginning and "version 0.0.8" in beginning


def test_the_citation_file_has_what_the_format_requires():
    keys = re.findall(r"^([a-z-]+):", text_of("CITATION.cff"), re.MULTILINE)
    assert {"cff-version", "message", "title", "authors"} <= set(keys)
    assert len(keys) == len(set(keys))
    assert f"license: {PROJECT['project']['license']}\n" in text_of("CITATION.cff")


# What it was tested with


def combinations() -> set[tuple[str, str]]:
    """The combinations in the table of docs/versions.md, as minor versions of Python and JAX."""
    rows = re.findall(r"^\| (3\.\d+)\.\d+ \| (0\.\d+)\.[\d.]+ \|", text_of("docs/versions.md"), re.MULTILINE)
    return set(rows)


def test_classifiers_claim_only_what_was_tested():
    claimed = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["project"]["classifiers"]))
    assert claimed and set(claimed) == {python for python, _ in combinations()}


def test_the_bounds_of_jax_are_those_of_the_tested_versions():
    (bounds,) = [text for text in PROJECT["project"]["dependencies"] if text.startswith("jax")]
    least, most = re.fullmatch(r"jax>=0\.(\d+),<0\.(\d+)", bounds).groups()  # type: ignore[union-attr]
    supported = {f"0.{minor}" for minor in range(int(least), int(most))}
    assert supported == {jax for _, jax in combinations()}
    assert combinations() <= set(tool("matrix").COMBINATIONS)


# Extras


def requirements(extra: str) -> set[str]:
    """The modules that an extra installs."""
    names = {text if text in COMPILERS else re.split(r"[\[<>=]", text)[0] for text in EXTRAS[extra]}
    return {MODULES.get(name, name) for name in names}


def required() -> dict[tuple[str, str], list[str]]:
    """Every `require(module, extra)` in the package: the top-level module and the extra, and the files it is in."""
    found: dict[tuple[str, str], list[str]] = {}
    for file in sorted((ROOT / "nnx").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require":
                module, extra = (ast.literal_eval(argument) for argument in node.args[:2])
                found.setdefault((module.partition(".")[0], extra), []).append(file.name)
    return found


def imported_if_present() -> set[str]:
    """Modules that the package imports only where `find_spec` has found them."""
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "nnx").rglob("*.py")]
    return {name for source in sources for name in re.findall(r'find_spec\("(\w+)"\)', source)}


def test_every_optional_import_names_an_extra_that_installs_it():
    assert required()
    wrong = {use: files for use, files in required().items() if use[0] not in requirements(use[1])}
    assert wrong == {}


def test_every_extra_is_used():
    used = {module for module, _ in required()} | imported_if_present()
    offered = {extra: requirements(extra) for extra in EXTRAS if extra not in FOR_WORK}
    assert {extra: modules - used for extra, modules in offered.items() if modules - used} == {}


def test_the_extra_all_holds_every_extra_for_users():
    assert EXTRAS["all"] == [f"nnx[{','.join(sorted(set(EXTRAS) - FOR_WORK - {'plan-gpu', 'plan-tpu'}))}]"]


# The files that are published


def test_everything_the_source_distribution_names_exists():
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert [path for path in included if not (ROOT / path[1:]).exists()] == []
    assert {"/tests", "/conftest.py", "/README.md", "/hatch_build.py", "/tools"} <= set(included)
    assert (ROOT / "nnx" / "py.typed").exists()


def test_make_help_lists_every_target():
    makefile = text_of("Makefile")
    targets = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split()
    explained = re.findall(r"^([a-z]+):.*## ", makefile, re.MULTILINE)
    assert sorted(targets) == sorted(explained)


# The long description

README = (
    "[JAX](https://docs.jax.dev) [guide](docs/index.md) [below](#more) ![picture](docs/a.png)\n\n```\na[0](b)\n```\n"
)


def test_links_to_files_become_absolute():
    convert = tool("long_description").long_description
    assert convert(README, "https://example.org/nnx/", "v1") == (
        "[JAX](https://docs.jax.dev) [guide](https://example.org/nnx/blob/v1/docs/index.md) [below](#more) "
        "![picture](https://example.org/nnx/raw/v1/docs/a.png)\n\n```\na[0](b)\n```\n"
    )


def test_links_to_files_become_text_where_the_repository_has_no_address():
    convert = tool("long_description").long_description
    expected = "[JAX](https://docs.jax.dev) guide [below](#more) picture\n\n```\na[0](b)\n```\n"
    assert convert(README) == expected


@pytest.mark.parametrize("repository", ["", "https://example.org/nnx"])
def test_no_link_of_the_readme_leads_nowhere(repository: str):
    description = tool("long_description")
    prose = "".join(description.FENCE.split(description.long_description(text_of("README.md"), repository))[::2])
    targets = [match["target"] for match in description.LINK.finditer(prose)]
    assert targets and [target for target in targets if not re.match("https://|#", target)] == []


def test_the_files_that_the_readme_links_to_exist():
    targets = [match["target"] for match in tool("long_description").LINK.finditer(text_of("README.md"))]
    files = [target.partition("#")[0] for target in targets if not re.match("https?://|#", target)]
    assert files and [file for file in files if not (ROOT / file).exists()] == []
