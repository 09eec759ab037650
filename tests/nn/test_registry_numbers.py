"""Numbers at the edges, over every layer of the registry: dtypes, empty batches, masks, offsets, initial variance."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.nn.registry import LAYERS

DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64]


def every(which=lambda entry: True):
    return pytest.mark.parametrize("entry", [e for e in LAYERS if which(e)], ids=lambda entry: entry.name)


def is_floating(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def with_gradients(entry, inputs, *losses, **more):
    """The output and the state after a call, and the gradients of losses by parameters and float inputs."""
    (params, rest), moduledef = entry.build().partition((nnx.Param, nnx.LoRAParam), ...)
    floats = [x for x in inputs if is_floating(x)]

    def run(params, floats):
        values = iter(floats)
        given = [next(values) if is_floating(x) else x for x in inputs]
        layer = moduledef.merge(params, rest)
        out = entry.run(layer, *given, **more)
        return [loss(out) for loss in losses], (out, layer.get_state())

    @jax.jit
    def all_at_once(params, floats):
        values, pullback, aux = jax.vjp(run, params, floats, has_aux=True)
        picked = jnp.eye(len(losses), dtype=values[0].dtype)
        return aux, [pullback(list(row)) for row in picked]

    return all_at_once(params, floats)


def all_finite(tree):
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


def output_dtype(entry, input_dtype, **dtypes):
    """The dtype of the output, without building or running anything."""
    with jax.enable_x64(True):
        inputs = [jax.ShapeDtypeStruct(x.shape, input_dtype if is_floating(x) else x.dtype) for x in entry.sample()]
        return jax.eval_shape(lambda *inputs: entry.run(entry.build(**dtypes), *inputs), *inputs).dtype


@every(lambda entry: "dtype" in entry.dtypes)
def test_the_output_has_the_computation_dtype_or_what_inputs_and_parameters_promote_to(entry):
    has_floats = any(is_floating(x) for x in entry.sample())
    for i, input_dtype in enumerate(DTYPES):
        for j, param_dtype in enumerate(DTYPES):
            promoted = jnp.promote_types(input_dtype, param_dtype) if has_floats else param_dtype
            assert output_dtype(entry, input_dtype, param_dtype=param_dtype) == promoted
            # Every computation dtype meets every input dtype and every parameter dtype.
            dtype = DTYPES[(i + j) % len(DTYPES)]
            assert output_dtype(entry, input_dtype, param_dtype=param_dtype, dtype=dtype) == dtype


@every(lambda entry: not entry.dtypes)
def test_the_output_of_a_layer_without_dtypes_promotes_input_and_parameters(entry):
    params = [leaf.value.dtype for leaf in entry.build().filter(nnx.Param).values()]
    for input_dtype in DTYPES:
        expected = input_dtype if not params else jnp.promote_types(input_dtype, params[0])
        assert output_dtype(entry, input_dtype) == expected


@every(lambda entry: entry.leading or entry.empty is not None)
def test_an_empty_batch_has_an_empty_output_and_gradients_of_zero(entry):
    inputs = entry.sample(0) if entry.empty is None else entry.sample(shapes=entry.empty)
    (out, state), gradients = with_gradients(entry, inputs, jnp.sum)
    assert out.size == 0
    assert entry.empty is not None or out.shape == (0, *entry.output)
    assert all_finite(state)
    assert not any(np.any(gradient) for gradient in jax.tree.leaves(gradients))


@every(lambda entry: entry.mask is not None)
def test_a_row_without_valid_entries_has_finite_values_and_gradients(entry):
    losses = (lambda y: jnp.sum(y**3), lambda y: jnp.sum(y[1:] ** 3))  # with the row in it, and without
    assert all_finite(with_gradients(entry, entry.sample(), *losses, mask=jnp.asarray(entry.mask)))


def test_every_layer_with_a_mask_is_tried_without_valid_entries():
    takes_mask = {e.layer_name for e in LAYERS if "mask" in inspect.signature(type(e.build()).__call__).parameters}
    assert takes_mask == {e.layer_name for e in LAYERS if e.mask is not None}


@every(lambda entry: entry.offset and any(is_floating(x) for x in entry.sample()))
def test_a_large_mean_costs_no_more_than_the_rounding_of_the_input(entry):
    inputs = [np.asarray(x + 1e4 if is_floating(x) else x) for x in entry.sample()]
    out = entry.run(entry.build(), *inputs)
    wide = [x.astype(np.float64) if is_floating(x) else x for x in inputs]
    layer = entry.build()
    with jax.enable_x64(True):
        expected = np.asarray(entry.run(layer, *wide))
    # Numbers near 1e4 are 1e-3 apart in float32, and the layers have a slope of about 1.
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=1e-5, atol=5e-3)


@every(lambda entry: entry.wide is not None)
def test_the_output_of_a_new_layer_has_variance_one(entry):
    layer, shapes = entry.wide(nnx.context(0))
    random = np.random.default_rng(0)
    out = layer(*[random.standard_normal(shape).astype(np.float32) for shape in shapes])
    assert np.var(out) == pytest.approx(1.0, rel=0.1)


def test_every_layer_with_a_fan_in_initializer_is_tried_for_its_variance():
    inits = ("kernel_init", "embedding_init")
    layers = {e.layer_name: inspect.signature(type(e.build())).parameters for e in LAYERS}
    with_fan_in = {name for name, parameters in layers.items() if any(init in parameters for init in inits)}
    # LearnedPositionEmbed starts with a fixed, small standard deviation; LoRALinear takes the arguments of Linear.
    expected = (with_fan_in - {"LearnedPositionEmbed"}) | {"LoRALinear"}
    assert expected == {e.layer_name for e in LAYERS if e.wide is not None}


PASS_LISTS_ON = {"Identity", "Dropout", "GaussianNoise"}  # they return their input, as they do when deterministic


@every(lambda entry: entry.name not in PASS_LISTS_ON)
def test_a_list_in_place_of_an_array_is_an_error_that_names_the_layer(entry):
    layer, names = entry.build(), f"{entry.layer_name}|{entry.blames}"
    with pytest.raises(TypeError, match=rf"({names}) expected an array, got list.*asarray"):
        entry.run(layer, *[x.tolist() for x in entry.sample()])
