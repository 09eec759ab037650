"""`nnx.jit(f).trace(...)` and `.lower(...)`: the stages of ahead-of-time compilation."""

from typing import Any

from nnx.transforms.engine.call import Call
from nnx.transforms.jit.compiled import Compiled
from nnx.transforms.jit.donation import Variant, arguments_of
from nnx.transforms.jit.interrupts import uninterrupted

OTHER_STRUCTURE = "{name} was compiled for arguments of a different structure."


class Staged:
    """A stage of compilation: JAX's own object, whose `compile()` returns a function that takes Modules again.

    Args:
        owner: the `Jit` it belongs to.
        compiled: the signature it is for.
        variant: how it donates, if it does.
        stage: JAX's object.
    """

    def __init__(self, owner: Any, compiled: Compiled, variant: Variant | None, stage: Any):
        self._owner, self._compiled, self._variant, self._stage = owner, compiled, variant, stage

    @staticmethod
    def of(owner: Any, compiled: Compiled, name: str, *values: Any) -> "Staged":
        """Traces or lowers (`name` says which) a compiled function for the values of a call: cells, data and forks."""
        if compiled.donation is None:
            return Staged(owner, compiled, None, getattr(compiled.jitted, name)(*arguments_of(*values)))
        return Staged(owner, compiled, *compiled.donation.stage(name, *values))

    def lower(self, *args: Any, **kwargs: Any) -> "Staged":
        """Returns the next stage, as in JAX."""
        return Staged(self._owner, self._compiled, self._variant, self._stage.lower(*args, **kwargs))

    def compile(self, *args: Any, **kwargs: Any) -> "Staged":
        """Returns the compiled function; call it with arguments of the same structure and shapes."""
        return Staged(self._owner, self._compiled, self._variant, self._stage.compile(*args, **kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call, compiled = self._owner.prepare(args, kwargs)
        if compiled is not self._compiled:
            raise TypeError(OTHER_STRUCTURE.format(name=self._owner.name))
        if self._variant is None:
            values = (compiled.cells_of(call), tuple(call.data), tuple(call.forks()))
            return compiled.finish(call, self._stage(*arguments_of(*values)))
        return uninterrupted(self._donate, self._variant, call)

    def _donate(self, variant: Variant, call: Call) -> Any:
        cells = self._compiled.cells_of(call)  # in this one list: holders are counted
        arguments, _ = variant.arguments(cells, tuple(call.data), tuple(call.forks()), call.flat)
        return self._compiled.finish(call, self._stage(*arguments))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)
