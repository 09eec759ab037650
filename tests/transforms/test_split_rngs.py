"""What scan and vmap say about streams that `split_rngs` does not select: every step or member draws the same key."""

import warnings

import jax
import jax.numpy as jnp
import pytest

import nnx

MODEL = nnx.Dict(w=nnx.Param(jnp.ones(2)))


def act(model, carry, x, ctx):
    return carry, jax.random.randint(ctx.make_rng("noise"), (), 0, 1_000_000)


def scanned(body=act, **options):
    return nnx.scan(body, **options)(MODEL, 0, jnp.arange(4), nnx.context(noise=0))[1]


def mapped(body=lambda model, x, ctx: jax.random.randint(ctx.make_rng("noise"), (), 0, 1_000_000), **options):
    return nnx.vmap(body, in_axes=(None, 0, None), **options)(MODEL, jnp.arange(4), nnx.context(noise=0))


class Drawn(nnx.Module):
    def __init__(self, *, ctx):
        self.w = nnx.Param(jax.random.normal(ctx.make_rng("params"), (2,)))

    def __call__(self, carry, x, ctx):
        return act(self, carry, x, ctx)


@pytest.mark.parametrize("run, name", [(scanned, r"nnx.scan\(act\)"), (mapped, r"nnx.vmap\(<lambda>\)")])
def test_warning_about_a_shared_stream_names_function_and_stream_and_advises(run, name):
    with pytest.warns(UserWarning, match=f"{name}.*the stream 'noise'.*`split_rngs='noise'`") as record:
        numbers = run()
    assert len(set(numbers.tolist())) == 1
    assert record[0].filename == __file__


@pytest.mark.parametrize("run", [scanned, mapped])
@pytest.mark.parametrize("split", ["noise", ..., ("params", "noise"), {"noise": True}])
def test_a_split_stream_does_not_warn(run, split):
    assert len(set(run(split_rngs=split).tolist())) == 4


@pytest.mark.parametrize("run", [scanned, mapped])
@pytest.mark.parametrize("split", [{"noise": False}, {...: False}, ("params", {"noise": False})])
def test_a_stream_that_is_shared_on_purpose_does_not_warn(run, split):
    assert len(set(run(split_rngs=split).tolist())) == 1


def twice(model, carry, x, ctx):
    return carry, jax.random.normal(ctx.make_rng("noise")) - jax.random.normal(ctx.make_rng("noise"))


@pytest.mark.parametrize("lifted", [nnx.scan(twice), nnx.vmap(twice, in_axes=(None, None, 0, None))])
def test_each_lifted_function_warns_once(lifted):
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for length in (3, 4):
            lifted(MODEL, 0, jnp.arange(length), nnx.context(noise=0))
    assert len(record) == 1


def test_a_warning_that_is_an_error_is_raised_by_every_call():
    lifted = nnx.scan(lambda *args: act(*args))
    for _ in range(2):
        with pytest.raises(UserWarning, match="'noise'"):
            lifted(MODEL, 0, jnp.arange(4), nnx.context(noise=0))


def test_scan_of_one_step_does_not_warn():
    nnx.scan(act, length=1)(MODEL, 0, None, nnx.context(noise=0))


INNER = {
    "jit": lambda: nnx.jit(act),
    "remat": lambda: nnx.remat(act),
    "grad": lambda: (
        lambda m, c, x, ctx: (
            c,
            nnx.grad(lambda m, ctx: m.w.sum() * jax.random.normal(ctx.make_rng("noise")))(m, ctx)["w"].value,
        )
    ),
    "fork": lambda: lambda m, c, x, ctx: act(m, c, x, ctx.fork()),
    "partition": lambda: lambda m, c, x, ctx: act(m, c, x, ctx.partition().merge()),
    "copy": lambda: lambda m, c, x, ctx: act(m, c, x, ctx.copy(flags={"deterministic": True})),
    "scan": lambda: lambda m, c, x, ctx: nnx.scan(act, split_rngs="noise")(m, c, jnp.arange(2), ctx),
}


@pytest.mark.parametrize("make", INNER.values(), ids=INNER)
def test_a_fork_of_a_shared_stream_warns_when_it_is_drawn_from(make):
    with pytest.warns(UserWarning, match="nnx.scan.*'noise'"):
        scanned(make())


def test_a_fork_that_draws_only_from_split_streams_does_not_warn():
    inner = nnx.jit(act)
    nnx.scan(inner, split_rngs="noise")(MODEL, 0, jnp.arange(3), nnx.context(0, noise=0, dropout=1))


STACKED = {"variable_axes": {nnx.Param: 0}, "length": 3}


def test_layers_with_equal_weights_warn_in_the_class_form():
    with pytest.warns(UserWarning, match=r"nnx.scan\(Drawn\).*`split_rngs='params'`"):
        stack = nnx.Scan(Drawn, **STACKED)(ctx=nnx.context(0))
    with pytest.warns(UserWarning, match=r"nnx.scan\(__call__\).*`split_rngs='noise'`"):
        stack(0, jnp.arange(3), nnx.context(noise=0))


def test_layers_with_equal_weights_warn_in_the_decorator_form():
    class Stack(nnx.Module):
        @nnx.scan(**STACKED)
        def __init__(self, *, ctx):
            self.linear = nnx.Linear(2, 2, ctx=ctx)

    with pytest.warns(UserWarning, match=r"nnx.scan\(__init__\).*'params'"):
        Stack(ctx=nnx.context(0))


@pytest.mark.parametrize("axes", [{}, {nnx.Cache: 0}], ids=["nothing stacked", "only a cache stacked"])
def test_a_constructor_of_shared_weights_does_not_warn(axes):
    class Block(nnx.Module):
        def __init__(self, *, ctx):
            self.linear = nnx.Linear(2, 2, ctx=ctx)
            self.past = nnx.Cache(jnp.zeros(2))

    stack = nnx.Scan(Block, variable_axes=axes, length=3)(ctx=nnx.context(0))
    assert stack.scan_module.linear.kernel.shape == (2, 2)


def test_rnn_that_shares_its_mask_on_purpose_does_not_warn():
    class Cell(nnx.SimpleCell):
        def __call__(self, carry, x, *, ctx):
            return super().__call__(carry, nnx.Dropout(0.5, deterministic=False)(x, ctx=ctx))

    rnn = nnx.RNN(Cell(2, 3, ctx=nnx.context(0)), split_rngs=None)
    rnn(jnp.ones((1, 4, 2)), ctx=nnx.context(0, dropout=1))
