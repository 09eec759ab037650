"""Targets: what the program at this point is compiled for, which need not be the machine that compiles it.

A *target* is a platform, the compute capability of its GPUs, and the number of devices that share a program. It follows
from the first of these that says something: the devices of the mesh the program is under, a `compiling_for` block, the
devices of the arrays it computes with, and JAX's default backend. The last one is a guess, because a traced function
can still be lowered for another platform; `lowered_on` then leaves the choice to the lowering.
"""

import contextlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import AbstractDevice, AbstractMesh, Mesh

from nnx.core.trace import is_tracer
from nnx.sharding.meshes import current_mesh

T = TypeVar("T")

PLATFORMS = ("any", "cpu", "gpu", "tpu", "interpreter")
UNKNOWN_PLATFORM = "compiling_for: expected one of the platforms {known}, got {got!r}."

# The compute capability of GPUs that are not here; a GPU that is here knows its own.
_CAPABILITIES = {
    **{"V100": "7.0", "T4": "7.5", "A100": "8.0", "A30": "8.0", "A10": "8.6", "A10G": "8.6", "A40": "8.6"},
    **{"L4": "8.9", "L40": "8.9", "L40S": "8.9", "H100": "9.0", "H200": "9.0", "H20": "9.0", "GH200": "9.0"},
    **{"B200": "10.0", "GB200": "10.0", "B300": "10.3", "GB300": "10.3"},
}


class Target(NamedTuple):
    """What a program is compiled for.

    Attributes:
        platform: "cpu", "gpu" or "tpu"; "any" for a program that must run on all of them, and "interpreter" where
            kernels of GPUs and TPUs are interpreted, in tests.
        capability: the compute capability of an NVIDIA GPU, as in "9.0"; "" if it is not known.
        devices: the number of devices that share the program.
        certain: whether this is known, and not only what JAX does by default.
    """

    platform: str
    capability: str
    devices: int
    certain: bool

    @property
    def major(self) -> int:
        """The first number of the compute capability; 0 if there is none."""
        major = self.capability.partition(".")[0]
        return int(major) if major.isdigit() else 0

    @property
    def interpreted(self) -> bool:
        """Whether kernels are interpreted."""
        return self.platform == "interpreter"

    @property
    def triton_obstacle(self) -> str | None:
        """The reason why Pallas cannot compile a GPU kernel for this target; None if it can."""
        # JAX 0.11 announced that Pallas will lose its Triton backend.
        if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
            return "this version of JAX has no Triton backend"
        if self.interpreted:
            return None
        if self.platform != "gpu":
            return f"it needs an NVIDIA GPU, and the platform is {self.platform!r}"
        if self.major < 8:
            return f"it needs compute capability 8.0, and the GPU has {self.capability!r}"
        return None


def target(*arrays: Any) -> Target:
    """Returns what the program at this point is compiled for.

    Args:
        *arrays: the arrays it computes with: concrete ones, tracers or `jax.ShapeDtypeStruct`s.
    """
    mesh = current_mesh()
    found = _of_mesh(mesh)
    if found is None:
        found = next(filter(None, map(_of_array, arrays)), None)
    if found is not None:
        return found
    platform, kind, capability = _default_device()
    devices = jax.device_count() if mesh is None or mesh.empty else mesh.size
    return Target(platform, _capability(platform, kind) if capability is None else capability, devices, certain=False)


