"""nnx.Optimizer: any optax transformation, in place."""

import copy
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import nnx


class Layer(nnx.Module):
    def __init__(self, din: int, dout: int, *, ctx: nnx.Context):
        self.kernel = nnx.Param(jax.random.normal(ctx.make_rng("params"), (din, dout)), ("in", "out"))
        self.bias = nnx.Param(jnp.zeros((dout,)))

    def __call__(self, x):
        return x @ self.kernel + self.bias


class Classifier(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.encoder = Layer(3, 4, ctx=ctx)
        self.head = Layer(4, 2, ctx=ctx)
        self.calls = nnx.var("calls", 0)

    def __call__(self, x):
        self.calls += 1
        return self.head(jnp.tanh(self.encoder(x)))


X = jnp.linspace(-1, 1, 15).reshape(5, 3)
Y = jnp.stack([X.sum(1), X[:, 0]], axis=1)


def loss_fn(model):
    return jnp.mean((model(X) - Y) ** 2)


def make_net(seed: int = 0) -> Classifier:
    return Classifier(ctx=nnx.context(seed))


def raw_params(model):
    return {path: leaf.value for path, leaf in model.filter(nnx.Param).items()}


def raw_loss(p):
    y = jnp.tanh(X @ p["encoder/kernel"] + p["encoder/bias"]) @ p["head/kernel"] + p["head/bias"]
    return jnp.mean((y - Y) ** 2)


TRANSFORMATIONS = {
    "sgd": lambda: optax.sgd(0.1),
    "adam": lambda: optax.adam(1e-2),
    "clipped adamw on a schedule": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10))
    ),
    "accumulation": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.01),
    "adafactor": lambda: optax.adafactor(0.01),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_optimizer_equals_optax_by_hand_bit_by_bit(name):
    model = make_net()
    params = raw_params(model)
    optimizer, tx = nnx.Optimizer(model, TRANSFORMATIONS[name]()), TRANSFORMATIONS[name]()
    opt_state = tx.init(params)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(nnx.grad(loss_fn)(model))

    @jax.jit
    def by_hand(params, opt_state):
        updates, opt_state = tx.update(jax.grad(raw_loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for _ in range(4):
        step(model, optimizer)
        params, opt_state = by_hand(params, opt_state)
    assert optimizer.step == 4
    for path, value in raw_params(model).items():
        np.testing.assert_array_equal(value, params[path], err_msg=path)
    for ours, theirs in zip(jax.tree.leaves(optimizer.optax_state), jax.tree.leaves(opt_state), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_rebuilding_the_model_does_not_retrace_the_step():
    @nnx.jit
    def step(model, optimizer):
        optimizer.update(nnx.grad(loss_fn)(model))

    for seed in range(3):
        model = make_net(seed)
        optimizer = nnx.Optimizer(model, optax.adam(1e-3))
        step(model, optimizer)
        step(model, optimizer)
    assert step.trace_count == 1


def test_fresh_pairs_have_equal_moduledefs():
    a, b = make_net(0), make_net(1)
    first, second = nnx.Optimizer(a, optax.adam(1e-3)), nnx.Optimizer(b, optax.adam(1e-3))
    assert first.get_module_def() == second.get_module_def()
    assert first.get_module_def() != nnx.Optimizer(b, optax.adam(1e-2)).get_module_def()


def test_its_state_are_variables_with_readable_paths_and_the_metadata_of_the_parameters():
    optimizer = nnx.Optimizer(make_net(), optax.adam(1e-3))
    state = optimizer.filter(nnx.OptState)
    assert list(state)[:3] == ["opt_state/0/count", "opt_state/0/mu/encoder/bias", "opt_state/0/mu/encoder/kernel"]
    assert list(optimizer.filter("opt_state")) == list(state)
    assert state["opt_state/0/mu/encoder/kernel"].sharding == ("in", "out")
    assert state["opt_state/0/count"].sharding is None
    assert all(isinstance(leaf.value, jax.Array) for leaf in state.values())


def test_a_factored_state_does_not_take_over_a_sharding_that_does_not_fit():
    optimizer = nnx.Optimizer(make_net(), optax.adafactor(0.01))
    for path, leaf in optimizer.filter(nnx.OptState).items():
        assert leaf.sharding is None or leaf.value.ndim == len(leaf.sharding), path


def test_only_what_wrt_selects_is_trained():
    model = make_net()
    before = raw_params(model)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.PathMatches("head/**"))
    optimizer.update(nnx.grad(loss_fn)(model))  # the gradients of all: those of the encoder are left alone
    after = raw_params(model)
    assert [path for path in after if (after[path] != before[path]).any()] == ["head/bias", "head/kernel"]


def test_several_optimizers_share_a_model():
    model = make_net()
    p = raw_params(model)
    slow = nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.PathMatches("encoder/**"))
    fast = nnx.Optimizer(model.head, optax.adam(0.1))

    @nnx.jit
    def step(model, slow, fast):
        grads = nnx.grad(loss_fn)(model)
        slow.update(grads)
        fast.update(nnx.State({"kernel": grads["head/kernel"], "bias": grads["head/bias"]}))

    step(model, slow, fast)
    grads, tx = jax.jit(jax.grad(raw_loss))(p), optax.adam(0.1)
    head = {k: v for k, v in p.items() if k.startswith("head")}
    updates, _ = tx.update({k: grads[k] for k in head}, tx.init(head))
    np.testing.assert_allclose(model.encoder.kernel, p["encoder/kernel"] - 0.01 * grads["encoder/kernel"], rtol=1e-6)
    np.testing.assert_allclose(model.head.kernel, p["head/kernel"] + updates["head/kernel"], rtol=1e-6)
    assert slow.model is fast.model or slow.model.head is fast.model


def test_tied_parameters_are_updated_once():
    ref = nnx.Ref(nnx.Param(jnp.array([3.0])))
    model = nnx.Dict(a=nnx.Dict(w=ref), b=nnx.Dict(w=ref))
    optimizer = nnx.Optimizer(model, optax.sgd(1.0))
    optimizer.update(nnx.grad(lambda m: jnp.sum(m.a.w * m.b.w))(model))
    assert model.a.w is model.b.w
    np.testing.assert_array_equal(model.a.w, [-3.0])


def test_lbfgs_gets_value_gradient_and_function():
    scales = jnp.array([1.0, 10.0, 100.0])
    model = nnx.Dict(w=nnx.Param(jnp.ones(3)), calls=nnx.var("calls", 0))
    optimizer = nnx.Optimizer(model, optax.lbfgs(memory_size=3))

    def loss_fn(model):
        return jnp.sum(scales * (model.w - 3) ** 2)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        rest, moduledef = model.filter(nnx.Not(nnx.Param)), model.get_module_def()
        value_fn = lambda params: loss_fn(moduledef.merge(params, rest))  # noqa: E731
        optimizer.update(grads, value=loss, grad=grads, value_fn=value_fn)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(20)]
    assert losses[-1] < 1e-4 * losses[0]


