"""EMA: the moving average of a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


def make_model(value: float = 0.0, dtype=jnp.float32):
    return nnx.Dict(
        layer=nnx.Dict(w=nnx.Param(jnp.full((2,), value, dtype), sharding=("x",))), stat=nnx.BatchStat(jnp.ones(2))
    )


def test_average_follows_the_formula():
    model = make_model()
    ema = nnx.EMA(model, 0.9)
    expected = np.zeros(2)
    for value in (1.0, 2.0, -1.0):
        model.layer.w = jnp.full((2,), value)
        ema.update(model)
        expected = 0.9 * expected + 0.1 * value
    np.testing.assert_allclose(ema.averaged(model).layer.w, expected, rtol=1e-6)
    assert ema.step == 3


def test_the_model_is_not_changed_and_the_copy_keeps_its_types():
    model = make_model(1.0)
    ema = nnx.EMA(model, 0.5)
    model.layer.w = jnp.full((2,), 3.0)
    ema.update(model)
    copy = ema.averaged(model)
    assert (model.layer.w == 3).all() and (copy.layer.w == 2).all()
    assert isinstance(copy.layer.variable("w"), nnx.Param)
    assert copy.get_module_def() == model.get_module_def()
    assert list(ema.averages(model)) == ["layer/w"]


def test_update_in_jit_is_traced_once():
    @nnx.jit
    def step(model, ema):
        model.layer.w += 1
        ema.update(model)

    model = make_model()
    ema = nnx.EMA(model, lambda step: jnp.where(step == 0, 0.0, 0.5))  # a warm-up
    for _ in range(3):
        step(model, ema)
    assert step.trace_count == 1
    np.testing.assert_array_equal(ema.averaged(model).layer.w, [2.25, 2.25])  # 1, 1.5, 2.25


def test_low_precision_parameters_are_averaged_in_float32():
    model = make_model(1.0, jnp.bfloat16)
    ema = nnx.EMA(model, 0.999)
    model.layer.w = jnp.full((2,), 2.0, jnp.bfloat16)
    for _ in range(100):
        ema.update(model)
    stored = ema.filter(nnx.EmaState)["average/layer/w"]
    assert stored.value.dtype == jnp.float32 and stored.sharding == ("x",)
    np.testing.assert_allclose(stored.value, 2 - 0.999**100, rtol=1e-5)
    assert ema.averaged(model).layer.w.dtype == jnp.bfloat16


def test_any_filter_says_what_is_averaged_and_integers_are_copied():
    model = make_model()
    model.count = nnx.var("counts", jnp.array(0))
    ema = nnx.EMA(model, 0.5, wrt=...)
    model.count, model.stat = jnp.array(5), jnp.full((2,), 3.0)
    ema.update(model)
    averaged = ema.averaged(model)
    assert averaged.count == 5 and averaged.count.dtype == jnp.int32
    assert (averaged.stat == 2).all()


def test_bad_input_is_named():
    model = make_model()
    with pytest.raises(ValueError, match="`decay` is a number from 0 to 1.*got 1.5"):
        nnx.EMA(model, 1.5)
    ema = nnx.EMA(model)
    with pytest.raises(ValueError, match="gone: 'layer/w'"):
        ema.update(nnx.Dict(w=nnx.Param(jnp.ones(2))))


def test_donating_the_model_leaves_the_averages():
    model = make_model(1.0)
    ema = nnx.EMA(model)
    jax.jit(lambda x: x + 1, donate_argnums=0)(model.layer.w).block_until_ready()
    np.testing.assert_array_equal(ema.average["layer"]["w"], [1, 1])


def test_a_parameter_that_the_model_gained_is_an_error():
    model = nnx.Linear(2, 3, ctx=nnx.context(0))
    ema = nnx.EMA(model)
    model.extra = nnx.Param(jnp.ones(2))
    with pytest.raises(ValueError, match=r"new: 'extra'.*Make a new nnx\.EMA"):
        ema.update(model)
