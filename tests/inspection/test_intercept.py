"""nnx.intercept: a hook in place of the calls of submodules."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.inspection.inside_models import BLOCK, GPT, LENGTH, TOKENS, Twice, block_by_hand

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


@pytest.fixture
def gpt():
    return GPT(ctx=nnx.context(0))


@pytest.fixture
def twice():
    return Twice(ctx=nnx.context(0))


def close(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), a, b)


def double(path, module, call, *args, **kwargs):
    return 2 * call(*args, **kwargs)


def ablate(path, module, call, *args, **kwargs):
    return jnp.zeros_like(call(*args, **kwargs))


def test_ablating_attention_in_a_scanned_stack_equals_the_stack_without_it(gpt):
    out = nnx.intercept(gpt, ablate, where="**/attention")(TOKENS)
    x = gpt.embed(TOKENS)
    for number in range(LENGTH):
        x = x + nnx.gelu(block_by_hand(gpt, number).mlp(x))
    close(out, gpt.embed.attend(gpt.norm(x)))


def test_a_hook_gets_the_path_the_module_the_call_and_its_arguments(twice):
    seen = []

    def hook(path, module, call, x):
        seen.append((path, module.kernel.shape, x.shape))
        return call(x)

    close(nnx.intercept(twice, hook, where=nnx.Linear)(X), twice(X))
    assert seen == [("layer", (4, 4), (2, 4))] * 2


def test_a_hook_can_call_the_original_with_other_arguments_several_times_or_never(twice):
    shifted = nnx.intercept(twice.encode, lambda path, module, call, x: call(x + 1) - call(x), where="layer")(X)
    close(shifted, twice.layer(X + 1) - twice.layer(X))
    constant = nnx.intercept(twice.encode, lambda path, module, call, x: 7 * x, where="layer")(X)
    close(constant, 7 * X)


def test_activations_of_one_run_can_be_patched_into_another(twice):
    _, clean = nnx.capture(twice, where="layer")(X)
    first, _ = clean["layer"]
    corrupted = X + 1

    def patch(path, module, call, x):
        return first if x is corrupted else call(x)

    close(nnx.intercept(lambda m, x: m(corrupted), patch, where="layer")(twice, X), twice(X))


def test_hooks_run_inside_every_transform(twice):
    bodies = [
        lambda model, x: nnx.jit(lambda model, x: model.layer(x))(model, x),
        lambda model, x: nnx.remat(lambda model, x: model.layer(x))(model, x),
        lambda model, x: nnx.fori_loop(0, 1, lambda i, c: (c[0], c[0].layer(c[1])), (model, x))[1],
        lambda model, x: nnx.cond(True, lambda model, x: model.layer(x), lambda model, x: x, model, x),
        lambda model, x: jax.jit(lambda x: model.layer(x))(x),
        lambda model, x: jax.vmap(lambda x: model.layer(x))(x),
    ]
    for body in bodies:
        close(nnx.intercept(body, double, where="layer")(twice, X), 2 * twice.layer(X))


def test_gradients_flow_through_hooks(twice):
    grads = nnx.grad(lambda model, x: nnx.intercept(model.encode, double, where="layer")(x).sum())(twice, X)
    expected = nnx.grad(lambda model, x: 2 * model.encode(x).sum())(twice, X)
    close(grads, expected)


def test_other_methods_can_be_intercepted(gpt):
    out = nnx.intercept(gpt, ablate, where="embed", methods=("attend",))(TOKENS)
    assert not out.any()


def test_hook_may_change_its_module():
    class Counted(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.array(0))

        def __call__(self, x):
            return x

    def hook(path, module, call, x):
        module.count += 1
        return call(x)

    model = Counted()
    nnx.intercept(nnx.jit(lambda model, x: model(x)), hook)(model, X)
    assert int(model.count) == 1
    nnx.intercept(model, hook, stateful=False)(X)
    assert int(model.count) == 1


def test_a_capture_around_an_intervention_sees_what_the_hook_returned(twice):
    _, acts = nnx.capture(nnx.intercept(lambda model, x: model.encode(x), double, where="layer"))(twice, X)
    close(acts["layer"], 2 * twice.layer(X))
    _, inner = nnx.intercept(nnx.capture(lambda model, x: model.encode(x)), double, where="layer")(twice, X)
    close(inner["layer"], twice.layer(X))


def test_interventions_nest_with_the_outer_hook_around_the_inner(twice):
    increment = lambda path, module, call, x: call(x) + 1  # noqa: E731
    inner = nnx.intercept(lambda model, x: model.encode(x), increment, where="layer")
    close(nnx.intercept(inner, double, where="layer")(twice, X), 2 * (twice.layer(X) + 1))


# Tracing


def test_repeating_a_call_with_the_same_hook_does_not_retrace(twice):
    forward = nnx.jit(lambda model, x: model(x))
    noise = jnp.ones(4)
    hook = lambda path, module, call, x: call(x) + noise  # noqa: E731
    for _ in range(3):
        nnx.intercept(forward, hook, where="layer")(twice, X)
    assert forward.trace_count == 1


def test_another_hook_or_another_value_that_it_reads_is_traced(twice):
    forward = nnx.jit(lambda model, x: model.encode(x))
    for scale in (2.0, 3.0):
        hook = lambda path, module, call, x: scale * call(x)  # noqa: E731, B023
        close(nnx.intercept(forward, hook, where="layer")(twice, X), scale * twice.layer(X))
    close(forward(twice, X), twice.layer(X))


def test_hook_that_reads_mutable_values_is_never_stale(twice):
    forward = nnx.jit(lambda model, x: model.encode(x))
    scales = [2.0]
    hook = lambda path, module, call, x: scales[0] * call(x)  # noqa: E731
    close(nnx.intercept(forward, hook, where="layer")(twice, X), 2 * twice.layer(X))
    scales[0] = 3.0
    close(nnx.intercept(forward, hook, where="layer")(twice, X), 3 * twice.layer(X))


def test_a_capture_and_many_interventions_in_turn_raise_no_warning_about_static_values(twice):
    forward = nnx.jit(lambda model, x: model.encode(x))
    for scale in range(12):
        hook = functools.partial(lambda scale, path, module, call, x: scale * call(x), scale)
        nnx.capture(forward, where="layer")(twice, X)
        nnx.intercept(forward, hook, where="layer")(twice, X)
    assert forward.trace_count == 13


def test_nothing_keeps_a_module_alive_that_a_hook_reached(twice):
    forward = nnx.jit(lambda model, x: model.encode(x))

    def patch_from_another_model():
        other = Twice(ctx=nnx.context(1))
        out = nnx.intercept(forward, lambda path, module, call, x: other.layer(x), where="layer")(twice, X)
        close(out, other.layer(X))
        return weakref.ref(other)

    weak = patch_from_another_model()
    gc.collect()
    assert weak() is None


def test_a_hook_need_not_be_a_function(twice):
    class Hook:
        __slots__ = ()

        def __call__(self, path, module, call, x):
            return -call(x)

        def method(self, path, module, call, x):
            return -call(x)

    for hook in (Hook(), Hook().method):
        close(nnx.intercept(twice.encode, hook, where="layer")(X), -twice.layer(X))


def test_a_hook_that_cannot_be_called_is_an_error(twice):
    with pytest.raises(TypeError, match=r"takes a function and a hook, nnx\.intercept\(f, hook, where=\.\.\.\).*got 3"):
        nnx.intercept(twice, 3)


def test_blocks_of_a_scan_are_one_module_to_a_hook(gpt):
    paths = []

    def hook(path, module, call, *args):
        paths.append(path)
        return call(*args)

    nnx.intercept(gpt, hook, where=BLOCK)(TOKENS)
    assert set(paths) == {BLOCK}
