"""Layers that add randomness in training and nothing otherwise: `Dropout`, `DropPath`, `GaussianNoise`.

Each takes its mode, `deterministic`, from the call, else the instance, else the Context's flag; and its random numbers
from the Context given to the call.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from nnx.core.context import Context
from nnx.core.module import Module
from nnx.nn.modes import resolve_mode
from nnx.sharding.explicit import result_sharding

RATE_OUT_OF_RANGE = "{layer}: `rate` is the probability of dropping, a number from 0 to 1, got {got!r}."
NEEDS_CONTEXT = (
    "{layer} draws random numbers when `deterministic` is False, but the call got no Context. "
    "Write `layer(x, ctx=ctx)` with `ctx = nnx.context(0, {stream}=1)`, or `deterministic=True`."
)


def _check_rate(layer: Module, rate: float) -> float:
    if not 0 <= rate <= 1:
        raise ValueError(RATE_OUT_OF_RANGE.format(layer=type(layer).__name__, got=rate))
    return rate


def _key(layer: Module, stream: str, ctx: Context | None) -> Array:
    if ctx is None:
        raise ValueError(NEEDS_CONTEXT.format(layer=type(layer).__name__, stream=stream))
    return ctx.make_rng(stream)


@partial(jax.jit, static_argnames=("rate", "mask_shape", "rescale"))
def _drop(x: Array, key: Array, *, rate: float, mask_shape: tuple[int, ...], rescale: bool) -> Array:
    keep = 1.0 - rate
    if keep == 0.0:
        return jnp.zeros_like(x)
    split = result_sharding((x, range(x.ndim)))
    mask = jax.random.bernoulli(key, keep, mask_shape, out_sharding=split if mask_shape == x.shape else None)
    mask = jnp.broadcast_to(mask, x.shape)
    if split is not None:
        mask = jax.sharding.reshard(mask, split)
    return jnp.where(mask, x / keep if rescale else x, jnp.zeros_like(x))


class Dropout(Module):
    """Sets entries to zero with probability `rate` and scales the others by `1 / (1 - rate)`; shape `(...) -> (...)`.

    Args:
        rate: probability of dropping an entry.
        broadcast_dims: axes along which entries are dropped together.
        deterministic: if true, the input is returned as it is; `None` to decide in the call or by the Context.
        rng_collection: name of the Context's stream to draw from.

    >>> import nnx, jax.numpy as jnp
    >>> layer = nnx.Dropout(0.5)
    >>> ctx = nnx.context(dropout=0, flags={"deterministic": False})
    >>> y = layer(jnp.ones((4, 8)), ctx=ctx)
    >>> sorted(set(y.ravel().tolist()))
    [0.0, 2.0]
    >>> bool((layer(jnp.ones(3), deterministic=True) == 1).all())
    True
    """

    def __init__(
        self,
        rate: float,
        broadcast_dims: Sequence[int] = (),
        deterministic: bool | None = None,
        rng_collection: str = "dropout",
    ):
        self.rate = _check_rate(self, rate)
        self.broadcast_dims = tuple(broadcast_dims)
        self.deterministic = deterministic
        self.rng_collection = rng_collection

    def __call__(self, inputs: Array, *, deterministic: bool | None = None, ctx: Context | None = None) -> Array:
        if self.rate == 0.0 or resolve_mode(self, "deterministic", deterministic, ctx):
            return inputs
        mask_shape = list(inputs.shape)
        for axis in self.broadcast_dims:
            mask_shape[axis] = 1
        key = _key(self, self.rng_collection, ctx)
        return _drop(inputs, key, rate=self.rate, mask_shape=tuple(mask_shape), rescale=True)


class DropPath(Module):
    """Stochastic depth: drops whole examples of a residual branch; shape `(batch, ...) -> (batch, ...)`.

    Args:
        rate: probability of dropping an example.
        deterministic: if true, the input is returned as it is; `None` to decide in the call or by the Context.
        rng_collection: name of the Context's stream to draw from.
        batch_dims: number of leading axes that are examples; 0 drops an unbatched input as a whole.
        rescale: whether what is kept is scaled by `1 / (1 - rate)`.

    >>> import nnx, jax.numpy as jnp
    >>> layer = nnx.DropPath(0.5, deterministic=False)
    >>> y = layer(jnp.ones((6, 3)), ctx=nnx.context(dropout=0))
    >>> bool((y == y[:, :1]).all())
    True
    """

    def __init__(
        self,
        rate: float,
        deterministic: bool | None = None,
        rng_collection: str = "dropout",
        *,
        batch_dims: int = 1,
        rescale: bool = True,
    ):
        self.rate = _check_rate(self, rate)
        self.deterministic = deterministic
        self.rng_collection = rng_collection
        self.batch_dims = batch_dims
        self.rescale = rescale

    def __call__(self, inputs: Array, *, deterministic: bool | None = None, ctx: Context | None = None) -> Array:
        if self.rate == 0.0 or resolve_mode(self, "deterministic", deterministic, ctx):
            return inputs
        if inputs.ndim < self.batch_dims:
            raise ValueError(
                f"DropPath expected an input with at least batch_dims={self.batch_dims} axes, got shape "
                f"{inputs.shape}. For an unbatched input write `nnx.DropPath(rate, batch_dims=0)`."
            )
        mask_shape = inputs.shape[: self.batch_dims] + (1,) * (inputs.ndim - self.batch_dims)
        key = _key(self, self.rng_collection, ctx)
        return _drop(inputs, key, rate=self.rate, mask_shape=mask_shape, rescale=self.rescale)


@jax.jit
def _add_noise(x: Array, key: Array, stddev: float) -> Array:
    return x + jnp.asarray(stddev, x.dtype) * jax.random.normal(key, x.shape, x.dtype)


class GaussianNoise(Module):
    """Adds normal noise of standard deviation `stddev`; shape `(...) -> (...)`.

    Args:
        stddev: standard deviation of the noise.
        deterministic: if true, the input is returned as it is; `None` to decide in the call or by the Context.
        rng_collection: name of the Context's stream to draw from.

    >>> import nnx, jax.numpy as jnp
    >>> layer = nnx.GaussianNoise(0.1)
    >>> layer(jnp.zeros((2, 3)), deterministic=False, ctx=nnx.context(dropout=0)).shape
    (2, 3)
    """

    def __init__(self, stddev: float, deterministic: bool | None = None, rng_collection: str = "dropout"):
        if stddev < 0:
            raise ValueError(f"GaussianNoise: `stddev` must not be negative, got {stddev!r}.")
        self.stddev = stddev
        self.deterministic = deterministic
        self.rng_collection = rng_collection

    def __call__(self, inputs: Array, *, deterministic: bool | None = None, ctx: Context | None = None) -> Array:
        if self.stddev == 0.0 or resolve_mode(self, "deterministic", deterministic, ctx):
            return inputs
        if not jnp.issubdtype(inputs.dtype, jnp.inexact):
            raise ValueError(f"GaussianNoise expected floating point numbers, got {inputs.dtype}.")
        return _add_noise(inputs, _key(self, self.rng_collection, ctx), self.stddev)
