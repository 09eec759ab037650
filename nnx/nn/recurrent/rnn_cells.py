"""Recurrent cells: `SimpleCell`, `GRUCell`, `LSTMCell`, `OptimizedLSTMCell`, `ConvLSTMCell`.

The carry of an LSTM cell is the pair `(memory, hidden)`, that of the others is the hidden state. What cells share is in
`cell_base`; `RNN` in `recurrent` runs a cell over a sequence.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from nnx.core.context import Context
from nnx.nn.conv import Conv
from nnx.nn.linear import Linear
from nnx.nn.recurrent.cell_base import Activation, BuiltInCell, GatedCell, default_recurrent_kernel_init
from nnx.nn.support.checks import PaddingLike, check_last_axis, shape_of
from nnx.nn.support.parameters import NO_METADATA, InitializerLike, default_bias_init, default_kernel_init
from nnx.nn.support.settings import PromoteDtype, cast, default_promote_dtype

LSTMCarry = tuple[jax.Array, jax.Array]
"""The carry of an LSTM cell: memory and hidden state."""


class SimpleCell(BuiltInCell):
    """The plain recurrent cell: `h' = act(x Wi + bi + h Wh)`, plus `h` inside when `residual`.

    Args:
        in_features: the number of features of the input.
        hidden_features: the number of features of carry and output.
        dtype: the computation dtype; by default, the dtype that inputs and parameters promote to.
        param_dtype: the dtype of the parameters and of the carry.
        carry_init: the initializer of the carry; zeros by default.
        residual: whether to add the hidden state before the activation.
        activation_fn: the activation.
        kernel_init: the initializer of the kernel on the input.
        recurrent_kernel_init: the initializer of the kernel on the hidden state.
        bias_init: the initializer of the bias.
        promote_dtype: a replacement for the function that converts arrays to one dtype.
        ctx: the Context; its stream "params" initializes the parameters.
        kernel_metadata, recurrent_kernel_metadata, bias_metadata: metadata of these Variables.

    Attributes:
        dense_i: the projection of the input, with the bias.
        dense_h: the projection of the hidden state.

    >>> cell = nnx.SimpleCell(3, 4, ctx=nnx.context(0))
    >>> carry, y = cell(cell.initialize_carry((2, 3)), jnp.ones((2, 3)))
    >>> y.shape
    (2, 4)
    """

    residual: bool
    dense_i: Linear
    dense_h: Linear

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        carry_init: InitializerLike | None = None,
        residual: bool = False,
        activation_fn: Activation = lax.tanh,
        kernel_init: InitializerLike = default_kernel_init,
        recurrent_kernel_init: InitializerLike = default_recurrent_kernel_init,
        bias_init: InitializerLike = default_bias_init,
        promote_dtype: PromoteDtype = default_promote_dtype,
        ctx: Context,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        recurrent_kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
    ) -> None:
        self._set_up(in_features, hidden_features, activation_fn, dtype, param_dtype, carry_init)
        self.residual = residual
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "promote_dtype": promote_dtype}
        bias: dict[str, Any] = {"bias_init": bias_init, "bias_metadata": bias_metadata}
        kernel: dict[str, Any] = {"kernel_init": kernel_init, "kernel_metadata": kernel_metadata}
        self.dense_i = Linear(in_features, hidden_features, ctx=ctx, **kernel, **bias, **dtypes)
        kernel = {"kernel_init": recurrent_kernel_init, "kernel_metadata": recurrent_kernel_metadata}
        self.dense_h = Linear(hidden_features, hidden_features, use_bias=False, ctx=ctx, **kernel, **dtypes)

    def __call__(self, carry: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Runs one step.

        Args:
            carry: the hidden state, `[batch..., hidden_features]`.
            inputs: an array of shape `[batch..., in_features]`.

        Returns:
            The new carry, and the output `[batch..., hidden_features]`.
        """
        self._check(carry, inputs, shape_of(self, inputs)[:-1])
        hidden = self.dense_i(inputs) + self.dense_h(carry)
        if self.residual:
            hidden = hidden + cast(carry, hidden.dtype)
        hidden = self.activation_fn(hidden)
        return cast(hidden, carry.dtype), hidden


