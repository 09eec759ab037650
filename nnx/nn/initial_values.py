"""How layers make the first values of their parameters: the default initialisers, and the keys they draw."""

from collections.abc import Callable
from typing import Any

import jax

from nnx.core.context import Context
from nnx.nn.initializers import Initializer, lecun_normal, ones, zeros

InitializerLike = Callable[..., Any]
"""An initialiser, or one wrapped by `nnx.with_metadata` or `nnx.with_partitioning`."""

RANDOM_INIT_NEEDS_CONTEXT = (
    "{layer} was given an initialiser that may draw random numbers, but no Context. "
    "Pass one to the constructor: `{layer}(..., ctx=nnx.context(0))`."
)


def compiled(initializer: Initializer) -> Initializer:
    """`initializer` as one compiled call per shape and dtype; for the defaults of layers, which are made at import."""
    return jax.jit(initializer, static_argnums=(1, 2))


default_kernel_init = compiled(lecun_normal())
default_bias_init = zeros()
default_scale_init = ones()

_KEYLESS = (zeros, zeros(), ones, ones())


def initial_value(
    layer: object, initializer: InitializerLike, ctx: Context | None, shape: tuple[int, ...], dtype: Any
) -> Any:
    """What `initializer` gives for `shape`; draws a key from the stream "params" only where it is needed."""
    if initializer in _KEYLESS:
        return initializer(None, shape, dtype)
    if ctx is None:
        raise ValueError(RANDOM_INIT_NEEDS_CONTEXT.format(layer=type(layer).__name__))
    return initializer(ctx.make_rng("params"), shape, dtype)
