"""TrainState: the record of a functional training loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx


class Projection(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.w = nnx.Param(jax.random.normal(ctx.make_rng("params"), (3, 2)))
        self.seen = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.seen += jnp.sum(x)
        return x @ self.w

    def double(self, x):
        return 2 * self(x)


X = jnp.arange(12.0).reshape(4, 3) / 10


def make_state(tx=None, **more):
    (params, batch_stats), moduledef = Projection(ctx=nnx.context(0)).partition(nnx.Param, nnx.BatchStat)
    return nnx.TrainState(moduledef, params=params, tx=tx or optax.adam(1e-2), batch_stats=batch_stats, **more)


def loss_fn(params, state):
    y, pure = state.apply(params, "batch_stats")(X)
    return jnp.mean(y**2), pure.filter(nnx.BatchStat)


def test_train_state_has_standard_and_given_fields():
    state = make_state(note="a", scale=jnp.ones(2))
    assert isinstance(state, nnx.Pytree)
    assert state.step == 0 and state.note == "a" and state.scale.shape == (2,)
    assert isinstance(state.params, nnx.State) and isinstance(state.moduledef, nnx.ModuleDef)
    assert state.opt_state[0].count == 0
    assert list(state.batch_stats) == ["seen"]


def test_names_in_apply_mean_fields():
    state = make_state()
    y, pure = state.apply("params", "batch_stats")(X)
    np.testing.assert_array_equal(y, X @ state.params["w"].value)
    assert pure.filter(nnx.BatchStat)["seen"].value == X.sum()
    twice, _ = state.apply("params", state.batch_stats).double(X)
    np.testing.assert_array_equal(twice, 2 * y)


def test_an_unknown_name_in_apply_lists_the_fields():
    with pytest.raises(ValueError, match="'cache' is not a field of this TrainState.*batch_stats.*params"):
        make_state().apply("params", "cache")


def test_a_training_step_compiles_once_and_equals_optax_by_hand():
    traces = []

    @jax.jit
    def step(state):
        traces.append(None)
        grads, batch_stats = jax.grad(loss_fn, has_aux=True)(state.params, state)
        return state.apply_gradients(grads, batch_stats=batch_stats)

    state, tx = make_state(), optax.adam(1e-2)
    params, opt_state = {"w": state.params["w"].value}, tx.init({"w": state.params["w"].value})

    @jax.jit
    def by_hand(params, opt_state):
        grads = jax.grad(lambda p: jnp.mean((X @ p["w"]) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for _ in range(3):
        state = step(state)
        params, opt_state = by_hand(params, opt_state)
    assert len(traces) == 1
    assert state.step == 3
    np.testing.assert_array_equal(state.params["w"].value, params["w"])
    np.testing.assert_allclose(state.batch_stats["seen"].value, 3 * X.sum(), rtol=1e-6)
    step(make_state())  # built anew by the same code
    assert len(traces) == 1


def test_replacements_must_be_fields():
    state = make_state()
    assert state.replace(step=7).step == 7
    with pytest.raises(ValueError, match="Trying to replace unknown fields"):
        state.apply_gradients(state.params, momentum=1)


def test_train_state_is_immutable():
    with pytest.raises(AttributeError, match="is immutable, trying to update field 'step'"):
        make_state().step = 3


def test_plain_sgd_has_no_optimizer_arrays_and_still_steps():
    state = make_state(optax.sgd(0.5))
    after = state.apply_gradients(jax.tree.map(jnp.ones_like, state.params))
    np.testing.assert_array_equal(after.params["w"].value, state.params["w"].value - 0.5)


def test_a_transformation_may_want_more_than_the_gradient():
    state = make_state(optax.contrib.reduce_on_plateau(patience=1))
    after = state.apply_gradients(state.params, tx_args={"value": jnp.array(1.0)})
    assert after.opt_state.best_value == 1.0


def test_states_of_plain_numbers_are_data_and_survive_flax_serialization():
    serialization = pytest.importorskip("flax.serialization")
    (params, counts), moduledef = nnx.Dict(w=nnx.Param(jnp.ones(2)), n=nnx.BatchStat(3)).partition(nnx.Param, ...)
    state = nnx.TrainState(moduledef, params=params, tx=optax.adam(1e-2), batch_stats=counts)
    assert jax.tree.leaves(state.batch_stats) == [3]
    assert len(jax.tree.leaves(state)) == 6
    zeros = jax.tree.map(lambda x: 0 * x, state)
    restored = serialization.from_bytes(zeros, serialization.to_bytes(state))
    assert restored.batch_stats["n"] == nnx.BatchStat(3)
    np.testing.assert_array_equal(restored.params["w"].value, [1, 1])
    assert jax.tree.structure(restored) == jax.tree.structure(state)
