"""Our Modules for trainers and tools that expect those of Flax; it is imported when one is made."""

from collections.abc import Callable
from typing import Any

from nnx.core.context import Context
from nnx.core.extras import require
from nnx.core.module.module import Module


def to_flax(module: Module, rngs: Any = None) -> Any:
    """Returns a Module as a `flax.nnx` module, for trainers that take those.

    The Flax module has its own variables, with the values of now. Calling it changes them as the Module would change
    its own; `.merge()` returns the Module with the present values. Static attributes that a call changes are dropped.

    Args:
        module: the Module.
        rngs: the `flax.nnx.Rngs` whose streams become the Context of a call. A call can bring its own: `rngs=`.
    """
    require("flax.nnx", "bridge", "nnx.bridge.to_flax")
    from nnx.bridge.flax_module import ToFlax

    return ToFlax(module, rngs)


def to_linen(
    build: Callable[[Context], Module], *, streams: tuple[str, ...] = ("dropout",), name: str | None = None
) -> Any:
    """Returns a Flax Linen module that runs a Module: `to_linen(lambda ctx: nnx.Linear(2, 3, ctx=ctx))`.

    Its variables are in the collections of their types, with nested names as in the Module. `init` builds the Module;
    `apply` takes `run=`, the name of another method than `__call__`, and `flags=` for the flags of the Context.

    Args:
        build: the function that makes the Module from a Context.
        streams: the streams of random numbers that a call may draw from, besides "params" when it initializes.
        name: the name of the Linen module in the one around it.
    """
    require("flax.linen", "bridge", "nnx.bridge.to_linen")
    from nnx.bridge.linen_module import ToLinen

    return ToLinen(build, streams, name=name)
