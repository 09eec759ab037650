"""`nnx.DynamicScale`: gradients of float16 models survive, overflow skips a step and halves the factor."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx

X = jnp.ones((4, 2))


class Tiny(nnx.Module):
    """A model whose gradients are too small for float16."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))

    def __call__(self, x):
        return (x.astype(jnp.float16) * self.w.astype(jnp.float16)).sum()


def small_loss(model, x):
    return model(x).astype(jnp.float32) * 1e-9


@nnx.jit
def train_step(optimizer, scale, x):
    loss, grads = scale.value_and_grad(lambda model: jnp.mean(model(x).astype(jnp.float32) ** 2))(optimizer.model)
    optimizer.update(grads)
    return loss, grads


def make(**options):
    model = nnx.Linear(2, 3, dtype=jnp.float16, ctx=nnx.context(0))
    return nnx.Optimizer(model, optax.sgd(0.1), skip_nonfinite=True), nnx.DynamicScale(**options)


def test_gradients_that_round_to_zero_survive_when_they_are_scaled():
    model = Tiny()
    assert (nnx.grad(small_loss)(model, X)["w"].value == 0).all()
    value, grads = nnx.DynamicScale().value_and_grad(small_loss)(model, X)
    np.testing.assert_allclose(grads["w"].value, 4e-9, rtol=1e-2)
    np.testing.assert_allclose(value, 8e-9, rtol=1e-2)


def test_value_and_gradient_are_those_without_a_scale():
    optimizer, scale = make()
    loss = lambda model: jnp.mean(model(X).astype(jnp.float32) ** 2)  # noqa: E731
    expected, expected_grads = nnx.value_and_grad(loss)(optimizer.model)
    value, grads = train_step(optimizer, scale, X)
    np.testing.assert_allclose(value, expected)
    for path, grad in expected_grads.items():
        np.testing.assert_allclose(grads[path].value, grad.value, rtol=2e-3)


def test_the_factor_grows_after_finite_steps_and_shrinks_after_an_overflow():
    optimizer, scale = make(scale=8.0, growth_interval=2, max_scale=16.0, min_scale=4.0)
    seen, traces = [], 0
    for overflow in (False, False, False, False, True, True, True, False):
        before = optimizer.model.kernel
        train_step(optimizer, scale, X * (jnp.inf if overflow else 1.0))
        assert (optimizer.model.kernel == before).all() == overflow  # the update is skipped
        seen.append((float(scale.scale), int(scale.finite_steps)))
        traces = train_step.trace_count if len(seen) == 1 else traces
    assert seen == [(8, 1), (16, 0), (16, 1), (16, 0), (8, 0), (4, 0), (4, 0), (4, 1)]
    assert (int(optimizer.step), int(optimizer.skipped)) == (5, 3)
    assert train_step.trace_count == traces  # a new factor is a new value


def test_an_overflow_in_float16_is_found_and_the_factor_comes_down():
    optimizer, scale = make(scale=2.0**24)
    steps = 0
    while int(optimizer.step) == 0:
        train_step(optimizer, scale, 100 * X)
        steps += 1
    assert 1 < steps < 25 and scale.scale < 2.0**24
    assert all(bool(jnp.isfinite(p).all()) for p in jax.tree.leaves(optimizer.model.get_state()))


def test_auxiliary_outputs_and_filters_work_as_in_value_and_grad():
    model = nnx.Sequence([nnx.Linear(2, 2, ctx=nnx.context(0)), nnx.BatchNorm(2, use_running_average=False)])
    scale = nnx.DynamicScale()
    only_bias = nnx.All(nnx.Param, nnx.PathMatches("**/bias"))
    (loss, aux), grads = scale.value_and_grad(lambda m, x: (m(x).sum(), "aux"), only_bias, has_aux=True)(model, X)
    assert aux == "aux" and loss.shape == () and list(grads) == ["0/bias", "1/bias"]
    assert (model[1].mean != 0).any()  # state changes are kept
    assert scale.finite_steps == 1


def test_dynamic_scale_is_saved_with_a_run(tmp_path):
    scale = nnx.DynamicScale()
    scale.unscale(nnx.State({"w": nnx.Param(jnp.array(jnp.nan))}))
    nnx.save(tmp_path / "run", {"scale": scale})
    fresh = nnx.load(tmp_path / "run", {"scale": nnx.DynamicScale()})["scale"]
    assert float(fresh.scale) == 2.0**14


def test_settings_and_arguments_are_checked():
    for options, message in [
        ({"scale": 0.0}, "0 < min_scale <= scale <= max_scale, got scale=0.0"),
        ({"growth_interval": 0}, "at least 1 step, got growth_interval=0"),
        ({"growth_factor": 1.0}, "a factor above 1"),
        ({"backoff_factor": 1.0}, "a factor between 0 and 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            nnx.DynamicScale(**options)
    with pytest.raises(TypeError, match="takes the gradients as a State"):
        nnx.DynamicScale().unscale({"w": X})  # pyright: ignore[reportArgumentType]
