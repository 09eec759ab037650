"""Variables of Flax and ours: which type corresponds to which, and states in the layout of the other side."""

from collections.abc import Iterator, Mapping
from typing import Any

from nnx.bridge.trees import own
from nnx.core.extras import require
from nnx.core.module.module import Module
from nnx.core.state.state import State
from nnx.core.variables.collection_names import snake_case
from nnx.core.variables.on_demand import var
from nnx.core.variables.variables import BatchStat, Cache, Intermediate, Node, Param, Variable
from nnx.nn.lora import LoRAParam

TYPES: dict[str, type[Variable[Any]]] = {
    "LoRAParam": LoRAParam,  # first: in Flax, it is a kind of Param
    "Param": Param,
    "BatchStat": BatchStat,
    "Cache": Cache,
    "Intermediate": Intermediate,
}
"""Our types by the name of Flax's. A Variable of another type belongs to the collection with its name."""
AXIS_NAMES = ("out_sharding", "sharding_names", "sharding")


def flax_nnx(use: str) -> Any:
    """Imports `flax.nnx`."""
    return require("flax.nnx", "bridge", use)


def to_ours(variable: Any) -> Any:
    """Returns a Variable of Flax as one of ours, with its axis names; any other value as it is."""
    fx = flax_nnx("A Variable of Flax")
    if not isinstance(variable, fx.Variable):
        return own(variable)
    metadata, value = variable.get_metadata(), own(variable.get_value())
    axes = next((metadata[name] for name in AXIS_NAMES if metadata.get(name) is not None), None)
    for name, ours in TYPES.items():
        if isinstance(variable, getattr(fx, name)):
            return ours(value, sharding=axes)
    return var(_collection(fx, type(variable)), value, axes)


def to_flax_variable(leaf: Any) -> Any:
    """Returns one of our Variables as one of Flax's, with its axis names; any other leaf as its value."""
    fx = flax_nnx("A Variable of Flax")
    if not isinstance(leaf, Variable):
        return leaf.value if isinstance(leaf, Node) else leaf
    name = next((name for name, ours in TYPES.items() if isinstance(leaf, ours)), None)
    collection = type(leaf).collection
    known = {"rng_key": fx.RngKey, "rng_count": fx.RngCount}
    cls = getattr(fx, name) if name else known.get(collection)
    cls = cls or fx.variable_type_from_name(collection, allow_register=True)
    # Their constructor would place the value on the mesh; it is where it belongs already.
    axes = {} if leaf.sharding is None else {"out_sharding": tuple(leaf.sharding), "eager_sharding": False}
    return cls(leaf.value, **axes)


def _collection(fx: Any, cls: type) -> str:
    try:
        return fx.variable_name_from_type(cls)
    except ValueError:  # it is not registered, and asking does not register it
        return snake_case(cls.__name__)


def flat_state(state: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields what a state of Flax or a nested dict holds, with its path as Flax has it."""
    fx = flax_nnx("A state of Flax")
    yield from fx.to_flat_state(fx.State(state) if isinstance(state, Mapping) else state)


def to_flax_state(module: Module | State) -> Any:
    """Returns the state of a Module as a `flax.nnx.State`, for tools and checkpoints of the Flax world.

    Variables keep their types, paths and axis names. Numbers in paths are ints, as in Flax.

    Args:
        module: the Module, or a State of it.
    """
    fx = flax_nnx("nnx.bridge.to_flax_state")
    state = module if isinstance(module, State) else Module.get_state(module)
    return fx.from_flat_state(
        [
            (tuple([int(name) if name.isdecimal() else name for name in path.split("/")]), to_flax_variable(leaf))
            for path, leaf in state.items()
        ]
    )


def from_flax_state(state: Any) -> State:
    """Returns a `flax.nnx.State`, or a nested dict of arrays, as a State, for `model.load_state(state)`.

    Args:
        state: what `flax.nnx.state(model)` or `to_flax_state` returned, or a checkpoint of it holds.
    """
    return State({"/".join(map(str, path)): to_ours(leaf) for path, leaf in flat_state(state)})
