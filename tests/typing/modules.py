"""What a type checker makes of Modules, Variables and States. Read by pyright, never run."""

from typing import assert_type

import jax
import jax.numpy as jnp

import nnx


class Linear(nnx.Module):
    def __init__(self, din: int, dout: int, *, ctx: nnx.Context):
        self.kernel = nnx.Param(jax.random.uniform(ctx.make_rng("params"), (din, dout)))
        self.bias = nnx.Param(jnp.zeros((dout,)), sharding=("dout",))
        self.scale = nnx.param(jnp.ones(()))
        self.mean = nnx.BatchStat(jnp.zeros((dout,)))
        self.calls = nnx.var("calls", 0)
        self.features = din

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls += 1
        return x @ self.kernel + self.bias


class Pair(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        self.first = Linear(2, 3, ctx=ctx)
        self.items = nnx.Sequence([self.first, jnp.sin])


class Hiding(nnx.Module):
    variable: jax.Array  # declared, because the name is that of a method

    def __init__(self):
        self.variable = nnx.Param(jnp.ones(3))


def a_declared_attribute_can_have_the_name_of_a_method(model: Hiding) -> None:
    assert_type(model.variable, jax.Array)
    nnx.Module.train(model)


def an_attribute_made_from_a_variable_has_the_type_of_its_value(model: Linear) -> None:
    assert_type(model.kernel, jax.Array)
    assert_type(model.bias, jax.Array)
    assert_type(model.scale, jax.Array)
    assert_type(model.mean, jax.Array)
    assert_type(model.calls, int)
    assert_type(model.kernel.T @ model.kernel, jax.Array)


def a_constructor_makes_its_own_class(ctx: nnx.Context) -> None:
    model = Linear(2, 3, ctx=ctx)
    assert_type(model, Linear)
    assert_type(model(jnp.ones(2)), jax.Array)
    assert_type(Pair(ctx=ctx).first, Linear)


def methods_keep_the_class(model: Linear) -> None:
    assert_type(model.clone(), Linear)
    assert_type(model.clone(copy_arrays=True), Linear)
    assert_type(model.get_state(), nnx.State)
    assert_type(model.get_module_def(), nnx.ModuleDef[Linear])
    assert_type(model.collections(), set[str])
    assert_type(model.load_state({"kernel": jnp.ones((2, 3))}, strict=False), nnx.LoadReport)
    assert_type(model.freeze("encoder/*").unfreeze(nnx.Param), Linear)
    assert_type(model.view(features=3), Linear)


def a_partition_is_a_state_and_a_moduledef(model: Linear) -> None:
    state, moduledef = model.partition()
    rebuilt: Linear = moduledef.merge(state)
    assert_type(rebuilt.kernel, jax.Array)
    pure: nnx.PureModule[Linear] = model.partition()
    pure.update_state(model.get_state())


def states_combine(a: nnx.State, b: nnx.State) -> None:
    assert_type(a | b, nnx.State)
    assert_type(a - b, nnx.State)
    assert_type(nnx.State.merge(a, b), nnx.State)
    assert_type(list(a), list[str])
    assert_type(a.sub("encoder").map(lambda path, p, q: p, b), nnx.State)


def contexts_give_keys(ctx: nnx.Context) -> None:
    assert_type(nnx.context(0, dropout=1), nnx.Context)
    assert_type(ctx.make_rng("dropout"), jax.Array)
    assert_type(ctx.has_rng("dropout"), bool)