def test_accumulation_changes_the_model_only_every_second_step():
    model = make_net()
    optimizer = nnx.Optimizer(model, optax.MultiSteps(optax.sgd(0.1), 2))
    before = model.head.kernel
    optimizer.update(nnx.grad(loss_fn)(model))
    np.testing.assert_array_equal(model.head.kernel, before)
    optimizer.update(nnx.grad(loss_fn)(model))
    assert (model.head.kernel != before).any()


def test_a_hyperparameter_can_be_changed_between_steps():
    model = make_net()
    optimizer = nnx.Optimizer(model, optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    optimizer.opt_state.hyperparams.learning_rate = jnp.array(0.0)
    before = model.head.kernel
    optimizer.update(nnx.grad(loss_fn)(model))
    np.testing.assert_array_equal(model.head.kernel, before)


def test_optax_state_can_be_read_and_replaced():
    model = make_net()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3))
    optimizer.update(nnx.grad(loss_fn)(model))
    assert optimizer.optax_state[0].count == 1
    optimizer.optax_state = optax.adam(1e-3).init(model.filter(nnx.Param))
    assert optimizer.optax_state[0].count == 0
    assert not optimizer.opt_state["0"]["mu"]["head"]["kernel"].any()


def test_a_clone_is_independent():
    model = make_net()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3))
    other = optimizer.clone()
    other.update(nnx.grad(loss_fn)(other.model))
    assert (other.step, optimizer.step) == (1, 0)
    assert other.model is not model and (other.model.head.bias != model.head.bias).any()
    assert copy.deepcopy(optimizer).step == 0


