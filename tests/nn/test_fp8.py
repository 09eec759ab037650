"""`nnx.fp8_dot_general`: products of operands rounded to 8 bits, and their derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import nnx

# Dimensions of a product with the shapes of its operands: a matrix, several axes, a batch.
PRODUCTS = [
    ((((1,), (0,)), ((), ())), (8, 16), (16, 4)),
    ((((1, 2), (0, 1)), ((), ())), (4, 2, 8), (2, 8, 4, 2)),
    ((((2,), (1,)), ((0,), (0,))), (2, 4, 8), (2, 8, 4)),
]


def draw(shape, seed, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def with_gradients(product, x, y, weights, dimensions):
    return jax.value_and_grad(lambda x, y: jnp.vdot(weights, product(x, y, dimensions)), (0, 1))(x, y)


def relative_error(found, expected):
    found, expected = (np.asarray(each, np.float64) for each in (found, expected))
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


class TestProducts:
    @pytest.mark.parametrize(("dimensions", "left", "right"), PRODUCTS)
    @pytest.mark.parametrize("factor", [1e-12, 1.0, 1e12])
    def test_values_and_gradients_have_the_error_of_8_bits_at_every_scale(self, dimensions, left, right, factor):
        x, y = factor * draw(left, 0), draw(right, 1) / factor
        out = jax.eval_shape(lambda: lax.dot_general(x, y, dimensions))
        weights = draw(out.shape, 2)
        expected = with_gradients(lax.dot_general, x, y, weights, dimensions)
        found = with_gradients(nnx.fp8_dot_general, x, y, weights, dimensions)
        for got, want in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
            assert got.dtype == want.dtype
            assert 0 < relative_error(got, want) < 0.08  # gradients have two bits behind the point
        product, exact = nnx.fp8_dot_general(x, y, dimensions), lax.dot_general(x, y, dimensions)
        assert product.dtype == exact.dtype
        assert 0 < relative_error(product, exact) < 0.05  # values have three

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_numbers_that_8_bits_hold_are_multiplied_exactly(self, dtype):
        x, y = (jnp.asarray(np.random.default_rng(seed).integers(-3, 4, (8, 8)), dtype) for seed in (0, 1))
        dimensions, *_ = PRODUCTS[0]
        expected = with_gradients(lax.dot_general, x, y, x, dimensions)
        found = with_gradients(nnx.fp8_dot_general, x, y, x, dimensions)
        assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(expected)))

    @pytest.mark.parametrize("value", [0.0, np.nan, np.inf, 3e38, 1e-38])
    def test_what_has_no_scale_stays_what_it_is(self, value):
        x, y = jnp.zeros((2, 2)).at[0, 0].set(value), jnp.eye(2)
        found = np.asarray(nnx.fp8_dot_general(x, y, PRODUCTS[0][0]))
        if np.isfinite(value):
            np.testing.assert_allclose(found[0, 0], value, rtol=0.07, atol=1e-37)
            assert not found[0, 1] and not found[1].any()
        else:
            assert not np.isfinite(found[0, 0])


class TestLayers:
    def test_an_mlp_learns_with_it_as_without(self):
        def train(product):
            ctx = nnx.context(0)
            model = nnx.MLP(16, 32, 16, ctx=ctx)
            for _, layer in model.named_modules():
                if isinstance(layer, nnx.Linear):
                    layer.dot_general = product
            optimizer = nnx.Optimizer(model, optax.adam(1e-2))
            x, target = draw((64, 16), 0), jnp.sin(draw((64, 16), 0) @ draw((16, 16), 1) / 4)

            @nnx.jit
            def step(optimizer):
                loss, grads = nnx.value_and_grad(lambda model: ((model(x) - target) ** 2).mean())(optimizer.model)
                optimizer.update(grads)
                return loss

            return [float(step(optimizer)) for _ in range(60)]

        plain, rounded = train(lax.dot_general), train(nnx.fp8_dot_general)
        assert rounded != plain
        assert rounded[-1] < 0.3 * rounded[0]
        np.testing.assert_allclose(rounded[-1], plain[-1], rtol=0.1)

    def test_attention_takes_it(self):
        layer = nnx.MultiHeadAttention(4, 16, qkv_dot_general=nnx.fp8_dot_general, ctx=nnx.context(0))
        x = draw((2, 6, 16), 0)
        rounded = layer(x)
        for _, part in layer.named_modules():
            if isinstance(part, nnx.LinearGeneral):
                part.dot_general = lax.dot_general
        assert 0 < relative_error(rounded, layer(x)) < 0.1
