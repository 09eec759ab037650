"""When a compiled function is traced again, and what it says about that."""

import copy
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx
from tests.models import Box, linear


def square(x):
    return x * x


class Block(nnx.Module):
    def __init__(self, features, *, activation, ctx):
        self.kernel = nnx.Param(jax.random.normal(ctx.make_rng("params"), (features, features)))
        self.activation = activation
        self.rate = 0.5

    def __call__(self, x):
        return self.activation(x @ self.kernel) * self.rate


class Model(nnx.Module):
    def __init__(self, *, ctx):
        self.layers = [Block(2, activation=lambda x: jnp.sin(x) + 0.1, ctx=ctx) for _ in range(2)]
        self.head = Block(2, activation=square, ctx=ctx)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Sgd(nnx.Module):
    """A fresh optimizer Module as users write them: an optax transformation and its state."""

    def __init__(self, model, tx):
        self.tx = tx
        self.state = tx.init(model.filter(nnx.Param))

    def update(self, model, grads):
        params = model.filter(nnx.Param)
        updates, self.state = self.tx.update(grads, self.state, params)
        model.update_state(optax.apply_updates(params, updates))


def loss(model, x):
    return (model(x) ** 2).mean()


X = jnp.ones((3, 2))


def make(seed, optimizer):
    model = Model(ctx=nnx.context(seed))
    return model, optimizer(model)


def train(model, optimizer, x):
    value, grads = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, grads)
    return value


# Equal models share one trace


def test_models_with_their_own_fresh_optimizer_modules_share_one_trace():
    step = nnx.jit(train)
    for seed in range(3):
        model, optimizer = make(seed, lambda model: Sgd(model, optax.adam(1e-2)))
        before = model.head.kernel
        step(model, optimizer, X)
        step(model, optimizer, X)
        assert not np.array_equal(before, model.head.kernel)
    assert step.trace_count == 1


def test_the_built_in_optimizer_shares_one_trace_too():
    def train_with(model, optimizer, x):
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(grads)
        return value

    step = nnx.jit(train_with)
    for seed in range(2):
        model, optimizer = make(seed, lambda model: nnx.Optimizer(model, optax.adam(1e-3)))
        first = step(model, optimizer, X)
        for _ in range(3):
            last = step(model, optimizer, X)
        assert last < first
    assert step.trace_count == 1


def test_another_learning_rate_is_another_trace():
    step = nnx.jit(train)
    for rate in (1e-2, 1e-3):
        step(*make(0, lambda model, rate=rate: Sgd(model, optax.adam(rate))), X)
    assert step.trace_count == 2


def test_a_changed_static_attribute_is_one_retrace_that_is_explained():
    step = nnx.jit(lambda m, x: m(x), explain_recompiles=True)
    model = Model(ctx=nnx.context(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, X)
        step(Model(ctx=nnx.context(1)), X)
    assert step.trace_count == 1
    model.layers[1].rate = 0.25
    with pytest.warns(UserWarning, match="layers/1/rate") as record:
        step(model, X)
    message = "\n".join(str(w.message) for w in record)
    assert "0.5" in message and "0.25" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, X)
        model.layers[1].rate = 0.5
        step(model, X)
    assert step.trace_count == 2


def test_retraces_are_silent_unless_asked_for():
    step = nnx.jit(lambda m, x: m(x))
    model = Model(ctx=nnx.context(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, X)
        model.head.rate = 0.1
        step(model, X)
    assert step.trace_count == 2


def test_explanation_distinguishes_different_values_with_equal_text():
    f = nnx.jit(lambda box: box.w, explain_recompiles=True)
    box = Box(w=nnx.Param(jnp.ones(2)), config=tuple(range(100)))
    f(box)
    box.config = (*range(99), 7)
    with pytest.warns(UserWarning, match="compiled again") as caught:
        f(box)
    before, after = str(caught[0].message).split(" -> ")
    assert before.rpartition("'config' of box: ")[2] != after


def test_clones_copies_and_rebuilt_models_share_the_trace():
    step = nnx.jit(lambda m, x: m(x))
    model = Model(ctx=nnx.context(0))
    step(model, X)
    step(model.clone(), X)
    step(model.partition().merge(), X)
    step(copy.deepcopy(model), X)
    model.layers[0].activation = model.layers[1].activation = square
    step(model, X)
    step(pickle.loads(pickle.dumps(model)), X)
    assert step.trace_count == 2


def test_another_module_created_between_calls_does_not_retrace():
    step = nnx.jit(lambda m, x: m(x))
    model = Model(ctx=nnx.context(0))
    for seed in range(4):
        step(model, X)
        Model(ctx=nnx.context(seed))
    assert step.trace_count == 1


# Contexts


def test_a_new_fork_of_a_context_every_step_compiles_once():
    step = nnx.jit(lambda m, ctx: m.kernel.sum() + jax.random.uniform(ctx.make_rng("noise")))
    model, ctx = linear(0, 3, 3), nnx.context(noise=0)
    values = {float(step(model, ctx.fork())) for _ in range(5)} | {float(step(model, ctx)) for _ in range(5)}
    assert len(values) == 10 and step.trace_count == 1


def test_keys_made_between_calls_do_not_recompile():
    step = nnx.jit(lambda ctx: jax.random.uniform(ctx.make_rng("noise")))
    ctx = nnx.context(noise=0)
    for _ in range(3):
        step(ctx)
        ctx.make_rng("noise")
    assert step.trace_count == 1


# Static values that keep changing


def test_a_static_counter_changed_every_step_warns_once():
    @nnx.jit
    def step(m):
        m.inner.n += 1

    class Inner(nnx.Module):
        def __init__(self):
            self.n = 0

    model = nnx.Dict(inner=Inner())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(25):
            step(model)
    about = [w for w in caught if "inner/n" in str(w.message)]
    assert model.inner.n == 25 and len(about) == 1


def test_a_static_counter_changed_outside_warns_once_too():
    class Schedule(nnx.Module):
        def __init__(self):
            self.epoch = 0
            self.w = nnx.Param(jnp.ones(()))

    step = nnx.jit(lambda m: m.w * m.epoch)
    model = Schedule()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(25):
            model.epoch = epoch
            assert step(model) == epoch
    assert len([w for w in caught if "epoch" in str(w.message)]) == 1


def test_a_static_that_toggles_between_two_values_does_not_warn():
    class Modal(nnx.Module):
        def __init__(self):
            self.mode = "train"
            self.w = nnx.Param(jnp.ones(()))

    step, model = nnx.jit(lambda m: m.w * (2 if m.mode == "train" else 3)), Modal()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(30):
            model.mode = "train" if i % 2 else "eval"
            step(model)
    assert step.trace_count == 2