def test_dtypes_of_parameters_stay():
    model = nnx.Dict(w=nnx.Param(jnp.ones(3, jnp.bfloat16)))
    optimizer = nnx.Optimizer(model, optax.adamw(0.1))
    optimizer.update(nnx.State({"w": jnp.ones(3, jnp.bfloat16)}))
    assert model.w.dtype == jnp.bfloat16 and (model.w != 1).all()


def test_the_wrong_things_are_refused_by_name():
    model = make_net()
    with pytest.raises(TypeError, match="takes a Module and an optax transformation"):
        nnx.Optimizer(model.filter(nnx.Param), optax.sgd(0.1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="such as optax.adam"):
        nnx.Optimizer(model, 1e-3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wrt=BatchStat matches nothing in this Classifier.*calls, params"):
        nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.BatchStat)


def test_gradients_that_do_not_fit_are_named_and_change_nothing():
    model = make_net()
    optimizer = nnx.Optimizer(model, optax.adam(0.1))
    grads = nnx.grad(loss_fn)(model)
    before = raw_params(model)
    with pytest.raises(TypeError, match="takes the gradients as a State"):
        optimizer.update((grads, grads))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no gradient for 'encoder/bias', 'encoder/kernel'"):
        optimizer.update(grads.filter(nnx.PathMatches("head/**")))
    with pytest.raises(ValueError, match="gradient of 'head/bias' is float32.5,2., but the parameter is float32.2."):
        optimizer.update(grads | nnx.State({"head/bias": jnp.zeros((5, 2))}))
    with pytest.raises(ValueError, match="gradients for 'other/w', and the model has no such path"):
        optimizer.update(grads | nnx.State({"other/w": jnp.zeros(2)}))
    assert optimizer.step == 0
    assert all((value == before[path]).all() for path, value in raw_params(model).items())


def test_a_layer_replaced_by_one_of_another_shape_is_named():
    model = make_net()
    optimizer = nnx.Optimizer(model, optax.adam(0.1))
    shape = model.head.kernel.shape
    model.head = nnx.Linear(shape[0], shape[1] + 1, ctx=nnx.context(1))
    grads = jax.tree.map(jnp.ones_like, model.filter(nnx.Param))
    with pytest.raises(ValueError, match=r"'head/bias' has the shape \[\d\], but it had the shape .* been replaced"):
        optimizer.update(grads)


def test_a_model_that_changed_its_parameters_is_noticed():
    model = make_net()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1))
    model.scale = nnx.Param(jnp.ones(()))
    with pytest.raises(ValueError, match="no longer those the Optimizer was made for .new: 'scale'."):
        optimizer.update(model.filter(nnx.Param))


# What wrt selects


def test_a_path_alone_does_not_train_batch_statistics():
    model = nnx.Dict(head=nnx.Dict(w=nnx.Param(jnp.ones(2)), mean=nnx.BatchStat(jnp.zeros(2))))
    with pytest.raises(ValueError, match=r"nnx.Optimizer: .*Param \('head/w'\).\s.*nnx.All"):
        nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.PathMatches("head/**"))
    with pytest.raises(ValueError, match=r"nnx.EMA: .*Param \('head/w'\).\s.*nnx.All"):
        nnx.EMA(model, wrt=nnx.PathMatches("head/**"))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.All(nnx.Param, nnx.PathMatches("head/**")))
    assert optimizer.trains == ("head/w",)


