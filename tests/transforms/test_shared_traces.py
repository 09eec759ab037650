"""Rematerialized calls of equal structure share one trace, and only those: a trace is never stale."""

import contextvars
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx

LAYERS = 4
traced = []  # what the layers below were traced with


class Layer(nnx.Module):
    def __init__(self, weight, factor=1.0):
        self.weight = nnx.Param(jnp.asarray(weight))
        self.factor = factor
        self.calls = nnx.Variable(jnp.array(0))

    def note(self):
        traced.append(self.factor)

    def __call__(self, x):
        self.note()
        self.calls += 1
        return x * self.weight * self.factor


def layers(**options):
    traced.clear()
    return nnx.Sequence([Layer(2.0 + i, **options) for i in range(LAYERS)])


def product(model):
    return functools.reduce(lambda a, b: a * b, [layer.weight for layer in model])


def scaled(layer, x, scale):
    return layer(x) * scale


scale_of_this_module = 1.0
current_scale = contextvars.ContextVar("current_scale", default=1.0)


class Settings:
    scale = 1.0


def through_function(model, x):
    for layer in model:
        x = nnx.remat(Layer.__call__)(layer, x)
    return x


def through_module(model, x):
    for layer in model:
        x = nnx.remat(layer)(x)
    return x


def through_lambda_over_a_tracer(model, x):
    one = x / x
    body = nnx.remat(lambda layer, x: layer(x) * one)
    for layer in model:
        x = body(layer, x)
    return x


def through_static_arguments(model, x):
    for layer in model:
        x = nnx.remat(scaled, static_argnums=2)(layer, x, 1)
    return x


@pytest.mark.parametrize(
    "forward", [through_function, through_module, through_lambda_over_a_tracer, through_static_arguments]
)
def test_layers_of_equal_structure_are_traced_once(forward):
    model, x = layers(), jnp.array(3.0)
    value, grads = nnx.jit(nnx.value_and_grad(forward))(model, x)
    assert len(traced) == 1
    assert value == 3 * product(model)
    for i, layer in enumerate(model):
        assert np.allclose(grads[f"{i}/weight"].value, value / layer.weight)
        assert layer.calls == 1


def test_class_forms_of_equal_structure_are_traced_once():
    traced.clear()
    model = nnx.Sequence([nnx.Remat(Layer)(2.0 + i) for i in range(LAYERS)])
    nnx.jit(lambda model, x: functools.reduce(lambda x, layer: layer(x), model, x))(model, jnp.array(3.0))
    assert len(traced) == 1
    assert all(layer.remat_module.calls == 1 for layer in model)


def test_layers_of_other_structure_or_shape_have_their_own_trace():
    model = layers()
    model[1].factor = 5.0
    model[2].weight = jnp.array([1.0, 2.0])
    out = nnx.jit(through_module)(model, jnp.array(3.0))
    assert np.allclose(out, 3 * 2 * 3 * 5 * jnp.array([1.0, 2.0]) * 5)
    assert traced == [1.0, 5.0, 1.0, 1.0]  # the last one has an input of another shape than the first


def test_calls_from_plain_python_share_a_trace_as_well():
    class Fresh(Layer):  # no other test has called it
        pass

    traced.clear()
    through_module([Fresh(2.0 + i) for i in range(LAYERS)], jnp.array(3.0))
    assert len(traced) == 1


def test_a_value_in_the_closure_is_part_of_the_trace():
    def forward(model, x):
        for i, layer in enumerate(model):
            x = nnx.remat(lambda layer, x: layer(x) * i)(layer, x + 1)  # noqa: B023
        return x

    model = layers()
    assert np.allclose(nnx.jit(forward)(model, jnp.array(3.0)), forward(layers(), jnp.array(3.0)))
    assert len(traced) == LAYERS


def test_zero_and_negative_zero_are_different_values():
    def forward(model, x):
        return [nnx.remat(lambda layer, x: layer(x) / zero)(model[0], x) for zero in (0.0, -0.0)]  # noqa: B023

    assert nnx.jit(forward)(layers(), jnp.array(1.0)) == [jnp.inf, -jnp.inf]


