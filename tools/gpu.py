"""Runs the tests on a GPU, with the Python and JAX installed here.

    make gpu                                # all of them
    make gpu ARGS="--part 2/6"              # a sixth, for machines that are lent for minutes
    make gpu ARGS="--folders nn -- -k pool" # some of them

**Precision.** Tests compare with references in float32, and a GPU multiplies float32 matrices in TF32 by default, which
keeps ten bits. Every part therefore runs with `jax_default_matmul_precision="highest"`; tests that choose a precision
themselves keep it. Nothing else is changed: tolerances are those of the CPU.

**Kernels** are compiled, not interpreted: the fixture `interpreted` does nothing here (see tests/nn/conftest.py). XLA
does not time several of them for each shape, because tests have thousands of shapes; it does with
XLA_FLAGS=--xla_gpu_autotune_level=4.

With pytest-xdist, several processes share the GPU. The tests that need several devices start their own processes with
virtual CPU devices, here as everywhere. Nothing is installed: pytest and hypothesis must be there, and files that
import a package that is not there are left out, and named. With `--dry-run`, the plan is printed and nothing runs.
"""

import argparse
import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What depends most on the machine comes first.
FOLDERS = (
    *("nn", "transforms", "core", "training", "generation"),
    *("sharding", "models", "storage", "inspection", "interop"),
)
# Others that are installed here could warn, and tests treat warnings as errors.
PLUGINS = {"_hypothesis_pytestplugin": "hypothesispytest", "pytest_timeout": "timeout", "xdist": "xdist"}
MOST_WORKERS = 12  # each of them keeps half a gigabyte of the GPU for itself
NO_GPU = "There is no GPU: JAX's default backend is {backend!r}. `make test` runs the tests on a CPU."
LEFT_OUT = "Left out, because packages are missing: {file} ({packages})"


def main() -> int:
    """Runs the part that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", metavar="I/N", type=_part, default=(1, 1), help="which of how many parts")
    parser.add_argument("--folders", metavar="A,B", default=",".join(FOLDERS), help="folders of tests")
    parser.add_argument("--workers", metavar="N", type=int, default=_workers(), help="how many processes run tests")
    parser.add_argument("--dry-run", action="store_true", help="print the files of this part")
    parser.add_argument("tests", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    part, parts = options.part
    files = files_of_part(part, parts, options.folders.split(","))
    if options.dry_run:
        print("\n".join(files))
        return 0
    import jax

    if jax.default_backend() != "gpu":
        print(NO_GPU.format(backend=jax.default_backend()), file=sys.stderr)
        return 1
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, part {part} of {parts}", flush=True)
    for file in list(files):
        if packages := missing_packages(ROOT / file):
            print(LEFT_OUT.format(file=file, packages=", ".join(packages)), flush=True)
            files.remove(file)
    plugins = [part for name in PLUGINS if importlib.util.find_spec(name) for part in ("-p", PLUGINS[name])]
    processes = ["-n", str(options.workers), "--dist", "worksteal"] if options.workers > 1 else []
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=10", *plugins, *processes]
    return subprocess.run([*pytest, *files, *options.tests], cwd=ROOT, env=_environment()).returncode


def files_of_part(part: int, parts: int, folders: list[str]) -> list[str]:
    """Returns every n-th test file of `n` parts, largest first, so that the parts take about equally long."""
    files = [file for folder in folders for file in (ROOT / "tests" / folder).rglob("test_*.py")]
    files.sort(key=lambda file: (-file.stat().st_size, str(file)))
    return [str(file.relative_to(ROOT)) for file in files[part - 1 :: parts]]


def missing_packages(file: Path) -> list[str]:
    """Returns the packages that a file, or a helper it imports, imports at its top and that are not here."""
    missing, files = set(), [file]
    for source in files:  # which grows
        for statement in ast.parse(source.read_text()).body:
            names = [statement.module or ""] if isinstance(statement, ast.ImportFrom) else []
            names += [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
            helpers = [ROOT / f"{name.replace('.', '/')}.py" for name in names]
            files.extend(helper for helper in helpers if helper.is_file() and helper not in files)
            packages = {name.partition(".")[0] for name in names} - {"nnx", "tests", "benchmarks", "tools"}
            missing.update(name for name in packages if importlib.util.find_spec(name) is None)
    return sorted(missing)


def _environment() -> dict[str, str]:
    flags = os.environ.get("XLA_FLAGS", "")
    if "--xla_gpu_autotune_level" not in flags:
        flags = f"{flags} --xla_gpu_autotune_level=0".strip()
    return {
        **os.environ,
        "NNX_GPU": "1",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",  # kernels as users get them
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "XLA_FLAGS": flags,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # several processes use the GPU
    }


def _workers() -> int:
    return min(os.cpu_count() or 1, MOST_WORKERS) if importlib.util.find_spec("xdist") else 1


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, for example 2/6, got {text!r}")
    return int(part), int(parts)


if __name__ == "__main__":
    sys.exit(main())
