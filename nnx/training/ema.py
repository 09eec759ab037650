"""EMA: an exponential moving average of a model's parameters."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from nnx.core.module.dict_sequence import Dict
from nnx.core.module.module import Module
from nnx.core.module.variable_tree import variable_tree
from nnx.core.state.filters import Filter, check_wrt
from nnx.core.state.paths import listing
from nnx.core.state.state import State
from nnx.core.variables.variables import Node, Param, Variable, raw_value
from nnx.sharding.axes import DefaultAxes
from nnx.sharding.defaults import current_names, default_axes
from nnx.sharding.placement import whole_beside

T = TypeVar("T")
M = TypeVar("M", bound=Module)

OTHER_MODEL = """EMA.update: the parameters of the model are not those the EMA was made for ({changes}). Make a new \
nnx.EMA after changing the structure of a model."""
BAD_DECAY = "nnx.EMA: `decay` is a number from 0 to 1, or a function of the step; got {decay!r}."


class EmaState(Variable[T]):
    """An average kept by `nnx.EMA`. The collection "ema"."""

    __slots__ = ()
    collection = "ema"


class EMA(Module):
    """Averages the parameters of a model over its updates: `average = decay * average + (1 - decay) * value`.

    The averages start with the values the parameters have when the EMA is made, and are stored in at least float32.
    Integers are not averaged but copied.

    Args:
        model: the Module to average. The EMA does not hold on to it.
        decay: the weight of the old average in each update; a number, or a function of the number of updates so far.
        wrt: a filter that selects the parameters to average.

    Raises:
        ValueError: `decay` is not between 0 and 1.

    >>> model = nnx.Linear(2, 3, ctx=nnx.context(0))
    >>> ema = nnx.EMA(model, decay=0.9)
    >>> model.bias += 1
    >>> ema.update(model)
    >>> ema.averaged(model).bias
    Array([0.1, 0.1, 0.1], dtype=float32)
    """

    decay: float | Callable[[jax.Array], Any]
    wrt: Filter
    step: jax.Array
    average: Dict

    def __init__(self, model: Module, decay: float | Callable[[jax.Array], Any] = 0.999, *, wrt: Filter = Param):
        if not callable(decay) and not 0 <= decay <= 1:
            raise ValueError(BAD_DECAY.format(decay=decay))
        self.decay = decay
        self.wrt = tuple(wrt) if isinstance(wrt, list) else wrt
        check_wrt(wrt, Module.get_state(model).items(), "nnx.EMA")
        names = default_axes(model)  # asked now, because the model, and so its layers, are not kept
        selected = Module.filter(model, self.wrt)
        self.step = EmaState(whole_beside(jnp.zeros((), jnp.int32), selected))
        self.average = variable_tree((path, _start(leaf, names.get(path))) for path, leaf in selected.items())

    def update(self, model: Module) -> None:
        """Updates the averages with the current parameters of the model.

        Raises:
            ValueError: the model lacks a path that is averaged, or has gained one that `wrt` selects.
        """
        values, averages = Module.filter(model, self.wrt), Module.get_state(self.average)
        gone, new = [path for path in averages if path not in values], [path for path in values if path not in averages]
        if gone or new:
            parts = [f"{label}: {listing(paths)}" for label, paths in (("new", new), ("gone", gone)) if paths]
            raise ValueError(OTHER_MODEL.format(changes="; ".join(parts)))
        rate = 1 - (self.decay(self.step) if callable(self.decay) else self.decay)

        def mixed(path: str, old: Any) -> Any:
            return jax.tree.map(lambda a, x: _mix(a, x, rate), old.value, raw_value(values[path]))

        Module.update_state(self.average, averages.map(mixed))
        self.step += 1

    def averages(self, model: Module) -> State:
        """Returns the averages as a State for this model, with its Variable types, metadata and dtypes."""
        stored = Module.get_state(self.average)
        values = Module.filter(model, self.wrt)
        return State({path: _like(values[path], average.value) for path, average in stored.items() if path in values})

    def averaged(self, model: M) -> M:
        """Returns a copy of the model whose parameters are the averages."""
        copy: Any = Module.clone(model)
        Module.update_state(copy, self.averages(model))
        return copy


def _start(leaf: Any, names: DefaultAxes | None) -> Any:
    metadata = dict(leaf.metadata) if isinstance(leaf, Node) else {}
    metadata["sharding"] = current_names(metadata.get("sharding"), names)
    return EmaState(jax.tree.map(_widen, raw_value(leaf)), **metadata)


def _widen(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):  # an abstract model has an abstract average
        dtype = jnp.promote_types(x.dtype, jnp.float32) if jnp.issubdtype(x.dtype, jnp.inexact) else x.dtype
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    # A copy, because a step that donates the model's buffers must not delete the averages.
    return jnp.array(x, jnp.promote_types(x.dtype, jnp.float32))


def _mix(average: Any, x: Any, rate: Any) -> Any:
    x = jnp.asarray(x, average.dtype)
    if not jnp.issubdtype(average.dtype, jnp.inexact):
        return x
    return average + jnp.asarray(rate, average.real.dtype) * (x - average)


def _like(leaf: Any, average: Any) -> Any:
    value = jax.tree.map(lambda a, x: jnp.asarray(a, jnp.asarray(x).dtype), average, raw_value(leaf))
    return leaf.replace(value=value) if isinstance(leaf, Node) else value
