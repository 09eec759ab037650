"""nnx.capture: the outputs of submodules by path, and their gradients."""

import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx
from tests.inspection.inside_models import BLOCK, GPT, LENGTH, TOKENS, Twice, block_by_hand, mean_logit
from tests.nn.registry import LAYERS


@pytest.fixture
def gpt():
    return GPT(ctx=nnx.context(0))


@pytest.fixture
def twice():
    return Twice(ctx=nnx.context(0))


X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


def close(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), a, b)


def raises(beginning, *parts, error=ValueError):
    """Expects an error that begins with a text and then has these parts, in order."""
    return pytest.raises(error, match="^" + ".*".join(map(re.escape, (beginning, *parts))))


CANNOT_RECORD = "nnx.capture cannot record 'layer' (Linear): it was called inside "


# Values


def test_outputs_of_a_scanned_stack_equal_those_computed_by_hand(gpt):
    @nnx.jit
    def by_hand(gpt):
        x = gpt.embed(TOKENS)
        norms, mlps = [], []
        for number in range(LENGTH):
            block = block_by_hand(gpt, number)
            norms.append(block.norm(x))
            y = x + block.attention(block.norm(x), mask=nnx.make_causal_mask(jnp.ones(TOKENS.shape)))
            mlps.append(block.mlp(y))
            x, _ = block(x)
        blocks = {f"{BLOCK}/norm": jnp.stack(norms), f"{BLOCK}/mlp": jnp.stack(mlps)}
        return blocks | {"norm": gpt.norm(x), "embed": (gpt.embed(TOKENS), gpt(TOKENS))}

    where = (f"{BLOCK}/norm", f"{BLOCK}/mlp", "norm", "embed")
    out, acts = nnx.capture(gpt, where=where, methods=("attend",))(TOKENS)
    close(acts, by_hand(gpt))
    close(out, gpt(TOKENS))


def test_values_come_out_of_jit_and_derivatives_at_once(gpt):
    step = nnx.jit(lambda model, tokens: nnx.value_and_grad(mean_logit)(model, tokens))
    (loss, grads), acts = nnx.capture(step, where=nnx.Linear)(gpt, TOKENS)
    close((loss, grads), step(gpt, TOKENS))
    close(acts, nnx.jit(lambda model: nnx.capture(model, where=nnx.Linear)(TOKENS)[1])(gpt))


@pytest.mark.parametrize(
    "lifted",
    [
        lambda model, x: nnx.remat(model)(x),
        lambda model, x: nnx.vjp(lambda model, x: model(x), model, x)[0],
        lambda model, x: nnx.jvp(lambda model, x: model(x), (model, x), (model.filter(nnx.Param), x))[0],
        lambda model, x: nnx.jacrev(lambda model, x: model(x), argnums=1)(model, x),
        lambda model, x: nnx.jacfwd(lambda model, x: model(x), argnums=1)(model, x),
        lambda model, x: nnx.linearize(lambda model, x: model(x), model, x)[0],
        lambda model, x: nnx.jit(lambda model, x: model(x), stateful=False)(model, x),
        lambda model, x: nnx.grad(lambda model, x: model(x).sum(), stateful=False)(model, x),
    ],
    ids=["remat", "vjp", "jvp", "jacrev", "jacfwd", "linearize", "jit that discards", "grad that discards"],
)
def test_values_come_out_of_every_transform_that_runs_its_function_once(twice, lifted):
    _, acts = nnx.capture(lifted, where="layer")(twice, X)
    first = twice.layer(X)
    close(acts["layer"], (first, twice.layer(nnx.tanh(first))))


def test_values_come_out_of_vmap_stacked():
    ctx = nnx.context(0)
    options = {"variable_axes": {nnx.Param: 0}, "split_rngs": "params", "axis_size": 3, "in_axes": None}
    ensemble = nnx.Vmap(Twice, **options)(ctx=ctx)
    out, acts = nnx.capture(ensemble, where="**/layer")(X)
    kernels, biases = ensemble.vmap_module.layer.kernel, ensemble.vmap_module.layer.bias
    first = jnp.einsum("bi,eio->ebo", X, kernels) + biases[:, None]
    close(acts["vmap_module/layer"], (first, out))


