"""The shape of the package: rooms import downward only, and nobody reaches into JAX's private parts."""

import ast
import importlib.util
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOMS = (
    "core",
    "storage",
    "sharding",
    "transforms",
    "nn",
    "training",
    "inspection",
    "interop",
    "bridge",
    "models",
    "generation",
    "planning",
    "commands",
)


# `Module.load_state` is a method of Modules, and matching a mapping with a Module is the business of storage.
CALLED_UPWARD = {"core/module/module.py": ("nnx.storage.load_state", "nnx.storage.errors")}


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
    root = ("__init__.py", "__main__.py")
    strays = [name_of(file) for file in FILES if room_of(file) not in ROOMS and name_of(file) not in root]
    assert not strays


def upward_imports(file: Path) -> Iterator[tuple[int, str]]:
    room = room_of(file)
    assert room is not None
    allowed = ROOMS[: ROOMS.index(room) + 1]
    for line, target in imported_modules(file):
        if target.startswith("nnx.") and target.split(".")[1] in ROOMS and target.split(".")[1] not in allowed:
            if not target.startswith(CALLED_UPWARD.get(name_of(file), "-")):
                yield line, target


def imports_of_the_root(file: Path) -> Iterator[tuple[int, str]]:
    yield from ((line, target) for line, target in imported_modules(file) if target == "nnx")
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            # ``import nnx.core.state.state`` without ``as`` binds the package root too.
            yield from ((node.lineno, a.name) for a in node.names if a.name.startswith("nnx.") and a.asname is None)


def private_jax(file: Path) -> Iterator[tuple[int, str]]:
    for line, name in [*imported_modules(file), *dotted_names(file)]:
        if name == "jax._src" or name.startswith("jax._src."):
            yield line, name


def found_in(files: list[Path], lint: Callable[[Path], Iterator[tuple[int, str]]]) -> list[str]:
    """Every place that a lint complains about, as an editor can open it."""
    return [f"nnx/{name_of(file)}:{line}: {text}" for file in files for line, text in lint(file)]


def test_rooms_import_downward_only():
    assert not found_in(ROOM_FILES, upward_imports)


def test_nothing_in_the_package_imports_the_package_root():
    # Commands are programs: like those of users, they import the package and use its public names.
    assert not found_in([file for file in ROOM_FILES if room_of(file) != "commands"], imports_of_the_root)


def test_private_jax_is_used_in_one_file_only():
    assert {place.split(":")[0] for place in found_in(FILES, private_jax)} == {"nnx/core/trace.py"}


def test_every_lint_finds_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    file = tmp_path / "core" / "bad.py"
    file.parent.mkdir()
    file.write_text("import nnx.core\nfrom nnx.nn.linear import Linear\nfrom jax._src import core\n")
    assert found_in([file], upward_imports) == [
        "nnx/core/bad.py:2: nnx.nn.linear",
        "nnx/core/bad.py:2: nnx.nn.linear.Linear",
    ]
    assert found_in([file], imports_of_the_root) == ["nnx/core/bad.py:1: nnx.core"]
    assert "nnx/core/bad.py:3: jax._src" in found_in([file], private_jax)


NAMED_TUPLE_METHODS = {
    "_replace",
    "_fields",
    "_asdict",
    "_make",
    "_field_defaults",
}  # documented, despite the underscore
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLE_METHODS


def private_attributes_defined(file: Path) -> set[str]:
    """The private attributes of the classes in a file: methods, class variables, slots, and what is set on `self`."""
    names: set[str] = set()
    for cls in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(cls, ast.ClassDef):
            continue
        for node in ast.walk(cls):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    names.add(node.attr)
            elif isinstance(node, ast.Assign) and any(ast.unparse(target) == "__slots__" for target in node.targets):
                names |= {part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)}
    return {name for name in names if is_private(name)}


def private_attributes_used(file: Path) -> Iterator[tuple[int, str, bool]]:
    """Every private attribute that a file uses: line, name, and whether it is that of `self` or `cls`.

    Uses by name count as well, as in `getattr(x, "_name")`.
    """
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.lineno, node.attr, ast.unparse(node.value) in ("self", "cls", "super()")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_NAME:
            texts = [part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            is_own = bool(node.args) and ast.unparse(node.args[0]) in ("self", "cls")
            yield from ((node.lineno, name, is_own) for text in texts for name in text.split(".") if is_private(name))


def test_no_file_uses_a_private_attribute_of_another_room():
    # A name that another room defines must be defined here, too: in this room if it is used on `self`, and in this very
    # file if it is used on any other object, whose class cannot be seen.
    defined = {file: private_attributes_defined(file) for file in FILES}
    by_room: dict[str | None, set[str]] = {}
    for file, names in defined.items():
        by_room.setdefault(room_of(file), set()).update(names)
    strays = []
    for file in FILES:
        room = room_of(file)
        elsewhere = set().union(*(names for other, names in by_room.items() if other != room))
        for line, name, is_own in private_attributes_used(file):
            if name in elsewhere and name not in (by_room[room] if is_own else defined[file]):
                strays.append(f"{name_of(file)} line {line}: {name}")
    assert not strays


def test_no_file_imports_a_private_name_from_another():
    strays = [
        f"{name_of(file)} line {line}: {target}"
        for file in FILES
        for line, target in imported_modules(file)
        if target.startswith("nnx.") and any(map(is_private, target.split(".")))
    ]
    assert not strays


def test_the_search_for_private_attributes_finds_them_however_they_are_spelled(tmp_path: Path):
    file = tmp_path / "stray.py"
    file.write_text("x._spec\ngetattr(self, '_spec')\nattrgetter('_nnx_info.flat')\nx._replace()\nx.__dict__\n")
    assert list(private_attributes_used(file)) == [(1, "_spec", False), (2, "_spec", True), (3, "_nnx_info", False)]
    file.write_text("class A:\n    __slots__ = ('_a',)\n    def _b(self):\n        self._c = 1\n    _d: int\n")
    assert private_attributes_defined(file) == {"_a", "_b", "_c", "_d"}


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

    assert sorted(nnx.__all__) == sorted(names_imported_by_the_root() - {"Any", "Sequence", "bridge", "models"})


OPTIONAL = (
    "flax",
    "equinox",
    "haiku",
    "grain",
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
    late = (*OPTIONAL, "tensorstore")  # which the first save or load imports
    code = f"import sys, nnx; print([name for name in {late!r} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def test_the_core_needs_four_packages_only():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {dependency.split(">")[0].split("=")[0].strip() for dependency in project["dependencies"]}
    assert names == {"jax", "numpy", "optax", "tensorstore"}
    assert all("<" in dependency for dependency in project["dependencies"])
    assert project["requires-python"] == ">=3.11"
