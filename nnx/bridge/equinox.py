"""Models of Equinox as Modules."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from nnx.bridge.call import ForeignCall, parameters_of
from nnx.bridge.foreign import Foreign, Ran
from nnx.bridge.trees import is_array, own, path_of, put_back, take_out, value_at
from nnx.core.extras import require
from nnx.core.variables.variables import BatchStat, Node, Param

NOT_EQUINOX = "nnx.bridge.from_equinox takes an instance of eqx.Module; got {got}."


@dataclasses.dataclass(frozen=True)
class EquinoxAdapter:
    """Runs an Equinox Module.

    Attributes:
        module: the frame of the Module.
        state: the structure of its `eqx.nn.State`, if it has one.
        state_paths: the paths of the arrays of the State.
        call: a function to run in place of `__call__`.
        stream: the stream that the `key` is drawn from.
    """

    module: Any
    state: Any
    state_paths: tuple[str, ...]
    call: Callable[..., Any] | None
    stream: str

    def run(self, call: ForeignCall, variables: Mapping[str, Any]) -> Ran:
        """Runs a method, or the function `call` in place of `__call__`."""
        eqx = require("equinox", "bridge", "A model of Equinox")
        module = put_back(self.module, variables)
        inference = call.mode("inference")
        if inference is not None:
            module = eqx.nn.inference_mode(module, value=inference)
        is_replaced = self.call is not None and call.method == "__call__"
        function: Any = self.call if is_replaced else getattr(module, call.method)
        args = (module, *call.args) if is_replaced else call.args
        names = {parameter.name for parameter in parameters_of(function)}
        kwargs = call.kwargs_for(function, len(args))
        structure = self.state if "state" in names else None
        if structure is not None:
            kwargs.setdefault("state", structure.unflatten([value_at(variables, path) for path in self.state_paths]))
        if "key" in names and "key" not in kwargs and (key := call.key(self.stream)) is not None:
            kwargs["key"] = key
        out = function(*args, **kwargs)
        if structure is None:
            return Ran(out, {})
        out, state = out
        return Ran(out, dict(zip(self.state_paths, structure.flatten_up_to(state), strict=True)))

    def has_method(self, name: str) -> bool:
        """Whether the class of the Module has a method of this name."""
        return not name.startswith("_") and callable(getattr(type(self.module), name, None))


def from_equinox(
    module: Any, state: Any = None, *, call: Callable[..., Any] | None = None, stream: str = "dropout"
) -> Foreign:
    """Returns a Module that runs an Equinox Module.

    Its floating-point arrays are Params, other arrays are plain nodes, and the arrays of the `eqx.nn.State` are
    `nnx.BatchStat`s at the paths of their `eqx.nn.StateIndex`. `train()` and `eval()` set `inference` everywhere.

    Args:
        module: the Equinox Module.
        state: its `eqx.nn.State`, if it has one; both as `eqx.nn.make_with_state` returned them.
        call: a function `call(module, *args)` to run in place of the Module, for example under `jax.vmap`. It also gets
            the `state` and the `key` if it has arguments of these names; with a state, it returns `(out, new_state)`.
        stream: the stream of the Context that the `key` is drawn from. Without it, no key is passed.
    """
    eqx = require("equinox", "bridge", "nnx.bridge.from_equinox")
    if not isinstance(module, eqx.Module):
        raise TypeError(NOT_EQUINOX.format(got=type(module).__name__))
    frame, arrays = take_out(module, "model", is_array)
    trained = {path_of(key_path) for key_path, leaf in jax.tree_util.tree_leaves_with_path(module) if is_trained(leaf)}
    variables: dict[str, Any] = {path: Param(x) if path in trained else Node(x) for path, x in arrays.items()}
    structure, paths = None, ()
    if state is not None:
        leaves, structure = jax.tree.flatten(state)
        paths = _paths_of_state(eqx, module, state, variables)
        variables.update({path: BatchStat(own(value)) for path, value in zip(paths, leaves, strict=True)})
    frame = jax.tree.map(_one_marker, frame)
    return Foreign(EquinoxAdapter(frame, structure, paths, call, stream), variables)


def is_trained(leaf: Any) -> bool:
    """Whether Equinox takes a leaf for a parameter: it is an array of JAX that holds floating-point numbers."""
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _paths_of_state(eqx: Any, module: Any, state: Any, taken: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the paths of the arrays of a State: those of the indices in the model, as users know them."""
    leaves, structure = jax.tree.flatten(state)
    numbered = jax.tree.unflatten(structure, range(len(leaves)))
    paths = [f"state/{number}" for number in range(len(leaves))]  # of an index that is out of sight, in a function

    def is_index(value: Any) -> bool:
        return isinstance(value, eqx.nn.StateIndex)

    for key_path, index in jax.tree_util.tree_leaves_with_path(module, is_leaf=is_index):
        if is_index(index):
            for inner, number in jax.tree_util.tree_leaves_with_path(numbered.get(index)):
                paths[number] = path_of((*key_path, *inner))
    return tuple([f"{path}.state" if path in taken else path for path in paths])


_markers: dict[type, Any] = {}


def _one_marker(leaf: Any) -> Any:
    """Returns the same object for all of Equinox's markers of one class.

    `eqx.nn.Shared` puts a new object without content in place of each array that it ties. Compared by identity, it
    would keep two equal models from sharing a trace.
    """
    cls = type(leaf)
    has_identity = cls.__eq__ is object.__eq__ and not callable(leaf) and not getattr(leaf, "__dict__", None)
    return _markers.setdefault(cls, leaf) if has_identity and cls.__module__.startswith("equinox.") else leaf