def test_a_module_that_runs_in_two_scans_and_outside_has_one_value_per_call():
    def run(layer, x):
        step = nnx.scan(lambda layer, carry, _: (layer(carry), None), length=3)
        x, _ = step(layer, layer(x), None)
        return step(layer, x, None)[0]

    layer = nnx.Linear(4, 4, ctx=nnx.context(0))
    out, acts = nnx.capture(run)(layer, X)
    outside, first, second = acts[""]
    chain = [layer(X)]
    for _ in range(6):
        chain.append(layer(chain[-1]))
    close((outside, first, second), (chain[0], jnp.stack(chain[1:4]), jnp.stack(chain[4:7])))
    close(out, chain[-1])


@pytest.mark.parametrize("entry", LAYERS, ids=lambda entry: entry.name)
def test_every_layer_computes_the_same_while_it_is_captured(entry):
    @nnx.jit
    def run_both(layer, *inputs):
        expected = entry.run(layer.clone(), *inputs)
        out, acts = nnx.capture(lambda layer, *inputs: entry.run(layer, *inputs))(layer, *inputs)
        return out, expected, acts

    out, expected, acts = run_both(entry.build(), *entry.sample())
    close(out, expected)
    assert "" in acts


def test_a_bound_method_can_be_captured_and_observed(twice):
    out, acts = nnx.capture(twice.encode, where=("", "layer"), methods="encode")(X)
    close(acts, {"": out, "layer": out})


def test_outputs_of_a_dict_that_is_called_leave_its_items_alone():
    class Chain(nnx.Dict):
        def __call__(self, x):
            for key in self:
                x = self[key](x)
            return x * len(self)

    ctx = nnx.context(0)
    chain = Chain(a=nnx.Linear(4, 4, ctx=ctx), b=nnx.Linear(4, 4, ctx=ctx))
    out, acts = nnx.capture(chain)(X)
    assert sorted(acts) == ["", "a", "b"]
    close(out, chain(X))


def test_container_is_captured_as_it_was_when_returned():
    class Dicts(nnx.Module):
        def __call__(self, x):
            return {"x": x}

    class Outer(nnx.Module):
        def __init__(self):
            self.inner = Dicts()

        def __call__(self, x):
            out = self.inner(x)
            out["y"] = x
            return out

    _, acts = nnx.capture(Outer(), where="inner")(X)
    assert list(acts["inner"]) == ["x"]


# Selection and paths


@pytest.mark.parametrize(
    "where",
    ["layer", nnx.Linear, [nnx.Conv, "lay*"], lambda path, module: isinstance(module, nnx.Linear)],
    ids=["glob", "type", "sequence", "function"],
)
def test_a_selector_is_a_glob_a_type_a_function_or_several(twice, where):
    _, acts = nnx.capture(twice, where=where)(X)
    assert list(acts) == ["layer"]


def test_a_selector_function_gets_the_callers_own_modules(twice):
    _, acts = nnx.capture(twice, where=lambda path, module: module is twice.layer)(X)
    assert list(acts) == ["layer"]


def test_paths_start_with_a_number_if_several_modules_are_passed():
    models = [Twice(ctx=nnx.context(seed)) for seed in (0, 1)]
    _, acts = nnx.capture(lambda models, x: models[0](x) + models[1].encode(x), where="layer")(models, X)
    close(acts["1/layer"], models[1].layer(X))
    assert sorted(acts) == ["0/layer", "1/layer"]


def test_modules_that_did_not_run_are_left_out(twice):
    _, acts = nnx.capture(twice.encode)(X)
    assert list(acts) == ["layer"]


# The caller's Modules


