"""Our Modules as `flax.nnx` modules. This file imports Flax; `nnx.bridge.to_flax` imports it when it is called."""

from typing import Any

import flax.nnx as fx

from nnx.bridge.flax_variables import to_flax_variable
from nnx.core.context import context
from nnx.core.module.dict_sequence import accepts_ctx
from nnx.core.module.modes import set_mode
from nnx.core.module.module import Module
from nnx.core.state.state import State


class ToFlax(fx.Module):
    """One of our Modules as a Flax module: its variables are Flax's Variables, at the same paths.

    `deterministic` is the mode of all layers, which Flax's `train()` and `eval()` set; None leaves it to the Module.
    """

    def __init__(self, module: Module, rngs: fx.Rngs | None):
        state, self.moduledef = Module.partition(module)
        self.paths = tuple(state)
        self.rngs = rngs
        self.deterministic: bool | None = None
        for path, leaf in state.items():
            owner, name = self._owner(path)
            setattr(owner, name, to_flax_variable(leaf))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the Module, and keeps what changes in it; `rngs` become its Context."""
        rngs = kwargs.pop("rngs", self.rngs)
        module: Any = self.merge()
        if self.deterministic is not None:
            set_mode(module, not self.deterministic)
        if accepts_ctx(module) and "ctx" not in kwargs and rngs is not None:
            keys = {name: stream() for name, stream in rngs.items()}
            if "default" in keys and "dropout" not in keys:
                keys["dropout"] = rngs.dropout()  # which is the default stream, as for layers of Flax
            kwargs["ctx"] = context(**keys)
        out = module(*args, **kwargs)
        for path, leaf in Module.get_state(module).items():
            owner, name = self._owner(path)
            held = getattr(owner, name, None)
            if not isinstance(held, fx.Variable):
                setattr(owner, name, to_flax_variable(leaf))
            elif held.get_value() is not leaf.value:
                held.set_value(leaf.value)
        return out

    def merge(self) -> Module:
        """Returns the Module with the present values."""
        held = {path: getattr(*self._owner(path)) for path in self.paths}
        values = {path: leaf.get_value() if isinstance(leaf, fx.Variable) else leaf for path, leaf in held.items()}
        return self.moduledef.merge(State(values))

    def _owner(self, path: str) -> tuple[Any, str]:
        """Returns the object that holds what is at a path, and its name there."""
        *parents, name = path.split("/")
        owner: Any = self
        for parent in parents:
            if not hasattr(owner, parent):
                setattr(owner, parent, fx.Dict())
            owner = getattr(owner, parent)
        return owner, name
