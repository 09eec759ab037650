"""`nnx.Scan`: stacked layers, carried state, split randomness, metadata of the axis; its decorator form, and remat."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.checks import assert_no_tracers
from tests.models import Count
from tests.transforms.scan_models import LENGTH, STACKED, Block, X, layers, stack, unrolled

# The class form


def test_scan_builds_one_module_with_stacked_variables():
    m = stack()
    assert isinstance(m.scan_module, Block)
    assert m.scan_module.kernel.shape == (LENGTH, 3, 3) and m.scan_module.bias.shape == (LENGTH, 3)
    assert m.scan_module.count.shape == () and m.scan_module.node.shape == (2,)
    assert isinstance(m.scan_module.variable("kernel"), nnx.Param)
    assert list(m.filter(nnx.Param)) == ["scan_module/bias", "scan_module/kernel"]
    assert_no_tracers(m)


def test_streams_selected_by_split_rngs_differ_per_layer():
    kernel = stack().scan_module.kernel
    assert len({float(kernel[i, 0, 0]) for i in range(LENGTH)}) == LENGTH


def test_streams_not_selected_by_split_rngs_are_shared_by_the_layers():
    with pytest.warns(UserWarning, match=r"nnx.scan\(Block\).*'params'"):
        kernel = stack(split_rngs=None).scan_module.kernel
    assert all(np.array_equal(kernel[0], kernel[i]) for i in range(LENGTH))


def test_calling_a_scanned_module_scans_over_its_layers():
    m = stack()
    y, ys = m(X, None)
    expected, expected_ys = unrolled(m.scan_module, X)
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    np.testing.assert_allclose(ys, expected_ys, rtol=1e-5)


def test_carried_state_passes_from_step_to_step():
    m = stack()
    m(X, None)
    m(X, None)
    assert m.scan_module.count == 2 * LENGTH and m.scan_module.count.shape == ()
    assert_no_tracers(m)


def test_call_reaches_any_method_and_passes_broadcast_arguments():
    m = stack()
    shifts = jnp.arange(4.0)
    y, ys = m.call.shifted(X, shifts, 2.0)
    x = X
    for i in range(LENGTH):
        x = x @ m.scan_module.kernel[i] * 2.0 + shifts[i]
    np.testing.assert_allclose(y, x, rtol=1e-5)
    np.testing.assert_array_equal(ys, shifts)


def test_call_itself_is_the_modules_call():
    m = stack()
    np.testing.assert_allclose(m.call(X, None)[0], m(X, None)[0], rtol=1e-6)


def test_a_context_passed_to_a_scanned_call_is_split():
    m = stack(split_rngs=("params", "noise"))
    ctx = nnx.context(noise=0)
    _, first = m.call.noisy(0.0, None, ctx=ctx)
    _, second = m.call.noisy(0.0, None, ctx=ctx)
    assert len({float(v) for v in [*first, *second]}) == 2 * LENGTH


def test_selected_streams_differ_per_step_and_the_others_are_shared():
    m = stack(split_rngs={"noise": True, "shared": False, "params": True})
    _, (noise, shared) = m.call.noisy_and_shared(0.0, None, ctx=nnx.context(noise=0, shared=1))
    assert len({float(v) for v in noise}) == LENGTH
    assert len({float(v) for v in shared}) == 1


@pytest.mark.filterwarnings("ignore:.*which `split_rngs` does not select")
@pytest.mark.parametrize(
    "split_rngs, splits",
    [
        (None, set()),
        (..., {"noise", "shared"}),
        ("noise", {"noise"}),
        (["noise", "shared"], {"noise", "shared"}),
        (lambda name: name == "shared", {"shared"}),
        ({"noise": True, ...: False}, {"noise"}),
    ],
    ids=["none", "all", "name", "sequence", "callable", "mapping"],
)
def test_split_rngs_takes_every_rng_filter(split_rngs, splits):
    m = stack(split_rngs=split_rngs)
    _, (noise, shared) = m.call.noisy_and_shared(0.0, None, ctx=nnx.context(noise=0, shared=1))
    for name, values in (("noise", noise), ("shared", shared)):
        assert len({float(v) for v in values}) == (LENGTH if name in splits else 1)


def test_the_axis_of_the_stack_can_be_chosen():
    m = stack(variable_axes={nnx.PathMatches("**/kernel"): 1, nnx.Param: 0})
    assert m.scan_module.kernel.shape == (3, LENGTH, 3) and m.scan_module.bias.shape == (LENGTH, 3)
    y, _ = m(X, None)
    np.testing.assert_allclose(y, unrolled(m.scan_module, X, axis=1)[0], rtol=1e-5)


def test_a_negative_axis_counts_from_the_end():
    m = stack(variable_axes={nnx.PathMatches("**/kernel"): -1, nnx.Param: 0})
    assert m.scan_module.kernel.shape == (3, 3, LENGTH)
    np.testing.assert_allclose(m(X, None)[0], unrolled(m.scan_module, X, axis=2)[0], rtol=1e-5)


def test_state_under_variable_axes_may_change_per_step():
    m = stack(variable_axes={nnx.Param: 0, Count: 0})
    assert m.scan_module.count.shape == (LENGTH,)
    m(X, None)
    np.testing.assert_array_equal(m.scan_module.count, np.ones(LENGTH))


def test_reverse_runs_the_layers_backwards():
    m = stack(reverse=True)
    y, ys = m(X, None)
    expected, expected_ys = unrolled(m.scan_module, X, order=reversed(range(LENGTH)))
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    np.testing.assert_allclose(ys, expected_ys, rtol=1e-5)


def test_unroll_changes_nothing_but_the_program():
    np.testing.assert_allclose(stack(unroll=2)(X, None)[0], stack()(X, None)[0], rtol=1e-6)


def test_a_scanned_module_under_jit_and_grad():
    m = stack()

    @nnx.jit
    def step(m, x):
        return nnx.grad(lambda m: (m(x, None)[0] ** 2).sum())(m)

    grads = step(m, X)
    step(m, X)

    def by_hand(kernel):
        block = nnx.Dict(kernel=nnx.Param(kernel), bias=nnx.Param(m.scan_module.bias))
        return (unrolled(block, X)[0] ** 2).sum()

    expected = jax.grad(by_hand)(m.scan_module.kernel)
    np.testing.assert_allclose(grads["scan_module/kernel"].value, expected, rtol=1e-4, atol=1e-6)
    assert m.scan_module.count == 2 * LENGTH and step.trace_count == 1


def test_a_scanned_module_can_be_partitioned_cloned_and_merged():
    m = stack()
    rebuilt = m.partition().merge()
    np.testing.assert_allclose(rebuilt(X, None)[0], m.clone()(X, None)[0], rtol=1e-6)


def test_scanned_modules_nest():
    Inner = nnx.Scan(Block, variable_axes={nnx.Param: 0}, split_rngs="params", length=2)
    m = nnx.Scan(Inner, variable_axes={nnx.Param: 0}, split_rngs="params", length=3)(3, ctx=nnx.context(0))
    kernel = m.scan_module.scan_module.kernel
    assert kernel.shape == (3, 2, 3, 3)
    y, ys = m(X, None)
    x = X
    for i in range(3):
        for j in range(2):
            x = jnp.tanh(x @ kernel[i, j])
    np.testing.assert_allclose(y, x, rtol=1e-5)
    assert m.scan_module.scan_module.count == 6


def test_scan_without_variable_axes_runs_one_layer_again_and_again():
    m = nnx.Scan(Block, length=3)(3, ctx=nnx.context(0))
    assert m.scan_module.kernel.shape == (3, 3)
    y, _ = m(X, None)
    x = X
    for _ in range(3):
        x = jnp.tanh(x @ m.scan_module.kernel)
    np.testing.assert_allclose(y, x, rtol=1e-5)


# The decorator form


class Stack(nnx.Module):
    @nnx.scan(**STACKED)
    def __init__(self, features, *, ctx):
        self.kernel = nnx.Param(jax.random.normal(ctx.make_rng("params"), (features, features)))
        self.bias = nnx.Param(jnp.zeros((features,)))
        self.count = Count(jnp.zeros((), jnp.int32))

    @functools.partial(nnx.scan, variable_axes={nnx.Param: 0}, length=LENGTH)
    def __call__(self, x, _):
        """One layer."""
        self.count += 1
        x = jnp.tanh(x @ self.kernel + self.bias)
        return x, x.sum()

    @nnx.scan(variable_axes={nnx.Param: 0}, split_rngs="noise", length=LENGTH)
    def noisy(self, x, _, *, ctx):
        noise = jax.random.uniform(ctx.make_rng("noise"))
        return x + noise, noise


def test_scan_decorates_init_and_methods():
    m = Stack(3, ctx=nnx.context(0))
    assert m.kernel.shape == (LENGTH, 3, 3) and m.count == 0
    assert len({float(m.kernel[i, 0, 0]) for i in range(LENGTH)}) == LENGTH
    y, ys = m(X, None)
    expected, expected_ys = unrolled(m, X)
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    np.testing.assert_allclose(ys, expected_ys, rtol=1e-5)
    assert m.count == LENGTH
    assert_no_tracers(m)


def test_a_decorated_method_takes_a_context():
    _, noise = Stack(3, ctx=nnx.context(0)).noisy(0.0, None, ctx=nnx.context(noise=1))
    assert len({float(v) for v in noise}) == LENGTH


def test_is_init_overrides_the_name():
    class Setup(nnx.Module):
        def __init__(self, *, ctx):
            self.setup(ctx=ctx)

        @nnx.scan(is_init=True, **STACKED)
        def setup(self, *, ctx):
            self.kernel = nnx.Param(jax.random.normal(ctx.make_rng("params"), (2,)))

    assert Setup(ctx=nnx.context(0)).kernel.shape == (LENGTH, 2)


def test_a_decorated_method_keeps_name_docstring_and_signature():
    assert Stack.__call__.__name__ == "__call__" and Stack.__call__.__doc__ == "One layer."
    assert list(inspect.signature(Stack.noisy).parameters) == ["self", "x", "_", "ctx"]


# Remat and Scan


def test_remat_inside_scan():
    m = nnx.Scan(nnx.Remat(Block), **STACKED)(3, ctx=nnx.context(0))
    block = m.scan_module.remat_module
    assert isinstance(block, Block) and block.kernel.shape == (LENGTH, 3, 3)
    y, _ = m(X, None)
    np.testing.assert_allclose(y, unrolled(block, X)[0], rtol=1e-5)
    z, _ = m.call.call(X, None)
    np.testing.assert_allclose(z, y, rtol=1e-6)
    assert block.count == 2 * LENGTH


def test_scan_inside_remat():
    m = nnx.Remat(nnx.Scan(Block, **STACKED))(3, ctx=nnx.context(0))
    block = m.remat_module.scan_module
    assert block.kernel.shape == (LENGTH, 3, 3)
    y, _ = m(X, None)
    np.testing.assert_allclose(y, unrolled(block, X)[0], rtol=1e-5)
    z, _ = m.call.call(X, None)
    np.testing.assert_allclose(z, y, rtol=1e-6)
    assert block.count == 2 * LENGTH


@pytest.mark.parametrize("order", ["scan of remat", "remat of scan"])
def test_gradients_agree_with_and_without_remat(order):
    make = nnx.Scan(nnx.Remat(Block), **STACKED) if order == "scan of remat" else nnx.Remat(nnx.Scan(Block, **STACKED))
    plain, m = stack(), make(3, ctx=nnx.context(0))

    def loss(m):
        return (m(X, None)[0] ** 2).sum()

    expected = nnx.grad(loss)(plain)
    m.update_state(rename(plain.get_state(), order))
    grads = nnx.grad(loss)(m)
    for found, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def rename(state, order):
    inside = ["scan_module", "remat_module"] if order == "scan of remat" else ["remat_module", "scan_module"]
    nested = state.to_nested()["scan_module"]
    return nnx.State.from_nested({inside[0]: {inside[1]: nested}})


def test_remat_and_scan_compose_as_decorators():
    @nnx.scan(variable_axes={nnx.Param: 0}, length=LENGTH)
    @nnx.remat
    def f(m, carry, _):
        return m(carry)

    @nnx.remat
    def g(m, carry):
        return nnx.scan(lambda m, c, _: m(c), variable_axes={nnx.Param: 0}, length=LENGTH)(m, carry, None)

    m = layers()
    np.testing.assert_allclose(f(m, X, None)[0], unrolled(m, X)[0], rtol=1e-5)
    np.testing.assert_allclose(g(m, X)[0], unrolled(m, X)[0], rtol=1e-5)
    assert m.count == 2 * LENGTH


def test_data_transform_sees_the_state_inside_the_body():
    seen = []

    def constrain(state):
        seen.append({path: leaf.value.shape for path, leaf in state.items() if isinstance(leaf, nnx.Param)})
        return state

    m = stack(data_transform=constrain)
    y, _ = m(X, None)
    np.testing.assert_allclose(y, unrolled(m.scan_module, X)[0], rtol=1e-5)
    assert any((3, 3) in shapes.values() for shapes in seen)
