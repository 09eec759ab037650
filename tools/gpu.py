"""Runs the tests of layers, transforms, generation and training on a GPU, with the Python and JAX installed here.

    make gpu                      # all of them
    make gpu ARGS="--part 2/6"    # a sixth, for machines that are lent for minutes
    make gpu ARGS="-- -k pool"    # some of them

**Precision.** Tests compare with references in float32, and a GPU multiplies float32 matrices in TF32 by default, which
keeps ten bits. Every part therefore runs with `jax_default_matmul_precision="highest"`; tests that choose a precision
themselves keep it. Nothing else is changed: tolerances are those of the CPU.

**Kernels** are compiled, not interpreted: the fixture `interpreted` does nothing here (see tests/nn/conftest.py).

The tests that need several devices start their own processes with virtual CPU devices, here as everywhere. Nothing is
installed: the packages of the extra "test" must be there. With `--dry-run`, the plan is printed and nothing runs.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tests/nn", "tests/transforms", "tests/generation", "tests/training")
NO_GPU = "There is no GPU: JAX's default backend is {backend!r}. `make test` runs the tests on a CPU."


def main() -> int:
    """Runs the part that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", metavar="I/N", type=_part, default=(1, 1), help="which of how many parts")
    parser.add_argument("--dry-run", action="store_true", help="print the files of this part")
    parser.add_argument("tests", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    files = files_of_part(*options.part)
    if options.dry_run:
        print("\n".join(files))
        return 0
    import jax

    if jax.default_backend() != "gpu":
        print(NO_GPU.format(backend=jax.default_backend()), file=sys.stderr)
        return 1
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, part {options.part[0]} of {options.part[1]}")
    environment = {
        **os.environ,
        "NNX_GPU": "1",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # programs that tests start use the GPU as well
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",  # kernels as users get them
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=10", *files, *options.tests]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def files_of_part(part: int, parts: int) -> list[str]:
    """Returns every n-th test file of `n` parts, largest first, so that the parts take about equally long."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("test_*.py")]
    files.sort(key=lambda file: (-file.stat().st_size, str(file)))
    return [str(file.relative_to(ROOT)) for file in files[part - 1 :: parts]]


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, for example 2/6, got {text!r}")
    return int(part), int(parts)


if __name__ == "__main__":
    sys.exit(main())