# Axis names


def moments(optimizer):
    state = optimizer.filter(nnx.OptState)
    return {path.removeprefix("opt_state/"): leaf.sharding for path, leaf in state.items() if leaf.value.ndim}


def test_moments_take_names_that_their_parameters_get_later():
    optimizer = nnx.Optimizer(nnx.Linear(2, 3, ctx=nnx.context(0)), optax.trace(0.9))
    assert set(moments(optimizer).values()) == {None}
    nnx.name_axes(optimizer)
    assert moments(optimizer) == {"trace/bias": ("out",), "trace/kernel": ("in", "out")}
    specs = nnx.get_partition_spec(nnx.Optimizer(nnx.Linear(2, 3, ctx=nnx.context(0)), optax.trace(0.9)))
    assert specs["opt_state/trace/kernel"] == PartitionSpec("in", "out")


def test_naming_the_axes_of_a_model_does_not_disturb_its_optimizer():
    optimizer, named = (nnx.Optimizer(nnx.Linear(2, 3, ctx=nnx.context(0)), optax.adam(0.1)) for _ in range(2))
    step = nnx.jit(lambda optimizer: optimizer.update(jax.tree.map(jnp.ones_like, optimizer.model.filter(nnx.Param))))
    for each in (optimizer, named):
        step(each)
    nnx.name_axes(named)
    for each in (optimizer, named):
        step(each)
        step(each)
    assert step.trace_count == 2  # one per structure
    np.testing.assert_array_equal(named.model.kernel, optimizer.model.kernel)
    assert list(named.get_state()) == list(optimizer.get_state())


def test_a_history_of_gradients_has_the_names_after_its_own_axis():
    optimizer = nnx.Optimizer(make_net(), optax.scale_by_lbfgs(memory_size=3))
    found = moments(optimizer)
    assert found["diff_params_memory/encoder/kernel"] == (None, "in", "out")
    assert found["params/encoder/kernel"] == ("in", "out")


def test_the_optimizer_of_an_abstract_model_is_abstract():
    abstract = nnx.eval_shape(Classifier, ctx=nnx.context(0))
    optimizer = nnx.Optimizer(abstract, optax.adam(1e-3), skip_nonfinite=True)
    leaves = jax.tree.leaves(optimizer.get_state())
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    concrete = nnx.Optimizer(make_net(), optax.adam(1e-3), skip_nonfinite=True)
    assert optimizer.get_module_def() == concrete.get_module_def()
    assert [leaf.shape for leaf in leaves] == [jnp.shape(leaf) for leaf in jax.tree.leaves(concrete.get_state())]


# Gradients that cannot be used


def test_complex_gradients_of_real_parameters_are_refused_by_path():
    model = make_net()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1))
    grads = nnx.grad(loss_fn)(model)
    before = raw_params(model)
    bad = grads | nnx.State({"head/bias": jnp.ones(2, jnp.complex64)})
    with pytest.raises(ValueError, match="gradient of 'head/bias' is complex, complex64.2., but the parameter is real"):
        optimizer.update(bad)
    with pytest.raises(ValueError, match="'head/bias' is complex"):
        nnx.jit(lambda optimizer, grads: optimizer.update(grads))(optimizer, bad)
    assert optimizer.step == 0 and all((value == before[path]).all() for path, value in raw_params(model).items())


def test_complex_parameters_are_trained_with_complex_gradients():
    model = nnx.Dict(w=nnx.Param(jnp.ones(2, jnp.complex64)))
    optimizer = nnx.Optimizer(model, optax.sgd(1.0))
    optimizer.update(nnx.State({"w": jnp.array([1j, 1], jnp.complex64)}))
    np.testing.assert_array_equal(model.w, [1 - 1j, 0])


def pair(tx, **options):
    model = nnx.Dict(a=nnx.Param(jnp.ones(3)), b=nnx.Param(jnp.ones((2, 2), jnp.bfloat16)))
    return nnx.Optimizer(model, tx, **options)


