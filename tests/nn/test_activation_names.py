"""Layers name their activations: `nnx.remat` keeps what it is told to, and elsewhere there are no names."""

import re

import jax
import jax.numpy as jnp
import pytest

import nnx

BATCH, LENGTH = 2, 5


class Block(nnx.Module):
    def __init__(self, *, ctx):
        self.attention = nnx.MultiHeadAttention(2, 16, num_kv_heads=1, ctx=ctx)
        self.mlp = nnx.MLP(16, 64, 16, ctx=ctx)
        self.gated = nnx.GatedMLP(16, 48, ctx=ctx)

    def __call__(self, x):
        x = x + self.attention(x)
        x = x + self.mlp(x)
        return x + self.gated(x)


INPUT = (16,)  # always kept: the input of the function


def kept(policy):
    """The shapes, without batch and length, of the activations that the backward pass gets from the forward pass."""
    pure = Block(ctx=nnx.context(0)).partition()
    forward = nnx.remat(lambda block, x: block(x), policy=policy)
    x = jnp.ones((BATCH, LENGTH, 16))
    pull = jax.eval_shape(lambda pure, x: jax.vjp(lambda pure, x: forward(pure.merge(), x), pure, x)[1], pure, x)
    shapes = [leaf.shape for leaf in jax.tree.leaves(pull)]
    return sorted(shape[2:] for shape in shapes if shape[:2] == (BATCH, LENGTH))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, [INPUT]),
        ("mlp_hidden", [INPUT, (48,), (48,), (64,)]),
        (("query", "key", "value"), [(1, 8), (1, 8), (2, 8), INPUT]),
        (["attention"], [(2, 8), INPUT]),
        (("attention_out", "mlp_out"), [INPUT, INPUT, INPUT]),
        ("a name nobody uses", [INPUT]),
    ],
)
def test_remat_keeps_the_activations_with_these_names(policy, expected):
    assert kept(policy) == expected


def test_names_and_the_policy_of_jax_mean_the_same():
    by_hand = jax.checkpoint_policies.save_only_these_names("attention", "mlp_hidden")
    assert kept(("mlp_hidden", "attention")) == kept(by_hand)


def test_the_same_names_share_a_trace(capsys):
    def forward(block, x):
        print("traced")
        return block(x)

    block, x = nnx.MLP(4, 8, 4, ctx=nnx.context(0)), jnp.ones((1, 4))
    for policy in (("mlp_hidden", "mlp_out"), ["mlp_out", "mlp_hidden"]):
        nnx.remat(forward, policy=policy)(block, x)
    assert capsys.readouterr().out == "traced\n"


@pytest.mark.parametrize("policy", [3, (), ("mlp_hidden", 3)])
def test_argument_that_is_not_a_policy_is_refused(policy):
    with pytest.raises(TypeError, match=r"policy is the name of an activation.*got "):
        nnx.remat(lambda block, x: block(x), policy=policy)


def names_in(function, *args):
    return sorted(set(re.findall(r"name=(\w+)", str(jax.make_jaxpr(function)(*args)))))


def test_activations_have_names_inside_remat_only():
    pure, x = Block(ctx=nnx.context(0)).partition(), jnp.ones((BATCH, LENGTH, 16))
    names = {"query", "key", "value", "attention", "attention_out", "mlp_hidden", "mlp_out"}
    assert not names & set(names_in(lambda pure, x: pure.merge()(x), pure, x))
    assert names <= set(names_in(lambda pure, x: nnx.remat(lambda block, x: block(x))(pure.merge(), x), pure, x))


def test_a_function_that_ran_without_remat_before_has_names_inside_it():
    block, x = Block(ctx=nnx.context(0)), jnp.ones((BATCH, LENGTH, 16))

    def layers(block, x):
        return nnx.scan(lambda block, x, _: (block(x), None), length=2)(block, x, None)[0]

    def both(pure, x):
        block = pure.merge()
        return nnx.remat(layers)(block, layers(block, x))

    assert "mlp_hidden" in names_in(both, block.partition(), x)
