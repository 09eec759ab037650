"""`nnx.cross_entropy`: the textbook loss and gradient, by ordinary operations and by the kernel, and bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx
from nnx.sharding.target import compiling_for
from tests.nn.arrays import numpy_normal

IMPLEMENTATIONS = ["xla", "triton"]  # on a CPU, the kernel is interpreted


def implementations(test):
    return pytest.mark.usefixtures("interpreted")(pytest.mark.parametrize("implementation", IMPLEMENTATIONS)(test))


def textbook(logits, targets, mask=None):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.mean(losses) if mask is None else jnp.mean(losses, where=mask)


# Compiled: operation by operation, every shape would be a program of its own.
value_and_gradient = jax.jit(jax.value_and_grad(nnx.cross_entropy), static_argnames="implementation")
textbook_value_and_gradient = jax.jit(jax.value_and_grad(textbook))


def batch(*shape: int, classes: int = 700):
    logits = 3 * numpy_normal(*shape, classes)
    targets = np.random.default_rng(1).integers(0, classes, shape).astype(np.int32)
    return jnp.asarray(logits), jnp.asarray(targets)


@implementations
@pytest.mark.parametrize(("shape", "classes"), [((2, 3), 700), ((5,), 4), ((), 2049)], ids=str)
def test_loss_and_gradient_are_those_of_the_textbook(implementation, shape, classes):
    logits, targets = batch(*shape, classes=classes)
    loss, gradient = value_and_gradient(logits, targets, implementation=implementation)
    expected, expected_gradient = textbook_value_and_gradient(logits, targets)
    alone = nnx.cross_entropy(logits, targets, implementation=implementation)
    np.testing.assert_allclose([loss, alone], [expected] * 2, rtol=2e-6)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)


@implementations
def test_positions_that_do_not_count_change_nothing(implementation):
    logits, targets = batch(4)
    mask = jnp.array([True, False, True, False])
    damaged = logits.at[1].set(jnp.nan)
    wrong = targets.at[3].set(-1)
    loss, gradient = value_and_gradient(damaged, wrong, mask=mask, implementation=implementation)
    expected, expected_gradient = textbook_value_and_gradient(logits, targets, mask)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)


@implementations
def test_no_position_that_counts_is_a_loss_of_zero(implementation):
    logits, targets = batch(2, classes=5)
    mask = jnp.zeros(2, bool)
    loss, gradient = value_and_gradient(logits, targets, mask=mask, implementation=implementation)
    assert loss == 0 and not gradient.any()


@implementations
@pytest.mark.parametrize("target", [-1, 5])
def test_a_target_outside_of_the_classes_is_nan(implementation, target):
    logits, _ = batch(2, classes=5)
    targets = jnp.array([0, target])
    loss, gradient = value_and_gradient(logits, targets, implementation=implementation)
    assert jnp.isnan(loss)
    if implementation == "triton":
        assert jnp.isnan(gradient[1]).all() and not jnp.isnan(gradient[0]).any()


@implementations
def test_a_target_beyond_the_range_of_int32_is_nan(implementation):
    logits, wide = jnp.zeros((2, 5)), np.array([0, 2**32 + 1])
    assert jnp.isnan(nnx.cross_entropy(logits, wide, implementation=implementation))
    with jax.enable_x64(True):
        for targets in (jnp.array(wide), jnp.array([0, 2**64 - 1], jnp.uint64)):
            assert jnp.isnan(nnx.cross_entropy(logits, targets, implementation=implementation))
            masked = nnx.cross_entropy(logits, targets, mask=targets == 0, implementation=implementation)
            np.testing.assert_allclose(masked, np.log(5), rtol=1e-6)


def test_lists_are_refused():
    logits, targets, mask = jnp.zeros((2, 3)), jnp.zeros(2, int), jnp.ones(2, bool)
    for given in (([[0.0] * 3] * 2, targets, mask), (logits, [0, 1], mask), (logits, targets, [True, False])):
        with pytest.raises(TypeError, match="nnx.cross_entropy expected an array.*got list"):
            nnx.cross_entropy(*given[:2], mask=given[2])


@implementations
def test_the_cotangent_scales_the_gradient(implementation):
    logits, targets = batch(3, classes=50)
    options = {"implementation": implementation}
    gradient = jax.grad(nnx.cross_entropy)(logits, targets, **options)
    scaled = jax.grad(lambda logits: 1024 * nnx.cross_entropy(logits, targets, **options))(logits)
    np.testing.assert_allclose(scaled, 1024 * gradient, rtol=1e-6)


@implementations
def test_logits_of_bfloat16_are_summed_in_float32(implementation):
    logits, targets = batch(2, classes=3000)
    narrow = logits.astype(jnp.bfloat16)
    loss, gradient = jax.value_and_grad(nnx.cross_entropy)(narrow, targets, implementation=implementation)
    assert loss.dtype == jnp.float32 and gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(loss, textbook(narrow.astype(jnp.float32), targets), rtol=1e-5)


@implementations
def test_large_logits_do_not_overflow(implementation):
    logits = jnp.array([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]])
    loss, gradient = jax.value_and_grad(nnx.cross_entropy)(logits, jnp.array([0, 1]), implementation=implementation)
    np.testing.assert_allclose(loss, np.log(3) / 2, rtol=1e-4)  # 1e4 is known to 1e-3
    assert jnp.isfinite(gradient).all()


def test_an_empty_batch_has_a_loss_of_zero():
    assert nnx.cross_entropy(jnp.zeros((0, 5)), jnp.zeros(0, jnp.int32)) == 0


def test_the_gradient_keeps_nothing_but_the_logits_and_one_number_per_row():
    logits, targets = batch(8, classes=100)
    _, pullback = jax.vjp(lambda logits: nnx.cross_entropy(logits, targets), logits)
    kept = [leaf.shape for leaf in jax.tree.leaves(pullback) if getattr(leaf, "size", 0) >= 100]
    assert kept == [(8, 100)]


@pytest.mark.parametrize(
    ("logits", "targets", "mask", "message"),
    [
        (jnp.zeros((2, 3)), jnp.zeros((3,), int), None, r"expected targets of shape \(2,\).*\(2, 3\), got \(3,\)"),
        (jnp.zeros((2, 3)), jnp.zeros((2,)), None, "expected integers, got float32 .*optax.softmax_cross_entropy"),
        (jnp.zeros((2, 3)), jnp.zeros((2,), int), jnp.ones(2), r"expected a boolean mask of shape \(2,\).*float32"),
        (jnp.zeros((2, 3)), jnp.zeros((2,), int), jnp.ones((1,), bool), r"of shape \(2,\), .*got bool \(1,\)"),
        (jnp.zeros((2, 3), int), jnp.zeros((2,), int), None, "floating-point dtype, got int32"),
    ],
    ids=["shape", "floats", "float mask", "mask shape", "integer logits"],
)
def test_bad_input_is_an_error(logits, targets, mask, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        nnx.cross_entropy(logits, targets, mask=mask)


def test_the_kernel_is_refused_where_there_is_no_gpu_for_it():
    logits, targets = batch(2, classes=5)
    with (
        compiling_for("cpu"),
        pytest.raises(ValueError, match="implementation='triton' is not possible here: it needs an NVIDIA GPU"),
    ):
        nnx.cross_entropy(logits, targets, implementation="triton")
    with (
        compiling_for("gpu", "Tesla T4"),
        pytest.raises(ValueError, match="compute capability 8.0, and the GPU has"),
    ):
        nnx.cross_entropy(logits, targets, implementation="triton")


def kernel_calls(platform):
    logits, targets = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((4, 64), "bfloat16"), ((4,), "int32")))
    traced = jax.jit(jax.grad(nnx.cross_entropy)).trace(logits, targets)
    return traced.lower(lowering_platforms=(platform,)).as_text().count("__gpu$xla.gpu.triton")


def test_the_kernel_is_chosen_for_the_target(pretend):
    with compiling_for("gpu", "NVIDIA H100 80GB HBM3"):
        assert kernel_calls("cuda") == 1
    with compiling_for("gpu", "Tesla T4"):
        assert kernel_calls("cuda") == 0
    pretend("gpu")
    with compiling_for("tpu"):
        assert kernel_calls("tpu") == 0
    assert kernel_calls("tpu") == kernel_calls("cpu") == 0  # which is known only when the program is lowered


def test_a_program_lowered_elsewhere_computes_the_same(pretend):
    logits, targets = batch(3, classes=50)
    expected = jax.value_and_grad(nnx.cross_entropy)(logits, targets)
    pretend("gpu")
    found = jax.jit(jax.value_and_grad(nnx.cross_entropy))(logits, targets)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, expected)
