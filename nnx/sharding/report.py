"""The sharding report: how a model would be split over a mesh, before anything is allocated."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from nnx.core.absent import is_here
from nnx.core.sizes import size_in_bytes
from nnx.sharding.constraints import constrained_names
from nnx.sharding.findings import find, size_text
from nnx.sharding.meshes import current_mesh
from nnx.sharding.rules import AnyMesh, Rules, RulesLike, as_rules, memory_kind_of, resolve
from nnx.sharding.specs import map_named


@dataclasses.dataclass(frozen=True)
class ShardingRow:
    """One array of a model on a mesh.

    Attributes:
        path: the path of the array in the model.
        shape: the shape of the whole array.
        dtype: the dtype of the array.
        logical_axes: the axis names.
        mesh_axes: the mesh axes the rules chose for them.
        shard_shape: the shape of the part on one device.
        bytes_per_device: the size of that part.
        errors: the reasons why the array cannot be placed like this.
        notes: the axes a rule would split but could not: not divisible, or the mesh axis was already claimed.
        memory_kind: the memory that an `nnx.on_host` rule chooses; None for that of the device.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    logical_axes: tuple[Any, ...]
    mesh_axes: PartitionSpec
    shard_shape: tuple[int, ...]
    bytes_per_device: int
    errors: tuple[str, ...]
    notes: tuple[str, ...]
    memory_kind: str | None = None

    @property
    def bytes(self) -> int:
        """The size of the whole array."""
        return size_in_bytes(self.shape, self.dtype)


@dataclasses.dataclass(frozen=True)
class ShardingReport:
    """A report of how a model is split over a mesh; its `str` is a table.

    Attributes:
        rows: the arrays, one row each.
        mesh_shape: the size of every mesh axis; empty if there is no mesh.
        rules: the rules that were tried.
        findings: what deserves a look: rules, mesh axes and names in constraints that have no effect, large arrays that
            every device holds as a whole, and pairs of `Linear`s that tensor parallelism gathers between.
        device_memory: the bytes of memory of one device, if known.
    """

    rows: tuple[ShardingRow, ...]
    mesh_shape: Mapping[str, int]
    rules: Rules
    findings: tuple[str, ...] = ()
    device_memory: int | None = None

    @property
    def bytes(self) -> int:
        """The size of the whole model."""
        return sum(row.bytes for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """The size of the part that each device holds in its own memory."""
        return sum(row.bytes_per_device for row in self.rows if row.memory_kind in (None, "device"))

    @property
    def host_bytes_per_device(self) -> int:
        """The size of the part of each device that is kept in the memory of the host (`nnx.on_host`)."""
        return sum(row.bytes_per_device for row in self.rows) - self.bytes_per_device

    @property
    def free_per_device(self) -> int | None:
        """The memory of a device that is left for gradients, activations and buffers, negative if the model does not
        fit; None if the memory is not known."""
        return None if self.device_memory is None else self.device_memory - self.bytes_per_device

    @property
    def errors(self) -> dict[str, tuple[str, ...]]:
        """The reasons why `nnx.shard` would fail, by path."""
        return {row.path: row.errors for row in self.rows if row.errors}

    @property
    def notes(self) -> dict[str, tuple[str, ...]]:
        """The axes that a rule would split but could not, by path."""
        return {row.path: row.notes for row in self.rows if row.notes}

    def __str__(self) -> str:
        header = ("path", "shape", "dtype", "logical axes", "mesh axes", "per device", "")
        lines = _aligned([header, *(_cells(row) for row in self.rows)])
        rule = "─" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:], rule, self._summary(), *self._remarks()])

    def _summary(self) -> str:
        total, devices = size_text(self.bytes), math.prod(self.mesh_shape.values())
        if not self.mesh_shape:
            return f"{total} in {len(self.rows)} arrays; no mesh, so nothing is split"
        axes = " × ".join(f"{name}={size}" for name, size in self.mesh_shape.items())
        parts = f"{size_text(self.bytes_per_device)} on each"
        if self.host_bytes_per_device:
            parts += f" and {size_text(self.host_bytes_per_device)} for each on its host"
        places = "1 device" if devices == 1 else f"{devices} devices"
        return f"{total} in {len(self.rows)} arrays on {places} ({axes}): {parts}{self._fit(devices)}"

    def _fit(self, devices: int) -> str:
        if self.device_memory is None or self.free_per_device is None:
            return ""
        memory = size_text(self.device_memory)
        if self.free_per_device >= 0:
            return f" of {memory}, which leaves {size_text(self.free_per_device)} for everything else"
        least = math.ceil(self.bytes / self.device_memory)
        if least > devices:
            return f", but they have {memory}: even fully split, this takes at least {least} devices"
        return f", but they have {memory}: fully split, {size_text(-(-self.bytes // devices))} on each would fit"

    def _remarks(self) -> list[str]:
        errors = [f"! {path}: {text}" for path, texts in self.errors.items() for text in texts]
        notes = [f"* {path}: {text}" for path, texts in self.notes.items() for text in texts]
        return [*errors, *notes, *(f"? {text}" for text in self.findings)]