def scale_by_global(layer, x):
    return layer(x) * scale_of_this_module


def set_global(value):
    global scale_of_this_module
    scale_of_this_module = value


def test_a_global_that_a_body_names_is_part_of_the_trace():
    def forward(model, x):
        for i, layer in enumerate(model):
            set_global((1.0, 2.0)[i // 2])
            x = nnx.remat(scale_by_global)(layer, x)
        return x

    model = layers()
    assert nnx.jit(forward)(model, jnp.array(3.0)) == 3 * product(model) * 1 * 1 * 2 * 2
    assert len(traced) == 2


def test_a_context_variable_is_part_of_the_trace():
    def scale_by_context_variable(layer, x):
        return scaled(layer, x, current_scale.get())

    def forward(model, x):
        for i, layer in enumerate(model):
            current_scale.set((1.0, 2.0)[i // 2])
            x = nnx.remat(scale_by_context_variable)(layer, x)
        return x

    model = layers()
    assert nnx.jit(forward)(model, jnp.array(3.0)) == 3 * product(model) * 1 * 1 * 2 * 2
    assert len(traced) == 2


def test_a_captured_weight_that_changes_between_two_layers_is_traced_again():
    def forward(model, scale, x):
        body = nnx.remat(lambda layer, x: layer(x) * scale.n)
        for i, layer in enumerate(model):
            if i == 2:
                scale.n = scale.n * 2.0
            x = body(layer, x)
        return x

    model, scale = layers(), nnx.Dict(n=nnx.Variable(jnp.array(1.0)))
    assert nnx.jit(forward)(model, scale, jnp.array(3.0)) == 3 * product(model) * 1 * 1 * 2 * 2
    assert len(traced) == 2


def test_a_body_that_reaches_something_mutable_is_traced_each_time():
    items, namespace, instance = [0.0], types.SimpleNamespace(), Settings()

    def forward(model, x, read, write):
        for i, layer in enumerate(model):
            write(float(i + 1))
            x = nnx.remat(lambda layer, x: layer(x) * read())(layer, x)
        return x

    for read, write in (
        (lambda: items[0], functools.partial(items.__setitem__, 0)),
        (lambda: namespace.scale, functools.partial(setattr, namespace, "scale")),
        (lambda: instance.scale, functools.partial(setattr, instance, "scale")),
    ):
        model = layers()
        out = nnx.jit(lambda model, x, read=read, write=write: forward(model, x, read, write))(model, jnp.array(3.0))
        assert out == 3 * product(model) * 24
        assert len(traced) == LAYERS


def test_each_call_draws_its_own_random_numbers():
    def forward(model, x, ctx):
        return [nnx.remat(noisy)(layer, x, ctx=ctx) for layer in model]

    def noisy(layer, x, ctx):
        return layer(x) * 0 + jax.random.normal(ctx.make_rng("noise"))

    drawn = nnx.jit(forward)(layers(), jnp.array(3.0), nnx.context(noise=0))
    assert len(traced) == 1
    assert len({float(value) for value in drawn}) == LAYERS


def test_structural_changes_reach_every_layer():
    def grow(layer, x):
        layer.last = nnx.Variable(x)
        return layer(x)

    def forward(model, x):
        for layer in model:
            x = nnx.remat(grow)(layer, x)
        return x

    model = layers()
    out = nnx.jit(forward)(model, jnp.array(3.0))
    assert out == 3 * product(model) and [float(layer.last) for layer in model] == [3.0, 6.0, 18.0, 72.0]


def test_a_later_call_of_the_enclosing_function_sees_nothing_of_an_earlier_trace():
    def scale_by_settings(layer, x):
        return layer(x) * Settings.scale

    def forward(model, x):
        for layer in model:
            x = nnx.remat(scale_by_settings)(layer, x)
        return x

    for scale in (1.0, 2.0):
        Settings.scale = scale
        model = layers()
        assert nnx.jit(forward)(model, jnp.array(3.0)) == 3 * product(model) * scale**LAYERS