def pair_grads(spoiled_by=0.5):
    return nnx.State({"a": jnp.array([1.0, spoiled_by, 2.0]), "b": jnp.ones((2, 2), jnp.bfloat16)})


@pytest.mark.parametrize("lift", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_an_update_with_a_gradient_that_is_not_finite_is_skipped_whole(lift):
    optimizer, reference = pair(optax.adam(1e-2), skip_nonfinite=True), pair(optax.adam(1e-2))
    step = lift(lambda optimizer, grads: optimizer.update(grads))
    for value in (0.5, jnp.nan, jnp.inf, 0.5, -jnp.inf):
        step(optimizer, pair_grads(value))
    for _ in range(2):
        step(reference, pair_grads())
    assert (optimizer.step, optimizer.skipped) == (2, 3)
    assert optimizer.model.get_state() == reference.model.get_state()
    assert optimizer.opt_state.get_state() == reference.opt_state.get_state()


def test_random_keys_in_the_optimizer_state_are_kept_when_an_update_is_skipped():
    optimizer = pair(optax.add_noise(0.1, 0.5, jax.random.key(0)), skip_nonfinite=True)
    step = nnx.jit(lambda optimizer, grads: optimizer.update(grads))
    step(optimizer, pair_grads())
    before = optimizer.opt_state.get_state()
    step(optimizer, pair_grads(jnp.nan))
    assert optimizer.opt_state.get_state() == before and optimizer.skipped == 1
    step(optimizer, pair_grads())
    assert optimizer.opt_state.get_state() != before


def test_optimizer_skips_nothing_by_default():
    optimizer = pair(optax.sgd(0.1))
    optimizer.update(pair_grads(jnp.nan))
    assert np.isnan(optimizer.model.a).any() and not hasattr(optimizer, "skipped")


# pickle


@pytest.mark.parametrize("holder", [lambda x: x, lambda x: nnx.Dict(inner=[x])], ids=["alone", "in a Module"])
def test_pickling_an_optimizer_raises_with_advice(holder):
    held = holder(nnx.Optimizer(nnx.Dict(w=nnx.Param(jnp.ones(2))), optax.adam(1e-3)))
    with pytest.raises(TypeError, match="This nnx.Optimizer cannot be pickled.*local object") as error:
        pickle.dumps(held)
    assert "nnx.save(path, optimizer)" in str(error.value)
    assert "nnx.load(path, nnx.Optimizer(model, tx))" in str(error.value)
    assert copy.deepcopy(held).get_module_def() == held.get_module_def()


def test_cloudpickle_takes_the_parts_of_an_optimizer_as_the_error_says():
    cloudpickle = pytest.importorskip("cloudpickle")
    optimizer = nnx.Optimizer(nnx.Dict(w=nnx.Param(jnp.ones(2))), optax.sgd(1.0, momentum=0.5))
    optimizer.update(nnx.State({"w": jnp.ones(2)}))
    with pytest.raises(TypeError, match=r"pickle \(optimizer\.model, optimizer\.tx, optimizer\.get_state\(\)\)"):
        cloudpickle.dumps(optimizer)
    parts = (optimizer.model, optimizer.tx, optimizer.get_state())
    model, tx, state = pickle.loads(cloudpickle.dumps(parts))
    restored = nnx.Optimizer(model, tx)
    restored.update_state(state)
    assert restored.get_state() == optimizer.get_state() and restored.step == 1
    restored.update(nnx.State({"w": jnp.ones(2)}))
    np.testing.assert_array_equal(restored.model.w, [-1.5, -1.5])


def init_sum(params):
    return optax.TraceState(jax.tree.map(jnp.zeros_like, params))


def descend(updates, state, params=None):
    return jax.tree.map(lambda g: -g, updates), optax.TraceState(jax.tree.map(jnp.add, state.trace, updates))


def test_an_optimizer_with_a_transformation_of_named_functions_survives_pickling():
    model = nnx.Linear(2, 3, ctx=nnx.context(0))
    optimizer = nnx.Optimizer(model, optax.GradientTransformation(init_sum, descend))
    restored = pickle.loads(pickle.dumps(optimizer))
    assert restored.get_module_def() == optimizer.get_module_def()
    restored.update(jax.tree.map(jnp.ones_like, model.filter(nnx.Param)))
    np.testing.assert_array_equal(restored.model.kernel, model.kernel - 1)
    np.testing.assert_array_equal(restored.opt_state.trace.kernel, jnp.ones((2, 3)))


def test_an_optimizer_can_be_annotated_with_the_type_of_its_model():
    model = make_net()
    plain, typed = nnx.Optimizer(model, optax.adam(1e-3)), nnx.Optimizer[Classifier](model, optax.adam(1e-3))
    assert type(typed) is nnx.Optimizer
    assert typed.get_module_def() == plain.get_module_def() and list(typed.get_state()) == list(plain.get_state())


# The learning rate


def injected(rate=0.1):
    model = nnx.Linear(2, 1, ctx=nnx.context(0))
    tx = optax.chain(optax.clip_by_global_norm(1e3), optax.inject_hyperparams(optax.sgd)(learning_rate=rate))
    return nnx.Optimizer(model, tx)


def test_the_learning_rate_is_read_and_set_without_recompiling():
    optimizer = injected()

    @nnx.jit
    def step(optimizer):
        optimizer.update(jax.tree.map(jnp.ones_like, optimizer.model.filter(nnx.Param)))

    for rate in (0.1, 0.5):
        optimizer.learning_rate = rate
        assert float(optimizer.learning_rate) == np.float32(rate)
        before = optimizer.model.bias
        step(optimizer)
        np.testing.assert_allclose(before - optimizer.model.bias, rate, rtol=1e-6)
    assert step.trace_count == 1


def test_a_scheduled_learning_rate_is_read_but_not_set():
    optimizer = injected(optax.linear_schedule(1.0, 0.0, 4))
    grads = jax.tree.map(jnp.ones_like, optimizer.model.filter(nnx.Param))
    rates = []
    for _ in range(3):
        optimizer.update(grads)
        rates.append(float(optimizer.learning_rate))
    assert rates == [1.0, 0.75, 0.5]
    with pytest.raises(AttributeError, match="follows a schedule, which would overwrite"):
        optimizer.learning_rate = 0.1


def test_a_learning_rate_that_optax_hides_is_an_error_that_says_how_to_inject_it():
    optimizer = nnx.Optimizer(nnx.Linear(2, 1, ctx=nnx.context(0)), optax.adam(1e-3))
    for action in (lambda: optimizer.learning_rate, lambda: setattr(optimizer, "learning_rate", 1.0)):
        with pytest.raises(AttributeError, match=r"keeps none in its state.*optax.inject_hyperparams\(optax.adam\)"):
            action()
    with pytest.raises(ValueError, match="it is one number, got"):
        injected().learning_rate = jnp.ones(2)


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda model: setattr(model, "kernel", jnp.ones((4, 3))), r"'kernel' has the shape \[4, 3\].*shape \[2, 3\]"),
        (lambda model: setattr(model, "kernel", jnp.ones(3)), r"'kernel' has the shape \[3\].*shape \[2, 3\]"),
        (lambda model: setattr(model, "bias", None), "'bias' is None"),
    ],
)
def test_a_parameter_of_another_shape_is_named(change, text):
    model = nnx.Linear(2, 3, ctx=nnx.context(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3))
    change(model)
    grads = jax.tree.map(jnp.ones_like, model.filter(nnx.Param))
    with pytest.raises(ValueError, match=text + r".*Make a new nnx\.Optimizer"):
        optimizer.update(grads)


