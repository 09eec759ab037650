"""Recurrent cells, and the networks that run them over sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.nn.arrays import numpy_normal


def agree(out, expected) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4), out, expected)


CELLS = [nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell, nnx.SimpleCell]
cells = pytest.mark.parametrize("cell_type", CELLS)


def by_loop(cell, carry, steps) -> tuple:
    """A cell over `[time, …]`, one call after the other."""
    outputs = []
    for x in steps:
        carry, y = cell(carry, x)
        outputs.append(y)
    return carry, jnp.stack(outputs)


class Counter(nnx.Variable):
    pass


class Forgetful(nnx.RNNCellBase):
    """Adds up its inputs with dropout, and counts its steps."""

    def __init__(self):
        self.dropout = nnx.Dropout(0.5)
        self.steps = Counter(jnp.array(0))

    def __call__(self, carry, inputs, ctx=None):
        self.steps = self.steps + 1
        y = self.dropout(inputs, ctx=ctx)
        return carry + y, y

    def initialize_carry(self, input_shape, ctx=None, carry_init=None):
        return jnp.zeros(input_shape)


class TestCells:
    @cells
    @pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=["unbatched", "batch", "two batch axes"])
    def test_shapes(self, cell_type, batch):
        cell = cell_type(3, 4, ctx=nnx.context(0))
        carry = cell.initialize_carry((*batch, 3))
        new_carry, y = jax.eval_shape(cell, carry, jnp.ones((*batch, 3)))
        assert y.shape == (*batch, 4)
        assert jax.tree.map(jnp.shape, new_carry) == jax.tree.map(jnp.shape, carry)

    def test_both_lstm_cells_compute_the_same(self):
        one, two = nnx.LSTMCell(3, 4, ctx=nnx.context(0)), nnx.OptimizedLSTMCell(3, 4, ctx=nnx.context(1))
        two.dense_i.kernel = jnp.concatenate([g.kernel for g in (one.ii, one.if_, one.ig, one.io)], -1)
        two.dense_h.kernel = jnp.concatenate([g.kernel for g in (one.hi, one.hf, one.hg, one.ho)], -1)
        carry, x = (numpy_normal(2, 4), numpy_normal(2, 4, seed=1)), numpy_normal(2, 3, seed=2)
        agree(two(carry, x), one(carry, x))

    def test_simple_cell_can_be_residual(self):
        cell = nnx.SimpleCell(3, 4, residual=True, ctx=nnx.context(0))
        h, x = numpy_normal(2, 4), numpy_normal(2, 3, seed=1)
        agree(cell(h, x)[1], jnp.tanh(x @ cell.dense_i.kernel + h @ cell.dense_h.kernel + h))

    @cells
    def test_outputs_have_the_dtype_of_the_computation_and_carries_keep_theirs(self, cell_type):
        cell = cell_type(3, 4, dtype=jnp.bfloat16, ctx=nnx.context(0))
        carry = cell.initialize_carry((2, 3))
        new_carry, y = jax.eval_shape(cell, carry, numpy_normal(2, 3))
        assert y.dtype == jnp.bfloat16
        assert {leaf.dtype for leaf in jax.tree.leaves((carry, new_carry))} == {jnp.dtype(jnp.float32)}
        half = cell_type(3, 4, dtype=None, param_dtype=jnp.float16, ctx=nnx.context(0))
        carry, y = jax.eval_shape(half, half.initialize_carry((2, 3)), numpy_normal(2, 3))
        assert y.dtype == jnp.float32
        assert {leaf.dtype for leaf in jax.tree.leaves(carry)} == {jnp.dtype(jnp.float16)}

    @cells
    def test_wrong_features_say_expected_and_got(self, cell_type):
        cell = cell_type(3, 4, ctx=nnx.context(0))
        with pytest.raises(ValueError, match=f"{cell_type.__name__} expected 3 features.*got 5"):
            cell(cell.initialize_carry((2, 3)), jnp.ones((2, 5)))

    @cells
    def test_a_carry_is_never_broadcast(self, cell_type):
        cell = cell_type(3, 4, ctx=nnx.context(0))
        with pytest.raises(ValueError, match=rf"{cell_type.__name__} expected a carry of shape \(2, 4\).*got \(4,\)"):
            cell(cell.initialize_carry((3,)), jnp.ones((2, 3)))

    @cells
    def test_carries_can_be_drawn(self, cell_type):
        cell = cell_type(3, 4, carry_init=nnx.initializers.normal(1.0), ctx=nnx.context(0))
        carry = cell.initialize_carry((2, 3), nnx.context(0))
        assert all(np.asarray(leaf).std() > 0.1 for leaf in jax.tree.leaves(carry))
        given = cell.initialize_carry((2, 3), nnx.context(carry=0), carry_init=nnx.initializers.constant(2.0))
        assert all((np.asarray(leaf) == 2).all() for leaf in jax.tree.leaves(given))
        with pytest.raises(ValueError, match="needs a Context: pass ctx=ctx"):
            cell.initialize_carry((2, 3))

    def test_conv_lstm_carries_images(self):
        cell = nnx.ConvLSTMCell(3, 4, (3, 3), ctx=nnx.context(0))
        x = numpy_normal(2, 6, 5, 3)
        carry = cell.initialize_carry(x.shape)
        assert jax.tree.map(jnp.shape, carry) == ((2, 6, 5, 4), (2, 6, 5, 4))
        carry, y = jax.eval_shape(cell, carry, x)
        assert y.shape == (2, 6, 5, 4)
        with pytest.raises(ValueError, match="ConvLSTMCell expected 3 features.*got 2"):
            cell(carry, x[..., :2])
        with pytest.raises(ValueError, match=r"ConvLSTMCell expected a carry of shape \(2, 6, 5, 4\)"):
            cell(cell.initialize_carry(x[:1].shape), x)

    def test_conv_lstm_with_strides_has_a_smaller_carry(self):
        cell = nnx.ConvLSTMCell(3, 4, (3,), strides=2, ctx=nnx.context(0))
        x = numpy_normal(2, 6, 3)
        assert jax.eval_shape(cell, cell.initialize_carry(x.shape), x)[1].shape == (2, 3, 4)

    def test_cell_without_a_step_raises_with_advice(self):
        with pytest.raises(TypeError, match="define `__call__"):
            nnx.RNNCellBase()(None, jnp.ones(3))
        with pytest.raises(TypeError, match="define `initialize_carry"):
            nnx.RNNCellBase().initialize_carry((3,))


class TestRNN:
    @cells
    def test_rnn_equals_a_loop_over_time(self, cell_type):
        cell = cell_type(3, 4, ctx=nnx.context(0))
        x = numpy_normal(2, 5, 3)
        out = nnx.RNN(cell, return_carry=True)(x)
        carry, y = by_loop(cell, cell.initialize_carry((2, 3)), x.swapaxes(0, 1))
        agree(out, (carry, y.swapaxes(0, 1)))

    def test_conv_lstm_over_a_film(self):
        cell = nnx.ConvLSTMCell(2, 3, (3,), ctx=nnx.context(0))
        x = numpy_normal(2, 3, 4, 2)
        carry, y = by_loop(cell, cell.initialize_carry((2, 4, 2)), x.swapaxes(0, 1))
        agree(nnx.RNN(cell)(x), y.swapaxes(0, 1))

    @pytest.mark.parametrize("batch", [(), (2, 3)], ids=["unbatched", "two batch axes"])
    def test_any_number_of_batch_axes(self, batch):
        rnn = nnx.RNN(nnx.GRUCell(3, 4, ctx=nnx.context(0)))
        x = numpy_normal(*batch, 5, 3)
        agree(rnn(x), rnn(x.reshape(-1, 5, 3)).reshape(*batch, 5, 4))

    def test_time_may_come_first(self):
        cell = nnx.GRUCell(3, 4, ctx=nnx.context(0))
        x = numpy_normal(2, 5, 3)
        expected = nnx.RNN(cell)(x).swapaxes(0, 1)
        agree(nnx.RNN(cell, time_major=True)(x.swapaxes(0, 1)), expected)
        agree(nnx.RNN(cell)(x.swapaxes(0, 1), time_major=True), expected)

    def test_the_carry_can_be_passed_on(self):
        rnn = nnx.RNN(nnx.LSTMCell(3, 4, ctx=nnx.context(0)))
        x = numpy_normal(2, 5, 3)
        carry, first = rnn(x[:, :2], return_carry=True)
        agree(jnp.concatenate([first, rnn(x[:, 2:], initial_carry=carry)], 1), rnn(x))

    @pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
    def test_lengths_make_each_row_as_if_alone(self, reverse):
        rnn = nnx.RNN(nnx.OptimizedLSTMCell(3, 4, ctx=nnx.context(0)), return_carry=True, reverse=reverse)
        x, lengths = numpy_normal(2, 5, 3), [5, 2]
        carry, y = rnn(x, seq_lengths=jnp.array(lengths))
        _, aligned = rnn(x, seq_lengths=jnp.array(lengths), keep_order=True)
        for row, n in enumerate(lengths):
            alone_carry, alone = rnn(x[row, :n])
            agree(y[row, :n], alone)
            agree(aligned[row, :n], alone[::-1] if reverse else alone)
            agree(jax.tree.map(lambda c, row=row: c[row], carry), alone_carry)

    def test_a_row_of_no_steps_keeps_its_initial_carry(self):
        rnn = nnx.RNN(nnx.GRUCell(3, 4, ctx=nnx.context(0)), return_carry=True)
        initial = numpy_normal(2, 4)
        carry, _ = rnn(numpy_normal(2, 3, 3), initial_carry=initial, seq_lengths=jnp.array([0, 3]))
        np.testing.assert_array_equal(carry[0], initial[0])
        assert not np.array_equal(carry[1], initial[1])

    def test_reverse_gives_outputs_in_the_order_they_were_made(self):
        rnn = nnx.RNN(nnx.GRUCell(3, 4, ctx=nnx.context(0)))
        x = numpy_normal(2, 5, 3)
        flipped = rnn(x[:, ::-1])
        agree(rnn(x, reverse=True), flipped)
        agree(rnn(x, reverse=True, keep_order=True), flipped[:, ::-1])

    def test_unrolling_changes_nothing(self):
        cell = nnx.GRUCell(3, 4, ctx=nnx.context(0))
        x = numpy_normal(2, 5, 3)
        agree(nnx.RNN(cell, unroll=2)(x), nnx.RNN(cell)(x))

    def test_gradients_agree_with_the_loop(self):
        rnn, x = nnx.RNN(nnx.GRUCell(3, 4, ctx=nnx.context(0))), numpy_normal(2, 5, 3)
        scanned = nnx.grad(lambda m: (m(x) ** 2).sum())(rnn)
        looped = nnx.grad(lambda m: (by_loop(m.cell, jnp.zeros((2, 4)), x.swapaxes(0, 1))[1] ** 2).sum())(rnn)
        agree(dict(scanned), dict(looped))

    def test_half_precision_runs_through_the_scan(self):
        for options in ({"dtype": jnp.bfloat16}, {"param_dtype": jnp.float16}, {"dtype": jnp.float16}):
            rnn = nnx.RNN(nnx.OptimizedLSTMCell(3, 4, ctx=nnx.context(0), **options))
            assert jax.eval_shape(rnn, numpy_normal(2, 5, 3)).shape == (2, 5, 4)

    def test_state_of_the_cell_goes_from_step_to_step(self):
        rnn = nnx.RNN(Forgetful())
        rnn(jnp.ones((2, 5, 3)), ctx=nnx.context(dropout=0, flags={"deterministic": True}))
        assert int(rnn.cell.steps) == 5
        nnx.jit(lambda m, ctx: m(jnp.ones((2, 5, 3)), ctx=ctx))(
            rnn, nnx.context(dropout=0, flags={"deterministic": True})
        )
        assert int(rnn.cell.steps) == 10

    def test_every_step_draws_its_own_key(self):
        rnn = nnx.RNN(Forgetful())
        out = rnn(jnp.ones((20, 16)), ctx=nnx.context(dropout=0, flags={"deterministic": False}))
        assert set(np.unique(out)) == {0.0, 2.0}
        assert len(np.unique(np.asarray(out), axis=0)) > 15

    def test_wrong_inputs_say_expected_and_got(self):
        rnn = nnx.RNN(nnx.GRUCell(3, 4, ctx=nnx.context(0)))
        with pytest.raises(ValueError, match="GRUCell expected 3 features.*got 5"):
            rnn(jnp.ones((2, 5, 5)))
        with pytest.raises(ValueError, match=r"RNN: expected an input with a time axis .* got shape \(3,\)"):
            rnn(jnp.ones(3))
        with pytest.raises(ValueError, match=r"RNN: expected seq_lengths of shape \(2,\).*got \(3,\)"):
            rnn(jnp.ones((2, 5, 3)), seq_lengths=jnp.array([1, 2, 3]))


def both_ways(**options) -> nnx.Bidirectional:
    ctx = nnx.context(0)
    return nnx.Bidirectional(nnx.RNN(nnx.GRUCell(3, 4, ctx=ctx)), nnx.RNN(nnx.GRUCell(3, 4, ctx=ctx)), **options)


class TestBidirectional:
    def test_directions_are_aligned_and_joined(self):
        layer, x = both_ways(), numpy_normal(2, 5, 3)
        forward, backward = layer.forward_rnn(x), layer.backward_rnn(x[:, ::-1])[:, ::-1]
        agree(layer(x), jnp.concatenate([forward, backward], -1))

    def test_merging_carries_and_time_first(self):
        layer, x = both_ways(merge_fn=jnp.add, return_carry=True, time_major=True), numpy_normal(5, 2, 3)
        (forward_carry, backward_carry), y = layer(x)
        assert y.shape == (5, 2, 4)
        assert forward_carry.shape == backward_carry.shape == (2, 4)
        (_, second), _ = layer(x, initial_carry=(forward_carry, backward_carry))
        assert not np.allclose(second, backward_carry)

    def test_lengths_reach_both_directions(self):
        layer, x = both_ways(), numpy_normal(2, 5, 3)
        out = layer(x, seq_lengths=jnp.array([5, 2]))
        agree(out[1, :2], layer(x[1, :2]))

    def test_one_network_twice_is_refused(self):
        rnn = nnx.RNN(nnx.GRUCell(3, 4, ctx=nnx.context(0)))
        with pytest.raises(ValueError, match="same object"):
            nnx.Bidirectional(rnn, rnn)

    def test_outputs_are_always_aligned(self):
        with pytest.raises(ValueError, match="keep_order=False would merge"):
            both_ways()(numpy_normal(2, 5, 3), keep_order=False)


@pytest.mark.parametrize("reverse", [False, True])
def test_nan_in_padded_steps_does_not_reach_gradients(reverse):
    rnn = nnx.RNN(nnx.GRUCell(3, 4, ctx=nnx.context(0)), return_carry=True, reverse=reverse)
    x, lengths = numpy_normal(2, 5, 3), jnp.array([5, 2])
    padded = jnp.where((jnp.arange(5) < lengths[:, None])[..., None], x, jnp.nan)

    def loss(rnn, x):
        carry, y = rnn(x, seq_lengths=lengths)
        return carry.sum() + jnp.where((jnp.arange(5) < lengths[:, None])[..., None], y, 0).sum()

    expected = nnx.grad(loss)(rnn, jnp.asarray(x))
    for path, gradient in nnx.grad(loss)(rnn, padded).items():
        np.testing.assert_allclose(gradient.value, expected[path].value, rtol=1e-4, atol=1e-6)


def test_cells_compute_in_the_dtype_of_their_parameters_by_default():
    for cell in CELLS:
        layer = cell(3, 4, param_dtype=jnp.bfloat16, ctx=nnx.context(0))
        _, y = layer(layer.initialize_carry((3,)), jnp.ones(3, jnp.bfloat16))
        assert y.dtype == jnp.bfloat16
