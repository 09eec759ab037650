"""What recurrent cells share: the contract `RNNCellBase`, and the settings and checks of the built-in cells.

A cell maps `(carry, input)` to `(carry, output)`. The *carry* is what it remembers from step to step: an array or a
tuple of arrays. It keeps the dtype it was made with (`param_dtype`), while outputs have the computation dtype.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.core.module.module import Module
from nnx.nn.initializers import orthogonal
from nnx.nn.linear import Linear
from nnx.nn.support.checks import check_last_axis, check_sizes
from nnx.nn.support.parameters import NO_METADATA, InitializerLike, default_bias_init, default_kernel_init
from nnx.nn.support.settings import PromoteDtype, as_dtype, as_optional_dtype, default_promote_dtype

Activation = Callable[..., Any]

WRONG_CARRY = (
    "{layer} expected a carry of shape {expected} for an input of shape {shape}, got {got}. "
    "Make it with `cell.initialize_carry(inputs.shape)`."
)
CARRY_NEEDS_CONTEXT = (
    "{layer}: `carry_init` draws random numbers and needs a Context: pass ctx=ctx to `initialize_carry`, or to the "
    "RNN's call."
)
NO_STEP = "{layer} is a recurrent cell without a step: define `__call__(self, carry, inputs)`."
NO_INITIAL_CARRY = (
    "{layer} does not define its initial carry: define `initialize_carry(self, input_shape, ctx=None, "
    "carry_init=None)`, or pass `initial_carry` to the RNN."
)


@functools.partial(jax.jit, static_argnums=(1, 2))
def default_recurrent_kernel_init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Draws an orthogonal matrix in any dtype; the decomposition it needs exists from float32 up."""
    return orthogonal()(key, shape, jnp.promote_types(dtype, jnp.float32)).astype(dtype)


class RNNCellBase(Module):
    """The base of recurrent cells; subclass it to write your own.

    A subclass defines `__call__(carry, inputs)` and `initialize_carry`. Its call can take `ctx` (for dropout), and it
    can hold Variables that change from step to step.

    >>> class Sum(nnx.RNNCellBase):
    ...     def __call__(self, carry, inputs):
    ...         return carry + inputs, carry + inputs
    ...
    ...     def initialize_carry(self, input_shape, ctx=None, carry_init=None):
    ...         return jnp.zeros(input_shape)
    >>> nnx.RNN(Sum())(jnp.ones((3, 1)))[:, 0].tolist()
    [1.0, 2.0, 3.0]
    """

    def __call__(self, carry: Any, inputs: jax.Array) -> tuple[Any, jax.Array]:
        """Runs one step and returns the new carry and the output."""
        raise TypeError(NO_STEP.format(layer=type(self).__name__))

    def initialize_carry(
        self, input_shape: Sequence[int], ctx: Context | None = None, carry_init: InitializerLike | None = None
    ) -> Any:
        """Makes the carry before the first step.

        Args:
            input_shape: the shape of the input of one step, `[batch..., *features]`.
            ctx: the Context, with a stream "carry" or "params"; needed only for a `carry_init` that draws random
                numbers.
            carry_init: the initializer of the carry; by default that of the instance, or zeros if it has none.
        """
        raise TypeError(NO_INITIAL_CARRY.format(layer=type(self).__name__))

    @property
    def num_feature_axes(self) -> int:
        """The number of trailing axes of an input that belong to one step; those before are batch axes."""
        return 1


class BuiltInCell(RNNCellBase):
    """What the built-in cells share: settings, checks, and the first carry."""

    in_features: int
    hidden_features: int
    activation_fn: Activation
    dtype: np.dtype | None
    param_dtype: np.dtype
    carry_init: InitializerLike | None

    def _set_up(
        self,
        in_features: int,
        hidden_features: int,
        activation_fn: Activation,
        dtype: DTypeLike | None,
        param_dtype: DTypeLike,
        carry_init: InitializerLike | None,
    ) -> None:
        """Stores the settings; not a constructor, because every cell makes its own submodules."""
        check_sizes(self, in_features=in_features, hidden_features=hidden_features)
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.activation_fn = activation_fn
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.carry_init = carry_init

    def initialize_carry(
        self, input_shape: Sequence[int], ctx: Context | None = None, carry_init: InitializerLike | None = None
    ) -> Any:
        return self._initial((*input_shape[:-1], self.hidden_features), ctx, carry_init)

    def _initial(self, shape: tuple[int, ...], ctx: Context | None, carry_init: InitializerLike | None) -> jax.Array:
        carry_init = self.carry_init if carry_init is None else carry_init
        if carry_init is None:
            return jnp.zeros(shape, self.param_dtype)
        if ctx is None:
            raise ValueError(CARRY_NEEDS_CONTEXT.format(layer=type(self).__name__))
        return carry_init(ctx.make_rng("carry" if ctx.has_rng("carry") else "params"), shape, self.param_dtype)

    def _check(self, carry: Any, inputs: jax.Array, carry_axes: tuple[int, ...]) -> None:
        """Raises `ValueError` unless input and carry fit; `carry_axes` are the axes of the carry before its last."""
        check_last_axis(self, inputs, self.in_features, "in_features")
        expected = (*carry_axes, self.hidden_features)
        for held in jax.tree.leaves(carry):
            if held.shape != expected:
                name = type(self).__name__
                raise ValueError(WRONG_CARRY.format(layer=name, expected=expected, shape=inputs.shape, got=held.shape))


class GatedCell(BuiltInCell):
    """The constructor that GRU and LSTM cells share; each of them makes its own projections."""

    gate_fn: Activation

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: Activation = lax.logistic,
        activation_fn: Activation = lax.tanh,
        kernel_init: InitializerLike = default_kernel_init,
        recurrent_kernel_init: InitializerLike = default_recurrent_kernel_init,
        bias_init: InitializerLike = default_bias_init,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        carry_init: InitializerLike | None = None,
        promote_dtype: PromoteDtype = default_promote_dtype,
        ctx: Context,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        recurrent_kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
    ) -> None:
        self._set_up(in_features, hidden_features, activation_fn, dtype, param_dtype, carry_init)
        self.gate_fn = gate_fn
        options: dict[str, Any] = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "promote_dtype": promote_dtype,
            "bias_init": bias_init,
            "bias_metadata": bias_metadata,
            "ctx": ctx,
        }
        self._make_projections(
            functools.partial(Linear, in_features, kernel_init=kernel_init, kernel_metadata=kernel_metadata, **options),
            functools.partial(
                Linear,
                hidden_features,
                kernel_init=recurrent_kernel_init,
                kernel_metadata=recurrent_kernel_metadata,
                **options,
            ),
        )

    def _make_projections(self, from_input: Callable[..., Linear], from_hidden: Callable[..., Linear]) -> None:
        """Sets the projections of a subclass; each function takes the number of output features and `use_bias`."""