def test_changes_to_modules_are_written_back_unless_stateful_is_false():
    norm = nnx.BatchNorm(4, use_running_average=False, ctx=nnx.context(0))
    before, expected = norm.mean, norm.clone()
    nnx.capture(norm, stateful=False)(X)
    assert norm.mean is before
    expected(X)
    nnx.capture(norm)(X)
    close(norm.mean, expected.mean)


def test_a_donating_training_step_can_be_captured_again_and_again(twice):
    optimizer = nnx.Optimizer(twice, optax.sgd(0.1))

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(grads)
        return loss

    losses = [float(nnx.capture(step, where=nnx.Linear)(twice, optimizer, X)[0]) for _ in range(12)]
    assert losses == sorted(losses, reverse=True) and step.trace_count == 1


def test_modules_keep_their_classes_and_attributes(twice):
    attributes = dict(twice.layer.__dict__)
    definition = twice.get_module_def()

    def run(model, x):
        return model(x), model, model.clone(), model.apply(x)[1]

    (_, same, clone, applied), _ = nnx.capture(run)(twice, X)
    assert same is twice and twice.layer.__dict__ == attributes
    assert [model.get_module_def() for model in (twice, clone, applied)] == [definition] * 3
    assert type(twice.layer) is type(clone.layer) is type(applied.layer) is nnx.Linear


def test_an_error_in_the_function_leaves_the_modules_alone(twice):
    def run(model, x):
        model(x)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        nnx.capture(run)(twice, X)
    assert type(twice) is Twice and type(twice.layer) is nnx.Linear


def test_a_class_that_registers_its_subclasses_registers_no_other():
    registered = []

    class Base(nnx.Module):
        def __init_subclass__(cls, *, tag, **kwargs):
            super().__init_subclass__(**kwargs)
            registered.append(tag)

    class Layer(Base, tag="layer"):
        def __call__(self, x):
            return x

    nnx.capture(Layer())(X)
    assert registered == ["layer"]


def test_a_captured_class_is_not_kept_alive():
    class Layer(nnx.Module):
        def __call__(self, x):
            return 2 * x

    nnx.capture(Layer())(X)
    weak = weakref.ref(Layer)
    del Layer
    gc.collect()
    assert weak() is None


# Tracing


def test_repeating_a_call_does_not_retrace(gpt):
    forward = nnx.jit(lambda model, tokens: model(tokens))
    forward(gpt, TOKENS)
    for _ in range(3):
        nnx.capture(forward, where="blocks/**/mlp")(gpt, TOKENS)
    assert forward.trace_count == 2
    forward(gpt, TOKENS)
    assert forward.trace_count == 2


def test_another_model_of_the_same_structure_does_not_retrace(gpt):
    forward = nnx.jit(lambda model, tokens: model(tokens))
    for model in (gpt, GPT(ctx=nnx.context(1))):
        _, acts = nnx.capture(forward, where="norm")(model, TOKENS)
        close(nnx.capture(model, where="norm")(TOKENS)[1], acts)
    assert forward.trace_count == 1


class Traced:
    """How many times a body was traced. A list in its closure would be part of what its trace depends on."""

    times = 0


def test_the_trace_of_an_eager_scan_is_kept_for_a_repeated_call():
    def body(layer, carry, _):
        Traced.times += 1
        return layer(carry), None

    layer, scanned = nnx.Linear(4, 4, ctx=nnx.context(0)), nnx.scan(body, length=2)
    for _ in range(3):
        nnx.capture(scanned)(layer, X, None)
    assert Traced.times == 1


def test_capture_works_inside_jit(twice):
    @nnx.jit
    def run(model, x):
        return nnx.capture(model, where="layer")(x)

    for _ in range(2):
        out, acts = run(twice, X)
    close(acts["layer"], (twice.layer(X), out))
    assert run.trace_count == 1


