"""A scanned stack with dropout and one BatchNorm shared by all layers equals the unrolled loop."""

import jax
import jax.numpy as jnp
import numpy as np

import nnx

LAYERS, FEATURES, RATE = 4, 8, 0.5


class BatchNorm(nnx.Module):
    """Normalises over the batch and keeps a running mean and variance."""

    def __init__(self, features, momentum=0.9):
        self.scale = nnx.Param(jnp.ones((features,)))
        self.mean = nnx.BatchStat(jnp.zeros((features,)))
        self.var = nnx.BatchStat(jnp.ones((features,)))
        self.momentum = momentum

    def __call__(self, x):
        mean, var = x.mean(0), x.var(0)
        self.mean = self.momentum * self.mean + (1 - self.momentum) * mean
        self.var = self.momentum * self.var + (1 - self.momentum) * var
        return self.scale * (x - mean) / jnp.sqrt(var + 1e-5)


class Layer(nnx.Module):
    def __init__(self, *, ctx):
        self.kernel = nnx.Param(jax.random.normal(ctx.make_rng("params"), (FEATURES, FEATURES)) / np.sqrt(FEATURES))
        self.norm = BatchNorm(FEATURES)

    def __call__(self, x, mask):
        y = self.norm(x @ self.kernel) * mask / (1 - RATE)
        return x + jnp.tanh(y)


class Stack(nnx.Module):
    """Layers whose kernels are stacked while the norm is one for all of them."""

    kernels = nnx.PathMatches("**/kernel")

    def __init__(self, *, ctx):
        self.layers = nnx.Scan(Layer, variable_axes={self.kernels: 0}, split_rngs="params", length=LAYERS)(ctx=ctx)

    def __call__(self, x, *, ctx):
        @nnx.scan(variable_axes={self.kernels: 0}, split_rngs="dropout", length=LAYERS)
        def run(layer, x, _, ctx):
            mask = jax.random.bernoulli(ctx.make_rng("dropout"), 1 - RATE, x.shape)
            return layer(x, mask), mask

        return run(self.layers.scan_module, x, None, ctx)


def unrolled(kernels, norm, x, masks):
    for kernel, mask in zip(kernels, masks, strict=True):
        x = x + jnp.tanh(norm(x @ kernel) * mask / (1 - RATE))
    return x


X = jax.random.normal(jax.random.key(1), (6, FEATURES))


@nnx.jit
def forward(model, x, ctx):
    return model(x, ctx=ctx)


@nnx.jit
def build(ctx):
    return Stack(ctx=ctx)


def test_masks_differ_per_layer_and_per_call():
    model, ctx = build(nnx.context(0)), nnx.context(dropout=1)
    masks = [m for _ in range(2) for m in forward(model, X, ctx)[1]]
    assert len({np.asarray(m).tobytes() for m in masks}) == 2 * LAYERS


def test_kernels_are_stacked_and_the_norm_is_shared():
    inner = build(nnx.context(0)).layers.scan_module
    assert inner.kernel.shape == (LAYERS, FEATURES, FEATURES)
    assert inner.norm.mean.shape == (FEATURES,) and inner.norm.scale.shape == (FEATURES,)


def test_outputs_and_statistics_equal_the_unrolled_loop():
    model, ctx = build(nnx.context(0)), nnx.context(dropout=1)
    inner = model.layers.scan_module
    for _ in range(2):
        norm = inner.norm.clone()
        y, masks = forward(model, X, ctx)
        expected = unrolled(inner.kernel, norm, X, masks)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(inner.norm.mean, norm.mean, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(inner.norm.var, norm.var, rtol=1e-4, atol=1e-6)
    assert not np.allclose(inner.norm.mean, 0)


def test_gradients_equal_the_unrolled_loop():
    model = build(nnx.context(0))
    inner = model.layers.scan_module
    norm = inner.norm.clone()

    def loss(m, ctx):
        y, masks = m(X, ctx=ctx)
        return (y**2).mean(), masks

    @nnx.jit
    def step(m, ctx):
        return nnx.grad(loss, has_aux=True)(m, ctx)

    grads, masks = step(model, nnx.context(dropout=1))

    def by_hand(kernels, scale):
        fresh = norm.clone()
        fresh.scale = scale
        return (unrolled(kernels, fresh, X, masks) ** 2).mean()

    expected = jax.grad(by_hand, argnums=(0, 1))(inner.kernel, inner.norm.scale)
    prefix = "layers/scan_module"
    np.testing.assert_allclose(grads[f"{prefix}/kernel"].value, expected[0], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(grads[f"{prefix}/norm/scale"].value, expected[1], rtol=1e-3, atol=1e-5)
    assert not isinstance(inner.norm.mean, jax.core.Tracer) and not np.allclose(inner.norm.mean, 0)


def test_the_built_in_batchnorm_and_dropout_behave_the_same():
    class BuiltIn(nnx.Module):
        def __init__(self, *, ctx):
            self.linear = nnx.Linear(FEATURES, FEATURES, ctx=ctx)
            self.norm = nnx.BatchNorm(FEATURES, momentum=0.9, ctx=ctx)
            self.dropout = nnx.Dropout(RATE)

        def __call__(self, x, _, *, ctx):
            y = self.dropout(self.norm(self.linear(x), ctx=ctx), ctx=ctx)
            return x + jnp.tanh(y), y == 0

    axes = {nnx.All(nnx.Param, nnx.PathMatches("**/linear/*")): 0}
    m = nnx.Scan(BuiltIn, variable_axes=axes, split_rngs=("params", "dropout"), length=LAYERS)(ctx=nnx.context(0))
    flags = {"deterministic": False, "use_running_average": False}
    inner = m.scan_module
    norm = inner.norm.clone()
    y, dropped = m(X, None, ctx=nnx.context(dropout=1, flags=flags))
    assert len({np.asarray(d).tobytes() for d in dropped}) == LAYERS

    x = X
    for i in range(LAYERS):
        hidden = norm(x @ inner.linear.kernel[i] + inner.linear.bias[i], use_running_average=False)
        x = x + jnp.tanh(jnp.where(dropped[i], 0.0, hidden / (1 - RATE)))
    np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(inner.norm.mean, norm.mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(inner.norm.var, norm.var, rtol=1e-4, atol=1e-6)
