"""Modules as models of Flax: same variables, same training, same numbers."""

from typing import Any

import flax.linen as linen
import flax.nnx as flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as orbax
import pytest

import nnx
from nnx import bridge
from tests.bridge.models import TX, FlaxNet, X, loss_of


class Net(nnx.Module):
    def __init__(self, ctx: nnx.Context):
        init = nnx.with_partitioning(nnx.initializers.normal(), ("embed", None))
        self.layers = [nnx.Linear(3, 5, ctx=ctx), nnx.BatchNorm(5), nnx.Dropout(0.5)]
        self.out = nnx.Linear(5, 2, kernel_init=init, ctx=ctx)

    def __call__(self, x: jax.Array, *, ctx: nnx.Context | None = None) -> jax.Array:
        return self.out(self.layers(x, ctx=ctx))

    def hidden(self, x: jax.Array) -> jax.Array:
        return self.layers[0](x)


def make() -> Net:
    return Net(nnx.context(0))


def assert_equal(first: nnx.State, second: nnx.State) -> None:
    assert list(first) == list(second)
    for path, leaf in first.items():
        assert type(leaf) is type(second[path]) and leaf.sharding == second[path].sharding
        np.testing.assert_array_equal(leaf.value, second[path].value, path)


def test_state_goes_to_flax_and_back():
    state = make().get_state()
    theirs = bridge.to_flax_state(make())
    assert isinstance(theirs["layers"][1]["mean"], flax.BatchStat)
    assert theirs["out"]["kernel"].get_metadata()["out_sharding"] == ("embed", None)
    assert_equal(bridge.from_flax_state(theirs), state)
    model = Net(nnx.context(1))
    model.load_state(bridge.from_flax_state(flax.to_pure_dict(theirs)))  # nested dicts of arrays do as well
    assert_equal(model.get_state(), state)


def test_types_made_on_demand_and_lora_survive_the_way_through_flax():
    model = nnx.Dict(calls=nnx.var("calls", jnp.ones(2)), lora=nnx.LoRAParam(jnp.ones(3)), table=jnp.arange(3))
    back = bridge.from_flax_state(bridge.to_flax_state(model))
    assert type(back["calls"]) is type(model.variable("calls")) and isinstance(back["lora"], nnx.LoRAParam)
    assert isinstance(back["table"], jax.Array)


def test_orbax_writes_our_weights_and_flax_reads_them(tmp_path):
    source = bridge.from_flax(FlaxNet(flax.Rngs(0))).filter(nnx.Param)
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "weights", flax.to_pure_dict(bridge.to_flax_state(source)))
    target = flax.to_pure_dict(flax.state(FlaxNet(flax.Rngs(1)), flax.Param))
    with orbax.StandardCheckpointer() as checkpointer:
        restored: Any = checkpointer.restore(tmp_path / "weights", target)
    np.testing.assert_array_equal(restored["dense"]["kernel"], source["dense/kernel"].value)
    assert list(bridge.from_flax_state(restored)) == list(source)


def test_module_trains_as_a_flax_module_as_it_does_here():
    ours, theirs = nnx.Optimizer(make().eval(), TX), bridge.to_flax(make())
    theirs.eval()
    optimizer = flax.Optimizer(theirs, TX, wrt=flax.Param)

    @flax.jit
    def their_step(model: Any, optimizer: Any) -> Any:
        value, grads = flax.value_and_grad(lambda model: loss_of(model(X)))(model)
        optimizer.update(model, grads)
        return value

    @nnx.jit
    def our_step(optimizer: nnx.Optimizer) -> Any:
        value, grads = nnx.value_and_grad(lambda model: loss_of(model(X)))(optimizer.model)
        optimizer.update(grads)
        return value

    for _ in range(3):
        np.testing.assert_allclose(their_step(theirs, optimizer), our_step(ours), rtol=1e-6)
    merged = theirs.merge()
    assert isinstance(merged, Net)
    assert merged.out.variable("kernel").sharding == ("embed", None)
    np.testing.assert_allclose(merged.out.kernel, ours.model.out.kernel, rtol=1e-4, atol=1e-6)


def test_flax_module_has_modes_keys_and_statistics_of_ours():
    theirs = bridge.to_flax(make(), flax.Rngs(dropout=0))
    theirs.train()
    first, second = theirs(X), theirs(X)
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(theirs(X, rngs=flax.Rngs(dropout=3)), theirs(X, rngs=flax.Rngs(dropout=3)))
    assert np.abs(theirs.merge().layers[1].mean).max() > 0
    theirs.eval()
    np.testing.assert_array_equal(theirs(X), theirs.merge().eval()(X))
    expected = {"/".join(map(str, path)) for path, _ in flax.to_flat_state(flax.state(theirs, flax.Param))}
    assert expected == set(make().filter(nnx.Param))


def test_source_of_a_flax_module_stays_as_it_is():
    model = make()
    before = model.get_state()
    theirs = bridge.to_flax(model, flax.Rngs(0))
    theirs.train()
    theirs(X)
    assert_equal(model.get_state(), before)


FLAGS = {
    flag: {"deterministic": value, "use_running_average": value} for flag, value in (("train", False), ("eval", True))
}


def test_linen_module_has_nested_names_and_the_numbers_of_ours():
    module = bridge.to_linen(Net)
    variables = module.init(jax.random.key(0), X, flags=FLAGS["eval"])
    assert variables["params"]["layers"]["0"]["kernel"].shape == (3, 5)
    assert variables["params"]["out"]["kernel"].names == ("embed", None)
    model = make()
    trees = linen.unbox(variables)
    model.load_state(nnx.State.from_nested(trees["params"]) | nnx.State.from_nested(trees["batch_stats"]))
    np.testing.assert_allclose(module.apply(variables, X, flags=FLAGS["eval"]), model.eval()(X), rtol=1e-6)
    np.testing.assert_allclose(module.apply(variables, X, run="hidden"), model.hidden(X), rtol=1e-6)
    rngs = {"dropout": jax.random.key(1)}
    _, new = module.apply(variables, X, flags=FLAGS["train"], rngs=rngs, mutable=["batch_stats"])
    model.train()(X, ctx=nnx.context(dropout=0))
    np.testing.assert_allclose(new["batch_stats"]["layers"]["1"]["mean"], model.layers[1].mean, rtol=1e-5)


def test_linen_module_names_a_collection_that_is_missing():
    module = bridge.to_linen(Net)
    variables = module.init(jax.random.key(0), X, flags=FLAGS["eval"])
    with pytest.raises(ValueError, match="not given the collection 'batch_stats'"):
        module.apply({"params": variables["params"]}, X)


def test_module_crosses_linen_twice():
    class Outer(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return linen.Dense(2)(bridge.to_linen(lambda ctx: nnx.Linear(3, 4, ctx=ctx), name="inner")(x))

    model = bridge.from_linen(Outer(), X, ctx=nnx.context(0))
    assert set(model.get_state()) == {"Dense_0/bias", "Dense_0/kernel", "inner/bias", "inner/kernel"}
    optimizer = nnx.Optimizer(model, optax.sgd(0.1))
    optimizer.update(nnx.grad(lambda model: (model(X) ** 2).sum())(model))


def test_pure_is_the_way_into_libraries_of_functions():
    model = nnx.MLP(3, 4, 3, ctx=nnx.context(0))
    pure = model.partition()
    out = jax.jit(lambda pure, x: pure.call(x))(pure, X)
    np.testing.assert_allclose(out, model(X), rtol=1e-5)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(pure))