def test_conjugated_gradients_minimize_over_complex_parameters():
    model = nnx.Dict(z=nnx.Param(jnp.array(1.0 + 2.0j)))
    optimizer = nnx.Optimizer(model, optax.sgd(0.25))
    for _ in range(40):
        grads = nnx.grad(lambda model: jnp.abs(model.z - 3j) ** 2)(model)
        optimizer.update(jax.tree.map(jnp.conj, grads))
    assert jnp.allclose(model.z, 3j, atol=1e-4)


def test_a_replaced_layer_of_the_same_shape_is_noticed_once_outside_jit():
    model = nnx.Sequence([nnx.Linear(2, 2, ctx=nnx.context(0)), nnx.Linear(2, 2, ctx=nnx.context(1))])
    optimizer = nnx.Optimizer(model, optax.adam(0.1))
    grads = jax.tree.map(jnp.ones_like, model.filter(nnx.Param))
    optimizer.update(grads)
    model[1] = nnx.Linear(2, 2, ctx=nnx.context(2))
    with pytest.warns(UserWarning, match="have been replaced by others of the same shapes: '1'.*a new nnx.Optimizer"):
        optimizer.update(grads)
    optimizer.update(grads)
    nnx.Optimizer(model, optax.adam(0.1)).update(grads)


