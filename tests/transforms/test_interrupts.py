"""Ctrl-C at any moment of a jitted call, donated or not: all of a step is there, or nothing of it."""

import random
import signal
import typing

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

import nnx
from nnx.transforms.jit.interrupts import uninterrupted
from tests.models import Count

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers"),
]
DONATED = pytest.mark.parametrize("options", [{}, {"donate_argnums": 0}], ids=["plain", "donated"])


def interrupt_again_and_again(call, check, rounds=40):
    """Calls under a timer that raises KeyboardInterrupt at random moments, checking after each; returns the hits."""

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    rng, interrupted = random.Random(0), 0
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(rounds):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 2e-3))
                for _ in range(300):
                    call()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            except (jax.errors.JaxRuntimeError, ValueError) as error:  # by JAX, if it was raised in a callback
                assert "KeyboardInterrupt" in str(error)
                interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            check()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    return interrupted


class Many(nnx.Module):
    def __init__(self, names):
        for name in names:
            setattr(self, name, Count(jnp.zeros((), jnp.int32)))


@DONATED
def test_an_interrupt_never_tears_the_write_back_of_values(options):
    names = [f"count_{i}" for i in range(60)]
    model = Many(names)

    @nnx.jit(**options)
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


@DONATED
def test_an_interrupt_never_tears_a_structural_change(options):
    names = [f"count_{i}" for i in range(20)]
    model = Many(names)
    for name in names:
        setattr(model, f"mode_{name}", "a")

    @nnx.jit(**options)
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


class Result(typing.NamedTuple):
    count: jax.Array


def in_debug_callback(m):
    jax.debug.callback(lambda x: None, m.count_0)


def in_ordered_callback(m):
    jax.debug.callback(lambda x: None, m.count_0, ordered=True)


def in_io_callback(m):
    io_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.int32), m.count_0)


def in_pure_callback(m):
    m.count_1 += 0 * jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.int32), m.count_0)


def in_a_constructor(m):
    return Result(m.count_0)  # the class of a result, called by JAX


def in_trees(m):
    m.tree = jax.tree.map(lambda x: x + 1, m.tree)


@DONATED
@pytest.mark.parametrize(
    "where", [in_debug_callback, in_ordered_callback, in_io_callback, in_pure_callback, in_a_constructor, in_trees]
)
def test_an_interrupt_while_python_runs_inside_the_call_loses_nothing(where, options):
    if "callback" in where.__name__ and jax.default_backend() == "gpu":
        pytest.skip("the call has returned when a GPU calls back, so its results hold the error")
    model = Many(["count_0", "count_1"])
    if where is in_trees:
        model.tree = nnx.Variable((Result(jnp.zeros((), jnp.int32)), {"x": jnp.zeros((), jnp.int32)}))

    @nnx.jit(**options)
    def step(m):
        m.count_0 += 1
        m.count_1 += 1
        return where(m)

    def check():
        counts = [model.count_0, model.count_1, *(jax.tree.leaves(model.tree) if where is in_trees else [])]
        assert len(set(map(int, counts))) == 1

    step(model)
    assert interrupt_again_and_again(lambda: step(model), check, rounds=25) > 5


def by_shape(m, x):
    m.count_0 += 1
    m.count_1 += 1
    if x.shape == (2,):
        m.extra += 1


def with_context(m, x, ctx):
    m.count_0 += jnp.where(jax.random.uniform(ctx.make_rng("noise")) < 2, 1, 0)
    m.count_1 += 1


@DONATED
@pytest.mark.parametrize("form", ["several sets of effects", "a Context", "tied outside", "held by the caller"])
def test_an_interrupt_of_any_form_of_call_loses_nothing(form, options):
    model, held, calls = Many(["count_0", "count_1"]), [], [0]
    model.extra = Count(jnp.zeros((), jnp.int32))
    if form == "tied outside":
        model.count_0 = nnx.Ref(model.variable("count_0"))
        partner = nnx.Dict(count=model._nnx_info.kinds["count_0"])
    step, ctx = nnx.jit(by_shape, **options), nnx.context(noise=0)
    context_step = nnx.jit(with_context, **options)
    shapes = [jnp.ones(1), jnp.ones(2)]  # made before: an interrupt in an operation of JAX's own can break JAX

    def call():
        calls[0] += 1
        held[:] = [model.count_1] if form == "held by the caller" else []
        if form == "a Context":
            context_step(model, shapes[0], ctx)
        else:
            step(model, shapes[calls[0] % 2 if form == "several sets of effects" else 0])

    def check():
        assert int(model.count_0) == int(model.count_1)
        assert form != "tied outside" or partner.count is model.count_0

    for _ in range(2):
        call()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **kwargs: None)  # of copies
        assert interrupt_again_and_again(call, check, rounds=25) > 5


def test_a_call_that_cannot_be_interrupted_gets_the_signal_when_it_has_ended():
    seen = []

    def handle(number, frame):
        seen.append("handled")
        raise KeyboardInterrupt

    def work():
        signal.raise_signal(signal.SIGUSR1)
        seen.append("worked")

    previous = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(KeyboardInterrupt):
            uninterrupted(uninterrupted, work)
        assert seen == ["worked", "handled"] and signal.getsignal(signal.SIGUSR1) is handle
        with pytest.raises(ValueError, match="from the call"):
            uninterrupted(raise_value_error)
        assert signal.getsignal(signal.SIGUSR1) is handle
    finally:
        signal.signal(signal.SIGUSR1, previous)


def raise_value_error():
    raise ValueError("from the call")
