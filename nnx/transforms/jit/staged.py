"""`nnx.jit(f).trace(...)` and `.lower(...)`: the stages of ahead-of-time compilation."""

from typing import Any

from nnx.transforms.jit.compiled import Compiled, arguments_of

OTHER_STRUCTURE = "{name} was compiled for arguments of a different structure."


class Staged:
    """A stage of compilation: JAX's own object, whose `compile()` returns a function that takes Modules again.

    Args:
        owner: the `Jit` it belongs to.
        compiled: the signature it is for.
        arrange: a function from cells, data and forks to the arguments JAX knows.
        stage: JAX's object.
    """

    def __init__(self, owner: Any, compiled: Compiled, arrange: Any, stage: Any):
        self._owner, self._compiled, self._arrange, self._stage = owner, compiled, arrange, stage

    @staticmethod
    def of(owner: Any, compiled: Compiled, name: str, *values: Any) -> "Staged":
        """Traces or lowers (`name` says which) a compiled function for the values of a call: cells, data and forks."""
        jitted, arrange = compiled.jitted, arguments_of
        if compiled.donation is not None:
            variant = compiled.donation.variant(*values)
            jitted, arrange = variant.jitted, variant.arrange
        return Staged(owner, compiled, arrange, getattr(jitted, name)(*arrange(*values)))

    def lower(self, *args: Any, **kwargs: Any) -> "Staged":
        """Returns the next stage, as in JAX."""
        return Staged(self._owner, self._compiled, self._arrange, self._stage.lower(*args, **kwargs))

    def compile(self, *args: Any, **kwargs: Any) -> "Staged":
        """Returns the compiled function; call it with arguments of the same structure and shapes."""
        return Staged(self._owner, self._compiled, self._arrange, self._stage.compile(*args, **kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call, compiled = self._owner.prepare(args, kwargs)
        if compiled is not self._compiled:
            raise TypeError(OTHER_STRUCTURE.format(name=self._owner.name))
        values = ([*call.cells(), *compiled.captured.values()], tuple(call.data), tuple(call.forks()))
        return compiled.finish(call, self._stage(*self._arrange(*values)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)
