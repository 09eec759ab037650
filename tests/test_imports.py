"""The shape of the package: rooms import downward only, and nobody reaches into JAX's private parts."""

import ast
import importlib.util
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOMS = ("core", "sharding", "transforms", "nn", "training", "inspection", "interop", "models", "generation")


def package_root() -> Path:
    spec = importlib.util.find_spec("nnx")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


PACKAGE = package_root()
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(file: Path) -> str:
    parts = ("nnx", *file.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(file: Path) -> str:
    name = module_name(file)
    return name if file.name == "__init__.py" else name.rpartition(".")[0]


def imported_modules(file: Path) -> Iterator[tuple[int, str]]:
    """Every module that a file imports, wherever in the file, with its line."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package_of(file).split(".")
                parents = parents[: len(parents) - (node.level - 1)]
                base = ".".join([*parents, base] if base else parents)
            yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def dotted_names(file: Path) -> Iterator[tuple[int, str]]:
    """Every dotted attribute access that a file spells out, such as ``jax._src.core``."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


def room_of(file: Path) -> str | None:
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


ROOM_FILES = [file for file in FILES if room_of(file) in ROOMS]


def name_of(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


def test_every_file_lives_in_a_known_room():
    strays = [name_of(file) for file in FILES if room_of(file) not in ROOMS and name_of(file) != "__init__.py"]
    assert not strays


@pytest.mark.parametrize("file", ROOM_FILES, ids=name_of)
def test_rooms_import_downward_only(file: Path):
    room = room_of(file)
    assert room is not None
    allowed = ROOMS[: ROOMS.index(room) + 1]
    upward = [
        f"line {line}: {target}"
        for line, target in imported_modules(file)
        if target.startswith("nnx.") and target.split(".")[1] in ROOMS and target.split(".")[1] not in allowed
    ]
    assert not upward


@pytest.mark.parametrize("file", ROOM_FILES, ids=name_of)
def test_nothing_in_the_package_imports_the_package_root(file: Path):
    source = ast.parse(file.read_text(encoding="utf-8"))
    from_root = [f"line {line}" for line, target in imported_modules(file) if target == "nnx"]
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            # ``import nnx.core.state`` without ``as`` binds the package root too.
            from_root += [
                f"line {node.lineno}" for alias in node.names if alias.name.startswith("nnx.") and alias.asname is None
            ]
    assert not from_root


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_private_jax_is_used_in_one_file_only(file: Path):
    if name_of(file) == "core/trace.py":
        return
    private = [
        f"line {line}: {name}"
        for line, name in [*imported_modules(file), *dotted_names(file)]
        if name == "jax._src" or name.startswith("jax._src.")
    ]
    assert not private


def names_imported_by_the_root() -> set[str]:
    """Every name that `nnx/__init__.py` imports for its users."""
    body = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")).body
    return {alias.asname or alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_the_public_surface_has_no_private_names():
    import nnx

    assert all(not name.startswith("_") for name in nnx.__all__)
    assert nnx.__version__


def test_all_lists_every_public_name_once_except_rooms_and_those_that_shadow_typing():
    import nnx

    assert sorted(nnx.__all__) == sorted(names_imported_by_the_root() - {"Any", "Sequence", "models"})


def test_a_star_import_shadows_neither_any_nor_sequence_and_brings_no_room():
    import collections.abc
    import typing

    namespace: dict[str, object] = {}
    exec("from typing import Any\nfrom collections.abc import Sequence\nfrom nnx import *", namespace)
    assert namespace["Any"] is typing.Any
    assert namespace["Sequence"] is collections.abc.Sequence
    assert not namespace.keys() & set(ROOMS)
    assert {"Module", "Param", "jit", "Linear", "Optimizer"} <= namespace.keys()


def test_the_names_that_a_star_import_leaves_out_are_still_public():
    import nnx

    assert issubclass(nnx.Sequence, nnx.Module)
    assert callable(nnx.Any(nnx.Param, nnx.BatchStat))


OPTIONAL = (
    "flax",
    "equinox",
    "orbax",
    "safetensors",
    "treescope",
    "rich",
    "matplotlib",
    "torch",
    "transformers",
    "tokenizers",
    "jinja2",
    "tensorboardX",
    "wandb",
)


def test_importing_the_package_imports_no_optional_dependency():
    code = f"import sys, nnx; print([name for name in {OPTIONAL!r} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def test_the_core_needs_jax_numpy_and_optax_only():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {dependency.split(">")[0].split("=")[0].strip() for dependency in project["dependencies"]}
    assert names == {"jax", "numpy", "optax"}
    assert all("<" in dependency for dependency in project["dependencies"])
    assert project["requires-python"] == ">=3.11"
