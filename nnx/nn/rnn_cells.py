"""Recurrent cells: one step of a recurrent network.

A cell maps `(carry, input)` to `(carry, output)`. The *carry* is what it remembers: an array or a tuple of them. It
keeps the dtype it was made with (`param_dtype`), while outputs have the dtype of the computation. Here are what all
cells have in common and the cells with one array; `lstm_cells.py` has those with a memory, and `RNN` in `recurrent.py`
runs a cell over a sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from nnx.core.context import Context
from nnx.core.module import Module
from nnx.nn.checks import check_last_axis
from nnx.nn.dtypes import PromoteDtype, as_dtype, as_optional_dtype, cast, promote_dtype
from nnx.nn.initial_values import InitializerLike, default_bias_init, default_kernel_init
from nnx.nn.initializers import orthogonal
from nnx.nn.linear import NO_METADATA, Linear


@functools.partial(jax.jit, static_argnums=(1, 2))
def default_recurrent_kernel_init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Orthogonal in any dtype; the decomposition behind it exists from float32 up."""
    return orthogonal()(key, shape, jnp.promote_types(dtype, jnp.float32)).astype(dtype)


WRONG_CARRY = (
    "{layer} expected a carry of shape {expected} for an input of shape {shape}, got {got}. "
    "Make it with `cell.initialize_carry(inputs.shape)`."
)
CARRY_NEEDS_CONTEXT = (
    "{layer}: `carry_init` draws random numbers and needs a Context: pass ctx=ctx to `initialize_carry`, or to the "
    "RNN's call."
)


