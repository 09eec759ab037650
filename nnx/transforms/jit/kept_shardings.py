"""State stays where it is: what a jitted function writes back has the sharding of what it replaces.

On automatic mesh axes the compiler decides how results are split. Left alone, it may split a replicated parameter
because its moments are split (ZeRO-1): memory and communication change after the first step, and the second step is
compiled again for the new shardings. So a function is traced with the shardings of its cells, and constrains what it
writes back to them. State in host memory (`nnx.on_host`) is written back there as well.

Only cells over several devices have a sharding to keep. A cell is free (None) if it is on one device, if its value is
not one array, or if the mesh has explicit axes, where the type of a value already says how it is split.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import is_
from typing import Any

from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

KeptShardings = tuple[NamedSharding | None, ...]


def shardings_to_keep(cells: Sequence[Any]) -> KeptShardings:
    """Returns for every cell the sharding to keep, or None."""
    return tuple(map(_sharding_to_keep, map(_sharding, cells)))


def _sharding(value: Any) -> Any:
    # A traced value has no sharding to keep: the function around decides.
    return None if isinstance(value, Tracer) else getattr(value, "sharding", None)


def _sharding_to_keep(sharding: Any) -> NamedSharding | None:
    if (
        type(sharding) is not NamedSharding
        or sharding.num_devices == 1
        or AxisType.Explicit in sharding.mesh.axis_types
    ):
        return None
    # P("data", None) and P("data") mean the same, but are not equal. So is P("data", "model") if the mesh axis
    # "model" has one device, and JAX returns the shorter form.
    spec = [_without_trivial_axes(entry, sharding.mesh.shape) for entry in sharding.spec]
    while spec and spec[-1] is None:
        spec.pop()
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def _without_trivial_axes(entry: Any, sizes: Mapping[str, int]) -> Any:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return entry
    axes = tuple(axis for axis in (entry if isinstance(entry, tuple) else (entry,)) if sizes[axis] > 1)
    return None if not axes else axes[0] if len(axes) == 1 else axes


def output_shardings(given: Sequence[Any] | None, kept: KeptShardings, hooks: Collection[int]) -> list[Any]:
    """Returns how to split what is written back to each cell; None where the compiler decides.

    Args:
        given: the sharding that `in_shardings` has for each cell, which takes precedence.
        kept: the shardings of the cells.
        hooks: the cells with a hook, which places their values itself (`with_logical_partitioning`).
    """
    chosen = [None if i in hooks else sharding for i, sharding in enumerate(kept)]
    if given is None:
        return chosen
    return [own if wanted is None else wanted for wanted, own in zip(given, chosen, strict=True)]


class ShardedFunction:
    """A jitted function of cells on several devices: one trace for each set of shardings it is called with.

    JAX traces once for all shardings on automatic axes, so the shardings that are part of a trace have to be
    compared here. In the steady state every sharding is the very object that the last call returned.

    Args:
        make: a function that returns a new jitted function, which will be traced with the shardings of its first call.
        kept, jitted: the first function, and the shardings it was traced with.
    """

    def __init__(self, make: Callable[[], Any], kept: KeptShardings, jitted: Any):
        self._make = make
        self._functions: dict[KeptShardings, Any] = {kept: jitted}
        self._last: tuple[list[Any], Any] = ([], jitted)  # one tuple, because another thread may replace it

    def at(self, cells: Sequence[Any]) -> Any:
        """Returns the function for cells that are placed like these."""
        shardings = [*map(_sharding, cells)]
        known, jitted = self._last
        if len(known) == len(shardings) and all(map(is_, known, shardings)):
            return jitted
        kept = tuple(map(_sharding_to_keep, shardings))
        jitted = self._functions.get(kept)
        if jitted is None:
            jitted = self._functions[kept] = self._make()
        self._last = (shardings, jitted)
        return jitted

    def __call__(self, cells: Any, *rest: Any) -> Any:
        return self.at(cells)(cells, *rest)

    def lower(self, cells: Any, *rest: Any) -> Any:
        return self.at(cells).lower(cells, *rest)

    def trace(self, cells: Any, *rest: Any) -> Any:
        return self.at(cells).trace(cells, *rest)

    def clear_cache(self) -> None:
        for jitted in self._functions.values():
            jitted.clear_cache()
