"""How layers make their parameters: initializers and their defaults, metadata, and default axis names.

Initializers are used in the constructor and not kept, so that two layers built by the same code are equal.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.variables.variables import ContainerMetadata, Param
from nnx.nn.initializers import ones, zeros
from nnx.nn.support.draws import fan_in_initializer

InitializerLike = Callable[..., Any]
"""An initializer, or one wrapped by `nnx.with_metadata` or `nnx.with_partitioning`."""
AxisNames = Mapping[str, tuple[str | None, ...]]
"""Default logical axis names: the path of a Variable within its layer, and one name (or `None`) per axis."""

NO_METADATA: Mapping[str, Any] = MappingProxyType({})

RANDOM_INIT_NEEDS_CONTEXT = (
    "{layer} has an initializer that may draw random numbers, but no Context was passed. "
    "Pass one to the constructor: `{layer}(..., ctx=nnx.context(0))`."
)


default_kernel_init: InitializerLike = fan_in_initializer(1.0, "truncated_normal")
default_bias_init: InitializerLike = zeros()
default_scale_init: InitializerLike = ones()

_KEYLESS = (zeros, zeros(), ones, ones())


@functools.cache
def _default_for(
    in_axes: tuple[int, ...], out_axes: tuple[int, ...], batch_axes: tuple[int, ...], gain: float
) -> InitializerLike:
    return fan_in_initializer(gain, "truncated_normal", in_axes, out_axes, batch_axes)


def kernel_init_for(
    initializer: InitializerLike,
    in_axes: tuple[int, ...],
    out_axes: tuple[int, ...],
    batch_axes: tuple[int, ...] = (),
    *,
    gain: float = 1.0,
) -> InitializerLike:
    """Returns the default initializer of kernels for a kernel with these axes; any other initializer unchanged.

    The default assumes that the last two axes are inputs and outputs. Other initializers have their own arguments for
    that.

    Args:
        initializer: the initializer the layer was given.
        in_axes: the axes of the kernel that are summed over.
        out_axes: the axes that become axes of the output; those in neither are summed over as well.
        batch_axes: the axes along which every entry is a kernel by itself.
        gain: the size of those axes divided by the number of their entries that one output sums over.
    """
    return _default_for(in_axes, out_axes, batch_axes, gain) if initializer is default_kernel_init else initializer


def one_per_entry(initializer: InitializerLike, entries: int) -> InitializerLike:
    """Returns an initializer that calls this one for every entry of a new first axis, each with its own key."""
    if initializer in _KEYLESS:
        return lambda key, shape, dtype: initializer(key, (entries, *shape), dtype)

    def drawn(key: Any, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        metadata: list[Mapping[str, Any]] = []

        def one(key: Any) -> Any:
            value = initializer(key, shape, dtype)
            if isinstance(value, ContainerMetadata):
                metadata.append(value.metadata)
                value = value.value
            return value

        values = jax.vmap(one)(jax.random.split(key, entries))
        return ContainerMetadata(values, metadata[0]) if metadata else values

    return drawn


def initial_value(
    layer: object, initializer: InitializerLike, ctx: Context | None, shape: tuple[int, ...], dtype: DTypeLike
) -> Any:
    """Calls `initializer` for `shape` and `dtype`, with a key from the stream "params".

    Zeros and ones draw no key, so that layers that only use those can be built without a Context.

    Raises:
        ValueError: if a key is needed and there is no Context.
    """
    if initializer in _KEYLESS:
        return initializer(None, shape, dtype)
    if ctx is None:
        raise ValueError(RANDOM_INIT_NEEDS_CONTEXT.format(layer=type(layer).__name__))
    return initializer(ctx.make_rng("params"), shape, dtype)


def make_param(
    layer: Any,
    initializer: InitializerLike,
    ctx: Context | None,
    shape: tuple[int, ...],
    metadata: Mapping[str, Any] = NO_METADATA,
) -> jax.Array:
    """Makes a `Param` for `layer`, stored in its `param_dtype`; to a type checker it is the array itself."""
    return Param(initial_value(layer, initializer, ctx, shape, layer.param_dtype), **metadata)
