"""Recurrent networks: cells run over sequences.

`RNN` scans a cell (see `rnn_cells`) along time; `Bidirectional` runs one network forward and another backward. A
sequence is `[batch..., time, *features]`, or `[time, batch..., *features]` when `time_major`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from nnx.core.context import Context, streams_of
from nnx.core.module.dict_sequence import accepts_ctx
from nnx.core.module.module import Module
from nnx.core.variables.variables import Param
from nnx.nn.recurrent.cell_base import RNNCellBase
from nnx.nn.support.checks import shape_of
from nnx.sharding.explicit import is_split, with_types
from nnx.transforms.control.eval_shape import eval_shape
from nnx.transforms.control.scan import scan

NO_TIME_AXIS = (
    "RNN: expected an input with a time axis and {axes} axes of features for {cell}, got shape {shape}. "
    "Write `x[None]` for a sequence of one step."
)
WRONG_LENGTHS = "RNN: expected seq_lengths of shape {expected}, one per row of inputs {inputs}, got {got}."
SAME_NETWORK = (
    "Bidirectional: forward_rnn and backward_rnn are the same object, so both directions would have the same weights. "
    "Make two."
)
MISALIGNED = (
    "Bidirectional: keep_order=False would merge the first step of one direction with the last of the other. "
    "Leave it out."
)


class RNN(Module):
    """Runs a cell over a sequence.

    Args:
        cell: any `RNNCellBase`. It can hold Variables that change from step to step, and its call can take `ctx`.
        time_major: whether inputs and outputs have time first instead of after the batch axes.
        return_carry: whether to return `(carry, outputs)` instead of the outputs alone.
        reverse: whether to go from the last step to the first; outputs then come in the order they were made.
        keep_order: whether to put the outputs of `reverse` back into the order of the inputs.
        unroll: the number of steps per iteration of the compiled loop.
        variable_axes, variable_broadcast, variable_carry, split_rngs: what happens to the cell's Variables and the
            Context's streams from step to step, as in `scan`. By default, parameters are read only, other Variables are
            carried on, and every step draws different keys.

    >>> rnn = nnx.RNN(nnx.GRUCell(3, 4, ctx=nnx.context(0)), return_carry=True)
    >>> x = jnp.ones((2, 5, 3))  # batch, time, features
    >>> carry, y = rnn(x, seq_lengths=jnp.array([5, 2]))
    >>> carry.shape, y.shape
    ((2, 4), (2, 5, 4))
    """

    cell: RNNCellBase
    time_major: bool
    return_carry: bool
    reverse: bool
    keep_order: bool
    unroll: int
    variable_axes: Mapping[Any, int] | None
    variable_broadcast: Any
    variable_carry: Any
    split_rngs: Any

    def __init__(
        self,
        cell: RNNCellBase,
        *,
        time_major: bool = False,
        return_carry: bool = False,
        reverse: bool = False,
        keep_order: bool = False,
        unroll: int = 1,
        variable_axes: Mapping[Any, int] | None = None,
        variable_broadcast: Any = Param,
        variable_carry: Any = ...,
        split_rngs: Any = ...,
    ) -> None:
        self.cell = cell
        self.time_major = time_major
        self.return_carry = return_carry
        self.reverse = reverse
        self.keep_order = keep_order
        self.unroll = unroll
        self.variable_axes = variable_axes
        self.variable_broadcast = variable_broadcast
        self.variable_carry = variable_carry
        self.split_rngs = split_rngs

    def __call__(
        self,
        inputs: jax.Array,
        *,
        initial_carry: Any = None,
        seq_lengths: jax.Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        ctx: Context | None = None,
    ) -> Any:
        """Runs the cell over a sequence.

        Args:
            inputs: `[batch..., time, *features]` with any number of batch axes, including none.
            initial_carry: the carry to start with; by default, the cell's `initialize_carry`.
            seq_lengths: `[batch...]`, the number of real steps in each row; they come first. The carry stops at a row's
                last real step (with `reverse` it starts there); inputs past it do not matter, outputs past it are
                meaningless.
            return_carry, time_major, reverse, keep_order: override those of the instance.
            ctx: the Context, passed to a cell that takes it, with different keys in every step.

        Returns:
            The outputs, `[batch..., time, *output_features]`, or `(carry, outputs)`.
        """
        return_carry = self.return_carry if return_carry is None else return_carry
        time_major = self.time_major if time_major is None else time_major
        reverse = self.reverse if reverse is None else reverse
        keep_order = self.keep_order if keep_order is None else keep_order

        time_axis = 0 if time_major else self._batch_axes(inputs)
        steps = jnp.moveaxis(inputs, time_axis, 0) if time_axis else inputs  # [time, batch..., *features]
        batch = steps.shape[1 : 1 + self._batch_axes(inputs)]
        if seq_lengths is not None and seq_lengths.shape != batch:
            raise ValueError(WRONG_LENGTHS.format(expected=batch, inputs=inputs.shape, got=seq_lengths.shape))
        carry = self.cell.initialize_carry(steps.shape[1:], ctx) if initial_carry is None else initial_carry
        if steps.shape[0] and is_split((steps, Module.get_state(self.cell))):
            carry = with_types(carry, _carry_types(self.cell, carry, steps[0], ctx))

        run = scan(
            _step,
            variable_axes=self.variable_axes,
            variable_broadcast=self.variable_broadcast,
            variable_carry=self.variable_carry,
            split_rngs=(self.split_rngs, {...: False}),  # all are split by default: others are meant to be shared
            length=steps.shape[0] if self.variable_axes else None,
            reverse=reverse,
            unroll=self.unroll,
        )
        numbers = None if seq_lengths is None else jnp.arange(steps.shape[0])
        carry, outputs = run(self.cell, carry, (steps, numbers), seq_lengths, ctx)

        # A reversed scan returns outputs in the order of its inputs; flipping them restores the order of the steps.
        if reverse and not keep_order:
            outputs = jax.tree.map(lambda y: _flipped(y, seq_lengths), outputs)
        if time_axis:
            outputs = jax.tree.map(lambda y: jnp.moveaxis(y, 0, time_axis), outputs)
        return (carry, outputs) if return_carry else outputs

    def _batch_axes(self, inputs: jax.Array) -> int:
        feature_axes = self.cell.num_feature_axes
        batch_axes = len(shape_of(self, inputs)) - feature_axes - 1
        if batch_axes < 0:
            cell = type(self.cell).__name__
            raise ValueError(NO_TIME_AXIS.format(axes=feature_axes, cell=cell, shape=inputs.shape))
        return batch_axes


def _carry_types(cell: Any, carry: Any, x: jax.Array, ctx: Context | None) -> Any:
    """Returns how the cell splits its carry on explicit mesh axes, where a loop has to start with the same types."""
    if ctx is not None:  # the same streams, but none of the keys of this Context is drawn
        ctx = ctx.definition().merge({name: stream.key for name, stream in streams_of(ctx).items()})
    return eval_shape(lambda cell, carry, x, ctx: _step(cell, carry, (x, None), None, ctx)[0], cell, carry, x, ctx)


def _step(
    cell: Any,
    carry: Any,
    step: tuple[jax.Array, jax.Array | None],
    seq_lengths: jax.Array | None,
    ctx: Context | None,
) -> tuple[Any, Any]:
    """Runs one step of the scan; rows that have ended keep their carry."""
    x, number = step
    real = None if number is None or seq_lengths is None else number < seq_lengths
    if real is not None:
        # A NaN in the padding would be in the derivative of this step, and zero times NaN is NaN.
        x = jnp.where(_aligned(real, x), x, jnp.zeros_like(x))
    new_carry, y = cell(carry, x) if ctx is None or not accepts_ctx(cell) else cell(carry, x, ctx=ctx)
    if real is not None:
        new_carry = jax.tree.map(lambda new, old: jnp.where(_aligned(real, new), new, old), new_carry, carry)
    return new_carry, y


class Bidirectional(Module):
    """Runs two networks, one forward and one backward in time, and merges their outputs.

    Args:
        forward_rnn, backward_rnn: the networks; they must be two objects.
        merge_fn: a function `(forward, backward) -> output`; by default, it concatenates the features.
        time_major: whether inputs and outputs have time first.
        return_carry: whether to return `((forward_carry, backward_carry), outputs)`.

    >>> ctx = nnx.context(0)
    >>> layer = nnx.Bidirectional(nnx.RNN(nnx.GRUCell(3, 4, ctx=ctx)), nnx.RNN(nnx.GRUCell(3, 4, ctx=ctx)))
    >>> layer(jnp.ones((2, 5, 3))).shape
    (2, 5, 8)
    """

    forward_rnn: RNN
    backward_rnn: RNN
    merge_fn: Callable[[Any, Any], Any]
    time_major: bool
    return_carry: bool

    def __init__(
        self,
        forward_rnn: RNN,
        backward_rnn: RNN,
        *,
        merge_fn: Callable[[Any, Any], Any] | None = None,
        time_major: bool = False,
        return_carry: bool = False,
    ) -> None:
        if forward_rnn is backward_rnn:
            raise ValueError(SAME_NETWORK)
        self.forward_rnn = forward_rnn
        self.backward_rnn = backward_rnn
        self.merge_fn = merge_features if merge_fn is None else merge_fn
        self.time_major = time_major
        self.return_carry = return_carry

    def __call__(
        self,
        inputs: jax.Array,
        *,
        initial_carry: tuple[Any, Any] | None = None,
        ctx: Context | None = None,
        seq_lengths: jax.Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> Any:
        """Runs both networks over the whole sequence.

        Args:
            inputs: `[batch..., time, *features]`.
            initial_carry: the carries to start with, forward and backward.
            ctx: the Context, passed to cells that take it.
            seq_lengths: `[batch...]`, the number of real steps in each row.
            return_carry, time_major: override those of the instance.
            reverse: whether to swap the directions of the two networks.
            keep_order: must not be False, because the directions are aligned before they are merged.

        Returns:
            The merged outputs, `[batch..., time, *output_features]`, or `((forward_carry, backward_carry), outputs)`.
        """
        if keep_order is False:
            raise ValueError(MISALIGNED)
        return_carry = self.return_carry if return_carry is None else return_carry
        forward_carry, backward_carry = (None, None) if initial_carry is None else initial_carry
        options: dict[str, Any] = {
            "seq_lengths": seq_lengths,
            "return_carry": True,
            "time_major": self.time_major if time_major is None else time_major,
            "keep_order": True,
            "ctx": ctx,
        }
        forward_carry, forward = self.forward_rnn(inputs, initial_carry=forward_carry, reverse=bool(reverse), **options)
        backward_carry, backward = self.backward_rnn(
            inputs, initial_carry=backward_carry, reverse=not reverse, **options
        )
        outputs = jax.tree.map(self.merge_fn, forward, backward)
        return ((forward_carry, backward_carry), outputs) if return_carry else outputs


def merge_features(forward: jax.Array, backward: jax.Array) -> jax.Array:
    """Concatenates the features of both directions."""
    return lax.concatenate((forward, backward), forward.ndim - 1)


def _aligned(rows: jax.Array, like: jax.Array) -> jax.Array:
    """Returns one value per row, with axes of size 1 for the remaining axes of `like`."""
    return rows.reshape(rows.shape + (1,) * (like.ndim - rows.ndim))


def _flipped(outputs: jax.Array, seq_lengths: jax.Array | None) -> jax.Array:
    """Reverses the real steps of each row of `[time, batch..., …]`, and leaves the padding at the end."""
    if seq_lengths is None:
        return lax.rev(outputs, (0,))
    numbers = jnp.arange(outputs.shape[0]).reshape((-1,) + (1,) * seq_lengths.ndim)
    source = jnp.where(numbers < seq_lengths, seq_lengths - 1 - numbers, numbers)
    return jnp.take_along_axis(outputs, _aligned(source, outputs), axis=0)
