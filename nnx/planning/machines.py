"""Machines: how many of which chip, by a name such as "v5e-16", and their devices, which need not be here.

The number counts chips. (Google's own names count the cores of v4 and v5p, two for each chip: their "v5p-128" is
"v5p-64" here.) The devices of TPUs and GPUs come from their compilers (`jax.experimental.topologies`), so nothing can
run on them. Those of `cpu-8` are the virtual devices of this process.
"""

import importlib.metadata
import importlib.util
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from nnx.core.extras import require
from nnx.core.repr import short
from nnx.planning.chips import CHIPS, Chip

UNKNOWN = """nnx.plan: there is no machine {got!r}. A name is a chip and a number of chips, e.g. "v5e-16". Known \
chips: {known}.{hint}"""
NO_SUCH_SLICE = """nnx.plan: there is no slice of {count} {chip} chips. Sizes of slices: {sizes}."""
NOT_A_NUMBER_OF_GPUS = """nnx.plan: {name} is not a number of whole nodes: take up to {node} GPUs, or a multiple of \
{node}."""
TOO_FEW_CPUS = """nnx.plan: {name} takes {count} CPU devices, and this process has {here}. They are virtual: say \
jax.config.update("jax_num_cpu_devices", {count}) before JAX is used, or set the environment variable \
XLA_FLAGS=--xla_force_host_platform_device_count={count}."""
WRONG_LIBTPU = """nnx.plan: libtpu {found} is installed, but JAX {jax} was released with libtpu {expected}; with \
another one, some programs do not compile. pip install 'jax[tpu]=={jax}'"""
WRONG_PLUGIN = """nnx.plan: jaxlib {jaxlib} and {package} {found} do not belong together. pip install \
'{package}=={jaxlib}'"""
DOES_NOT_FIT_MESH = """nnx.plan: the mesh {mesh} has {size} devices, and {name} has {count} chips.{hint}"""
UNKNOWN_DEVICES = """nnx.plan: the devices of this mesh are of the kind {kind!r}, about which nothing is known. Known \
kinds: {known}."""
NOT_A_MACHINE = """nnx.plan: `on` is the name of a machine such as "v5e-16", a list of names, or a Mesh; got {got}."""

# Without these, libtpu looks for a TPU and for the machine it belongs to, and allows one process at a time.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {
    **{1: "1x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"},
    **{512: "8x8x8", 1024: "8x8x16", 2048: "8x16x16", 4096: "16x16x16"},
}
_SLICES = {"v4": _CUBES, "v5e": _FLAT, "v5p": _CUBES, "v6e": _FLAT}


class Machine(NamedTuple):
    """Some chips of one kind.

    Attributes:
        chip: the kind.
        count: how many there are.
    """

    chip: Chip
    count: int

    @property
    def name(self) -> str:
        """The name, e.g. "v5e-16"."""
        return f"{self.chip.name}-{self.count}"

    @property
    def memory(self) -> int | None:
        """The bytes of memory of one chip that JAX can give to programs; None for virtual devices.

        On a GPU, the context of CUDA and its libraries need the rest; see `preallocated`.
        """
        memory = self.chip.memory
        return (int(0.95 * memory) if self.chip.platform == "cuda" else memory) or None

    @property
    def preallocated(self) -> int | None:
        """The bytes that JAX takes of the memory of a GPU by default, 75 %, and gives to programs; None for others."""
        fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))
        return int(fraction * self.chip.memory) if self.chip.platform == "cuda" else None

    @property
    def sides(self) -> tuple[int, ...]:
        """The sides of the torus of a slice of TPUs, largest first; for others the number of chips."""
        slices = _SLICES.get(self.chip.name)
        return tuple(sorted(map(int, slices[self.count].split("x")), reverse=True)) if slices else (self.count,)

    def devices(self) -> list[Any]:
        """Returns the devices, in order.

        Raises:
            ImportError: the package with the compiler is missing, or does not belong to this version of JAX.
        """
        return {"tpu": _tpus, "cuda": _gpus, "cpu": _cpus}[self.chip.platform](self)

    def mesh(self, axes: Mapping[str, int] | None = None) -> Mesh:
        """Returns a mesh of all chips; by default with one axis, "data"."""
        axes = {"data": self.count} if axes is None else dict(axes)
        size = math.prod(axes.values())
        if size != self.count:
            hint = "" if self.count % size else f" One that fits: { ({**axes, **_widened(axes, self.count // size)}) }."
            text = {"mesh": axes, "size": size, "name": self.name, "count": self.count, "hint": hint}
            raise ValueError(DOES_NOT_FIT_MESH.format(**text))
        types = (AxisType.Auto,) * len(axes)
        shape, names, devices = tuple(axes.values()), tuple(axes), self.devices()
        try:
            return jax.make_mesh(shape, names, axis_types=types, devices=devices)
        except NotImplementedError:  # the axes do not follow the sides of the torus
            return Mesh(np.array(devices).reshape(shape), names, axis_types=types)


def _widened(axes: Mapping[str, int], times: int) -> dict[str, int]:
    """Returns the first axis of a mesh, so many times as long."""
    name, length = next(iter(axes.items()))
    return {name: length * times}


