"""What a Module's class and dict can be: another Module class, never a pytree, never replaced wholesale."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import nnx


class Double(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))

    def __call__(self):
        return self.w * 2


class Triple(Double):
    def __call__(self):
        return self.w * 3


def test_a_new_class_is_noticed_by_a_compiled_function():
    call = nnx.jit(lambda model: model())
    model = nnx.Dict(inner=Double())
    run = nnx.jit(lambda model: model.inner())
    assert call(model.inner)[0] == 2.0 and run(model)[0] == 2.0
    model.inner.__class__ = Triple
    assert call(model.inner)[0] == 3.0 and run(model)[0] == 3.0
    assert "Triple" in str(model.get_module_def())


@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat])
def test_a_class_assigned_inside_a_transform_is_there_afterwards(transform):
    model = nnx.Dict(inner=Double())
    inner = model.inner

    @transform
    def become(model):
        model.inner.__class__ = Triple

    for _ in range(2):
        become(model)
        assert model.inner is inner and type(inner) is Triple
        model.inner.__class__ = Double


def test_a_body_that_runs_many_times_must_not_change_a_class():
    def become(model, carry, _):
        model.__class__ = Triple
        return carry, None

    with pytest.raises(ValueError, match="changes the class of"):
        nnx.scan(become, length=2)(Double(), 1.0, None)


def test_a_module_cannot_become_something_else():
    with pytest.raises(TypeError, match="the new class must be a subclass of nnx.Module, got .*int"):
        Double().__class__ = int


def test_the_dict_of_a_module_cannot_be_replaced():
    model = Double()
    with pytest.raises(AttributeError, match="Cannot assign `__dict__` of Double: .* update_state"):
        model.__dict__ = {}
    assert model()[0] == 2.0


def test_a_module_class_that_is_a_pytree_is_refused_when_it_is_used():
    @jax.tree_util.register_pytree_node_class
    class Early(nnx.Module):
        def tree_flatten(self):
            return (), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls()

    @dataclasses.dataclass
    class Late(nnx.Module):
        w: jax.Array

    with pytest.raises(ValueError, match="Early is registered with JAX as a pytree.*nnx.Pytree instead"):
        Early()
    late = Late(jnp.ones(2))
    assert nnx.jit(lambda m: m.w)(late)[0] == 1.0
    jax.tree_util.register_dataclass(Late, data_fields=["w"], meta_fields=[])
    for use in (
        lambda: nnx.grad(lambda m: m.w.sum(), wrt=...)(late),
        lambda: nnx.jit(lambda x, m: m.w)(1.0, late),
        lambda: nnx.Dict(late=late).partition(),
        lambda: Late(jnp.ones(2)).clone(),
    ):
        with pytest.raises(ValueError, match="Late is registered with JAX as a pytree"):
            use()
