"""Initial values whose programs are shared by layers of different shapes.

The constructor of a model draws an array per kernel, and XLA takes far longer to compile a random program for a new
shape than to run it. A *block* is a flat array of random values whose size is one of `BLOCK_SIZES`: one program per
size, distribution and dtype, with the standard deviation as an argument. With JAX's default generator, element i of a
draw depends on the key and on i alone, so the front of a block, reshaped, has the very bits of a draw of that shape.

Blocks are used while nothing is being traced, where JAX does nothing out of the ordinary (`is_ordinary`). Everywhere
else, and for a shape that is drawn again and again, a program for that shape alone is compiled.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.nn.initializers import Initializer, normal, truncated_normal, variance_scaling

from nnx.core.trace import NO_GUARD, is_eager, is_tracer, transfer_guard
from nnx.sharding.meshes import current_mesh

BLOCK_SIZES = (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
LARGEST = BLOCK_SIZES[-1]
"""The number of elements up to which values come from blocks or numpy. Larger ones are not worth a second copy."""

OWN_PROGRAM_AFTER = 1024
"""How often a shape is cut from blocks before it gets a program of its own, which takes one call instead of three. By
then, cutting has taken about as long as compiling does."""
FILLED_BY_PROGRAM_AFTER = 256
"""The same for zeros and ones, whose programs are compiled faster."""

DTYPES = frozenset(np.dtype(name) for name in ("float32", "float16", "bfloat16"))
"""The dtypes of values that come from blocks or numpy. float64 depends on a setting, and others are rare."""
_TRUNCATED = 0.87962566103423978
"""The standard deviation of the standard normal distribution, truncated to (-2, 2)."""


class DefaultInitializer:
    """An initializer that layers have by default: that of JAX, compiled, and drawn from blocks where possible.

    Args:
        initializer: the initializer of JAX, for shapes and places that blocks are not for.
        distribution: "normal", "truncated_normal" or "uniform", as in `jax.nn.initializers.variance_scaling`.
        deviation: a function of a shape and a dtype that returns what the drawn values are multiplied by, of that
            dtype; None for shapes that the initializer refuses.
    """

    __slots__ = ("compiled", "distribution", "deviation", "_drawn", "__weakref__")

    def __init__(
        self,
        initializer: Initializer,
        distribution: str,
        deviation: Callable[[tuple[int, ...], np.dtype[Any]], Any],
    ):
        self.compiled = jax.jit(initializer, static_argnums=(1, 2))
        self.distribution = distribution
        self.deviation = deviation
        self._drawn: dict[Any, int] = {}  # how often each shape and dtype was cut from a block

    def __call__(self, key: Any, shape: tuple[int, ...], dtype: Any = None) -> Array:
        """Draws an array; the bits are the same wherever it is called."""
        drawn = self._from_block(key, shape, dtype)
        return self.compiled(key, shape, dtype) if drawn is None else drawn

    def _from_block(self, key: Any, shape: Any, dtype: Any) -> Array | None:
        """Returns the value, cut from a block; None if a block cannot be used here."""
        if dtype not in DTYPES or type(shape) is not tuple or not (is_eager() and is_ordinary(key)):
            return None
        size = math.prod(shape)
        drawn = self._drawn.get((shape, dtype), 0)
        if not 0 < size <= LARGEST or drawn >= OWN_PROGRAM_AFTER:
            return None
        deviation = self.deviation(shape, dtype)
        if deviation is None:
            return None
        self._drawn[shape, dtype] = drawn + 1
        block_size = next(block_size for block_size in BLOCK_SIZES if size <= block_size)
        block = _block(key, deviation, self.distribution, block_size, dtype)
        return owned(np.asarray(block)[:size].reshape(shape))


def owned(values: np.ndarray[Any, Any]) -> Array:
    """Returns a copy of numpy values as an array that owns its memory.

    `jax.device_put` may return a view instead. A view of a block would keep all of it in memory, and no view can be
    updated in place by a donated step.
    """
    return jnp.array(values)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _block(key: Array, deviation: Any, distribution: str, size: int, dtype: Any) -> Array:
    # These are the expressions of jax.nn.initializers with the deviation as a tracer. The order of their products
    # differs from one version of JAX to another, and decides the last bit, so they are not written out here.
    if distribution == "uniform":
        return jax.random.uniform(key, (size,), dtype, -1) * deviation
    make = normal if distribution == "normal" else truncated_normal
    return make(deviation)(key, (size,), dtype)


def is_ordinary(key: Any = None) -> bool:
    """Returns whether an array may be made in plain Python, where JAX would put what a jitted function returns.

    It is not if there is a mesh, or a guard against transfers, if functions are not jitted, if the key is committed to
    a device, or if it belongs to a generator whose draws depend on their shape.
    """
    return (
        transfer_guard() in NO_GUARD
        and _fetch_guard() in NO_GUARD
        and current_mesh() is None
        and not _setting("jax_disable_jit")
        and (key is None or _has_independent_elements(key))
    )


def _setting(name: str) -> Any:
    return getattr(jax.config, name)  # by name, because type checkers do not know the settings


def _fetch_guard() -> Any:
    return getattr(jax.transfer_guard_device_to_host, "value", None)


def _has_independent_elements(key: Any) -> bool:
    """Returns whether element i of a draw depends on this key and i alone; if so, the key has no device of its own."""
    if not isinstance(key, Array) or is_tracer(key) or key.committed or not _setting("jax_threefry_partitionable"):
        return False
    if key.dtype == np.uint32:  # a key of the older form
        return key.shape == (2,) and _setting("jax_default_prng_impl") == "threefry2x32"
    return key.dtype == _threefry_dtype() and key.shape == ()


@functools.cache
def _threefry_dtype() -> Any:
    return jax.random.key(0, impl="threefry2x32").dtype


def fan_in_initializer(
    scale: float,
    distribution: str,
    in_axis: int | Sequence[int] = -2,
    out_axis: int | Sequence[int] = -1,
    batch_axis: int | Sequence[int] = (),
) -> DefaultInitializer:
    """Returns the default initializer that is `jax.nn.initializers.variance_scaling` with the mode "fan_in"."""

    def deviation(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        if in_axis == -2 and len(shape) < 2:
            return None
        others = math.prod(_sizes(shape, out_axis)) * math.prod(_sizes(shape, batch_axis))
        variance = np.asarray(scale / (math.prod(shape) / others), dtype)
        if distribution == "uniform":
            return np.sqrt(np.asarray(3, dtype) * variance)
        root = np.sqrt(variance)
        return root / np.asarray(_TRUNCATED, dtype) if distribution == "truncated_normal" else root

    made: Any = variance_scaling(scale, "fan_in", distribution, in_axis, out_axis, batch_axis)  # pyright: ignore
    return DefaultInitializer(made, distribution, deviation)


def normal_initializer(deviation: float) -> DefaultInitializer:
    """Returns the default initializer that is `jax.nn.initializers.normal`."""
    return DefaultInitializer(normal(deviation), "normal", lambda shape, dtype: np.asarray(deviation, dtype))


def _sizes(shape: tuple[int, ...], axes: int | Sequence[int]) -> list[int]:
    return [shape[axis] for axis in ((axes,) if isinstance(axes, int) else axes)]
