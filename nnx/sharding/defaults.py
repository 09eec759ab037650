"""Default axis names: what a Module class says of the axes of its Variables, and of those below it.

A class may have an attribute (or property) `logical_axes`, a mapping from relative path to axis names:

    logical_axes = {"up/kernel": ("embed", "mlp"), "up/bias": ("mlp",)}

The names speak of the array's last axes, so that they stay right when a scan or vmap stacks the layer. They count only
for Variables whose `sharding` metadata are None; where an outer and an inner class name the same Variable, the outer
one knows better. Without rules they mean nothing at all.
"""

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from nnx.core.graph import flat_of, number_modules
from nnx.core.module import Module
from nnx.core.moduledef import ModuleDef
from nnx.core.refs import Ref
from nnx.core.updates import check_levels
from nnx.core.variables import Spec
from nnx.sharding.axes import DefaultAxes, axis_names

M = TypeVar("M", bound=Module)


def default_axes(model: Any) -> dict[str, DefaultAxes]:
    """The default names in a Module or ModuleDef, by canonical path; explicit metadata are not looked at."""
    if isinstance(model, ModuleDef):
        module, key = model.merge(), model._key
    else:
        module, key = model, flat_of(model).key
    paths = key.layout.paths
    found: dict[str, DefaultAxes] = {}
    for path, inner in module.named_modules():  # outer Modules come first
        for relative, names in _declared(inner).items():
            cell = key.find(f"{path}/{relative}" if path else relative)
            if cell is not None:
                found.setdefault(paths[cell], DefaultAxes(axis_names(names)))
    return found


def _declared(module: Any) -> Mapping[str, Any]:
    declared = inspect.getattr_static(type(module), "logical_axes", None)
    if isinstance(declared, property):
        declared = module.logical_axes
    return declared if isinstance(declared, Mapping) else {}


def name_axes(module: M) -> M:
    """Writes the default axis names of the layers into the `sharding` metadata of Variables that have none, in place.

    What is made from the Module afterwards (gradients, optimizer state, averages) then carries the names too.
    `nnx.shard` and `nnx.init_sharded` do this themselves.

    Returns:
      The Module.

    >>> class Scale(nnx.Module):
    ...     logical_axes = {"scale": ("embed",)}
    ...     def __init__(self):
    ...         self.scale = nnx.Param(jnp.ones(4))
    >>> nnx.name_axes(Scale()).variable("scale").sharding
    ('embed',)
    """
    key = flat_of(module).key
    names = default_axes(module)
    modules, _, _, _ = number_modules((module,))
    check_levels(modules, "naming the axes")
    for path, (at, name, spec) in zip(key.layout.paths, key.cells, strict=True):
        if path in names and is_unnamed(spec):
            _set_spec(modules[at], name, Spec.of(spec.type, {**spec.metadata, "sharding": names[path]}))
    return module


def is_unnamed(spec: Any) -> bool:
    """Whether a cell of this kind is a Variable without axis names of its own."""
    return type(spec) is Spec and "sharding" in spec.metadata and spec.metadata["sharding"] is None


def _set_spec(owner: Any, name: str, spec: Spec) -> None:
    kind = owner._nnx_info.kinds[name]
    if type(kind) is Ref:
        kind._spec = spec
        kind.version.changed()
    else:
        owner._nnx_info.kinds[name] = spec
        owner._nnx_info.changed()
