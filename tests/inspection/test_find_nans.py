"""nnx.find_nans: the first submodule whose output is not finite."""

import jax.numpy as jnp
import pytest

import nnx
from tests.inspection.inside_models import BLOCK, GPT, TOKENS, Twice

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


@pytest.fixture
def gpt():
    return GPT(ctx=nnx.context(0))


@pytest.fixture
def poisoned(gpt):
    """A model whose second block has a NaN in the weights of its MLP."""
    mlp = gpt.blocks.scan_module.remat_module.mlp
    mlp.kernel = mlp.kernel.at[1, 0, 0].set(jnp.nan)
    return gpt


def test_a_finite_run_finds_nothing(gpt):
    assert nnx.find_nans(gpt)(TOKENS) is None


def test_the_layer_and_the_step_of_the_scan_are_named(poisoned):
    found = nnx.find_nans(poisoned)(TOKENS)
    assert found == nnx.NotFinite(f"{BLOCK}/mlp", "Linear", 0, (1,), True)
    assert str(found) == f"The output of '{BLOCK}/mlp' (Linear) at step 1 is not finite; its inputs are finite."


def test_nans_are_found_inside_jit_and_derivatives(poisoned):
    step = nnx.jit(lambda model, tokens: nnx.grad(lambda model: model(tokens).sum())(model))
    found = nnx.find_nans(step)(poisoned, TOKENS)
    assert found is not None and (found.path, found.index) == (f"{BLOCK}/mlp", (1,))


def test_the_first_in_the_order_of_calls_is_named_not_the_first_by_path():
    class Net(nnx.Module):
        def __init__(self, *, ctx):
            self.a = nnx.Linear(4, 4, ctx=ctx)
            self.z = nnx.Linear(4, 4, ctx=ctx)

        def __call__(self, x):
            return self.z(x) + self.a(x)

    net = Net(ctx=nnx.context(0))
    for layer in (net.a, net.z):
        layer.bias = layer.bias.at[0].set(jnp.inf)
    found = nnx.find_nans(net)(X)
    assert found is not None and found.path == "z"


def test_the_number_of_the_call_is_named():
    twice = Twice(ctx=nnx.context(0))
    twice.layer.kernel = jnp.full((4, 4), 3e38)
    found = nnx.find_nans(twice)(jnp.full((1, 4), 0.1))
    assert found is not None and (found.path, found.call) == ("layer", 1)
    assert "in call 1" in str(found)


def test_nan_between_submodules_shows_as_a_bad_input():
    def forward(layer, x):
        return layer(jnp.log(x))

    found = nnx.find_nans(forward)(nnx.Linear(4, 4, ctx=nnx.context(0)), X)
    assert found == nnx.NotFinite("", "Linear", 0, (), False)
    assert str(found).endswith("its inputs are not finite either.")


def test_a_module_around_a_loop_is_named_in_place_of_those_inside():
    class Loop(nnx.Module):
        def __init__(self, *, ctx):
            self.layer = nnx.Linear(4, 4, ctx=ctx)

        def __call__(self, x):
            return nnx.fori_loop(0, 2, lambda i, c: (c[0], c[0].layer(c[1])), (self, x))[1]

    loop = Loop(ctx=nnx.context(0))
    loop.layer.bias = loop.layer.bias.at[0].set(jnp.nan)
    found = nnx.find_nans(loop)(X)
    assert found is not None and found.path == ""


def test_modules_stay_as_they_are_and_repeated_runs_raise_no_warning():
    class Counter(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.array(0))

        def __call__(self, x):
            self.count += 1
            return x

    counter, step = Counter(), nnx.jit(lambda counter, x: counter(x))
    count = counter.count
    for _ in range(12):
        assert nnx.find_nans(step)(counter, X) is None
    assert counter.count is count
