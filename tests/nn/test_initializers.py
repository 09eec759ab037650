"""Initialisers and activations: all of jax's, and the two that become factories."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


def test_every_initialiser_of_jax_is_there():
    names = {name for name in dir(jax.nn.initializers) if not name.startswith("_")}
    assert names <= set(dir(nnx.initializers))


def test_every_function_of_jax_nn_is_there():
    names = {name for name in dir(jax.nn) if not name.startswith("_")}
    assert names <= set(dir(nnx))
    assert nnx.gelu is jax.nn.gelu


@pytest.mark.parametrize("name", ["relu", "silu", "gelu", "softmax", "tanh"])
def test_activations_are_pickled_by_name(name):
    function = getattr(nnx, name)
    assert pickle.loads(pickle.dumps(function)) is function
    assert copy.deepcopy(function) is function


@pytest.mark.parametrize("name, value", [("zeros", 0.0), ("ones", 1.0)])
def test_zeros_and_ones_are_factories_that_may_be_given_uncalled(name, value):
    factory = getattr(nnx.initializers, name)
    for initializer in (factory(), factory, getattr(nnx.initializers, f"{name}_init")()):
        made = initializer(jax.random.key(0), (2, 3), jnp.bfloat16)
        assert made.dtype == jnp.bfloat16
        np.testing.assert_array_equal(made, np.full((2, 3), value))
    assert factory()(None, [2]).dtype == jnp.float32


SHAPES = [3, np.int64(3), (3,), [2, 3], np.array([2, 3]), (), (np.int32(2),)]


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
@pytest.mark.parametrize("name", ["zeros", "ones"])
def test_zeros_and_ones_take_what_those_of_jax_take(name, shape):
    theirs = getattr(jax.nn.initializers, name)
    for ours in (getattr(nnx.initializers, name)(), getattr(nnx.initializers, f"{name}_init")()):
        for options in ({}, {"dtype": None}, {"dtype": "bfloat16"}, {"dtype": jnp.complex64}):
            made, expected = ours(None, shape, **options), theirs(None, shape, **options)
            assert made.dtype == expected.dtype
            np.testing.assert_array_equal(made, expected)


def test_random_initializers_take_an_int_as_a_shape_of_one_axis():
    key = jax.random.key(0)
    for name in ("normal", "uniform", "truncated_normal"):
        initializer = getattr(nnx.initializers, name)()
        np.testing.assert_array_equal(initializer(key, 3), initializer(key, (3,)))
    assert nnx.initializers.constant(2.0)(key, 3).tolist() == [2, 2, 2]


@pytest.mark.parametrize("name", ["zeros", "ones"])
def test_layers_take_either_spelling_without_drawing_a_key(name):
    factory = getattr(nnx.initializers, name)
    expected = nnx.Linear(3, 4, kernel_init=factory(), ctx=nnx.context(0)).kernel
    np.testing.assert_array_equal(nnx.Linear(3, 4, kernel_init=factory, ctx=nnx.context(0)).kernel, expected)
    ctx, fresh = nnx.context(0), nnx.context(0)
    nnx.Linear(3, 4, kernel_init=factory(), ctx=ctx)
    np.testing.assert_array_equal(
        jax.random.key_data(ctx.make_rng("params")), jax.random.key_data(fresh.make_rng("params"))
    )


def test_default_kernels_are_lecun_normal():
    kernel = nnx.Linear(400, 300, ctx=nnx.context(0)).kernel
    assert float(kernel.std()) == pytest.approx(400**-0.5, rel=0.02)
    assert float(jnp.abs(kernel).max()) < 2.4 * 400**-0.5


def test_layers_built_in_turn_have_different_weights():
    ctx = nnx.context(0)
    assert not jnp.allclose(nnx.Linear(3, 4, ctx=ctx).kernel, nnx.Linear(3, 4, ctx=ctx).kernel)


def test_layers_can_be_built_inside_a_transformation():
    shapes = jax.eval_shape(lambda key: nnx.Linear(3, 4, ctx=nnx.context(key)).get_state(), jax.random.key(0))
    assert {path: leaf.value.shape for path, leaf in shapes.items()} == {"bias": (4,), "kernel": (3, 4)}
