"""What must not go wrong: after an exception or an interrupt a Module is unchanged or wholly changed."""

import random
import signal

import jax
import jax.numpy as jnp
import pytest

import nnx
from tests.checks import assert_unchanged, photograph
from tests.models import Count, linear, net
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
def test_an_exception_in_the_body_leaves_the_module_as_it_was(call):
    model = net()
    before = photograph(model)
    with pytest.raises(Boom, match="in the body"):
        call(model)
    assert_unchanged(model, before)
    model(jnp.ones((1, 2)))
    assert model.encoder.count == 1


def test_an_exception_in_a_nested_transform_leaves_every_module_as_it_was():
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
def test_a_result_that_cannot_be_made_leaves_the_module_as_it_was(result, error):
    model = net()
    before = photograph(model)

    @nnx.jit
    def f(m):
        vandalise(m)
        return result(m.encoder)

    with pytest.raises(error):
        f(model)
    assert_unchanged(model, before)


def test_an_exception_while_dispatching_leaves_the_module_as_it_was():
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


def interrupt_again_and_again(call, check):
    """Calls under a timer that raises KeyboardInterrupt at random moments, checking after each; returns the hits."""

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    rng, interrupted = random.Random(0), 0
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(80):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 2e-3))
                for _ in range(40):
                    call()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            check()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    return interrupted


def interruptible(test):
    test = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")(test)
    return pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")(test)


class Many(nnx.Module):
    def __init__(self, names):
        for name in names:
            setattr(self, name, Count(jnp.zeros((), jnp.int32)))


@interruptible
def test_an_interrupt_never_tears_the_write_back_of_values():
    names = [f"count_{i}" for i in range(60)]
    model = Many(names)

    @nnx.jit
    def step(m):
        for name in names:
            setattr(m, name, getattr(m, name) + 1)

    def check():
        assert len({int(getattr(model, name)) for name in names}) == 1

    step(model)
    assert interrupt_again_and_again(lambda: step(model), check) > 10
    count = int(model.count_0)
    step(model)
    assert int(model.count_59) == count + 1


@interruptible
def test_an_interrupt_never_tears_a_structural_change():
    names = [f"count_{i}" for i in range(20)]
    model = Many(names)
    for name in names:
        setattr(model, f"mode_{name}", "a")

    @nnx.jit
    def toggle(m):
        odd = m.mode_count_0 == "a"
        for name in names:
            setattr(m, f"mode_{name}", "b" if odd else "a")
            if odd:
                setattr(m, f"extra_{name}", nnx.Cache(getattr(m, name) * 1))
            else:
                delattr(m, f"extra_{name}")
            setattr(m, name, getattr(m, name) + 1)

    def check():
        count = int(model.count_0)
        assert {int(getattr(model, name)) for name in names} == {count}
        assert {getattr(model, f"mode_{name}") for name in names} == {"b" if count % 2 else "a"}
        assert {hasattr(model, f"extra_{name}") for name in names} == {count % 2 == 1}
        assert len(model.get_state()) == len(names) * (1 + count % 2)

    toggle(model)
    toggle(model)
    assert interrupt_again_and_again(lambda: toggle(model), check) > 10
    assert toggle.trace_count == 2