class RNNCellBase(Module):
    """What every cell has; subclass it to write your own.

    A subclass defines `__call__(carry, inputs)` and `initialize_carry`, and may take `ctx` in its call (for dropout)
    and hold Variables that change from step to step.

    >>> import nnx, jax.numpy as jnp
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
        """One step: the new carry and the output."""
        raise TypeError(
            f"{type(self).__name__} is a recurrent cell without a step: define `__call__(self, carry, inputs)`."
        )

    def initialize_carry(
        self, input_shape: Sequence[int], ctx: Context | None = None, carry_init: InitializerLike | None = None
    ) -> Any:
        """The carry before the first step.

        Args:
            input_shape: of the input of one step, `[batch..., *features]`.
            ctx: Context with the stream "carry" or "params"; only needed for a `carry_init` that draws random numbers.
            carry_init: initialiser of the carry; the instance's by default, and zeros without one.
        """
        raise TypeError(
            f"{type(self).__name__} does not say what it starts with: define `initialize_carry(self, input_shape, "
            "ctx=None, carry_init=None)`, or pass `initial_carry`."
        )

    @property
    def num_feature_axes(self) -> int:
        """How many trailing axes of an input belong to one step; those before are batch axes."""
        return 1

    def _initial(
        self, shape: tuple[int, ...], dtype: Any, ctx: Context | None, carry_init: InitializerLike | None
    ) -> jax.Array:
        carry_init = getattr(self, "carry_init", None) if carry_init is None else carry_init
        if carry_init is None:
            return jnp.zeros(shape, dtype)
        if ctx is None:
            raise ValueError(CARRY_NEEDS_CONTEXT.format(layer=type(self).__name__))
        return carry_init(ctx.make_rng("carry" if ctx.has_rng("carry") else "params"), shape, dtype)

    def _check(self, carry: Any, inputs: jax.Array, in_features: int, carry_shape: tuple[int, ...]) -> None:
        check_last_axis(self, inputs, in_features, "in_features")
        for held in jax.tree.leaves(carry):
            if held.shape != carry_shape:
                raise ValueError(
                    WRONG_CARRY.format(
                        layer=type(self).__name__, expected=carry_shape, shape=inputs.shape, got=held.shape
                    )
                )


class GRUCell(RNNCellBase):
    """A gated recurrent unit.

        r = gate(x Wir + bir + h Whr)       z = gate(x Wiz + biz + h Whz)
        n = act(x Win + bin + r (h Whn))    h' = (1 - z) n + z h

    Args:
        in_features: of the input.
        hidden_features: of the carry and output.
        gate_fn: activation of the gates.
        activation_fn: activation of the update.
        kernel_init: initialiser of the kernel on the input.
        recurrent_kernel_init: initialiser of the kernel on the hidden state.
        bias_init: initialiser of the biases.
        dtype: of the computation; by default that of inputs and parameters, promoted.
        param_dtype: of the parameters and of the carry.
        carry_init: initialiser of the carry; zeros by default.
        promote_dtype: replaces the function that brings arrays to one dtype.
        ctx: Context with the stream "params".
        kernel_metadata, recurrent_kernel_metadata, bias_metadata: metadata of these Variables.

    Attributes:
        dense_i: from the input, kernel `[in_features, 3 * hidden_features]` for r, z, n, with the biases.
        dense_h: from the hidden state, kernel `[hidden_features, 3 * hidden_features]`.

    >>> import nnx, jax.numpy as jnp
    >>> cell = nnx.GRUCell(3, 4, ctx=nnx.context(0))
    >>> carry, y = cell(cell.initialize_carry((2, 3)), jnp.ones((2, 3)))
    >>> y.shape
    (2, 4)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: Callable[..., Any] = lax.logistic,
        activation_fn: Callable[..., Any] = lax.tanh,
        kernel_init: InitializerLike = default_kernel_init,
        recurrent_kernel_init: InitializerLike = default_recurrent_kernel_init,
        bias_init: InitializerLike = default_bias_init,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        carry_init: InitializerLike | None = None,
        promote_dtype: PromoteDtype = promote_dtype,
        ctx: Context,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        recurrent_kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
    ):
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.gate_fn = gate_fn
        self.activation_fn = activation_fn
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.carry_init = carry_init
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "promote_dtype": promote_dtype}
        gates = 3 * hidden_features
        self.dense_i = Linear(
            in_features,
            gates,
            kernel_init=kernel_init,
            bias_init=bias_init,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
            ctx=ctx,
            **dtypes,
        )
        self.dense_h = Linear(
            hidden_features,
            gates,
            use_bias=False,
            kernel_init=recurrent_kernel_init,
            kernel_metadata=recurrent_kernel_metadata,
            ctx=ctx,
            **dtypes,
        )

    def __call__(self, carry: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One step.

        Args:
            carry: hidden state, `[batch..., hidden_features]`.
            inputs: `[batch..., in_features]`.

        Returns:
            The new carry, and the output `[batch..., hidden_features]`.
        """
        self._check(carry, inputs, self.in_features, (*inputs.shape[:-1], self.hidden_features))
        sizes, axis = [self.hidden_features] * 3, inputs.ndim - 1
        input_r, input_z, input_n = lax.split(self.dense_i(inputs), sizes, axis=axis)
        hidden_r, hidden_z, hidden_n = lax.split(self.dense_h(carry), sizes, axis=axis)
        reset = self.gate_fn(input_r + hidden_r)
        keep = self.gate_fn(input_z + hidden_z)
        update = self.activation_fn(input_n + reset * hidden_n)
        hidden = (1.0 - keep) * update + keep * carry
        return cast(hidden, carry.dtype), cast(hidden, update.dtype)

    def initialize_carry(
        self, input_shape: Sequence[int], ctx: Context | None = None, carry_init: InitializerLike | None = None
    ) -> jax.Array:
        return self._initial((*input_shape[:-1], self.hidden_features), self.param_dtype, ctx, carry_init)


class SimpleCell(RNNCellBase):
    """The plain recurrent cell: `h' = act(x Wi + bi + h Wh)`, plus `h` inside when `residual`.

    Args:
        in_features: of the input.
        hidden_features: of the carry and output.
        dtype: of the computation; `None` for that of inputs and parameters, promoted.
        param_dtype: of the parameters and of the carry.
        carry_init: initialiser of the carry; zeros by default.
        residual: add the hidden state before the activation.
        activation_fn: the activation.
        kernel_init: initialiser of the kernel on the input.
        recurrent_kernel_init: initialiser of the kernel on the hidden state.
        bias_init: initialiser of the bias.
        promote_dtype: replaces the function that brings arrays to one dtype.
        ctx: Context with the stream "params".
        kernel_metadata, recurrent_kernel_metadata, bias_metadata: metadata of these Variables.

    >>> import nnx, jax.numpy as jnp
    >>> cell = nnx.SimpleCell(3, 4, ctx=nnx.context(0))
    >>> carry, y = cell(cell.initialize_carry((2, 3)), jnp.ones((2, 3)))
    >>> y.shape
    (2, 4)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        carry_init: InitializerLike | None = None,
        residual: bool = False,
        activation_fn: Callable[..., Any] = lax.tanh,
        kernel_init: InitializerLike = default_kernel_init,
        recurrent_kernel_init: InitializerLike = default_recurrent_kernel_init,
        bias_init: InitializerLike = default_bias_init,
        promote_dtype: PromoteDtype = promote_dtype,
        ctx: Context,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        recurrent_kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
    ):
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.carry_init = carry_init
        self.residual = residual
        self.activation_fn = activation_fn
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "promote_dtype": promote_dtype}
        self.dense_i = Linear(
            in_features,
            hidden_features,
            kernel_init=kernel_init,
            bias_init=bias_init,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
            ctx=ctx,
            **dtypes,
        )
        self.dense_h = Linear(
            hidden_features,
            hidden_features,
            use_bias=False,
            kernel_init=recurrent_kernel_init,
            kernel_metadata=recurrent_kernel_metadata,
            ctx=ctx,
            **dtypes,
        )

    def __call__(self, carry: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One step, with shapes as in `GRUCell`."""
        self._check(carry, inputs, self.in_features, (*inputs.shape[:-1], self.hidden_features))
        hidden = self.dense_i(inputs) + self.dense_h(carry)
        if self.residual:
            hidden = hidden + cast(carry, hidden.dtype)
        hidden = self.activation_fn(hidden)
        return cast(hidden, carry.dtype), hidden

    def initialize_carry(
        self, input_shape: Sequence[int], ctx: Context | None = None, carry_init: InitializerLike | None = None
    ) -> jax.Array:
        return self._initial((*input_shape[:-1], self.hidden_features), self.param_dtype, ctx, carry_init)