def sharding_report(
    model: Any, mesh: AnyMesh | None = None, rules: RulesLike = None, *, device_memory: int | None = None
) -> ShardingReport:
    """Reports how a model would be split over a mesh: names, mesh axes, bytes per device, and what could not be split.

    Nothing is allocated or placed. The model can be abstract (`nnx.eval_shape`), and so can the mesh
    (`jax.sharding.AbstractMesh`), so its devices need not exist. Misfits do not raise; they are listed in the report.

    Args:
        model: a Module, State, TrainState or other pytree, of arrays or `jax.ShapeDtypeStruct`s.
        mesh: the mesh to plan for; by default that of `jax.set_mesh` or of a `with mesh:` block.
        rules: the rules to use; by default those of `logical_axis_rules`.
        device_memory: the bytes of memory of one device, to see what fits; by default what the devices of the mesh
            say, if it has devices and they know.

    Returns:
        The report, whose `str` is a table.

    >>> model = nnx.Dict(w=nnx.Param(jax.ShapeDtypeStruct((1024, 512), jnp.float32), ("embed", "mlp")))
    >>> report = nnx.sharding_report(model, jax.sharding.AbstractMesh((8,), ("model",)), [("mlp", "model")])
    >>> report.bytes_per_device
    262144
    """
    rules = as_rules(rules)
    mesh = current_mesh(mesh)
    mesh_shape = {} if mesh is None else dict(mesh.shape)
    rows: list[ShardingRow] = []

    def add(path: str, names: tuple[Any, ...], leaf: Any, container: Any) -> None:
        applied = rules if mesh_shape else ()
        memory = memory_kind_of(path, leaf, container, applied)
        rows.append(_row(path, names, leaf, memory, applied, mesh_shape))

    map_named(add, model)
    findings = find(rows, mesh_shape, rules, constrained_names(rules)) if mesh_shape else []
    memory = _memory_of(mesh) if device_memory is None else device_memory
    return ShardingReport(tuple(rows), mesh_shape, rules, tuple(findings), memory)


def _row(
    path: str, names: tuple[Any, ...], leaf: Any, memory: str | None, rules: Rules, mesh_shape: Mapping[str, int]
) -> ShardingRow:
    shape, dtype = tuple(jax.numpy.shape(leaf)), jax.dtypes.result_type(leaf) if _is_number(leaf) else leaf.dtype
    resolution = resolve(names, rules, shape, mesh_shape or None)
    spec, errors, notes = resolution.spec, resolution.errors, resolution.notes
    part = () if errors else tuple(spec)
    shard_shape = tuple(size // _parts(entry, mesh_shape) for size, entry in zip(shape, part, strict=False))
    shard_shape += shape[len(shard_shape) :]
    on_each = size_in_bytes(shard_shape, dtype)
    return ShardingRow(path, shape, dtype, names, spec, shard_shape, on_each, errors, notes, memory)


def _memory_of(mesh: Any) -> int | None:
    """Returns the memory of the smallest device of this process; None if it is not known, as on a CPU."""
    if not isinstance(mesh, jax.sharding.Mesh) or not is_here(mesh):
        return None
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    return min((entry["bytes_limit"] for entry in stats if "bytes_limit" in entry), default=None)


def _is_number(leaf: Any) -> bool:
    return not hasattr(leaf, "dtype")


def _parts(entry: Any, mesh_shape: Mapping[str, int]) -> int:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return 1
    return math.prod(mesh_shape[axis] for axis in (entry if isinstance(entry, tuple) else (entry,)))


def _cells(row: ShardingRow) -> tuple[str, ...]:
    return (
        row.path,
        "×".join(map(str, row.shape)) or "scalar",
        str(row.dtype),
        _axes(row.logical_axes),
        _axes(tuple(row.mesh_axes)),
        size_text(row.bytes_per_device),
        " ".join(["!" if row.errors else "*" if row.notes else "", row.memory_kind or ""]).strip(),
    )


def _axes(names: Sequence[Any]) -> str:
    shown = ["–" if name is None else "+".join(name) if isinstance(name, tuple) else str(name) for name in names]
    return ", ".join(shown) or "–"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
