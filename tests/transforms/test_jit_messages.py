"""What `nnx.jit` says when something goes wrong: the user's function, line, argument names and paths."""

import inspect
import warnings

import jax
import jax.errors
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


class Net(nnx.Module):
    def __init__(self):
        self.layers = [nnx.Linear(2, 2, ctx=nnx.context(0)), nnx.Dropout(0.5)]
        self.scale = nnx.Param(jnp.ones(()))
        self.steps = 0

    def __call__(self, x):
        return self.layers[0](x) * self.scale


X = jnp.ones((3, 2))


@pytest.fixture
def net():
    return Net()


def line_of(function):
    return f"{__file__}:{inspect.unwrap(function).__code__.co_firstlineno}"


def message_of(error, function, *args, **kwargs):
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    text = str(caught.value)
    assert not any(word in text for word in ("cells[", "data[", "forks[", "compiled.py"))
    return text


# Tracer errors


def test_a_branch_on_a_weight_names_the_function_the_argument_and_the_path(net):
    @nnx.jit
    def step(model, x):
        return x if model.layers[0].kernel.sum() > 0 else model(x)

    text = message_of(jax.errors.TracerBoolConversionError, step, net, X)
    assert f"the function step at {line_of(step)} for nnx.jit" in text
    assert "depends on the value of the argument 'layers/0/kernel' of model" in text
    assert "nnx.cond" in text and "static_argnames" not in text


def test_a_branch_on_data_names_the_argument(net):
    step = nnx.jit(lambda model, batch, flag: batch["x"] if flag else model(batch["x"]))
    text = message_of(jax.errors.TracerBoolConversionError, step, net, {"x": X}, jnp.array(True))
    assert "the value of the argument flag." in text and "static_argnames='flag'" in text
    step = nnx.jit(lambda model, *batches: 1 if batches[1]["x"][0, 0] else 0)
    text = message_of(jax.errors.TracerBoolConversionError, step, net, X, {"x": X})
    assert "the argument batches[1]['x']" in text


def test_several_modules_and_keyword_arguments_are_distinguished(net):
    @nnx.jit
    def step(student, *, teacher):
        return bool(student.scale + teacher["net"].scale > 0)

    text = message_of(jax.errors.TracerBoolConversionError, step, net, teacher={"net": Net()})
    assert "'scale' of student and 'scale' of teacher['net']" in text


def test_numbers_and_numpy_arrays(net):
    text = message_of(jax.errors.TracerIntegerConversionError, nnx.jit(lambda m, n: list(range(n))), net, 3)
    assert "the argument n" in text and "static_argnames='n'" in text
    text = message_of(jax.errors.ConcretizationTypeError, nnx.jit(lambda m, rate: float(rate)), net, 0.1)
    assert "the argument rate" in text
    text = message_of(jax.errors.TracerArrayConversionError, nnx.jit(lambda m: np.asarray(m.scale)), net)
    assert "'scale' of m" in text and "Use jax.numpy" in text


def test_a_boolean_mask(net):
    @nnx.jit
    def select(m, x):
        return x[x > 0]

    text = message_of(jax.errors.NonConcreteBooleanIndexError, select, net, X)
    assert f"select at {line_of(select)}" in text and "jnp.where(mask, x, fill)" in text


def test_a_donated_function_and_a_context(net):
    @nnx.jit(donate_argnums=0)
    def step(model, ctx):
        return bool(jax.random.bernoulli(ctx.make_rng("noise")))

    text = message_of(jax.errors.TracerBoolConversionError, step, net, nnx.context(noise=0))
    assert "ctx" in text


def test_a_tracer_of_the_outer_function_keeps_its_name(net):
    @nnx.jit
    def outer(model, x):
        positive = x[0, 0] > 0
        return nnx.jit(lambda other: other.scale if positive else 0)(model)

    text = message_of(jax.errors.TracerBoolConversionError, outer, net, X)
    assert "the function outer at" in text and "the argument x." in text


def test_a_leaked_tracer_names_the_function(net):
    kept = []

    @nnx.jit
    def leaks(model):
        kept.append(model.scale * 2)

    leaks(net)
    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        kept[0] + 1
    assert f"leaks at {line_of(leaks)}" in str(caught.value)


def test_compiled_programs_have_the_name_of_the_function(net):
    @nnx.jit
    def train_step(model, x):
        return model(x)

    assert "jit(train_step)/layers/0" in train_step.lower(net, X).compile().as_text()
    donated = nnx.jit(train_step.__wrapped__, donate_argnums=0)
    assert "jit_train_step" in donated.lower(net, X).compile().as_text()


# Warnings


def warned(function, *args, **kwargs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, **kwargs)
        line = inspect.currentframe().f_lineno - 1
    (warning,) = caught
    assert (warning.filename, warning.lineno) == (__file__, line)
    return str(warning.message)


def test_a_recompilation_points_at_the_call_and_names_what_changed(net):
    @nnx.jit(explain_recompiles=True)
    def step(model, batch, flag=None):
        return model(batch["x"])

    step(net, {"x": X})
    assert warned(step, net, {"x": X[:2]}) == "step is compiled again: batch['x']: float32[3,2] -> float32[2,2]"
    net.steps = 1
    assert warned(step, net, {"x": X}) == "step is compiled again: 'steps' of model: 0 -> 1"
    expected = "step is compiled again: batch: {'x': array} -> {'x': array, 'y': array}; flag: not given -> array"
    assert warned(step, net, {"x": X, "y": X}, 1.0) == expected
    net.scale = jnp.ones((1,))
    text = warned(step, net, {"x": X, "y": X}, 1.0)
    assert text == "step is compiled again: 'scale' of model: float32[] -> float32[1]"


def test_the_tenth_retrace_points_at_the_call_and_names_the_attribute(net):
    @nnx.jit
    def step(model, other):
        model.steps += 1

    for _ in range(10):
        step(net, nnx.Dict())
    text = warned(step, net, nnx.Dict())
    assert "the static attribute 'steps' of model changed (9 -> 10 this time)" in text


# Modes


def test_a_layer_without_a_mode_names_its_path_and_train_and_eval(net):
    with pytest.raises(ValueError, match=r"Dropout at 'layers/1' does not know its mode.*model.train\(\).*model.eval"):
        nnx.jit(lambda m, x: m.layers[1](x))(net, X)
    with pytest.raises(ValueError, match="Dropout does not know its mode"):
        net.layers[1](X)
