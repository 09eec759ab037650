"""Layers that add randomness in training and do nothing otherwise: `Dropout`, `DropPath`, `GaussianNoise`.

The mode `deterministic` comes from the call, the instance or the Context's flag, in this order, and the random numbers
come from the Context passed to the call.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from nnx.core.context import Context
from nnx.core.module.module import Module
from nnx.nn.support.checks import shape_of
from nnx.nn.support.settings import compiled_body, resolve_mode
from nnx.sharding.explicit import result_sharding

RATE_OUT_OF_RANGE = "{layer}: `rate` is the probability of dropping, a number from 0 to 1, got {got!r}."
NEEDS_CONTEXT = (
    "{layer} draws random numbers when `deterministic` is False, but the call got no Context. "
    "Write `layer(x, ctx=ctx)` with `ctx = nnx.context(0, {stream}=1)`, or `deterministic=True`."
)
WRONG_BROADCAST_DIMS = "Dropout: broadcast_dims={dims} are axes of the input, and it has {ndim}: shape {shape}."
TOO_FEW_BATCH_AXES = (
    "DropPath expected an input with at least batch_dims={batch_dims} axes, got shape {shape}. "
    "For an unbatched input write `nnx.DropPath(rate, batch_dims=0)`."
)
NEGATIVE_STDDEV = "GaussianNoise: `stddev` must not be negative, got {got!r}."
NOT_FLOATS = (
    "GaussianNoise expected floating point numbers, got {got}. Convert the input first: `x.astype(jnp.float32)`."
)


def _checked_rate(layer: Module, rate: float) -> float:
    if not 0 <= rate <= 1:
        raise ValueError(RATE_OUT_OF_RANGE.format(layer=type(layer).__name__, got=rate))
    return rate


def draw_key(layer: Module, stream: str, ctx: Context | None) -> jax.Array:
    """Returns a key from the Context passed to a layer."""
    if ctx is None:
        raise ValueError(NEEDS_CONTEXT.format(layer=type(layer).__name__, stream=stream))
    return ctx.make_rng(stream)


@compiled_body
def _drop(x: jax.Array, key: jax.Array, *, rate: float, mask_shape: tuple[int, ...], rescale: bool) -> jax.Array:
    keep = 1.0 - rate
    if keep == 0.0:
        return jnp.zeros_like(x)  # also avoids a division by zero below, whose gradient would be NaN
    split = result_sharding((x, range(x.ndim)))
    mask = jax.random.bernoulli(key, keep, mask_shape, out_sharding=split if mask_shape == x.shape else None)
    mask = jnp.broadcast_to(mask, x.shape)
    if split is not None:
        mask = jax.sharding.reshard(mask, split)
    return jnp.where(mask, x / keep if rescale else x, jnp.zeros_like(x))


class Dropout(Module):
    """Sets entries to zero with probability `rate` and scales the others by `1 / (1 - rate)`; shape `(...) -> (...)`.

    Args:
        rate: the probability of dropping an entry.
        broadcast_dims: the axes along which entries are dropped together.
        deterministic: whether to return the input unchanged; `None` to decide in the call or by the Context.
        rng_collection: the name of the Context's stream to draw from.

    >>> layer = nnx.Dropout(0.5)
    >>> ctx = nnx.context(dropout=0, flags={"deterministic": False})
    >>> y = layer(jnp.ones((4, 8)), ctx=ctx)
    >>> sorted(set(y.ravel().tolist()))
    [0.0, 2.0]
    >>> bool((layer(jnp.ones(3), deterministic=True) == 1).all())
    True
    """

    rate: float
    broadcast_dims: tuple[int, ...]
    deterministic: bool | None
    rng_collection: str

    def __init__(
        self,
        rate: float,
        broadcast_dims: Sequence[int] = (),
        deterministic: bool | None = None,
        rng_collection: str = "dropout",
    ) -> None:
        self.rate = _checked_rate(self, rate)
        self.broadcast_dims = tuple(broadcast_dims)
        self.deterministic = deterministic
        self.rng_collection = rng_collection

    def __call__(
        self, inputs: jax.Array, *, deterministic: bool | None = None, ctx: Context | None = None
    ) -> jax.Array:
        """Drops entries of `inputs`.

        Args:
            inputs: an array of any shape.
            deterministic: the mode of this call; overrides the instance's and the Context's.
            ctx: the Context to draw from; its flag `deterministic` sets the mode when nothing else does.
        """
        if self.rate == 0.0 or resolve_mode(self, "deterministic", deterministic, ctx):
            return inputs
        mask_shape = list(shape_of(self, inputs))
        if any(not -len(mask_shape) <= axis < len(mask_shape) for axis in self.broadcast_dims):
            shape = tuple(mask_shape)
            raise ValueError(WRONG_BROADCAST_DIMS.format(dims=self.broadcast_dims, ndim=len(shape), shape=shape))
        for axis in self.broadcast_dims:
            mask_shape[axis] = 1
        if self.rate == 1.0:
            return jnp.zeros_like(inputs)  # nothing to draw
        key = draw_key(self, self.rng_collection, ctx)
        return _drop(inputs, key, rate=self.rate, mask_shape=tuple(mask_shape), rescale=True)


class DropPath(Module):
    """Stochastic depth: drops whole examples of a residual branch; shape `(batch, ...) -> (batch, ...)`.

    Args:
        rate: the probability of dropping an example.
        deterministic: whether to return the input unchanged; `None` to decide in the call or by the Context.
        rng_collection: the name of the Context's stream to draw from.
        batch_dims: the number of leading axes that are examples; 0 drops an unbatched input as a whole.
        rescale: whether to scale what is kept by `1 / (1 - rate)`.

    >>> layer = nnx.DropPath(0.5, deterministic=False)
    >>> y = layer(jnp.ones((6, 3)), ctx=nnx.context(dropout=0))
    >>> bool((y == y[:, :1]).all())
    True
    """

    rate: float
    deterministic: bool | None
    rng_collection: str
    batch_dims: int
    rescale: bool

    def __init__(
        self,
        rate: float,
        deterministic: bool | None = None,
        rng_collection: str = "dropout",
        *,
        batch_dims: int = 1,
        rescale: bool = True,
    ) -> None:
        self.rate = _checked_rate(self, rate)
        self.deterministic = deterministic
        self.rng_collection = rng_collection
        self.batch_dims = batch_dims
        self.rescale = rescale

    def __call__(
        self, inputs: jax.Array, *, deterministic: bool | None = None, ctx: Context | None = None
    ) -> jax.Array:
        """Drops examples of `inputs`; the arguments are those of `Dropout`."""
        if self.rate == 0.0 or resolve_mode(self, "deterministic", deterministic, ctx):
            return inputs
        if len(shape_of(self, inputs)) < self.batch_dims:
            raise ValueError(TOO_FEW_BATCH_AXES.format(batch_dims=self.batch_dims, shape=inputs.shape))
        mask_shape = inputs.shape[: self.batch_dims] + (1,) * (inputs.ndim - self.batch_dims)
        key = draw_key(self, self.rng_collection, ctx)
        return _drop(inputs, key, rate=self.rate, mask_shape=mask_shape, rescale=self.rescale)


# `stddev` is an argument, not a setting: changing the noise level during training does not recompile.
@jax.jit
def _add_noise(x: jax.Array, key: jax.Array, stddev: float) -> jax.Array:
    return x + jnp.asarray(stddev, x.dtype) * jax.random.normal(key, x.shape, x.dtype)


class GaussianNoise(Module):
    """Adds normal noise with standard deviation `stddev`; shape `(...) -> (...)`.

    Args:
        stddev: the standard deviation of the noise.
        deterministic: whether to return the input unchanged; `None` to decide in the call or by the Context.
        rng_collection: the name of the Context's stream to draw from.

    >>> layer = nnx.GaussianNoise(0.1)
    >>> layer(jnp.zeros((2, 3)), deterministic=False, ctx=nnx.context(dropout=0)).shape
    (2, 3)
    """

    stddev: float
    deterministic: bool | None
    rng_collection: str

    def __init__(self, stddev: float, deterministic: bool | None = None, rng_collection: str = "dropout") -> None:
        if stddev < 0:
            raise ValueError(NEGATIVE_STDDEV.format(got=stddev))
        self.stddev = stddev
        self.deterministic = deterministic
        self.rng_collection = rng_collection

    def __call__(
        self, inputs: jax.Array, *, deterministic: bool | None = None, ctx: Context | None = None
    ) -> jax.Array:
        """Adds noise to `inputs`; the arguments are those of `Dropout`."""
        if self.stddev == 0.0 or resolve_mode(self, "deterministic", deterministic, ctx):
            return inputs
        shape_of(self, inputs)
        if not jnp.issubdtype(inputs.dtype, jnp.inexact):
            raise ValueError(NOT_FLOATS.format(got=inputs.dtype))
        return _add_noise(inputs, draw_key(self, self.rng_collection, ctx), self.stddev)