def test_captures_nest(twice):
    inner = nnx.capture(lambda model, x: model(x), where="layer")
    (_, inner_acts), outer_acts = nnx.capture(inner, where=("", "layer"))(twice, X)
    close(inner_acts["layer"], outer_acts["layer"])
    close(outer_acts[""], inner_acts["layer"][1])


# Gradients


def test_gradients_of_a_scanned_stack_equal_those_of_added_zeros(gpt):
    loss, acts, grads = nnx.capture(nnx.jit(mean_logit), where=(f"{BLOCK}/mlp", "norm"), grads=True)(gpt, TOKENS)

    def by_hand(zeros):
        x = gpt.embed(TOKENS)
        for number in range(LENGTH):
            block = block_by_hand(gpt, number)
            x = x + block.attention(block.norm(x), mask=nnx.make_causal_mask(jnp.ones(TOKENS.shape)))
            x = x + nnx.gelu(block.mlp(x) + zeros[0][number])
        return jnp.mean(gpt.embed.attend(gpt.norm(x) + zeros[1]) ** 2)

    zeros = (jnp.zeros((LENGTH, 2, 3, 4)), jnp.zeros((2, 3, 4)))
    expected = jax.jit(jax.grad(by_hand))(zeros)
    close((grads[f"{BLOCK}/mlp"], grads["norm"]), expected)
    close(loss, nnx.jit(mean_logit)(gpt, TOKENS))
    assert jax.tree.structure(acts) == jax.tree.structure(grads)


def test_a_submodule_that_runs_twice_has_two_gradients(twice):
    _, _, grads = nnx.capture(lambda model, x: model(x).sum(), where="layer", grads=True)(twice, X)
    ones = jnp.ones((2, 4))
    first = (1 - nnx.tanh(twice.layer(X)) ** 2) * (ones @ twice.layer.kernel.T)
    close(grads["layer"], (first, ones))


def test_a_submodule_in_scans_of_different_lengths_has_a_gradient_per_step():
    def run(layer, x):
        for length in (1, 2):
            x, _ = nnx.scan(lambda layer, carry, _: (layer(carry), None), length=length)(layer, x, None)
        return x.sum()

    layer = nnx.Linear(4, 4, ctx=nnx.context(0))
    _, _, grads = nnx.capture(run, grads=True)(layer, X)
    chain = [jnp.ones((2, 4))]
    for _ in range(2):
        chain.insert(0, chain[0] @ layer.kernel.T)
    close(grads[""], (jnp.stack(chain[:1]), jnp.stack(chain[1:])))


def test_integer_outputs_have_no_gradient():
    class Argmax(nnx.Module):
        def __call__(self, x):
            return x * 2, x.argmax()

    _, acts, grads = nnx.capture(lambda model, x: model(x)[0].sum(), grads=True)(Argmax(), X)
    close(grads[""][0], jnp.ones((2, 4)))
    assert grads[""][1] is None and acts[""][1].dtype == jnp.int32


def test_gradients_with_dropout_belong_to_the_run_that_was_captured():
    dropout = nnx.Dropout(0.5, deterministic=False)
    ctx = nnx.context(dropout=0)
    out, acts, grads = nnx.capture(lambda m, x, ctx: (m(x, ctx=ctx) ** 2).sum(), grads=True)(dropout, X, ctx)
    close(out, (acts[""] ** 2).sum())
    close(grads[""], 2 * acts[""])


def test_gradients_do_not_retrace_in_a_repeated_call(twice):
    loss = nnx.jit(lambda model, x: model(x).sum())
    nnx.capture(loss, where="layer", grads=True)(twice, X)
    count = loss.trace_count
    nnx.capture(loss, where="layer", grads=True)(twice, X)
    assert loss.trace_count == count


# Errors


def in_while_loop(model, x):
    return nnx.while_loop(lambda c: c[1].sum() < 0, lambda c: (c[0], c[0].layer(c[1])), (model, x))[1]


def in_fori_loop(model, x):
    return nnx.fori_loop(0, 2, lambda i, c: (c[0], c[0].layer(c[1])), (model, x))[1]


