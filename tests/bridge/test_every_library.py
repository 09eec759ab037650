"""A wrapped model is a Module like any other, whichever library it is from."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx
from nnx import bridge
from tests.bridge.models import CASES, KEYS, TX, Case, X, loss_of

LIBRARIES = pytest.mark.parametrize("name", CASES)


@nnx.jit
def step(optimizer: Any, key: jax.Array | None) -> Any:
    def loss(model: Any, key: jax.Array | None) -> jax.Array:
        return loss_of(model(X, ctx=None if key is None else nnx.context(dropout=key)))

    value, grads = nnx.value_and_grad(loss)(optimizer.model, key)
    optimizer.update(grads)
    return value, grads


def key_for(name: str, key: jax.Array) -> jax.Array | None:
    return None if name == "flax" else key  # its random numbers come from its own state, as in the native steps


@functools.cache
def trained(name: str) -> tuple[nnx.Optimizer, list[Any], list[Any]]:
    """An Optimizer after five steps, which no test changes, with the losses and gradients."""
    optimizer = nnx.Optimizer(CASES[name].make().train(), TX)
    results = [step(optimizer, key_for(name, key)) for key in KEYS]
    return optimizer, [value for value, _ in results], [grads for _, grads in results]


def call(model: Any, x: jax.Array = X, seed: int = 0) -> jax.Array:
    return model(x, ctx=nnx.context(dropout=seed))


def arrays(model: Any) -> dict[str, np.ndarray]:
    values = {path: jax.random.key_data(x) if is_key(x) else x for path, x in model.get_state().arrays().items()}
    return {path: np.asarray(value) for path, value in values.items()}


def is_key(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def assert_same(first: Any, second: Any) -> None:
    assert first.keys() == second.keys()
    for path in first:
        np.testing.assert_array_equal(first[path], second[path], path)


@LIBRARIES
def test_variables_have_their_native_paths_and_the_types_of_their_roles(name: str):
    case: Case = CASES[name]
    model = case.make()
    assert set(model.filter(nnx.Param)) == case.params
    assert set(model.filter(nnx.BatchStat)) == case.stats
    rest = set(model.get_state()) - case.params - case.stats
    assert rest == ({"drop/rngs/count", "drop/rngs/key"} if name == "flax" else set())


@LIBRARIES
def test_five_steps_of_adam_agree_with_the_native_ones(name: str):
    losses, grads = CASES[name].native()
    _, our_losses, our_grads = trained(name)
    np.testing.assert_allclose(our_losses, losses, rtol=1e-6)
    assert len(set(map(float, losses))) == len(KEYS)
    for ours, theirs in zip(our_grads, grads, strict=True):
        assert ours.keys() == theirs.keys()
        for path, value in theirs.items():
            np.testing.assert_allclose(ours[path].value, value, rtol=1e-5, atol=1e-6, err_msg=path)


@LIBRARIES
def test_two_equal_models_share_a_trace(name: str):
    trained(name)
    before = step.trace_count
    step(nnx.Optimizer(CASES[name].make().train(), optax.adam(1e-2)), key_for(name, KEYS[0]))
    assert step.trace_count == before


@LIBRARIES
def test_training_leaves_the_source_and_clones_alone(name: str):
    optimizer, losses, _ = trained(name)
    fresh = nnx.Optimizer(CASES[name].make().train(), TX)
    copy = fresh.clone()
    value, _ = step(fresh, key_for(name, KEYS[0]))
    assert value == losses[0]  # made from the same source, it begins where the first one began
    untouched = arrays(CASES[name].make())
    assert_same(arrays(copy.model), untouched)
    changed = [path for path, value in arrays(fresh.model).items() if not np.array_equal(value, untouched[path])]
    assert set(changed) >= CASES[name].params & set(fresh.model.filter(nnx.Param)) - {"dense/bias", "dense/b"}


def in_cond(model: Any, x: jax.Array, ctx: nnx.Context) -> Any:
    return nnx.cond(x[0, 0] < 100, lambda m, x, ctx: m(x, ctx=ctx), lambda m, x, ctx: jnp.zeros((4, 2)), model, x, ctx)


def in_loop(model: Any, x: jax.Array, ctx: nnx.Context) -> Any:
    def body(_: Any, carry: Any) -> Any:
        model, ctx, _ = carry
        return model, ctx, model(x, ctx=ctx)

    return nnx.fori_loop(0, 1, body, (model, ctx, jnp.zeros((4, 2))))[2]


def in_scan(model: Any, x: jax.Array, ctx: nnx.Context) -> Any:
    def body(model: Any, carry: Any, _: Any, ctx: nnx.Context) -> Any:
        return carry, model(x, ctx=ctx)

    return nnx.scan(body, length=1)(model, (), jnp.zeros(1), ctx)[1][0]


TRANSFORMED = {
    "jit": nnx.jit(call, static_argnames="seed"),
    "remat": lambda model: nnx.remat(lambda m, x, ctx: m(x, ctx=ctx))(model, X, nnx.context(dropout=0)),
    "grad": lambda model: nnx.value_and_grad(lambda m, ctx: (m(X, ctx=ctx).sum(), 0), has_aux=True)(
        model, nnx.context(dropout=0)
    ),
    "cond": lambda model: in_cond(model, X, nnx.context(dropout=0)),
    "fori_loop": lambda model: in_loop(model, X, nnx.context(dropout=0)),
    "scan": lambda model: in_scan(model, X, nnx.context(dropout=0)),
}


@LIBRARIES
@pytest.mark.parametrize("transform", TRANSFORMED)
def test_statistics_are_updated_in_place_under_every_transform(name: str, transform: str):
    case = CASES[name]
    model, eager = case.make().train(), case.make().train()
    TRANSFORMED[transform](model)
    call(eager)
    for path in case.stats:
        value, expected = model.get_path(path), eager.get_path(path)
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6, err_msg=path)
    assert not np.allclose(model.get_path(max(case.stats)), case.make().get_path(max(case.stats)))


@LIBRARIES
def test_mode_comes_from_train_and_eval_or_from_flags(name: str):
    model = CASES[name].make()
    evaluated, trained_ = model.eval()(X), call(model.train())
    assert not np.allclose(evaluated, trained_)
    model = CASES[name].make()
    for flags in ({"deterministic": True}, {"train": False}):
        np.testing.assert_array_equal(model(X, ctx=nnx.context(dropout=0, flags=flags)), evaluated)
    assert_same(arrays(model), arrays(CASES[name].make()))  # evaluation has changed nothing
    np.testing.assert_array_equal(model(X, ctx=nnx.context(dropout=0, flags={"deterministic": False})), trained_)


@LIBRARIES
def test_keys_come_from_the_context(name: str):
    first, again, other = (call(CASES[name].make().train(), seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@LIBRARIES
def test_a_view_in_evaluation_reads_what_training_changes(name: str):
    model = CASES[name].make().train()
    view = model.view(deterministic=True)
    before = view(X)
    call(model, 3 * X)
    assert not np.array_equal(view(X), before)
    np.testing.assert_array_equal(view(X), model.clone().eval()(X))


@LIBRARIES
def test_trained_model_is_saved_and_loaded(name: str, tmp_path):
    optimizer, _, _ = trained(name)
    nnx.save(tmp_path / "run", optimizer)
    loaded = nnx.load(tmp_path / "run", nnx.Optimizer(CASES[name].make().train(), TX))
    assert_same(arrays(loaded), arrays(optimizer))
    value, _ = step(loaded, key_for(name, KEYS[0]))
    assert value == step(optimizer.clone(), key_for(name, KEYS[0]))[0]


@LIBRARIES
def test_frozen_variables_have_no_gradient(name: str):
    model = CASES[name].make().eval()
    model.freeze(nnx.PathMatches("dense/**") if name != "functions" else nnx.PathMatches("dense"))
    grads = nnx.grad(lambda m: m(X).sum())(model)
    assert set(grads) == {path for path in CASES[name].params if not path.startswith("dense")}


@LIBRARIES
def test_exported_program_needs_neither_library(name: str, tmp_path):
    model = CASES[name].make().eval()
    nnx.export(tmp_path / "program", model, X)
    np.testing.assert_allclose(nnx.load_exported(tmp_path / "program")(X), model(X), rtol=1e-6)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.hidden])
def test_other_methods_are_called_by_their_names(name: str):
    model = CASES[name].make()
    kernel = model["dense"]["kernel"] if "kernel" in model["dense"] else model["dense"]["weight"].T
    expected = X @ kernel + model["dense"]["bias"]
    for call_ in (model.hidden, nnx.jit(model.hidden), functools.partial(model.run, "hidden")):
        np.testing.assert_allclose(call_(X), expected, rtol=1e-5)
    with pytest.raises(AttributeError, match="hiden"):
        model.hiden  # noqa: B018


class Tower(nnx.Module):
    """A wrapped model as a part of a Module of ours, with a carry of its own shape."""

    def __init__(self, name: str, ctx: nnx.Context):
        make = {"linen": linen_block, "flax": flax_block, "equinox": equinox_block}[name]
        self.block = make(ctx)

    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return jnp.tanh(self.block(x)), None


def linen_block(ctx: nnx.Context) -> bridge.Foreign:
    import flax.linen

    return bridge.from_linen(flax.linen.Dense(3), X, ctx=ctx)


def flax_block(ctx: nnx.Context) -> bridge.Foreign:
    import flax.nnx

    return bridge.from_flax(flax.nnx.Linear(3, 3, rngs=flax.nnx.Rngs(ctx.make_rng("params"))))


def equinox_block(ctx: nnx.Context) -> bridge.Foreign:
    import equinox

    linear = equinox.nn.Linear(3, 3, key=ctx.make_rng("params"))
    return bridge.from_equinox(linear, call=lambda m, x: jax.vmap(m)(x))


@pytest.mark.parametrize("name", ["linen", "flax", "equinox"])
def test_wrapped_models_are_stacked_by_scan(name: str):
    stack = nnx.Scan(Tower, variable_axes={nnx.Param: 0}, split_rngs="params", length=3)(name, ctx=nnx.context(0))
    weights = [leaf.value for leaf in stack.filter(nnx.Param).values()]
    assert [w.shape[0] for w in weights] == [3, 3] and not np.array_equal(weights[1][0], weights[1][1])
    out, _ = stack(X, jnp.zeros(3))
    expected = X
    kernel, bias = max(weights, key=lambda w: w.ndim), min(weights, key=lambda w: w.ndim)
    for i in range(3):
        w = kernel[i].T if name == "equinox" else kernel[i]
        expected = jnp.tanh(expected @ w + bias[i])
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
