"""TPUs that are not here: meshes of their devices, for which libtpu's compiler compiles programs on any machine."""

import contextlib
import functools
import importlib.util
import math
import re
from typing import Any

import jax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from nnx.planning.machines import machine_named

V5E = "v5e-8"
LARGER = "v5p-16"
MISSING = "libtpu is not installed, the compiler for TPUs; `make tpu` installs it and runs these tests"
# Takes half the time of the compiler, and leaves memory as it is. The option has another name from JAX 0.11 on.
FAST = {"optimization_level": "O1"} if jax.__version_info__ >= (0, 11) else {"exec_time_optimization_effort": -1.0}


@functools.cache
def devices(machine: str = V5E) -> Any:
    """The devices of a machine, in order; skips the test if their compiler is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip(MISSING)
    return machine_named(machine).devices()


def mesh(machine: str = V5E, kind: AxisType = AxisType.Auto, **axes: int) -> Mesh:
    """A mesh of some devices of a machine; without axes, of one device."""
    axes = axes or {"device": 1}
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes), devices=_first(machine, axes)
    )


def _first(machine: str, axes: dict[str, int]) -> Any:
    return devices(machine)[: math.prod(axes.values())]


def whole(tree: Any, on: Any) -> Any:
    """The arrays of a tree as abstract ones that are whole on every device of a mesh, or on one device."""
    sharding = NamedSharding(on, PartitionSpec()) if isinstance(on, Mesh) else SingleDeviceSharding(on)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def compiled(function: Any, *args: Any, on: Mesh | None = None, **options: Any) -> Any:
    """Compiles a function of abstract arrays for a mesh."""
    with contextlib.nullcontext() if on is None else jax.set_mesh(on):
        return optimized(jax.jit(function, **options).lower(*args))


def optimized(lowered: Any) -> Any:
    """Compiles a program as users get it; tests otherwise leave most optimizations out."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        return lowered.compile(FAST)
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def temporary(program: Any) -> int:
    """The bytes that a program needs besides its arguments and results."""
    return program.memory_analysis().temp_size_in_bytes


def copies(program: Any, size: int) -> list[str]:
    """The lines of a compiled program that copy or transpose an array of at least so many entries in memory."""
    found, fused = [], False
    for line in program.as_text().splitlines():
        if not line.startswith(" "):
            fused = "fused_computation" in line  # what happens inside of a fusion is not written to memory
        if fused:
            continue
        match = re.search(r" = \(?\w+\[([\d,]*)\][^=]* (copy|copy-start|transpose)\(", line)
        if match and _entries(match[1]) >= size:
            found.append(line.strip())
    return found


def _entries(shape: str) -> int:
    count = 1
    for number in filter(None, shape.split(",")):
        count *= int(number)
    return count


def collectives(program: Any) -> set[str]:
    """The kinds of collectives in a compiled program."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return set(re.findall(rf" ({kinds})(?:-start)?\(", program.as_text()))
