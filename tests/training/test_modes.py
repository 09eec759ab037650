"""Modes: training and use, set on all layers at once."""

import jax.numpy as jnp
import pytest

import nnx


class NormAndDropout(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.norm = nnx.BatchNorm(3, ctx=ctx)
        self.drop = nnx.Dropout(0.5)
        self.again = self.drop

    def __call__(self, x, ctx=None):
        return self.drop(self.norm(x, ctx=ctx), ctx=ctx)


X = jnp.arange(12.0).reshape(4, 3)


def make_net():
    return NormAndDropout(ctx=nnx.context(0))


def test_training_and_use_set_the_modes_of_all_layers():
    net = make_net()
    assert net.eval() is net
    assert net.norm.use_running_average is True and net.drop.deterministic is True
    out = net(X)  # no Context needed
    nnx.set_mode(net, training=True)
    assert net.norm.use_running_average is False and net.drop.deterministic is False
    trained = net(X, ctx=nnx.context(dropout=0))
    assert (trained == 0).any() and (out != trained).any()


def test_the_call_still_goes_first():
    net = make_net()
    nnx.set_mode(net, training=True)
    assert (net.drop(X, deterministic=True) == X).all()


def test_none_hands_the_decision_back_to_the_context():
    net = make_net()
    nnx.set_mode(net, training=True)
    nnx.set_mode(net, training=None)
    with pytest.raises(ValueError, match="deterministic|use_running_average"):
        net(X)
    net(X, ctx=nnx.context(flags={"deterministic": True, "use_running_average": True}))


def test_each_mode_is_compiled_once():
    net = make_net()
    run = nnx.jit(lambda net, x, ctx: net(x, ctx))
    for training in (True, False, True, False):
        nnx.set_mode(net, training)
        run(net, X, nnx.context(dropout=0))
    assert run.trace_count == 2


def test_attribute_that_is_not_a_mode_is_unchanged():
    class Odd(nnx.Module):
        def __init__(self):
            self.deterministic = "always"

    odd = Odd()
    nnx.set_mode(odd, training=True)
    assert odd.deterministic == "always"


def test_only_a_module_has_a_mode():
    with pytest.raises(TypeError, match="got dict"):
        nnx.set_mode({}, training=True)


def test_modes_that_are_true_in_training_are_set_the_other_way_round():
    ctx = nnx.context(0)
    layer = nnx.SpectralNorm(nnx.Linear(3, 2, ctx=ctx), ctx=ctx)
    layer.eval()
    before = layer.get_state()
    layer(X)
    assert layer.update_stats is False and layer.get_state() == before
    layer.train()
    layer(X)
    assert layer.update_stats is True and layer.get_state() != before
    nnx.set_mode(layer, training=None)
    with pytest.raises(ValueError, match="SpectralNorm does not know its mode: `update_stats`"):
        layer(X)
