"""`python -m nnx doctor`: versions, devices, extras and the compilation cache; what is wrong, and how to fix it.

A *finding* is one line of the report. It is broken only if NNX cannot run; anything that merely costs something, or
that somebody may have wanted, is a note.
"""

import argparse
import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import nnx
from nnx.commands.command import Command
from nnx.commands.tables import print_table

EXTRAS = {
    "display": ("rich", "treescope"),
    "models": ("tokenizers", "jinja2"),
    "plot": ("matplotlib",),
    "tensorboard": ("tensorboardX",),
    "export": ("flatbuffers",),
    "checkpoint": ("orbax",),
    "bridge": ("equinox", "flax"),
}
"""The packages of each extra, by the names that are imported."""

_SETTINGS = {
    "jax_disable_jit": "nothing is compiled; unset JAX_DISABLE_JIT",
    "jax_debug_nans": "every result is checked for NaN, and nothing is donated; for debugging only",
    "jax_enable_x64": "new arrays are float64, which is slow on accelerators",
    "jax_disable_most_optimizations": "programs are compiled quickly and run slowly; for tests only",
}


class Finding(NamedTuple):
    """One line of the report; `status` is "ok", "note" or "broken"."""

    status: str
    what: str
    found: str
    advice: str = ""


def _run(arguments: argparse.Namespace) -> int:
    findings = [finding for check in CHECKS for finding in _checked(check)]
    print_table(("", "what", "found", "advice"), [tuple(finding) for finding in findings])
    broken = [finding for finding in findings if finding.status == "broken"]
    if broken:
        print(f"\nNNX cannot run here: {', '.join(finding.what for finding in broken)}.")
    return 1 if broken else 0


def _checked(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yields the findings of a check; if it fails itself, that is one."""
    try:
        yield from check()
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        yield Finding("broken", check.__name__.strip("_"), f"{type(error).__name__}: {text}"[:100])


def _versions() -> Iterator[Finding]:
    python = platform.python_version()
    yield Finding("ok", "Python", f"{python} on {platform.system()} {platform.machine()}")
    yield Finding("ok", "NNX", f"{nnx.__version__} in {Path(nnx.__file__).parent}")
    bounds = _bounds()
    for package in (jax, np, optax):
        name = package.__name__
        bound = bounds.get(name, "")
        fits = not bound or _is_within(package.__version__, bound)
        advice = "" if fits else f"tested with {bound}: pip install '{name}{bound}'"
        yield Finding("ok" if fits else "note", name, package.__version__, advice)
    jaxlib = importlib.metadata.version("jaxlib")
    same = jaxlib.split(".")[:2] == jax.__version__.split(".")[:2]
    yield Finding("ok" if same else "note", "jaxlib", jaxlib, "" if same else f"pip install jaxlib=={jax.__version__}")


def _bounds() -> dict[str, str]:
    """Returns the versions of packages that NNX asks for."""
    try:
        requirements = importlib.metadata.requires("nnx") or []
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return {}
    matches = [re.match(r"([\w-]+)([<>=!~][^;]*)?\s*(;|$)", requirement) for requirement in requirements]
    return {match[1]: (match[2] or "").strip() for match in matches if match and match[3] != ";"}


def _is_within(version: str, bound: str) -> bool:
    number = _numbers(version)
    for operator, text in re.findall(r"(>=|<)\s*([\d.]+)", bound):
        limit = _numbers(text)
        if (operator == ">=" and number < limit) or (operator == "<" and number >= limit):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _devices() -> Iterator[Finding]:
    devices = jax.devices()
    kinds = sorted({f"{device.platform} ({device.device_kind})" for device in devices})
    advice = ""
    if devices[0].platform == "cpu" and not os.environ.get("JAX_PLATFORMS"):
        if Path("/dev/nvidia0").exists():
            advice = "there is an NVIDIA GPU, which this JAX does not use: pip install 'jax[cuda12]'"
        elif any(Path("/dev").glob("accel*")):
            advice = "there is a TPU, which this JAX does not use: pip install 'jax[tpu]'"
    yield Finding("note" if advice else "ok", "devices", f"{len(devices)} of {', '.join(kinds)}", advice)
    memory = devices[0].memory_stats() or {}
    if "bytes_limit" in memory:
        yield Finding("ok", "device memory", f"{memory['bytes_limit'] / 2**30:.1f} GiB for JAX")


def _a_training_step() -> Iterator[Finding]:
    start = time.perf_counter()
    model = nnx.Linear(4, 4, ctx=nnx.context(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1))

    @nnx.jit
    def step(optimizer: nnx.Optimizer[nnx.Linear], x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: jnp.square(model(x) - 1).mean())(optimizer.model)
        optimizer.update(grads)
        return loss

    first, second = (float(step(optimizer, jnp.ones((2, 4)))) for _ in range(2))
    seconds = time.perf_counter() - start
    status = "ok" if second < first else "broken"
    yield Finding(status, "a training step", f"loss {first:.3f}, then {second:.3f}; {seconds:.1f} s with compiling")


def _settings() -> Iterator[Finding]:
    for name, meaning in _SETTINGS.items():
        if getattr(jax.config, name, False):
            yield Finding("note", name, "on", meaning)
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES"):
        if os.environ.get(name):
            yield Finding("note", name, os.environ[name][:60], "set in the environment")


def _compilation_cache() -> Iterator[Finding]:
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    if not folder:
        advice = "nnx.compilation_cache() at the top of a script keeps compiled programs for the next run"
        yield Finding("note", "compilation cache", "off", advice)
        return
    path = Path(folder)
    if "://" in folder or not path.exists():
        yield Finding("ok", "compilation cache", folder)
    elif os.access(path, os.W_OK):
        programs = [file for file in path.iterdir() if file.is_file()]
        size = sum(file.stat().st_size for file in programs) / 2**20
        yield Finding("ok", "compilation cache", f"{folder}: {len(programs):,} files, {size:,.1f} MiB")
    else:
        yield Finding("note", "compilation cache", folder, "cannot be written to: change its permissions")


def _extras() -> Iterator[Finding]:
    for extra, packages in EXTRAS.items():
        missing = [package for package in packages if find_spec(package) is None]
        found = "installed" if not missing else f"without {' and '.join(missing)}"
        yield Finding(
            "ok" if not missing else "note", f"extra {extra}", found, f"pip install 'nnx[{extra}]'" * bool(missing)
        )


CHECKS = (_versions, _devices, _a_training_step, _settings, _compilation_cache, _extras)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


COMMAND = Command(
    help="say what is installed, what is wrong, and how to fix it; the exit status is 0 unless NNX cannot run",
    examples={"doctor": "the first thing to run after installing, and to add to a report of a bug"},
    add_arguments=_add_arguments,
    run=_run,
)
