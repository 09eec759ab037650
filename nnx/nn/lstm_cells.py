"""LSTM cells: recurrent cells with a memory beside the hidden state; the carry is the pair `(memory, hidden)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from nnx.core.context import Context
from nnx.nn.checks import check_last_axis
from nnx.nn.conv import Conv
from nnx.nn.dtypes import PromoteDtype, as_dtype, as_optional_dtype, cast, promote_dtype
from nnx.nn.initial_values import InitializerLike, default_bias_init, default_kernel_init
from nnx.nn.linear import NO_METADATA, Linear
from nnx.nn.rnn_cells import RNNCellBase, default_recurrent_kernel_init


class LSTMCell(RNNCellBase):
    """A long short-term memory cell.

        i = gate(x Wii + h Whi + bi)        f = gate(x Wif + h Whf + bf)
        g = act(x Wig + h Whg + bg)         o = gate(x Wio + h Who + bo)
        c' = f c + i g                      h' = o act(c')

    Each gate has its own projections; `OptimizedLSTMCell` computes the same with two.

    Args:
        in_features: of the input.
        hidden_features: of memory and output.
        gate_fn: activation of the gates.
        activation_fn: activation of update and output.
        kernel_init: initialiser of the kernels on the input.
        recurrent_kernel_init: initialiser of the kernels on the hidden state.
        bias_init: initialiser of the biases.
        dtype: of the computation; by default that of inputs and parameters, promoted.
        param_dtype: of the parameters and of the carry.
        carry_init: initialiser of the carry; zeros by default.
        promote_dtype: replaces the function that brings arrays to one dtype.
        ctx: Context with the stream "params".
        kernel_metadata, recurrent_kernel_metadata, bias_metadata: metadata of these Variables.

    >>> import nnx, jax.numpy as jnp
    >>> cell = nnx.LSTMCell(3, 4, ctx=nnx.context(0))
    >>> x = jnp.ones((2, 3))
    >>> carry = cell.initialize_carry(x.shape)
    >>> carry, y = cell(carry, x)
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

        def from_input() -> Linear:
            return Linear(
                in_features,
                hidden_features,
                use_bias=False,
                kernel_init=kernel_init,
                kernel_metadata=kernel_metadata,
                ctx=ctx,
                **dtypes,
            )

        def from_hidden() -> Linear:
            return Linear(
                hidden_features,
                hidden_features,
                kernel_init=recurrent_kernel_init,
                bias_init=bias_init,
                kernel_metadata=recurrent_kernel_metadata,
                bias_metadata=bias_metadata,
                ctx=ctx,
                **dtypes,
            )

        self.ii, self.if_, self.ig, self.io = from_input(), from_input(), from_input(), from_input()
        self.hi, self.hf, self.hg, self.ho = from_hidden(), from_hidden(), from_hidden(), from_hidden()

    def __call__(
        self, carry: tuple[jax.Array, jax.Array], inputs: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """One step.

        Args:
            carry: memory and hidden state, `[batch..., hidden_features]` each.
            inputs: `[batch..., in_features]`.

        Returns:
            The new carry, and the output `[batch..., hidden_features]`.
        """
        memory, hidden = carry
        self._check(carry, inputs, self.in_features, (*inputs.shape[:-1], self.hidden_features))
        input_gate = self.ii(inputs) + self.hi(hidden)
        forget_gate = self.if_(inputs) + self.hf(hidden)
        update = self.ig(inputs) + self.hg(hidden)
        output_gate = self.io(inputs) + self.ho(hidden)
        return _lstm_step(
            memory, hidden.dtype, input_gate, forget_gate, update, output_gate, self.gate_fn, self.activation_fn
        )

    def initialize_carry(
        self, input_shape: Sequence[int], ctx: Context | None = None, carry_init: InitializerLike | None = None
    ) -> tuple[jax.Array, jax.Array]:
        shape = (*input_shape[:-1], self.hidden_features)
        memory = self._initial(shape, self.param_dtype, ctx, carry_init)
        return memory, self._initial(shape, self.param_dtype, ctx, carry_init)


class OptimizedLSTMCell(RNNCellBase):
    """`LSTMCell` with the projections of all four gates in one kernel each for input and hidden state.

    Arguments and equations are those of `LSTMCell`; the kernels are those of its gates i, f, g, o side by side.

    Attributes:
        dense_i: from the input, kernel `[in_features, 4 * hidden_features]`.
        dense_h: from the hidden state, kernel `[hidden_features, 4 * hidden_features]`, with the biases.

    >>> import nnx, jax.numpy as jnp
    >>> cell = nnx.OptimizedLSTMCell(3, 4, ctx=nnx.context(0))
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
        gates = 4 * hidden_features
        self.dense_i = Linear(
            in_features,
            gates,
            use_bias=False,
            kernel_init=kernel_init,
            kernel_metadata=kernel_metadata,
            ctx=ctx,
            **dtypes,
        )
        self.dense_h = Linear(
            hidden_features,
            gates,
            kernel_init=recurrent_kernel_init,
            bias_init=bias_init,
            kernel_metadata=recurrent_kernel_metadata,
            bias_metadata=bias_metadata,
            ctx=ctx,
            **dtypes,
        )

    def __call__(
        self, carry: tuple[jax.Array, jax.Array], inputs: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """One step, as in `LSTMCell`."""
        memory, hidden = carry
        self._check(carry, inputs, self.in_features, (*inputs.shape[:-1], self.hidden_features))
        gates = self.dense_i(inputs) + self.dense_h(hidden)
        input_gate, forget_gate, update, output_gate = lax.split(gates, [self.hidden_features] * 4, axis=gates.ndim - 1)
        return _lstm_step(
            memory, hidden.dtype, input_gate, forget_gate, update, output_gate, self.gate_fn, self.activation_fn
        )

    def initialize_carry(
        self, input_shape: Sequence[int], ctx: Context | None = None, carry_init: InitializerLike | None = None
    ) -> tuple[jax.Array, jax.Array]:
        shape = (*input_shape[:-1], self.hidden_features)
        memory = self._initial(shape, self.param_dtype, ctx, carry_init)
        return memory, self._initial(shape, self.param_dtype, ctx, carry_init)


class ConvLSTMCell(RNNCellBase):
    """An LSTM cell on images: the projections are convolutions, the carry is an image.

    The equations are those of `LSTMCell` with 1 added to the forget gate before its activation.

    Args:
        in_features: channels of the input.
        hidden_features: channels of memory and output.
        kernel_size: of the convolutions, one entry per spatial dimension.
        strides: of the convolution on the input.
        padding: of the convolution on the input, as in `Conv`; the one on the hidden state keeps its size.
        use_bias: whether the convolutions have biases.
        dtype: of the computation; by default that of inputs and parameters, promoted.
        param_dtype: of the parameters and of the carry.
        carry_init: initialiser of the carry; zeros by default.
        gate_fn: activation of the gates.
        activation_fn: activation of update and output.
        kernel_init, recurrent_kernel_init: initialisers of the kernels on input and hidden state.
        bias_init: initialiser of the biases.
        promote_dtype: replaces the function that brings arrays to one dtype.
        ctx: Context with the stream "params".
        kernel_metadata, recurrent_kernel_metadata, bias_metadata: metadata of these Variables.

    Attributes:
        ih: `Conv` from the input to the gates i, g, f, o.
        hh: `Conv` from the hidden state to the same.

    >>> import nnx, jax.numpy as jnp
    >>> cell = nnx.ConvLSTMCell(3, 4, kernel_size=(3, 3), ctx=nnx.context(0))
    >>> x = jnp.ones((2, 8, 8, 3))  # batch, height, width, channels
    >>> carry, y = cell(cell.initialize_carry(x.shape), x)
    >>> y.shape
    (2, 8, 8, 4)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        kernel_size: Sequence[int],
        strides: int | Sequence[int] = 1,
        *,
        padding: Any = "SAME",
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        carry_init: InitializerLike | None = None,
        gate_fn: Callable[..., Any] = lax.logistic,
        activation_fn: Callable[..., Any] = lax.tanh,
        kernel_init: InitializerLike = default_kernel_init,
        recurrent_kernel_init: InitializerLike = default_kernel_init,
        bias_init: InitializerLike = default_bias_init,
        promote_dtype: PromoteDtype = promote_dtype,
        ctx: Context,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        recurrent_kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
    ):
        options: dict[str, Any] = {
            "use_bias": use_bias,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "bias_init": bias_init,
            "bias_metadata": bias_metadata,
            "promote_dtype": promote_dtype,
            "ctx": ctx,
        }
        gates = 4 * hidden_features
        self.ih = Conv(
            in_features,
            gates,
            kernel_size,
            strides,
            padding=padding,
            kernel_init=kernel_init,
            kernel_metadata=kernel_metadata,
            **options,
        )
        self.hh = Conv(
            hidden_features,
            gates,
            kernel_size,
            kernel_init=recurrent_kernel_init,
            kernel_metadata=recurrent_kernel_metadata,
            **options,
        )
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.kernel_size = tuple(kernel_size)
        self.dtype = as_optional_dtype(dtype)
        self.param_dtype = as_dtype(param_dtype)
        self.carry_init = carry_init
        self.gate_fn = gate_fn
        self.activation_fn = activation_fn

    def __call__(
        self, carry: tuple[jax.Array, jax.Array], inputs: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """One step.

        Args:
            carry: memory and hidden state, `[batch..., *spatial, hidden_features]` each.
            inputs: `[batch..., *spatial, in_features]`.

        Returns:
            The new carry, and the output `[batch..., *spatial, hidden_features]`.
        """
        memory, hidden = carry
        check_last_axis(self, inputs, self.in_features, "in_features")
        from_input = self.ih(inputs)
        self._check(carry, inputs, self.in_features, (*from_input.shape[:-1], self.hidden_features))
        gates = from_input + self.hh(hidden)
        input_gate, update, forget_gate, output_gate = lax.split(gates, [self.hidden_features] * 4, axis=gates.ndim - 1)
        return _lstm_step(
            memory, hidden.dtype, input_gate, forget_gate + 1.0, update, output_gate, self.gate_fn, self.activation_fn
        )

    def initialize_carry(
        self, input_shape: Sequence[int], ctx: Context | None = None, carry_init: InitializerLike | None = None
    ) -> tuple[jax.Array, jax.Array]:
        gates = jax.eval_shape(self.ih, jax.ShapeDtypeStruct(tuple(input_shape), self.param_dtype))
        shape = (*gates.shape[:-1], self.hidden_features)
        memory = self._initial(shape, self.param_dtype, ctx, carry_init)
        return memory, self._initial(shape, self.param_dtype, ctx, carry_init)

    @property
    def num_feature_axes(self) -> int:
        return len(self.kernel_size) + 1


def _lstm_step(
    memory: jax.Array,
    hidden_dtype: Any,
    input_gate: jax.Array,
    forget_gate: jax.Array,
    update: jax.Array,
    output_gate: jax.Array,
    gate_fn: Callable[..., Any],
    activation_fn: Callable[..., Any],
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """The new `(memory, hidden)` and the output from the gates before their activations."""
    new_memory = gate_fn(forget_gate) * memory + gate_fn(input_gate) * activation_fn(update)
    hidden = gate_fn(output_gate) * activation_fn(new_memory)
    return (cast(new_memory, memory.dtype), cast(hidden, hidden_dtype)), cast(hidden, output_gate.dtype)
