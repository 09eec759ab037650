"""A first program in the style of the README of version 0.0.8, with an attribute called `variable`."""

import jax
import jax.numpy as jnp

import nnx


class Submodule(nnx.Module):
    pass


class Attributes(nnx.Module):
    def __init__(self, *, ctx: nnx.Context):
        key = ctx.make_rng("params")
        self.variable = nnx.Param(jax.random.uniform(key, (3,)))
        self.node = nnx.Node(jnp.zeros(2))
        self.submodule = Submodule()
        self.static = 12


def test_a_module_can_call_its_attributes_by_what_they_are():
    model = Attributes(ctx=nnx.context(jax.random.PRNGKey(0)))
    state, moduledef = model.partition()
    assert list(state) == ["node", "variable"] and isinstance(state["variable"], nnx.Param)
    again = moduledef.merge(jax.tree.map(lambda x: x + 1, state))
    assert (again.variable == model.variable + 1).all() and again.static == 12
    assert nnx.jit(lambda model: model.variable.sum())(model).shape == ()
    assert nnx.Module.variable(model, "variable") == state["variable"]
