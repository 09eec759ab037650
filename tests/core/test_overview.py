"""The library on one page, in the functional style: build, split, transform with raw JAX, merge."""

import jax
import jax.numpy as jnp
import numpy as np

import nnx
from tests.models import Count


class Linear(nnx.Module):
    def __init__(self, din, dout, *, ctx: nnx.Context):
        self.w = nnx.Param(jax.random.uniform(ctx.make_rng("params"), (din, dout)))
        self.b = nnx.Param(jnp.zeros((dout,)))
        self.count = Count(0)

    def __call__(self, x):
        self.count += 1
        return x @ self.w + self.b


def test_an_ordinary_object_with_plain_mutation():
    model = Linear(12, 2, ctx=nnx.context(0))
    out = model(jnp.ones((3, 12)))
    assert out.shape == (3, 2)
    assert model.count == 1
    assert isinstance(model.w, jax.Array)


def test_state_and_moduledef_work_with_any_jax_api():
    model = Linear(12, 2, ctx=nnx.context(0))
    x, y = jnp.ones((3, 12)), jnp.zeros((3, 2))
    (params, counts), moduledef = model.partition(nnx.Param, Count)

    @jax.jit
    def train_step(params, counts):
        def loss(params):
            out, pure = moduledef.apply(params, counts)(x)
            return jnp.mean((out - y) ** 2), pure.filter(Count)

        (value, counts), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return value, jax.tree.map(lambda w, g: w - 0.01 * g, params, grads), counts

    losses = []
    for _ in range(5):
        value, params, counts = train_step(params, counts)
        losses.append(float(value))
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    model.update_state((params, counts))
    assert model.count == 5
    np.testing.assert_array_equal(model.w, params["w"].value)


def test_a_jitted_step_over_pures_compiles_once_for_two_models_built_by_the_same_code():
    traces = []

    @jax.jit
    def step(pure, x):
        traces.append(1)
        out, pure = pure.apply(x)
        return out, pure

    for seed in (0, 1):
        model = Linear(12, 2, ctx=nnx.context(seed))
        _, pure = step(model.partition(), jnp.ones((3, 12)))
        model.update_state(pure)
        step(model.partition(), jnp.ones((3, 12)))
    # The counter begins as a Python number and comes back as an array: jax.jit tells the two apart, once.
    assert len(traces) <= 2


def test_a_model_rebuilt_from_state_gives_the_same_numbers():
    model = Linear(4, 2, ctx=nnx.context(0))
    x = jnp.ones((1, 4))
    np.testing.assert_array_equal(model.partition().merge()(x), model(x))


def test_the_same_seed_gives_the_same_model():
    first, second = Linear(4, 2, ctx=nnx.context(0)), Linear(4, 2, ctx=nnx.context(0))
    np.testing.assert_array_equal(first.w, second.w)
    assert not np.array_equal(first.w, Linear(4, 2, ctx=nnx.context(1)).w)
