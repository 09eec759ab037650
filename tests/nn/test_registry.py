"""What holds for every layer, tried on each entry of the registry."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.nn.registry import LAYERS

every_layer = pytest.mark.parametrize("entry", LAYERS, ids=lambda entry: entry.name)
every_layer_with_leading_axes = pytest.mark.parametrize(
    "entry", [e for e in LAYERS if e.leading], ids=lambda entry: entry.name
)
every_layer_with_dtypes = pytest.mark.parametrize(
    "entry", [e for e in LAYERS if "dtype" in e.dtypes], ids=lambda entry: entry.name
)
every_differentiable_layer = pytest.mark.parametrize(
    "entry", [e for e in LAYERS if e.differentiable], ids=lambda entry: entry.name
)
every_wrong_call = pytest.mark.parametrize(
    "entry, shapes", [(e, shapes) for e in LAYERS for shapes in e.wrong], ids=lambda v: getattr(v, "name", str(v))
)


def as_function(entry, layer):
    """The layer as a function of its float state, which leaves the layer itself alone."""
    (floats, rest), moduledef = layer.partition(_is_float, ...)
    return floats, lambda floats, *inputs: entry.run(moduledef.merge(floats, rest), *inputs)


def _is_float(path, leaf):
    values = jax.tree.leaves(leaf)
    return bool(values) and all(jnp.issubdtype(jnp.result_type(v), jnp.floating) for v in values)


def close(a, b, tolerance=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=tolerance, atol=tolerance
        ),
        a,
        b,
    )


def test_every_public_layer_is_in_the_registry():
    registered = {entry.layer_name for entry in LAYERS}
    layers = {
        name
        for name, value in vars(nnx).items()
        if isinstance(value, type) and issubclass(value, nnx.Module) and value.__module__.startswith("nnx.nn.")
    }
    made_by_others = {"LoRALinearGeneral", "RNNCellBase", "KVCache"}
    assert layers - registered - made_by_others == set()


@every_layer
def test_output_has_the_expected_shape(entry):
    out = entry.run(entry.build(), *entry.sample())
    assert out.shape == entry.output
    assert np.all(np.isfinite(out))


@every_layer_with_leading_axes
def test_extra_leading_axes_go_through(entry):
    layer = entry.build()
    inputs = entry.sample(2, 3)
    out = entry.run(layer, *inputs)
    assert out.shape == (2, 3, *entry.output)
    close(out[1, 2], entry.run(entry.build(), *[x[1, 2] for x in inputs]), 1e-4)


@every_layer_with_dtypes
def test_half_precision_gives_nearly_the_same_output(entry):
    """test_registry_numbers tries all combinations of dtypes, without values."""
    out = entry.run(entry.build(dtype=jnp.bfloat16), *entry.sample())
    assert out.dtype == jnp.bfloat16
    expected = entry.run(entry.build(), *entry.sample())
    assert expected.dtype == jnp.float32
    close(out, expected, 0.1)


@pytest.mark.parametrize("entry", [e for e in LAYERS if "param_dtype" in e.dtypes], ids=lambda entry: entry.name)
def test_param_dtype_is_the_dtype_of_the_parameters(entry):
    def params_and_output(*inputs):
        layer = entry.build(param_dtype=jnp.bfloat16)
        return layer.filter((nnx.Param, nnx.LoRAParam)), entry.run(layer, *inputs)

    params, out = jax.eval_shape(params_and_output, *entry.sample(dtype=jnp.bfloat16))
    assert {leaf.value.dtype for leaf in params.values()} <= {jnp.dtype(jnp.bfloat16)}
    assert out.dtype == jnp.bfloat16


@pytest.mark.parametrize("entry", [e for e in LAYERS if not e.dtypes], ids=lambda entry: entry.name)
def test_layer_without_dtypes_keeps_that_of_its_input(entry):
    layer = entry.build()
    promoted = jnp.result_type(jnp.bfloat16, *[leaf.value for leaf in layer.filter(nnx.Param).values()])
    out = entry.run(layer, *entry.sample(dtype=jnp.bfloat16))
    assert out.dtype == promoted
    close(out, entry.run(entry.build(), *entry.sample()), 0.1)


@every_layer
def test_tracing_leaks_no_tracers(entry):
    floats, function = as_function(entry, entry.build())
    with jax.checking_leaks():
        jax.make_jaxpr(function)(floats, *entry.sample())


@every_layer
def test_jitted_call_has_the_output_and_state_of_an_eager_call(entry):
    inputs = entry.sample()
    eager, jitted = entry.build(), entry.build()
    expected = entry.run(eager, *inputs)
    close(nnx.jit(lambda layer, *inputs: entry.run(layer, *inputs))(jitted, *inputs), expected)
    close(jitted.get_state(), eager.get_state())


@every_layer
def test_vmap_gives_what_a_loop_gives(entry):
    inputs = entry.sample(3)
    floats, function = as_function(entry, entry.build())
    mapped = jax.jit(jax.vmap(lambda *inputs: function(floats, *inputs)))(*inputs)
    looped = np.stack([function(floats, *[x[i] for x in inputs]) for i in range(3)])
    close(mapped, looped)


@every_differentiable_layer
def test_gradients_agree_with_finite_differences(entry):
    floats, function = as_function(entry, entry.build())
    params, rest = floats.filter((nnx.Param, nnx.LoRAParam), ...)
    inputs = entry.sample()
    is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in inputs]

    def loss(params, float_inputs):
        values = iter(float_inputs)
        given = [next(values) if floating else x for x, floating in zip(inputs, is_float, strict=True)]
        return jnp.sum(jnp.sin(function(nnx.State.merge(params, rest), *given)))

    arguments = (params, [x for x, floating in zip(inputs, is_float, strict=True) if floating])
    values_and_grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    _, grads = values_and_grads(*arguments)
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(grads))

    random = np.random.default_rng(0)
    direction = jax.tree.map(lambda x: random.standard_normal(x.shape).astype(x.dtype), arguments)
    slope = sum(np.vdot(g, d) for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True))
    ahead, behind = (
        values_and_grads(*jax.tree.map(lambda x, d, step=step: x + step * d, arguments, direction))[0]
        for step in (np.float32(1e-2), np.float32(-1e-2))
    )
    np.testing.assert_allclose(slope, (ahead - behind) / 2e-2, rtol=3e-2, atol=3e-2)


@every_layer
def test_partition_and_merge_give_the_same_layer(entry):
    layer = entry.build()
    state, moduledef = layer.partition()
    merged = moduledef.merge(state)
    assert merged.get_module_def() == moduledef
    close(entry.run(merged, *entry.sample()), entry.run(layer, *entry.sample()))


@every_layer
def test_clone_and_pickle_give_independent_equal_layers(entry):
    layer = entry.build()
    expected = entry.run(entry.build(), *entry.sample())
    for copied in (layer.clone(), pickle.loads(pickle.dumps(layer))):
        assert copied.get_module_def() == layer.get_module_def()
        assert copied.get_state() == layer.get_state()
        close(entry.run(copied, *entry.sample()), expected)


@every_layer
def test_layers_built_by_the_same_code_have_equal_definitions(entry):
    first, second = entry.build(0).get_module_def(), entry.build(1).get_module_def()
    assert first == second
    assert hash(first) == hash(second)


@every_layer
def test_call_changes_no_state_unless_told_to(entry):
    layer = entry.build()
    before = layer.get_state()
    entry.run(layer, *entry.sample())
    assert (layer.get_state() == before) == entry.stateless


@every_layer
def test_repr_names_the_layer_and_shows_no_numbers(entry):
    text = repr(entry.build())
    assert text.startswith(entry.layer_name)
    assert "Array(" not in text


@every_layer
def test_docstring_says_what_the_layer_is_and_shows_it(entry):
    doc = type(entry.build()).__doc__
    assert ">>> " in doc


@every_wrong_call
def test_wrong_input_is_an_error_that_names_the_layer(entry, shapes):
    layer = entry.build()
    with pytest.raises(ValueError, match=entry.blames or entry.layer_name) as error:
        entry.run(layer, *entry.sample(shapes=shapes))
    assert "expected" in str(error.value) or "got" in str(error.value)
    assert "shape" in str(error.value)


@every_layer
def test_scan_over_a_stack_gives_what_a_loop_gives(entry):
    layers = [entry.build(seed) for seed in range(3)]
    inputs = entry.sample()
    moduledef = layers[0].get_module_def()
    expected = np.stack([entry.run(layer.clone(), *inputs) for layer in layers])
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *[layer.get_state() for layer in layers])

    @nnx.scan(variable_axes={...: 0}, length=3)
    def run(layer, carry, _):
        return carry, entry.run(layer, *inputs)

    _, outputs = run(moduledef.merge(stacked), 0, None)
    close(outputs, expected)


MODES = ("deterministic", "use_running_average", "update_stats")


def run_in_its_own_mode(entry, layer, inputs):
    """The output of a call that says nothing about the mode, and the state it leaves, caches aside."""
    options = {name: value for name, value in entry.call.items() if name not in MODES}
    if entry.ctx:
        options["ctx"] = nnx.context(dropout=3)
    out = entry.pick(layer(*entry.arrange(*inputs), **options))
    return out, layer.filter(nnx.Not(nnx.Cache))


@every_layer
def test_eval_reaches_every_layer_that_has_a_mode(entry):
    layer, inputs = entry.build(), entry.sample()
    before = layer.filter(nnx.Not(nnx.Cache))
    first, state = run_in_its_own_mode(entry, layer.eval(), inputs)
    assert state == before  # statistics are not updated
    again, _ = run_in_its_own_mode(entry, entry.build().eval(), inputs)
    np.testing.assert_array_equal(first, again)  # and nothing is random


LAYERS_WITH_A_MODE = {"BatchNorm", "Dropout", "DropPath", "GaussianNoise", "MoE", "SpectralNorm"}


@pytest.mark.parametrize(
    "entry", [e for e in LAYERS if e.layer_name in LAYERS_WITH_A_MODE], ids=lambda entry: entry.name
)
def test_train_switches_the_layer(entry):
    layer, inputs = entry.build(), entry.sample()
    used, before = run_in_its_own_mode(entry, layer.eval(), inputs)
    trained, after = run_in_its_own_mode(entry, layer.train(), inputs)
    assert (trained != used).any() or after != before


def test_no_other_layer_has_an_attribute_that_is_a_mode():
    found = set()
    for entry in LAYERS:
        layer = entry.build()
        modes = {name for name in MODES if hasattr(layer, name) and not hasattr(type(layer), name)}
        found |= {entry.layer_name} if modes else set()
    assert found - {"MultiHeadAttention"} == LAYERS_WITH_A_MODE