def test_layers_that_only_change_their_values_are_not_replaced():
    model = nnx.Sequence([nnx.Linear(2, 2, ctx=nnx.context(0))])
    optimizer = nnx.Optimizer(model, optax.sgd(0.1))
    step = nnx.jit(lambda optimizer: optimizer.update(jax.tree.map(jnp.ones_like, optimizer.model.filter(nnx.Param))))
    step(optimizer), optimizer.update(model.filter(nnx.Param))
    model[0].kernel = jnp.ones((2, 2))
    step(optimizer), optimizer.update(model.filter(nnx.Param)), optimizer.clone().update(model.filter(nnx.Param))


def counted_adam(before=lambda params: None):
    """Adam, and a list that grows with every call of its `init` that sees tracers (True) or values (False)."""
    calls, adam = [], optax.adam(1e-3)

    def init(params):
        calls.append(any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params)))
        before(params)
        return adam.init(params)

    return optax.GradientTransformation(init, adam.update), calls


sizes = itertools.count(61)


def layer_of_new_shape():
    return nnx.Linear(next(sizes), 2, ctx=nnx.context(0))


def test_the_first_state_for_a_structure_is_made_by_one_program():
    model = layer_of_new_shape()
    (tx, calls), (other, other_calls) = counted_adam(), counted_adam()
    first, again, third = nnx.Optimizer(model, tx), nnx.Optimizer(model, tx), nnx.Optimizer(model, other)
    assert calls == [True, False] and other_calls == [False]
    for optimizer in (again, third):
        assert optimizer.opt_structure == first.opt_structure
        for path, variable in first.filter("opt_state").items():
            same = optimizer.get_state()[path].value
            assert (same.dtype, same.weak_type, same.committed) == (
                variable.value.dtype,
                variable.value.weak_type,
                variable.value.committed,
            )
            np.testing.assert_array_equal(same, variable.value)


def test_a_transformation_that_needs_values_gets_them():
    tx, calls = counted_adam(before=lambda params: [float(leaf.sum()) for leaf in jax.tree.leaves(params)])
    nnx.Optimizer(layer_of_new_shape(), tx)
    assert calls == [True, False]


def test_a_mistake_in_a_transformation_is_raised_as_it_is():
    tx, _ = counted_adam(before=lambda params: {}["missing"])
    with pytest.raises(KeyError, match="missing"):
        nnx.Optimizer(layer_of_new_shape(), tx)


def test_python_values_in_a_state_stay_python_values():
    tx = optax.GradientTransformation(lambda params: {"rate": 0.5}, lambda grads, state, params=None: (grads, state))
    assert type(nnx.Optimizer(layer_of_new_shape(), tx).get_path("opt_state/rate")) is float


def test_the_state_of_parameters_with_a_device_is_made_there():
    model = layer_of_new_shape()
    model.update_state(jax.device_put(model.get_state(), jax.devices()[0]))
    tx, calls = counted_adam()
    nnx.Optimizer(model, tx)
    assert calls == [False]