class GRUCell(GatedCell):
    """A gated recurrent unit.

        r = gate(x Wir + bir + h Whr)       z = gate(x Wiz + biz + h Whz)
        n = act(x Win + bin + r (h Whn))    h' = (1 - z) n + z h

    Args:
        in_features: the number of features of the input.
        hidden_features: the number of features of carry and output.
        hidden_bias: whether the projection of the hidden state has biases as well, as in PyTorch's `GRU`. It makes a
            difference for `n`, where the reset gate applies to `h Whn + bhn`.
        gate_fn: the activation of the gates.
        activation_fn: the activation of the update.
        kernel_init: the initializer of the kernel on the input.
        recurrent_kernel_init: the initializer of the kernel on the hidden state.
        bias_init: the initializer of the biases.
        dtype: the computation dtype; by default, the dtype that inputs and parameters promote to.
        param_dtype: the dtype of the parameters and of the carry.
        carry_init: the initializer of the carry; zeros by default.
        promote_dtype: a replacement for the function that converts arrays to one dtype.
        ctx: the Context; its stream "params" initializes the parameters.
        kernel_metadata, recurrent_kernel_metadata, bias_metadata: metadata of these Variables.

    Attributes:
        dense_i: the projection of the input, kernel `[in_features, 3 * hidden_features]` for r, z, n, with the biases.
        dense_h: the projection of the hidden state, kernel `[hidden_features, 3 * hidden_features]`.

    >>> cell = nnx.GRUCell(3, 4, ctx=nnx.context(0))
    >>> carry, y = cell(cell.initialize_carry((2, 3)), jnp.ones((2, 3)))
    >>> y.shape
    (2, 4)
    """

    hidden_bias: bool
    dense_i: Linear
    dense_h: Linear

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        hidden_bias: bool = False,
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
        self.hidden_bias = hidden_bias
        super().__init__(
            in_features,
            hidden_features,
            gate_fn=gate_fn,
            activation_fn=activation_fn,
            kernel_init=kernel_init,
            recurrent_kernel_init=recurrent_kernel_init,
            bias_init=bias_init,
            dtype=dtype,
            param_dtype=param_dtype,
            carry_init=carry_init,
            promote_dtype=promote_dtype,
            ctx=ctx,
            kernel_metadata=kernel_metadata,
            recurrent_kernel_metadata=recurrent_kernel_metadata,
            bias_metadata=bias_metadata,
        )

    def _make_projections(self, from_input: Callable[..., Linear], from_hidden: Callable[..., Linear]) -> None:
        self.dense_i = from_input(3 * self.hidden_features)
        self.dense_h = from_hidden(3 * self.hidden_features, use_bias=self.hidden_bias)

    def __call__(self, carry: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Runs one step, with shapes as in `SimpleCell`."""
        self._check(carry, inputs, shape_of(self, inputs)[:-1])
        sizes, axis = [self.hidden_features] * 3, inputs.ndim - 1
        input_r, input_z, input_n = lax.split(self.dense_i(inputs), sizes, axis=axis)
        hidden_r, hidden_z, hidden_n = lax.split(self.dense_h(carry), sizes, axis=axis)
        reset = self.gate_fn(input_r + hidden_r)
        keep = self.gate_fn(input_z + hidden_z)
        update = self.activation_fn(input_n + reset * hidden_n)
        hidden = (1.0 - keep) * update + keep * carry
        return cast(hidden, carry.dtype), cast(hidden, update.dtype)


def _lstm_step(
    cell: Any,
    carry: LSTMCarry,
    input_gate: jax.Array,
    forget_gate: jax.Array,
    update: jax.Array,
    output_gate: jax.Array,
) -> tuple[LSTMCarry, jax.Array]:
    """Returns the new carry and the output, from the gates before their activations."""
    memory, hidden = carry
    new_memory = cell.gate_fn(forget_gate) * memory + cell.gate_fn(input_gate) * cell.activation_fn(update)
    output = cell.gate_fn(output_gate) * cell.activation_fn(new_memory)
    return (cast(new_memory, memory.dtype), cast(output, hidden.dtype)), cast(output, output_gate.dtype)


class _LSTM(GatedCell):
    """The carry that LSTM cells on vectors share."""

    def initialize_carry(
        self, input_shape: Sequence[int], ctx: Context | None = None, carry_init: InitializerLike | None = None
    ) -> LSTMCarry:
        shape = (*input_shape[:-1], self.hidden_features)
        return self._initial(shape, ctx, carry_init), self._initial(shape, ctx, carry_init)


class LSTMCell(_LSTM):
    """A long short-term memory cell.

        i = gate(x Wii + h Whi + bi)        f = gate(x Wif + h Whf + bf)
        g = act(x Wig + h Whg + bg)         o = gate(x Wio + h Who + bo)
        c' = f c + i g                      h' = o act(c')

    Each gate has its own projections; `OptimizedLSTMCell` computes the same with two.

    Args:
        in_features: the number of features of the input.
        hidden_features: the number of features of memory and output.
        gate_fn: the activation of the gates.
        activation_fn: the activation of update and output.
        kernel_init: the initializer of the kernels on the input.
        recurrent_kernel_init: the initializer of the kernels on the hidden state.
        bias_init: the initializer of the biases.
        dtype: the computation dtype; by default, the dtype that inputs and parameters promote to.
        param_dtype: the dtype of the parameters and of the carry.
        carry_init: the initializer of the carry; zeros by default.
        promote_dtype: a replacement for the function that converts arrays to one dtype.
        ctx: the Context; its stream "params" initializes the parameters.
        kernel_metadata, recurrent_kernel_metadata, bias_metadata: metadata of these Variables.

    Attributes:
        ii, if_, ig, io: the projections of the input, one per gate.
        hi, hf, hg, ho: the projections of the hidden state, one per gate, with the biases.

    >>> cell = nnx.LSTMCell(3, 4, ctx=nnx.context(0))
    >>> x = jnp.ones((2, 3))
    >>> carry = cell.initialize_carry(x.shape)
    >>> carry, y = cell(carry, x)
    >>> y.shape
    (2, 4)
    """

    ii: Linear
    if_: Linear
    ig: Linear
    io: Linear
    hi: Linear
    hf: Linear
    hg: Linear
    ho: Linear

    def _make_projections(self, from_input: Callable[..., Linear], from_hidden: Callable[..., Linear]) -> None:
        n = self.hidden_features
        self.ii, self.if_, self.ig, self.io = (from_input(n, use_bias=False) for _ in range(4))
        self.hi, self.hf, self.hg, self.ho = (from_hidden(n) for _ in range(4))

    def __call__(self, carry: LSTMCarry, inputs: jax.Array) -> tuple[LSTMCarry, jax.Array]:
        """Runs one step.

        Args:
            carry: memory and hidden state, `[batch..., hidden_features]` each.
            inputs: an array of shape `[batch..., in_features]`.

        Returns:
            The new carry, and the output `[batch..., hidden_features]`.
        """
        self._check(carry, inputs, shape_of(self, inputs)[:-1])
        hidden = carry[1]
        input_gate = self.ii(inputs) + self.hi(hidden)
        forget_gate = self.if_(inputs) + self.hf(hidden)
        update = self.ig(inputs) + self.hg(hidden)
        output_gate = self.io(inputs) + self.ho(hidden)
        return _lstm_step(self, carry, input_gate, forget_gate, update, output_gate)


class OptimizedLSTMCell(_LSTM):
    """`LSTMCell` with the projections of all four gates in one kernel each for input and hidden state.

    Arguments and equations are those of `LSTMCell`; the kernels are those of its gates i, f, g, o side by side.

    Attributes:
        dense_i: the projection of the input, kernel `[in_features, 4 * hidden_features]`.
        dense_h: the projection of the hidden state, kernel `[hidden_features, 4 * hidden_features]`, with the biases.

    >>> cell = nnx.OptimizedLSTMCell(3, 4, ctx=nnx.context(0))
    >>> carry, y = cell(cell.initialize_carry((2, 3)), jnp.ones((2, 3)))
    >>> y.shape
    (2, 4)
    """

    dense_i: Linear
    dense_h: Linear

    def _make_projections(self, from_input: Callable[..., Linear], from_hidden: Callable[..., Linear]) -> None:
        self.dense_i = from_input(4 * self.hidden_features, use_bias=False)
        self.dense_h = from_hidden(4 * self.hidden_features)

    def __call__(self, carry: LSTMCarry, inputs: jax.Array) -> tuple[LSTMCarry, jax.Array]:
        """Runs one step, as in `LSTMCell`."""
        self._check(carry, inputs, shape_of(self, inputs)[:-1])
        gates = self.dense_i(inputs) + self.dense_h(carry[1])
        return _lstm_step(self, carry, *lax.split(gates, [self.hidden_features] * 4, axis=gates.ndim - 1))


class ConvLSTMCell(BuiltInCell):
    """An LSTM cell on images: the projections are convolutions, and the carry is a pair of images.

    The equations are those of `LSTMCell` with 1 added to the forget gate before its activation.

    Args:
        in_features: the number of channels of the input.
        hidden_features: the number of channels of memory and output.
        kernel_size: the size of the convolutions, one entry per spatial dimension.
        strides: the strides of the convolution on the input.
        padding: the padding of the convolution on the input, as in `Conv`; the one on the hidden state keeps its size.
        use_bias: whether the convolutions have biases.
        dtype: the computation dtype; by default, the dtype that inputs and parameters promote to.
        param_dtype: the dtype of the parameters and of the carry.
        carry_init: the initializer of the carry; zeros by default.
        gate_fn: the activation of the gates.
        activation_fn: the activation of update and output.
        kernel_init, recurrent_kernel_init: the initializers of the kernels on input and hidden state.
        bias_init: the initializer of the biases.
        promote_dtype: a replacement for the function that converts arrays to one dtype.
        ctx: the Context; its stream "params" initializes the parameters.
        kernel_metadata, recurrent_kernel_metadata, bias_metadata: metadata of these Variables.

    Attributes:
        ih: the `Conv` from the input to the gates i, g, f, o.
        hh: the `Conv` from the hidden state to the same gates.

    >>> cell = nnx.ConvLSTMCell(3, 4, kernel_size=(3, 3), ctx=nnx.context(0))
    >>> x = jnp.ones((2, 8, 8, 3))  # batch, height, width, channels
    >>> carry, y = cell(cell.initialize_carry(x.shape), x)
    >>> y.shape
    (2, 8, 8, 4)
    """

    kernel_size: tuple[int, ...]
    gate_fn: Activation
    ih: Conv
    hh: Conv

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        kernel_size: Sequence[int],
        strides: int | Sequence[int] = 1,
        *,
        padding: PaddingLike = "SAME",
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        carry_init: InitializerLike | None = None,
        gate_fn: Activation = lax.logistic,
        activation_fn: Activation = lax.tanh,
        kernel_init: InitializerLike = default_kernel_init,
        recurrent_kernel_init: InitializerLike = default_kernel_init,
        bias_init: InitializerLike = default_bias_init,
        promote_dtype: PromoteDtype = default_promote_dtype,
        ctx: Context,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
        recurrent_kernel_metadata: Mapping[str, Any] = NO_METADATA,
        bias_metadata: Mapping[str, Any] = NO_METADATA,
    ) -> None:
        self._set_up(in_features, hidden_features, activation_fn, dtype, param_dtype, carry_init)
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
        kernel: dict[str, Any] = {"kernel_init": kernel_init, "kernel_metadata": kernel_metadata}
        self.ih = Conv(in_features, gates, kernel_size, strides, padding=padding, **kernel, **options)
        kernel = {"kernel_init": recurrent_kernel_init, "kernel_metadata": recurrent_kernel_metadata}
        self.hh = Conv(hidden_features, gates, kernel_size, **kernel, **options)
        self.kernel_size = self.ih.kernel_size
        self.gate_fn = gate_fn

    def __call__(self, carry: LSTMCarry, inputs: jax.Array) -> tuple[LSTMCarry, jax.Array]:
        """Runs one step.

        Args:
            carry: memory and hidden state, `[batch..., *spatial, hidden_features]` each.
            inputs: an array of shape `[batch..., *spatial, in_features]`.

        Returns:
            The new carry, and the output `[batch..., *spatial, hidden_features]`.
        """
        check_last_axis(self, inputs, self.in_features, "in_features")
        from_input = self.ih(inputs)
        self._check(carry, inputs, from_input.shape[:-1])
        gates = from_input + self.hh(carry[1])
        input_gate, update, forget_gate, output_gate = lax.split(gates, [self.hidden_features] * 4, axis=gates.ndim - 1)
        return _lstm_step(self, carry, input_gate, forget_gate + 1.0, update, output_gate)

    def initialize_carry(
        self, input_shape: Sequence[int], ctx: Context | None = None, carry_init: InitializerLike | None = None
    ) -> LSTMCarry:
        # Strides and padding change the size of the image, so the convolution itself is asked.
        gates = jax.eval_shape(self.ih, jax.ShapeDtypeStruct(tuple(input_shape), self.param_dtype))
        shape = (*gates.shape[:-1], self.hidden_features)
        return self._initial(shape, ctx, carry_init), self._initial(shape, ctx, carry_init)

    @property
    def num_feature_axes(self) -> int:
        return len(self.kernel_size) + 1
