"""Models of Flax NNX as Modules."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from nnx.bridge.call import ForeignCall
from nnx.bridge.flax_variables import flat_state, flax_nnx, to_ours
from nnx.bridge.foreign import Foreign, Ran
from nnx.core.statics.statics import Keyed, own_copy

NOT_FLAX = "nnx.bridge.from_flax takes an instance of flax.nnx.Module; got {got}."
MODES = ("deterministic", "use_running_average")  # the mode arguments that Flax has as attributes


@dataclasses.dataclass(frozen=True)
class FlaxAdapter:
    """Runs a Flax module, given its graphdef and the paths in it, as Flax has them."""

    cls: type
    graphdef: Keyed  # with its key: a graphdef has hundreds of parts, and is never changed
    paths: tuple[tuple[Any, ...], ...]

    def run(self, call: ForeignCall, variables: Mapping[str, Any]) -> Ran:
        """Runs a method of a copy of the module."""
        fx = flax_nnx("A model of Flax")
        given = [(path, variables[name_of(path)].value) for path in self.paths if name_of(path) in variables]
        module = fx.merge(self.graphdef.value, fx.from_flat_state(given))
        modes = {name: mode for name in MODES if (mode := call.mode(name)) is not None}
        fx.Module.set_attributes(module, raise_if_not_found=False, **modes)
        reseeded = _reseed(fx, module, call)
        before = fx.graphdef(module)
        function = getattr(module, call.method)
        out = function(*call.args, **call.kwargs_for(function, len(call.args)))
        sown = fx.pop(module, fx.Intermediate)  # not part of the structure, which every first call would change
        graphdef, state = fx.split(module)
        new = [*flat_state(state), *flat_state(sown)]
        updates = {name_of(path): to_ours(leaf) for path, leaf in new if path not in reseeded}
        return Ran(out, updates, None if graphdef == before else _adapter(module, graphdef, state))

    def has_method(self, name: str) -> bool:
        """Whether the class of the module has a method of this name that is not one of every Flax module."""
        base = flax_nnx("A model of Flax").Module
        return not name.startswith("_") and callable(getattr(self.cls, name, None)) and not hasattr(base, name)


def name_of(path: tuple[Any, ...]) -> str:
    """Returns a path of Flax as one of ours."""
    return "/".join(map(str, path))


def _adapter(module: Any, graphdef: Any, state: Any) -> FlaxAdapter:
    return FlaxAdapter(type(module), Keyed(own_copy(graphdef)), tuple([path for path, _ in flat_state(state)]))


def _reseed(fx: Any, module: Any, call: ForeignCall) -> set[tuple[Any, ...]]:
    """Seeds the random state of the module from the Context, and returns the paths of what that has changed.

    Flax keeps streams inside its modules, with the name they had where they were made. One made by `Rngs(0)` is called
    "default" whatever it is for, which most often is dropout. Streams that the Context lacks go on as they are.
    """
    if call.ctx is None:
        return set()
    keys, found = call.keys(), list(flat_state(fx.state(module, fx.RngState)))
    if "dropout" in keys:
        keys.setdefault("default", keys["dropout"])
    seeded: dict[tuple[Any, ...], Any] = {}
    for number, (path, variable) in enumerate(found):
        key = keys.get(variable.get_metadata().get("tag"))
        if key is None:
            continue
        value = variable.get_value()
        if isinstance(variable, fx.RngKey):
            key = jax.random.fold_in(key, number)  # layers made from one stream draw different numbers
            value = jax.random.split(key, value.shape) if value.shape else key
        else:
            value = value * 0
        seeded[path] = variable.replace(value)
    fx.update(module, fx.from_flat_state(seeded.items()))
    return set(seeded)


def from_flax(module: Any) -> Foreign:
    """Returns a Module that runs a `flax.nnx` module.

    Its Variables keep their paths, types and axis names; what is shared stays shared. A type of your own becomes the
    collection of its name. The module itself is not changed, and later changes to it are not seen.

    In a call with a Context, its streams seed those of the same name in the model; a stream "default", which is what
    `flax.nnx.Rngs(0)` makes, takes its keys from "dropout" if there is no "default". Other random state of Flax is
    state like any other: it is advanced by each call and saved with the model.

    Args:
        module: the Flax module.
    """
    fx = flax_nnx("nnx.bridge.from_flax")
    if not isinstance(module, fx.Module):
        raise TypeError(NOT_FLAX.format(got=type(module).__name__))
    copy = fx.clone(module)
    fx.pop(copy, fx.Intermediate)
    graphdef, state = fx.split(copy)
    return Foreign(_adapter(copy, graphdef, state), {name_of(path): to_ours(leaf) for path, leaf in flat_state(state)})
