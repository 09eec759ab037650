"""Gated delta networks: linear attention that remembers a text of any length in one matrix per head.

`GatedDeltaNet` is the layer of Qwen3-Next and Qwen3.5. Queries, keys and values pass through a short causal
convolution, and meet in the gated delta rule (`delta_rule`). `DeltaCache` is what it remembers of a text: the matrices,
and the last inputs of the convolution. Its size does not depend on the length of the text.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.module import Module
from nnx.nn.attention.room import POISONED, check_room, grown, is_known
from nnx.nn.linear import LinearGeneral
from nnx.nn.norms.norm import RMSNorm
from nnx.nn.recurrent.delta_rule import gated_delta_rule
from nnx.nn.support.activation_names import named
from nnx.nn.support.checks import check_sizes, shape_of
from nnx.nn.support.parameters import AxisNames, InitializerLike, default_kernel_init, make_param
from nnx.nn.support.settings import as_dtype, as_optional_dtype, cast, compiled_body, infer_dtype, statistics_dtype

WRONG_INPUT = "GatedDeltaNet: expected inputs of shape [batch..., length, {features}], got {got}."
HEADS_DO_NOT_DIVIDE = "GatedDeltaNet: expected key_heads to divide num_heads={heads}, got {got}."
NOT_BACKWARD = (
    "GatedDeltaNet runs forward through a text, so a token never sees later ones: call it with is_causal=True, or "
    "without `is_causal`."
)
MASK_OF_PAIRS = (
    "GatedDeltaNet: expected a mask [batch..., 1, 1, length] of the tokens that exist (padding is false), got {got}. "
    "The layer has one state for all later tokens, so it cannot hide a token from some of them: leave causality out "
    "of the mask, and give each of several packed texts a row of its own."
)
ROOM_FOR_NOTHING = "DeltaCache: expected max_length >= 1, got {got}."

_UNIT_EPSILON = 1e-6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaCache:
    """What a `GatedDeltaNet` remembers of a text, as a pytree that the caller owns; nothing is changed in place.

    Attributes:
        inputs: the last inputs of the convolution, `[batch..., taps - 1, channels]`.
        state: the matrix of each head, `[batch..., num_heads, key_dim, value_dim]`, in float32.
        max_length: the number of tokens that a row may hold. The arrays do not depend on it.
    """

    inputs: jax.Array
    state: jax.Array
    max_length: int = dataclasses.field(metadata={"static": True})

    def check(self, lengths: jax.Array, cache: str = "DeltaCache") -> None:
        """Raises `ValueError` if a row has overflowed inside a transform; call it outside of transforms.

        Args:
            lengths: `[batch...]`, the number of tokens each row holds.
            cache: the name to use in the error.
        """
        check_room(cache, self.max_length, lengths, 0, None)
        if is_known(self.state) and (poisoned := np.isnan(np.asarray(self.state)).all((-3, -2, -1))).any():
            row = ", ".join(map(str, np.argwhere(poisoned)[0]))
            raise ValueError(POISONED.format(cache=cache, row=row, max_length=self.max_length, longer="new "))


class GatedDeltaNet(Module):
    """Causal linear attention with the gated delta rule; shape `[batch..., length, features]`, kept.

    Whole texts are computed in chunks of 64 tokens, with products of matrices within a chunk and a scan between chunks,
    so the work grows linearly with the length.

    Args:
        in_features: the number of features of input and output.
        num_heads: the number of heads of values.
        key_dim: the number of features of a query or key.
        value_dim: the number of features of a value; `key_dim` by default.
        key_heads: the number of heads of queries and keys, a divisor of `num_heads`; `num_heads` by default.
        taps: the number of tokens that the convolution sees, including the current one.
        epsilon: the epsilon of the norm of the output.
        dtype: the computation dtype; by default, the dtype that inputs and parameters promote to. The state and what
            leads to it use at least float32.
        param_dtype: the dtype in which the parameters are stored.
        kernel_init: the initializer of the projections.
        ctx: the Context; its stream "params" initializes the parameters.

    Attributes:
        query, key: `LinearGeneral`s to `[key_heads, key_dim]`.
        value, gate: `LinearGeneral`s to `[num_heads, value_dim]`; the output is multiplied by `silu(gate)`.
        beta, decay: `LinearGeneral`s to `[key_heads, num_heads // key_heads]`, how much each token corrects, and how
            much of the state it keeps.
        conv_kernel: the kernel of the convolution, `[taps, 1, channels]`: those of queries, keys and values.
        decay_rate: the logarithm of each head's rate of decay, `[num_heads]`.
        decay_bias: a bias added to `decay`, `[num_heads]`.
        norm: the norm of the output of each head.
        out: a `LinearGeneral` with a kernel `[num_heads, value_dim, in_features]`.

    >>> layer = nnx.GatedDeltaNet(16, num_heads=4, key_dim=8, key_heads=2, ctx=nnx.context(0))
    >>> x = jnp.ones((2, 5, 16))
    >>> full = layer(x)
    >>> cache = layer.make_cache(2, max_length=8)
    >>> first, cache = layer.decode_step(x[:, :4], cache, jnp.array([0, 0]))
    >>> last, cache = layer.decode_step(x[:, 4:], cache, jnp.array([4, 4]))
    >>> bool(jnp.allclose(jnp.concatenate([first, last], axis=1), full, atol=1e-5))
    True
    """

    logical_axes: ClassVar[AxisNames] = {
        **dict.fromkeys(
            (f"{name}/kernel" for name in ("query", "key", "value", "gate")), ("embed", "heads", "head_dim")
        ),
        **dict.fromkeys(("beta/kernel", "decay/kernel"), ("embed", "heads", None)),
        **dict.fromkeys(("decay_rate", "decay_bias"), ("heads",)),
        "conv_kernel": (None, None, "in"),
        "out/kernel": ("heads", "head_dim", "embed"),
    }

    in_features: int
    num_heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    taps: int
    dtype: np.dtype | None
    param_dtype: np.dtype
    query: LinearGeneral
    key: LinearGeneral
    value: LinearGeneral
    gate: LinearGeneral
    beta: LinearGeneral
    decay: LinearGeneral
    conv_kernel: jax.Array
    decay_rate: jax.Array
    decay_bias: jax.Array
    norm: RMSNorm
    out: LinearGeneral

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        key_dim: int,
        value_dim: int | None = None,
        key_heads: int | None = None,
        *,
        taps: int = 4,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: InitializerLike = default_kernel_init,
        ctx: Context,
    ) -> None:
        value_dim = key_dim if value_dim is None else value_dim
        key_heads = num_heads if key_heads is None else key_heads
        check_sizes(self, in_features=in_features, num_heads=num_heads, key_dim=key_dim, value_dim=value_dim)
        check_sizes(self, key_heads=key_heads, taps=taps)
        if num_heads % key_heads:
            raise ValueError(HEADS_DO_NOT_DIVIDE.format(heads=num_heads, got=key_heads))
        self.in_features, self.num_heads, self.key_heads = in_features, num_heads, key_heads
        self.key_dim, self.value_dim, self.taps = key_dim, value_dim, taps
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)

        shared: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ctx": ctx}
        options: dict[str, Any] = {**shared, "kernel_init": kernel_init, "use_bias": False}
        self.query = LinearGeneral(in_features, (key_heads, key_dim), **options)
        self.key = LinearGeneral(in_features, (key_heads, key_dim), **options)
        self.value = LinearGeneral(in_features, (num_heads, value_dim), **options)
        self.gate = LinearGeneral(in_features, (num_heads, value_dim), **options)
        self.beta = LinearGeneral(in_features, (key_heads, num_heads // key_heads), **options)
        self.decay = LinearGeneral(in_features, (key_heads, num_heads // key_heads), **options)
        self.conv_kernel = make_param(self, _taps_init, ctx, (taps, 1, self.channels))
        self.decay_rate = make_param(self, _rate_init, ctx, (num_heads,))
        self.decay_bias = make_param(self, _bias_init, ctx, (num_heads,))
        self.norm = RMSNorm(value_dim, epsilon=epsilon, **shared)
        self.out = LinearGeneral((num_heads, value_dim), in_features, axis=(-2, -1), **options)

    @property
    def channels(self) -> int:
        """The number of features that the convolution sees: those of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.num_heads * self.value_dim

    def __call__(
        self,
        inputs: jax.Array,
        *,
        mask: jax.Array | None = None,
        is_causal: bool = True,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Mixes the tokens of whole texts, `[batch..., length, in_features]`.

        Args:
            inputs: the texts.
            mask: an array `[batch..., 1, 1, length]` that is true for real tokens and false for padding, which may be
                anywhere. Padding leaves the state as it is.
            is_causal: True; the layer cannot look ahead.
            positions: accepted as by attention, and without effect: only the order of the tokens counts.
        """
        del positions
        batch = self._batch_of(inputs)
        if not is_causal:
            raise ValueError(NOT_BACKWARD)
        real = None if mask is None else _real_tokens(mask, inputs.shape[:-1])
        before = jnp.zeros((*batch, self.taps - 1, self.channels), inputs.dtype)
        return self._mixed(inputs, before, None, real)[0]

    def make_cache(
        self, batch_shape: int | tuple[int, ...], max_length: int, dtype: DTypeLike = jnp.float32
    ) -> DeltaCache:
        """Returns an empty cache for `decode_step`.

        Args:
            batch_shape: the leading axes; an int means one axis.
            max_length: the number of tokens that a row may hold; the size of the cache does not depend on it.
            dtype: the dtype in which the inputs of the convolution are stored.
        """
        if max_length < 1:
            raise ValueError(ROOM_FOR_NOTHING.format(got=max_length))
        batch = (batch_shape,) if isinstance(batch_shape, int) else tuple(batch_shape)
        state = jnp.zeros((*batch, self.num_heads, self.key_dim, self.value_dim), jnp.float32)
        return DeltaCache(jnp.zeros((*batch, self.taps - 1, self.channels), dtype), state, max_length)

    def decode_step(
        self, inputs: jax.Array, cache: DeltaCache, lengths: jax.Array, seq_lengths: jax.Array | None = None
    ) -> tuple[jax.Array, DeltaCache]:
        """Advances a cache that the caller owns by some tokens.

        Args:
            inputs: `[batch..., length, in_features]`, the next tokens.
            cache: the cache, see `make_cache`.
            lengths: `[batch...]`, the number of tokens each row holds before this call.
            seq_lengths: `[batch...]`, the number of real tokens in each row, which come first.

        Returns:
            An array of shape `[batch..., length, in_features]`, and the cache with the tokens added.
        """
        batch, length = self._batch_of(inputs), inputs.shape[-2]
        check_room("DeltaCache", cache.max_length, lengths, length, seq_lengths, batch)
        overflows = grown(lengths, length, seq_lengths, cache.max_length)[0] > cache.max_length
        # A row that overflows must not fail silently: everything that is read from its state is NaN from now on.
        state = jnp.where(overflows[..., None, None, None], jnp.nan, cache.state)
        real = None
        if seq_lengths is not None:
            real = jnp.arange(length, dtype=jnp.int32) < seq_lengths[..., None]
        out, window, state = self._mixed(inputs, cast(cache.inputs, inputs.dtype), state, real)
        kept = _last_of(window, seq_lengths, length, taps=self.taps)
        return out, dataclasses.replace(cache, inputs=cast(kept, cache.inputs.dtype), state=state)

    def _batch_of(self, inputs: jax.Array) -> tuple[int, ...]:
        shape = shape_of(self, inputs)
        if len(shape) < 2 or shape[-1] != self.in_features:
            raise ValueError(WRONG_INPUT.format(features=self.in_features, got=shape))
        return shape[:-2]

    def _mixed(
        self, inputs: jax.Array, before: jax.Array, state: jax.Array | None, real: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the output, all inputs of the convolution including those `before`, and the new state."""
        if real is not None:
            inputs = jnp.where(real[..., None], inputs, 0)
        leading = inputs.shape[:-1]
        heads = [lax.collapse(project(inputs), len(leading)) for project in (self.query, self.key, self.value)]
        window = jnp.concatenate((cast(before, heads[0].dtype), jnp.concatenate(heads, -1)), -2)
        mixed = _convolved(window, self.conv_kernel, dtype=infer_dtype((window, self.conv_kernel), self.dtype))
        query, key, value = jnp.split(mixed, np.cumsum([head.shape[-1] for head in heads])[:-1], axis=-1)
        decay, beta = (lax.collapse(project(inputs), len(leading)) for project in (self.decay, self.beta))
        decay, beta = _rates(decay, beta, self.decay_rate, self.decay_bias, real)
        attended, state = gated_delta_rule(
            _unit(query.reshape(*leading, self.key_heads, self.key_dim), scale=self.key_dim**-0.5),
            _unit(key.reshape(*leading, self.key_heads, self.key_dim), scale=1.0),
            value.reshape(*leading, self.num_heads, self.value_dim),
            decay,
            beta,
            state,
        )
        gated = _gated(self.norm(cast(attended, value.dtype)), self.gate(inputs))
        return named(self.out(named(gated, "attention")), "attention_out"), window, state


def _real_tokens(mask: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns which tokens exist, `[batch..., length]`, by a mask that is the same for all heads and queries."""
    if any(size != 1 for size in mask.shape[-3:-1]) or mask.shape[-1:] not in ((1,), shape[-1:]):
        raise ValueError(MASK_OF_PAIRS.format(got=mask.shape))
    per_token = mask.reshape(*mask.shape[:-3], mask.shape[-1])
    return jnp.broadcast_to(per_token.astype(bool), shape)


def _last_of(window: jax.Array, seq_lengths: jax.Array | None, length: int, *, taps: int) -> jax.Array:
    """Returns the last inputs of the convolution that are real: `taps - 1` of them, with those before the call."""
    if seq_lengths is None:
        return window[..., length:, :]
    kept = seq_lengths[..., None] + jnp.arange(taps - 1, dtype=seq_lengths.dtype)
    return jnp.take_along_axis(window, kept[..., None], axis=-2, mode="clip")


@compiled_body
def _convolved(window: jax.Array, kernel: jax.Array, *, dtype: Any) -> jax.Array:
    """Returns silu of the causal convolution: each channel by itself, as a sum that fuses into one pass."""
    window, kernel = cast(window, dtype), cast(kernel, dtype)
    taps = kernel.shape[0]
    length = window.shape[-2] - taps + 1
    return jax.nn.silu(sum(window[..., i : i + length, :] * kernel[i, 0] for i in range(taps)))


@compiled_body
def _rates(
    decay: jax.Array, beta: jax.Array, rate: jax.Array, bias: jax.Array, real: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the logarithm of what remains, and the part that is corrected; zeros for tokens that are not real."""
    wide = statistics_dtype(decay.dtype)
    decay, rate, bias = cast(decay, wide), cast(rate, wide), cast(bias, wide)
    decay = -jnp.exp(rate) * jax.nn.softplus(decay + bias)
    beta = jax.nn.sigmoid(cast(beta, wide))
    if real is None:
        return decay, beta
    return jnp.where(real[..., None], decay, 0), jnp.where(real[..., None], beta, 0)


@compiled_body
def _unit(x: jax.Array, *, scale: float) -> jax.Array:
    """Returns vectors of length `scale`, in at least float32."""
    x = cast(x, statistics_dtype(x.dtype))
    return x * (scale * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + _UNIT_EPSILON))


@compiled_body
def _gated(x: jax.Array, gate: jax.Array) -> jax.Array:
    wide = statistics_dtype(x.dtype)
    return cast(cast(x, wide) * jax.nn.silu(cast(gate, wide)), x.dtype)


# Initial values: rates from 1 to 16, and steps between a thousandth and a tenth, so that some heads remember for a few
# tokens and others for a thousand.


def _rate_init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0)).astype(dtype)


def _bias_init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, math.log(1e-3), math.log(0.1)))
    return (step + jnp.log(-jnp.expm1(-step))).astype(dtype)  # the inverse of softplus


def _taps_init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.float32) * shape[0] ** -0.5).astype(dtype)
