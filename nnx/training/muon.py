"""`nnx.muon_dimensions`: which parameters Muon trains, and which of their axes are rows and columns.

Muon orthogonalizes the update of a *hidden matrix*, the weights between two layers of features. Which parameters those
are is known to the layers: the kernel of a convolution has four axes and is one matrix, a bias in a stack of layers has
two axes and is none, and an embedding is a table. Everything that is no hidden matrix is for AdamW.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from optax.contrib import MuonDimensionNumbers

from nnx.core.module.module import Module
from nnx.core.state.filters import Filter, to_predicate
from nnx.core.state.state import State
from nnx.core.structure.flat import flat_of
from nnx.core.structure.walk import number_modules
from nnx.core.variables.variables import Node, Param, raw_value, spec_of
from nnx.nn.conv import Conv, ConvTranspose
from nnx.nn.linear import Linear, LinearGeneral
from nnx.nn.moe.moe import MoE
from nnx.sharding.axes import DefaultAxes, axis_names
from nnx.sharding.defaults import current_names, default_axes


def muon_dimensions(model: Module, *, where: Filter = ...) -> Callable[[State], State]:
    """Returns which parameters of a model Muon trains, in the form that `optax.contrib.muon` takes.

    Those are the kernels of linear layers, attention, convolutions and experts, and in your own Modules the parameters
    with two axes. The axes of stacked layers and of experts are batch axes: every matrix is orthogonalized by itself.
    AdamW trains the rest: embeddings, norms, biases, routers, what has a "vocab" axis, such as the head of a language
    model, and what `where` does not select.

    Args:
        model: the Module to train; it is neither changed nor kept.
        where: a filter for the parameters that Muon may train, to leave out the head of a classifier, for example.

    Returns:
        A function for the argument `muon_weight_dimension_numbers`.

    >>> import optax
    >>> ctx = nnx.context(0)
    >>> model = nnx.Sequence([nnx.Embed(8, 4, ctx=ctx), nnx.Linear(4, 4, ctx=ctx), nnx.Linear(4, 3, ctx=ctx)])
    >>> dimensions = nnx.muon_dimensions(model, where=nnx.Not(nnx.PathMatches("2/**")))
    >>> tx = optax.contrib.muon(2e-2, adam_learning_rate=3e-3, muon_weight_dimension_numbers=dimensions)
    >>> optimizer = nnx.Optimizer(model, tx)
    >>> [path for path, found in dimensions(model.filter(nnx.Param)).items() if found.value is not None]
    ['1/kernel']
    """
    matrices = _matrices(model, to_predicate(where))

    def dimensions(params: State) -> State:
        # In the containers of these parameters: `nnx.shard` may have written axis names into them since.
        return params.map(lambda path, param: _boxed(param, matrices.get(path)))

    return dimensions


def _boxed(param: Any, value: Any) -> Any:
    return spec_of(param).box(value) if isinstance(param, Node) else value


def _matrices(model: Module, is_selected: Callable[[str, Any], bool]) -> dict[str, MuonDimensionNumbers]:
    """Returns the dimensions of the hidden matrices, by canonical path."""
    key, defaults, modules = flat_of(model).key, default_axes(model), number_modules((model,)).modules
    owners: dict[str, list[tuple[Any, str]]] = {}  # tied weights have several
    for (module, name), cell in key.cell_numbers.items():
        owners.setdefault(key.layout.paths[cell], []).append((modules[module], name))
    found = {}
    for path, param in Module.filter(model, Param).items():
        names = current_names(spec_of(param).metadata.get("sharding"), defaults.get(path))
        rank = jnp.ndim(raw_value(param))
        parts, *others = [_parts(module, name, names, rank) for module, name in owners[path]]
        if parts is None or any(other != parts for other in others):
            continue
        if "vocab" in axis_names(names) or not is_selected(path, param):
            continue
        summed, kept = parts
        first = rank - summed - kept
        found[path] = MuonDimensionNumbers(tuple(range(first, rank - kept)), tuple(range(rank - kept, rank)))
    return found


def _parts(module: Any, name: str, names: Any, rank: int) -> tuple[int, int] | None:
    """Returns how many axes of a matrix are summed over and how many it results in; None for other parameters.

    These are the last axes; those before them count matrices.
    """
    if isinstance(module, MoE):
        return (1, 1) if name in ("gate", "up", "down") else None
    if isinstance(module, (Linear, LinearGeneral, Conv, ConvTranspose)):
        if name != "kernel":
            return None
        if isinstance(module, LinearGeneral):
            return len(module.in_features), len(module.out_features)
        return (1, 1) if isinstance(module, Linear) else (len(module.kernel_size) + 1, 1)
    if type(module).__module__.startswith("nnx.nn."):
        return None
    # In a user's Module. Declared names describe an array without the axes along which it has been stacked.
    return (1, 1) if (len(names) if isinstance(names, DefaultAxes) else rank) == 2 else None
