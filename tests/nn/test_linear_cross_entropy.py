"""`nnx.linear_cross_entropy`: the plain loss and gradients, in blocks, without arrays of the size of the logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx
from tests.nn.arrays import numpy_normal

WIDTH, CLASSES = 16, 96
OPTIONS = {
    "plain": {},
    "soft cap": dict(soft_cap=2.0),
    "label smoothing": dict(label_smoothing=0.1),
    "z loss": dict(z_loss=1e-2),
    "everything": dict(soft_cap=3.0, label_smoothing=0.2, z_loss=1e-2),
}


def inputs(*shape: int):
    features, kernel, bias = numpy_normal(*shape, WIDTH), numpy_normal(WIDTH, CLASSES) / 2, numpy_normal(CLASSES)
    targets = np.random.default_rng(1).integers(0, CLASSES, shape).astype(np.int32)
    mask = np.random.default_rng(2).random(shape) < 0.7
    return jnp.asarray(features), jnp.asarray(kernel), jnp.asarray(bias), jnp.asarray(targets), jnp.asarray(mask)


@functools.partial(jax.jit, static_argnames=("soft_cap", "label_smoothing", "z_loss"))
@functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
def plain(features, kernel, bias, targets, mask, soft_cap=None, label_smoothing=0.0, z_loss=0.0):
    logits = features @ kernel + bias
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    labels = optax.smooth_labels(jax.nn.one_hot(targets, CLASSES), label_smoothing)
    losses = optax.softmax_cross_entropy(logits, labels) + z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    return jnp.mean(losses, where=mask)


@functools.partial(jax.jit, static_argnames=("soft_cap", "label_smoothing", "z_loss", "block_size"))
@functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
def in_blocks(features, kernel, bias, targets, mask, **options):
    return nnx.linear_cross_entropy(features, kernel, targets, bias=bias, mask=mask, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", [(3, 7), (2, 8)], ids=str)  # blocks with and without padding
def test_loss_and_gradients_are_those_of_the_plain_form(shape, options):
    given = inputs(*shape)
    loss, gradients = in_blocks(*given, block_size=4, **options)
    expected, expected_gradients = plain(*given, **options)
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    for gradient, wanted in zip(gradients, expected_gradients):
        np.testing.assert_allclose(gradient, wanted, atol=2e-6)


@pytest.mark.parametrize("shape", [(), (9,), (4, 1, 5)], ids=str)
def test_any_number_of_axes_of_positions(shape):
    features, kernel, _, targets, _ = inputs(*shape)
    loss = jax.jit(functools.partial(nnx.linear_cross_entropy, block_size=2))(features, kernel, targets)
    np.testing.assert_allclose(loss, nnx.cross_entropy(features @ kernel, targets), rtol=2e-6)


def test_only_the_gradients_that_are_asked_for_are_computed():
    features, kernel, _, targets, _ = inputs(4, 6)
    loss = functools.partial(nnx.linear_cross_entropy, targets=targets, block_size=4)

    def results_of_the_scan(argnums):
        jaxpr = jax.make_jaxpr(jax.grad(loss, argnums))(features, kernel)
        (scan,) = (equation for equation in jaxpr.eqns if equation.primitive.name == "scan")
        return [value.aval.shape for value in scan.outvars]

    assert results_of_the_scan(0) == [(), (6, 4, 1, WIDTH)]  # six blocks of one position per row
    assert results_of_the_scan(1) == [(), (WIDTH, CLASSES)]


def test_positions_that_do_not_count_change_nothing_even_if_they_are_nan():
    features, kernel, bias, targets, _ = inputs(2, 6)
    mask = jnp.arange(6) % 2 * jnp.ones((2, 1)) == 0
    damaged = jnp.where(mask[..., None], features, jnp.nan)
    wrong = jnp.where(mask, targets, -1)
    loss, gradients = in_blocks(damaged, kernel, bias, wrong, mask, block_size=3)
    expected, expected_gradients = plain(features, kernel, bias, targets, mask)
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    for gradient, wanted in zip(gradients, expected_gradients):
        np.testing.assert_allclose(gradient, wanted, atol=2e-6)
    nothing, gradients = in_blocks(damaged, kernel, bias, wrong, jnp.zeros_like(mask), block_size=3)
    assert nothing == 0 and not any(gradient.any() for gradient in gradients)


def test_a_target_outside_of_the_classes_is_nan():
    features, kernel, _, targets, _ = inputs(8)
    for wrong in (-1, CLASSES):
        assert jnp.isnan(nnx.linear_cross_entropy(features, kernel, targets.at[3].set(wrong), block_size=2))


def test_bfloat16_sums_the_gradient_of_the_kernel_in_float32():
    """Sixty-four blocks that each add about one part in 256 would be lost in a bfloat16 sum."""
    features, kernel, _, targets, _ = inputs(256)
    low = [value.astype(jnp.bfloat16) for value in (features, kernel)]
    blocks = jax.jit(jax.grad(functools.partial(nnx.linear_cross_entropy, block_size=4), argnums=1))(*low, targets)
    exact = jax.grad(lambda kernel: nnx.cross_entropy(features @ kernel, targets))(kernel)
    assert blocks.dtype == jnp.bfloat16
    error = jnp.linalg.norm(blocks.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
    assert error < 0.01, error


def test_memory_stays_below_the_logits():
    rows, width, classes = 2048, 64, 16384
    kernel = jax.ShapeDtypeStruct((width, classes), jnp.float32)
    features = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    targets = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def temporary(loss):
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(features, kernel, targets).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = rows * classes * 4
    assert temporary(functools.partial(nnx.linear_cross_entropy, block_size=128)) < 0.5 * logits
    assert temporary(lambda features, kernel, targets: nnx.cross_entropy(features @ kernel, targets)) >= logits


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(kernel=jnp.zeros((CLASSES, WIDTH))), "embed.embedding.T"),
        (dict(kernel=jnp.zeros((WIDTH, CLASSES), int)), "floating-point"),
        (dict(targets=jnp.zeros(5, int)), "expected targets of shape"),
        (dict(targets=jnp.zeros(4)), "expected integers"),
        (dict(mask=jnp.ones(4)), "boolean mask"),
        (dict(bias=jnp.zeros(3)), "one entry per class"),
        (dict(soft_cap=-1.0), "soft_cap=-1.0"),
        (dict(label_smoothing=1.0), "label_smoothing=1.0"),
        (dict(z_loss=-1.0), "z_loss=-1.0"),
        (dict(block_size=0), "block_size=0"),
    ],
)
def test_bad_input_is_named(changes, message):
    features, kernel, _, targets, _ = inputs(4)
    with pytest.raises(ValueError, match="nnx.linear_cross_entropy") as raised:
        nnx.linear_cross_entropy(**dict(features=features, kernel=kernel, targets=targets) | changes)
    assert message in str(raised.value)