def in_cond(model, x):
    return nnx.cond(True, lambda model, x: model.layer(x), lambda model, x: model.layer(x), model, x)


def in_switch(model, x):
    return nnx.switch(0, [lambda model, x: model.layer(x)], model, x)


def in_jitted_branch(model, x):
    inner = nnx.jit(lambda model, x: model.layer(x))
    return nnx.cond(True, inner, inner, model, x)


@pytest.mark.parametrize(
    "body, name",
    [
        (in_while_loop, "nnx.while_loop"),
        (in_fori_loop, "nnx.fori_loop"),
        (in_cond, "nnx.cond"),
        (in_switch, "nnx.switch"),
        (in_jitted_branch, "nnx.cond"),
    ],
)
def test_a_selected_module_inside_a_loop_or_branch_is_an_error_with_its_path(twice, body, name):
    with raises(CANNOT_RECORD + name, "may run any number of times", "Narrow `where=`", "or use nnx.scan or nnx.vmap"):
        nnx.capture(body, where=nnx.Linear)(twice, X)


def test_a_selected_module_inside_shard_map_is_an_error_with_its_path(twice):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    mapped = nnx.shard_map(
        lambda model, x: model(x), mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec("data")
    )
    with raises(CANNOT_RECORD + "nnx.shard_map", "every device has its own part", "Narrow `where=`"):
        nnx.capture(mapped, where=nnx.Linear)(twice, X)


@pytest.mark.parametrize(
    "body",
    [
        lambda model, x: jax.jit(lambda x: model.layer(x))(x),
        lambda model, x: jax.vmap(lambda x: model.layer(x))(x),
        lambda model, x: jax.grad(lambda x: model.layer(x).sum())(x),
        lambda model, x: jax.lax.scan(lambda x, _: (model.layer(x), None), x, length=2)[0],
    ],
    ids=["jit", "vmap", "grad", "scan"],
)
def test_a_selected_module_inside_a_raw_jax_transform_is_an_error_with_its_path(twice, body):
    with raises(CANNOT_RECORD + "a raw JAX transform", "pass the Module to it", error=nnx.TraceContextError):
        nnx.capture(body, where=nnx.Linear)(twice, X)


def test_modules_that_are_not_selected_may_run_anywhere(gpt, twice):
    def run(model, twice, x):
        return in_fori_loop(twice, x), model(TOKENS)

    _, acts = nnx.capture(run, where="norm")(gpt, twice, X)
    assert list(acts) == ["0/norm"]


def test_a_function_without_modules_is_an_error(twice):
    def forward(x):
        return twice(x)

    with raises("nnx.capture: there is no Module among the arguments of forward", "nnx.capture(model)(x)"):
        nnx.capture(forward)(X)


def test_a_selector_that_selects_nothing_is_an_error_that_lists_the_paths(twice):
    with raises("nnx.capture: where='blocks/*' selects none", "Their paths are: '', 'layer'"):
        nnx.capture(twice, where="blocks/*")(X)


def test_invalid_selector_raises(twice):
    with raises("nnx.capture: 3 does not select Modules", "a glob over paths", error=TypeError):
        nnx.capture(twice, where=3)(X)


def test_a_method_that_no_selected_module_has_is_an_error(twice):
    with raises("nnx.capture: methods='atend' is not a method", "Their classes are: Linear"):
        nnx.capture(twice, where="layer", methods="atend")(X)


def test_an_output_that_is_not_data_is_an_error_with_its_path():
    class Named(nnx.Module):
        def __call__(self, x):
            return x, "name"

    with raises("nnx.capture", "''", "Named", "'name'", error=TypeError):
        nnx.capture(Named())(X)


def test_gradients_need_a_scalar(twice):
    with raises("nnx.capture(grads=True) takes", "nnx.capture(Twice) returned float32[2,4]", error=TypeError):
        nnx.capture(twice, grads=True)(X)