@contextlib.contextmanager
def compiling_for(platform: str, device_kind: str = "") -> Iterator[None]:
    """Says what programs that are traced inside of a `with` block are compiled for.

    JAX keeps the traces made in such a block apart from those made outside of it. Under a mesh with devices the block
    has no effect, because they decide.

    Args:
        platform: "cpu", "gpu" (also "cuda" and "rocm"), "tpu"; "any" for several of them; or "interpreter".
        device_kind: the kind of device, as `device.device_kind` has it: "NVIDIA H100 80GB HBM3", "TPU v5 lite". By
            default, that of the default device if it is of this platform.

    >>> from nnx.sharding.target import compiling_for, target
    >>> with compiling_for("gpu", "NVIDIA H100 80GB HBM3"):
    ...     target().platform, target().capability
    ('gpu', '9.0')
    """
    name = "gpu" if platform in ("cuda", "rocm") else platform
    if name not in PLATFORMS:
        raise ValueError(UNKNOWN_PLATFORM.format(known=", ".join(PLATFORMS), got=platform))
    around = jax.sharding.get_abstract_mesh()
    if around.abstract_device is not None and not around.empty:
        yield
        return
    here, kind, _ = _default_device()
    device = AbstractDevice(device_kind or (kind if here == name else ""), None, name)
    axes = tuple(around.shape.values()), tuple(around.axis_names), tuple(around.axis_types)
    with jax.sharding.use_abstract_mesh(AbstractMesh(*axes, abstract_device=device)):
        yield


def lowered_on(
    at: Target, kernel: Callable[..., T], otherwise: Callable[..., T], *arrays: Any, platform: str | None = None
) -> T:
    """Runs a kernel that is for one platform only, and something else if the program is lowered for another one.

    Args:
        at: the target at this point.
        kernel: the function of the arrays that runs on the platform.
        otherwise: a function with the same results for all other platforms.
        *arrays: the arguments.
        platform: the platform of the kernel; by default, that of the target, for which it was chosen.
    """
    platform = at.platform if platform is None else platform
    if at.certain and at.platform != "any":
        return kernel(*arrays) if at.platform == platform else otherwise(*arrays)
    return jax.lax.platform_dependent(*arrays, default=otherwise, **{_lowering_name(platform): kernel})


def _lowering_name(platform: str) -> str:
    return "cuda" if platform == "gpu" else platform


def _of_mesh(mesh: Any) -> Target | None:
    """Returns the target that a mesh or a `compiling_for` block implies; None if neither has devices."""
    around = jax.sharding.get_abstract_mesh()
    mesh = around if mesh is None else mesh
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else mesh.abstract_device
    return None if device is None else _of_device(device, max(mesh.size, 1))


def _of_array(array: Any) -> Target | None:
    """Returns the target that an array implies; None for a tracer of an array on a single device."""
    if is_tracer(array):
        mesh = jax.typeof(array).sharding.mesh  # empty unless the array is on a mesh
        device = mesh.abstract_device
        return None if device is None else _of_device(device, max(mesh.size, 1))
    sharding = getattr(array, "sharding", None)
    if sharding is None or isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        return None
    devices = sharding.device_set
    return _of_device(next(iter(devices)), len(devices))


def _of_device(device: Any, devices: int) -> Target:
    platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        capability = _capability(platform, device.device_kind)
    return Target(platform, str(capability), devices, certain=True)


def _default_device() -> tuple[str, str, str | None]:
    """Returns platform, kind and compute capability of the device on which JAX puts new arrays."""
    config: Any = jax.config
    default = config.jax_default_device
    if default is None:
        platform = jax.default_backend()
    else:
        platform = default if isinstance(default, str) else default.platform
    platform = "gpu" if platform in ("cuda", "rocm") else platform
    if platform != "gpu":
        return platform, "", None
    device = jax.devices()[0] if default is None or isinstance(default, str) else default
    return platform, getattr(device, "device_kind", ""), getattr(device, "compute_capability", None)


def _capability(platform: str, kind: str) -> str:
    """Returns the compute capability of a kind of GPU; "" if it is not known."""
    if platform != "gpu":
        return ""
    if jax.default_backend() == "gpu" and getattr(jax.devices()[0], "device_kind", None) == kind:
        return str(getattr(jax.devices()[0], "compute_capability", ""))
    return next((_CAPABILITIES[word] for word in re.split(r"[^A-Za-z0-9]+", kind) if word in _CAPABILITIES), "")