def machine_named(name: Any) -> Machine:
    """Returns the machine with a name.

    Raises:
        ValueError: there is none; the message lists the chips.

    >>> machine_named("v5e-16").sides
    (4, 4)
    """
    match = re.fullmatch(r"([a-z0-9]+)-(\d+)", name) if isinstance(name, str) else None
    if match is None or match[1] not in CHIPS or int(match[2]) == 0:
        if not isinstance(name, str):
            raise TypeError(NOT_A_MACHINE.format(got=short(name)))
        known = ", ".join(f"{chip}-N" for chip in CHIPS)
        raise ValueError(UNKNOWN.format(got=name, known=known, hint=_hint(name)))
    chip, count = CHIPS[match[1]], int(match[2])
    slices = _SLICES.get(chip.name)
    if slices is not None and count not in slices:
        sizes = ", ".join(map(str, slices))
        raise ValueError(NO_SUCH_SLICE.format(count=count, chip=chip.name, sizes=sizes))
    if chip.platform == "cuda" and count > chip.node and count % chip.node:
        raise ValueError(NOT_A_NUMBER_OF_GPUS.format(name=name, node=chip.node))
    return Machine(chip, count)


def machine_of(mesh: Mesh) -> Machine:
    """Returns the machine that the devices of a mesh belong to."""
    device = mesh.devices.flat[0]
    for chip in CHIPS.values():
        if device.device_kind == chip.kind or (chip.platform == "cpu" and device.platform == "cpu"):
            return Machine(chip, mesh.size)
    known = ", ".join(repr(chip.kind) for chip in CHIPS.values())
    raise ValueError(UNKNOWN_DEVICES.format(kind=device.device_kind, known=known))


def _hint(name: str) -> str:
    """Returns what somebody may have meant by the name of a machine."""
    google = re.fullmatch(r"v5litepod-(\d+)|v5e:?(\d+)", name)
    if google:
        return f' Say "v5e-{google[1] or google[2]}".'
    if re.fullmatch(r"[a-z0-9]+", name) and name in CHIPS:
        return f' Say how many: "{name}-8".'
    lower = name.lower()
    return f' Say "{lower}".' if lower != name and lower.partition("-")[0] in CHIPS else ""


def _tpus(machine: Machine) -> list[Any]:
    require("libtpu", "plan-tpu", f"A plan for {machine.name}")
    _check_libtpu()
    if jax.default_backend() != "tpu":
        for name, value in _LIBTPU.items():
            os.environ.setdefault(name, value)
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if machine.count == 1:  # a slice has whole hosts unless it says otherwise
        options["chips_per_host_bounds"] = (1, 1, 1)
    if machine.chip.name == "v4":  # otherwise there is a device for each core
        options["chip_config_name"] = "megacore"
    name = f"{machine.chip.name}:{_SLICES[machine.chip.name][machine.count]}"
    return list(topologies.get_topology_desc(name, platform="tpu", **options).devices)


def _check_libtpu() -> None:
    """Raises `ImportError` if libtpu is not the one that this version of JAX was released with."""
    try:
        found, needs = importlib.metadata.version("libtpu"), importlib.metadata.requires("jax") or []
    except importlib.metadata.PackageNotFoundError:  # a copy that no package manager knows
        return
    for text in needs:
        pinned = re.match(r"libtpu==([\d.]+)\.\*", text)
        if pinned and not f"{found}.".startswith(f"{pinned[1]}."):
            raise ImportError(WRONG_LIBTPU.format(found=found, jax=jax.__version__, expected=f"{pinned[1]}.*"))


def _gpus(machine: Machine) -> list[Any]:
    if jax.default_backend() != "gpu":
        if importlib.util.find_spec("jax_cuda12_plugin"):  # which JAX 0.10 was the last to have
            _check_plugin("jax-cuda12-plugin")
        else:
            require("jax_cuda13_plugin", "plan-gpu", f"A plan for {machine.name}")
            _check_plugin("jax-cuda13-plugin")
    from jax.experimental import topologies

    description = pathlib.Path(__file__).with_name("gpus") / f"{machine.chip.name}.textproto"
    hosts, each = max(machine.count // machine.chip.node, 1), min(machine.count, machine.chip.node)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=description.read_text(encoding="utf-8"), topology=f"1x{hosts}x{each}"
    )
    return list(topology.devices)


def _check_plugin(package: str) -> None:
    """Raises `ImportError` if the CUDA plugin is that of another version of jaxlib."""
    try:
        found, jaxlib = importlib.metadata.version(package), importlib.metadata.version("jaxlib")
    except importlib.metadata.PackageNotFoundError:
        return
    if found != jaxlib:
        raise ImportError(WRONG_PLUGIN.format(jaxlib=jaxlib, package=package, found=found))


def _cpus(machine: Machine) -> list[Any]:
    here = jax.devices("cpu")
    if len(here) < machine.count:
        raise ValueError(TOO_FEW_CPUS.format(name=machine.name, count=machine.count, here=len(here)))
    return here[: machine.count]


def compiler_options(machine: Machine, quick: bool) -> dict[str, Any]:
    """Returns the options with which a step is compiled for a machine that is not here."""
    if machine.chip.platform == "tpu" and quick:
        return {"exec_time_optimization_effort": -1.0}
    if machine.chip.platform == "cuda":
        options: dict[str, Any] = {"xla_gpu_autotune_level": 0}  # which would run kernels
        for name in ("nvidia.cuda_nvcc", "nvidia.cu13"):
            found = importlib.util.find_spec("nvidia") and importlib.util.find_spec(name)
            if found and found.submodule_search_locations:
                options["xla_gpu_cuda_data_dir"] = next(iter(found.submodule_search_locations))
        return options
    return {}
