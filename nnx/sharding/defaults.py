"""Default axis names: the names a Module class declares for the axes of its Variables and of those below it.

A class can have an attribute (or property) `logical_axes`, a mapping from relative path to axis names:

    logical_axes = {"up/kernel": ("embed", "mlp"), "up/bias": ("mlp",)}

The names describe the array's last axes, so they remain correct when a scan or vmap stacks the layer. They apply only
to Variables whose `sharding` metadata are None. If an outer and an inner class both name a Variable, the outer class
wins. Without rules they have no effect. Instead of names, an entry can be an `AxesOf`: the Variable then *follows*
another one and takes its names, wherever those come from. Optimizer state follows its parameters.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from nnx.core.module.attributes import set_spec
from nnx.core.module.module import Module
from nnx.core.state.moduledef import ModuleDef, key_of
from nnx.core.state.updates import check_levels
from nnx.core.structure.flat import flat_of
from nnx.core.structure.structure import GraphKey
from nnx.core.structure.walk import number_modules
from nnx.core.variables.variables import Spec
from nnx.sharding.axes import DefaultAxes, aligned_names, axis_names, taken_over

M = TypeVar("M", bound=Module)


class AxesOf(NamedTuple):
    """An entry of `logical_axes` that takes the names of another Variable.

    Attributes:
        source: the path of the other Variable, relative to the Module that declares the entry.
        rank: the number of axes of the other Variable's array.
        axes: the axis of the other array for each axis of this one; None where it has no counterpart (`matching_axes`).
    """

    source: str
    rank: int
    axes: tuple[int | None, ...]


def default_axes(model: Any) -> dict[str, DefaultAxes]:
    """Returns the default names in a Module or ModuleDef, by canonical path.

    Explicit names are not among them, but a Variable that follows one with explicit names takes those.
    """
    if isinstance(model, ModuleDef):
        module, key = model.merge(), key_of(model)
    else:
        module, key = model, flat_of(model).key
    paths = key.layout.paths
    found: dict[str, DefaultAxes] = {}
    followers: list[tuple[int, int, AxesOf]] = []
    for path, inner in Module.named_modules(module):  # outer Modules come first
        prefix = f"{path}/" if path else ""
        for relative, names in _declared(inner).items():
            cell = key.find(prefix + relative)
            if cell is None:
                continue
            if not isinstance(names, AxesOf):
                found.setdefault(paths[cell], DefaultAxes(axis_names(names)))
            elif (source := key.find(prefix + names.source)) is not None:
                followers.append((cell, source, names))
    for cell, source, link in followers:
        kind = key.kinds[source]
        explicit = kind.metadata.get("sharding") if type(kind) is Spec else None
        names = current_names(explicit, found.get(paths[source]))
        if names is not None:
            whole = aligned_names(names, link.rank)
            found[paths[cell]] = taken_over(whole + (None,) * (link.rank - len(whole)), link.axes)
    return found


def current_names(sharding: Any, default: DefaultAxes | None) -> Any:
    """Returns the names that apply to a Variable: its explicit ones if it has any, else the default."""
    explicit = sharding is not None and not isinstance(sharding, DefaultAxes)
    return sharding if explicit or default is None else default


def _declared(module: Any) -> Mapping[str, Any]:
    declared = inspect.getattr_static(type(module), "logical_axes", None)
    if isinstance(declared, property):
        declared = module.logical_axes
    return declared if isinstance(declared, Mapping) else {}


def name_axes(module: M) -> M:
    """Writes the default axis names of the layers into the `sharding` metadata of Variables that have none, in place.

    Everything made from the Module afterwards (gradients, optimizer state, averages) has the names as well.
    `nnx.shard` and `nnx.init_sharded` do this automatically.

    Args:
        module: the Module to change.

    Returns:
        The same Module.

    Raises:
        TraceContextError: the Module was made at another trace level.

    >>> class Scale(nnx.Module):
    ...     logical_axes = {"scale": ("embed",)}
    ...     def __init__(self):
    ...         self.scale = nnx.Param(jnp.ones(4))
    >>> nnx.name_axes(Scale()).variable("scale").sharding
    ('embed',)
    """
    for owner, name, spec, names in _unnamed(module):
        set_spec(owner, name, Spec.of(spec.type, {**spec.metadata, "sharding": names}))
    return module


def name_whole_axes(roots: Iterable[Module], known: Iterable[tuple[Any, str]]) -> None:
    """Writes default names into the metadata as explicit ones, with one entry per axis.

    A transform that is about to stack Variables does this for those its body made, so that the name of the new axis
    can be inserted among them.

    Args:
        roots: the Modules to walk.
        known: the Variables that the body did not make, as `(module, name)`; they keep their metadata.
    """
    skipped = {(id(owner), name) for owner, name in known}
    for root in roots:
        for owner, name, spec, names in _unnamed(root):
            rank = getattr(owner.__dict__[name], "ndim", None)
            if rank is not None and (id(owner), name) not in skipped:
                whole = tuple(aligned_names(names, rank))
                set_spec(owner, name, Spec.of(spec.type, {**spec.metadata, "sharding": whole}))


def _unnamed(module: Any) -> list[tuple[Any, str, Spec, DefaultAxes]]:
    """Returns the Variables whose metadata lack their default names, as `(owner, attribute, spec, names)`."""
    key: GraphKey = flat_of(module).key
    defaults = default_axes(module)
    modules = number_modules((module,)).modules
    check_levels(modules, "naming the axes")
    found = []
    for path, (at, name, spec) in zip(key.layout.paths, key.cells, strict=True):
        if path in defaults and type(spec) is Spec and "sharding" in spec.metadata:
            sharding = spec.metadata["sharding"]
            names = current_names(sharding, defaults[path])
            if names is not sharding and names != sharding:
                found.append((modules[at], name, spec, names))
    return found
