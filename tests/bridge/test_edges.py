"""What is particular about one library: shared paths, ties, random state of its own, what compares by identity."""

import argparse
from typing import Any

import equinox as eqx
import flax.linen as linen
import flax.nnx as flax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from nnx import bridge
from tests.bridge.models import EquinoxNet, FlaxNet, LinenNet, linen_variables, make_equinox, make_flax, make_linen

X = jnp.ones((2, 3))


@pytest.fixture
def run():
    """A jitted call. One for all tests would warn that models of so many kinds retrace it."""
    return nnx.jit(lambda model, *args: model(*args))


# Linen


class Configured(linen.Module):
    config: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.config.scale * linen.Dense(2)(x)


def test_config_without_a_hash_is_noticed_when_it_changes(run):
    config = argparse.Namespace(scale=1.0)
    model = bridge.from_linen(Configured(config), X, ctx=nnx.context(0))
    once, eager_once = run(model, X), model(X)
    config.scale = 3.0
    np.testing.assert_allclose(run(model, X), 3 * once, rtol=1e-6)
    np.testing.assert_allclose(model(X), 3 * eager_once, rtol=1e-6)


class SharedPaths(linen.Module):
    """`scale` is in three collections, and a folder of a fourth; `plain.stats` ends like one of our suffixes."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", linen.initializers.ones, (3,))
        count = self.variable("stats", "scale", lambda: jnp.zeros(()))
        last = self.variable("cache", "scale", lambda: jnp.zeros(3))
        inner = self.variable("other", "scale", lambda: {"mean": jnp.zeros(())})
        odd = self.variable("stats", "plain.stats", lambda: jnp.zeros(()))
        if not self.is_initializing():
            count.value += 1
            last.value = x[0] * scale
            inner.value = {"mean": x.mean()}
            odd.value += 2
        return x * scale


def test_path_of_two_collections_names_the_collection_of_the_second(run):
    model = bridge.from_linen(SharedPaths(), X, ctx=nnx.context(0))
    run(model, 5 * X)
    run(model, 5 * X)
    values = {path: np.asarray(leaf).max() for path, leaf in model.get_state().items()}
    expected = {"plain.stats.stats": 4, "scale": 1, "scale.cache": 5, "scale.other/mean": 5, "scale.stats": 2}
    assert values == expected
    assert isinstance(model.variable("scale"), nnx.Param) and isinstance(model.variable("scale.cache"), nnx.Cache)
    assert type(model.variable("scale.stats")).collection == "stats"


class Tied(linen.Module):
    def setup(self) -> None:
        self.embed = linen.Embed(4, 3)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embed.attend(self.embed(tokens))


class TiedFlax(flax.Module):
    def __init__(self, rngs: flax.Rngs):
        self.embed = flax.Embed(4, 3, rngs=rngs)
        self.head = flax.Linear(3, 4, use_bias=False, rngs=rngs)
        self.head.kernel = self.embed.embedding  # square enough for a test: used transposed below

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embed(tokens) @ self.head.kernel[...].T


class TiedEquinox(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self, key: jax.Array):
        embed, head = eqx.nn.Embedding(4, 3, key=key), eqx.nn.Linear(3, 4, use_bias=False, key=key)
        self.shared = eqx.nn.Shared((embed, head), where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed, head = self.shared()
        return jax.vmap(lambda token: head(embed(token)))(tokens)


TOKENS = jnp.array([0, 2, 1])
TIED = {
    "linen": lambda: bridge.from_linen(Tied(), TOKENS, ctx=nnx.context(0)),
    "flax": lambda: bridge.from_flax(TiedFlax(flax.Rngs(0))),
    "equinox": lambda: bridge.from_equinox(TiedEquinox(jax.random.key(0))),
}


@pytest.mark.parametrize("name", TIED)
def test_tied_weights_are_one_variable_with_one_gradient_and_stay_tied(run, name: str):
    model = TIED[name]()
    (path,) = model.get_state()
    (grad,) = nnx.grad(lambda model: model(TOKENS).sum())(model).values()
    weight = model.get_path(path)
    expected = jax.grad(lambda w: (w[TOKENS] @ w.T).sum())(weight)
    np.testing.assert_allclose(grad.value, expected, rtol=1e-5)
    model.set_path(path, 2 * weight)
    np.testing.assert_allclose(run(model, TOKENS), 4 * (weight[TOKENS] @ weight.T), rtol=1e-5)
    assert model.get_module_def() == TIED[name]().get_module_def()


def test_what_is_sown_is_that_of_the_last_call():
    model = make_linen(sow=["intermediates"]).eval()
    model(X)
    model(2 * X)
    (normed,) = model["normed"]
    assert normed.shape == (2, 5)
    assert list(model.pop_state(nnx.Intermediate)) == ["normed"]
    assert make_linen().eval()(X).shape == (2, 2)  # without `sow`, nothing is collected


def test_axis_names_are_carried_over():
    for model in (make_linen(), make_flax()):
        assert model["out"].variable("kernel").sharding == ("embed", None)
        assert model["dense"].variable("kernel").sharding is None


class TwoFields(linen.Module):
    first: linen.Module
    second: linen.Module
    more: tuple[linen.Module, ...] = ()

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.second(self.first(x))
        for layer in self.more:
            x = layer(x)
        return x


def test_submodule_in_two_fields_of_linen_stays_one(run):
    dense = linen.Dense(3)
    shared = bridge.from_linen(TwoFields(dense, dense, (linen.Dense(3),)), X, ctx=nnx.context(0))
    apart = bridge.from_linen(TwoFields(linen.Dense(3), linen.Dense(3), (linen.Dense(3),)), X, ctx=nnx.context(0))
    assert len(shared.get_state()) == 4 and len(apart.get_state()) == 6
    np.testing.assert_allclose(run(shared, X), shared(X), rtol=1e-6)


def test_linen_variables_of_the_user_are_not_changed():
    variables = linen_variables()
    before = jax.tree.map(np.array, variables)
    model = bridge.from_linen(LinenNet(), variables=variables).train()
    run_with_ctx(model)
    jax.tree.map(np.testing.assert_array_equal, variables, before)


run_with_ctx = nnx.jit(lambda model: model(X, ctx=nnx.context(dropout=0)), donate_argnums=0)


def test_evaluation_can_be_differentiated_from_outside():
    # it changes nothing, so a Module of an outer trace level is not written to
    for model in (make_linen().eval(), make_flax().eval(), make_equinox().eval()):
        assert jax.grad(lambda x, model=model: model(x).sum())(X).shape == X.shape


# Flax


def test_random_state_of_flax_advances_by_itself_and_rests_under_a_context(run):
    model = make_flax().train()
    first, second = run(model, X + jnp.arange(2)[:, None]), run(model, X + jnp.arange(2)[:, None])
    assert model.get_path("drop/rngs/count") == 2 and not np.array_equal(first, second)
    key = model.get_path("drop/rngs/key")
    model(X, ctx=nnx.context(dropout=0))
    assert model.get_path("drop/rngs/count") == 2 and model.get_path("drop/rngs/key") == key


class TwoDropouts(flax.Module):
    def __init__(self, rngs: flax.Rngs):
        self.first = flax.Dropout(0.5, rngs=rngs)
        self.second = flax.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.first(x), self.second(x)


def test_layers_of_flax_draw_different_numbers_from_one_stream_of_the_context():
    model = bridge.from_flax(TwoDropouts(flax.Rngs(0, dropout=1))).train()
    x = jnp.ones(100)
    first, second = model(x, ctx=nnx.context(dropout=0))
    assert not np.array_equal(first, second)
    again, _ = model(x, ctx=nnx.context(dropout=0))
    np.testing.assert_array_equal(first, again)
    other, _ = model(x, ctx=nnx.context(noise=0))  # has no stream for it: the random state of Flax goes on
    assert not np.array_equal(other, first) and model.get_path("first/rngs/count") == 1


class Count(flax.Variable):
    pass


class Adapted(flax.Module):
    def __init__(self, rngs: flax.Rngs):
        self.lora = flax.LoRALinear(3, 2, lora_rank=1, rngs=rngs)
        self.calls = Count(jnp.zeros((), int))
        self.table = flax.data(jnp.arange(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        self.sow(flax.Intermediate, "seen", x.mean())
        return self.lora(x) + self.table


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_types_of_flax_have_their_counterparts(run):
    model = bridge.from_flax(Adapted(flax.Rngs(0)))
    run(model, X)
    run(model, X)
    assert set(model.filter(nnx.LoRAParam)) == {"lora/lora/lora_a", "lora/lora/lora_b"}
    assert set(model.filter(nnx.Param)) == {"lora/kernel", "lora/bias"}
    assert model.calls == 2 and type(model.variable("calls")).collection in ("Count", "count")
    assert list(model.pop_state(nnx.Intermediate)) == ["seen"]
    assert isinstance(model.get_state()["table"], jax.Array)


def test_source_in_flax_neither_changes_nor_is_followed(run):
    source = FlaxNet(flax.Rngs(0))
    before = jax.tree.map(np.asarray, flax.to_pure_dict(flax.state(source, flax.Not(flax.RngState))))
    model = bridge.from_flax(source).train()
    run(model, X)
    after = flax.to_pure_dict(flax.state(source, flax.Not(flax.RngState)))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    kernel = np.asarray(model["dense"]["kernel"])
    source.dense.kernel[...] = 0 * source.dense.kernel[...]
    np.testing.assert_array_equal(model["dense"]["kernel"], kernel)


# Equinox


class Listed(eqx.Module):
    weight: jax.Array
    table: np.ndarray
    scales: list[float] = eqx.field(static=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.weight * self.scales[0] + self.table[0]


def test_static_list_of_equinox_is_noticed_and_a_table_is_not_trained(run):
    scales = [1.0]
    model = bridge.from_equinox(Listed(jnp.ones(3), np.zeros(3), scales))
    before = run(model, X)
    scales[0] = 2.0
    np.testing.assert_allclose(run(model, X), 2 * before)
    assert set(model.filter(nnx.Param)) == {"weight"} and set(model.get_state()) == {"weight", "table"}


def test_equinox_model_without_a_key_is_called_with_a_context():
    assert make_equinox().hidden(X, ctx=nnx.context(dropout=0)).shape == (2, 5)


def test_state_of_equinox_is_at_the_paths_of_its_indices():
    _, state = eqx.nn.make_with_state(EquinoxNet)(jax.random.key(0))
    model = make_equinox()
    mean, var = state.get(eqx.nn.make_with_state(EquinoxNet)(jax.random.key(0))[0].norm.batch_state_index)
    np.testing.assert_array_equal(model.get_path("norm/batch_state_index/0"), mean)
    np.testing.assert_array_equal(model.get_path("norm/batch_state_index/1"), var)


# Functions and Haiku


def test_function_that_returns_another_state_says_so():
    model = bridge.from_functions(lambda params, state, x: (x, {"b": x}), {}, {"a": jnp.ones(3)})
    with pytest.raises(ValueError, match="state of another structure"):
        model(X)


def test_two_arrays_with_one_path_are_refused():
    with pytest.raises(ValueError, match="parameters have the path 'a/b'"):
        bridge.from_functions(lambda params: 0, {"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}})
    with pytest.raises(ValueError, match="lies below the other"):
        bridge.from_functions(lambda params: 0, {"a": jnp.ones(1), "a/b": jnp.ones(1)})


def test_state_with_the_path_of_a_parameter_gets_another(run):
    model = bridge.from_functions(
        lambda p, s, x: (p["w"] * x, {"w": s["w"] + 1}), {"w": jnp.ones(3)}, {"w": jnp.zeros(())}
    )
    run(model, X)
    assert model["w.state"] == 1 and list(model.get_state()) == ["w", "w.state"]


def test_arrays_of_numpy_are_copied():
    weight = np.ones(3, np.float32)
    model = bridge.from_functions(lambda params, x: params * x, weight)
    weight[:] = 5
    np.testing.assert_array_equal(model(X), X)
    assert list(model.get_state()) == ["value"]


def test_functions_by_name_are_methods():
    params = {"w": jnp.ones((3, 2))}
    functions = {"encode": lambda p, x: x @ p["w"], "decode": lambda p, z: z @ p["w"].T}
    model = bridge.from_functions(functions, params)
    assert model.decode(model.encode(X)).shape == X.shape
    with pytest.raises(AttributeError, match="no function '__call__' among"):
        model(X)


def test_two_functions_of_haiku_share_their_parameters():
    def both() -> Any:
        dense = hk.Linear(2, name="dense")
        return dense, {"encode": dense, "twice": lambda x: 2 * dense(x)}

    model = bridge.from_haiku(hk.multi_transform(both), X, ctx=nnx.context(0))
    np.testing.assert_allclose(model.twice(X), 2 * model.encode(X))
    assert set(model.filter(nnx.Param)) == {"dense/b", "dense/w"}


# Everything


def test_missing_variable_is_named():
    model = bridge.from_functions(lambda params, x: params["w"] * x, {"w": jnp.ones(3)})
    model.pop_state(nnx.Param)
    with pytest.raises(ValueError, match="has no 'w'"):
        model(X)


def test_variables_may_have_the_names_of_methods():
    names = ("filter", "train", "deterministic", "run", "_adapter", "items")
    params = {name: jnp.full(3, float(i)) for i, name in enumerate(names)}
    model = bridge.from_functions(lambda params, x: sum(params.values()) * x, params).train()
    np.testing.assert_array_equal(model(X), 15 * X)
    assert sorted(model) == sorted(names) and len(model) == len(names)
    np.testing.assert_array_equal(model.clone().eval()["deterministic"], params["deterministic"])


def test_wrapped_model_is_a_part_of_a_module():
    class Head(nnx.Module):
        def __init__(self, ctx: nnx.Context):
            self.backbone = bridge.from_linen(linen.Dense(4), X, ctx=ctx)
            self.head = nnx.Linear(4, 1, ctx=ctx)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.head(self.backbone(x))

    model = Head(nnx.context(0))
    assert list(model.get_state()) == ["backbone/bias", "backbone/kernel", "head/bias", "head/kernel"]
    sequence = nnx.Sequence([make_linen(), nnx.Dropout(0.5)]).train()
    assert sequence(X, ctx=nnx.context(dropout=0)).shape == (2, 2)
    assert "backbone" in str(nnx.summary(model, X))
