"""What must not go wrong: after an exception a Module is unchanged or wholly changed."""

import jax
import jax.numpy as jnp
import pytest

import nnx
from tests.checks import assert_unchanged, photograph
from tests.models import linear, net
from tests.transforms.harm import Boom, explode, vandalise


@pytest.mark.parametrize(
    "call",
    [
        lambda m: nnx.jit(explode)(m),
        lambda m: nnx.jit(explode, donate_argnums=0)(m),
        lambda m: nnx.grad(explode)(m),
        lambda m: nnx.value_and_grad(explode)(m),
        lambda m: nnx.vjp(explode, m),
        lambda m: nnx.remat(explode)(m),
        lambda m: nnx.vmap(explode)(m, jnp.ones(2)),
        lambda m: nnx.scan(explode, length=2)(m, 0.0, jnp.ones(2)),
        lambda m: nnx.cond(True, explode, explode, m),
        lambda m: nnx.switch(0, [explode, explode], m),
        lambda m: nnx.while_loop(lambda m: True, explode, m),
        lambda m: nnx.fori_loop(0, 2, lambda i, m: explode(m), m),
        lambda m: nnx.eval_shape(explode, m),
        lambda m: nnx.jit(explode).lower(m),
        lambda m: nnx.jit(explode).trace(m),
        lambda m: nnx.jit(explode).eval_shape(m),
    ],
    ids="jit donated grad value_and_grad vjp remat vmap scan cond switch while fori shapes lower trace shape".split(),
)
def test_exception_in_the_body_leaves_the_module_unchanged(call):
    model = net()
    before = photograph(model)
    with pytest.raises(Boom, match="in the body"):
        call(model)
    assert_unchanged(model, before)
    model(jnp.ones((1, 2)))
    assert model.encoder.count == 1


def test_exception_in_a_nested_transform_leaves_every_module_unchanged():
    model, other = net(0), net(1)
    before, other_before = photograph(model), photograph(other)

    @nnx.jit
    def outer(m, o):
        vandalise(o)
        nnx.grad(explode)(m)

    with pytest.raises(Boom):
        outer(model, other)
    assert_unchanged(model, before)
    assert_unchanged(other, other_before)


def test_the_call_after_a_failed_trace_works():
    model, fail = net(), [True]
    before = photograph(model)

    @nnx.jit
    def f(m):
        m.encoder.count += 1
        if fail:
            raise Boom
        return m.encoder.count

    for _ in range(2):
        with pytest.raises(Boom):
            f(model)
        assert_unchanged(model, before)
    fail.clear()
    assert f(model) == 1 and model.encoder.count == 1


@pytest.mark.parametrize(
    "result, error",
    [(lambda m: "a string", TypeError), (lambda m: float(m.kernel.sum()), jax.errors.ConcretizationTypeError)],
    ids=["nothing JAX can return", "a value JAX does not know yet"],
)
def test_failing_to_build_a_result_leaves_the_module_unchanged(result, error):
    model = net()
    before = photograph(model)

    @nnx.jit
    def f(m):
        vandalise(m)
        return result(m.encoder)

    with pytest.raises(error):
        f(model)
    assert_unchanged(model, before)


def test_exception_during_dispatch_leaves_the_module_unchanged():
    model = net()

    @nnx.jit
    def f(m, x):
        vandalise(m)
        return x

    before = photograph(model)
    with pytest.raises(TypeError):
        f(model, object())
    assert_unchanged(model, before)


def test_an_exception_in_the_body_of_a_cached_function_is_not_replayed():
    model = linear()

    @nnx.jit(static_argnums=1)
    def f(m, fail):
        m.count += 1
        if fail:
            raise Boom

    f(model, False)
    with pytest.raises(Boom):
        f(model, True)
    f(model, False)
    assert model.count == 2


def test_the_context_still_works_after_an_exception():
    ctx, model = nnx.context(noise=0), linear()

    @nnx.jit
    def f(m, ctx):
        ctx.make_rng("noise")
        raise Boom

    with pytest.raises(Boom):
        f(model, ctx)
    a = nnx.jit(lambda ctx: jax.random.uniform(ctx.make_rng("noise")))(ctx)
    b = jax.random.uniform(ctx.make_rng("noise"))
    assert a != b
