"""Compiles the programs of tests/targets for TPUs, with the compiler that belongs to each version of JAX.

    make tpu                                # JAX 0.10
    make tpu ARGS="--jax 0.12 -- -k pages"  # another version of JAX, some programs

`jax[tpu]` pins the version of libtpu that JAX was released with; with another one, some programs fail. Each version has
its own environment, in `.tpu` unless `--envs` names another folder. No TPU is needed, and nothing runs on one.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = {"0.10": "0.10.2", "0.11": "0.11.2", "0.12": "0.12.0"}


def main() -> int:
    """Makes the environment if there is none, and compiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jax", choices=list(VERSIONS), default="0.10", help="the version of JAX")
    parser.add_argument("--envs", metavar="FOLDER", type=Path, default=ROOT / ".tpu", help="where environments are")
    parser.add_argument("tests", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    python = _environment(options.envs / f"jax{options.jax}", VERSIONS[options.jax])
    programs = ["tests/targets/test_tpu.py", "tests/targets/compile_everything.py"]
    # The compiler takes minutes for some programs where other processes use the machine as well.
    pytest = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=1200", "--durations=10"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run([*pytest, *programs, *options.tests], cwd=ROOT, env=environment).returncode


def _environment(folder: Path, jax: str) -> Path:
    """Returns the Python of an environment with this JAX and its libtpu."""
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    if not ready.exists():
        print(f"installing jax[tpu]=={jax} into {folder} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        packages = [f"jax[tpu]=={jax}", "hypothesis", "pytest", "pytest-timeout", "--editable", ".[models]"]
        subprocess.run([*pip, *packages], cwd=ROOT, check=True)
        ready.touch()
    return python


if __name__ == "__main__":
    sys.exit(main())
