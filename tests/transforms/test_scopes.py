"""Submodule calls appear under their paths in the names of compiled operations, and nowhere else."""

import abc
import inspect
import re

import jax
import jax.numpy as jnp
import pytest

import nnx


class Block(nnx.Module):
    def __init__(self, ctx):
        self.inner = nnx.Sequence([nnx.Linear(2, 2, ctx=ctx), jnp.sin])

    def __call__(self, x):
        return x + self.inner(x)


class Taller(Block):
    def __call__(self, x):
        return super().__call__(x)


class Model(nnx.Module):
    def __init__(self, ctx, block=Taller):
        self.blocks = [block(ctx), block(ctx)]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


X = jnp.ones((1, 2))


def operation_names(function, *args, kind="dot_general"):
    text = nnx.jit(function).lower(*args).compile().as_text()
    names = re.findall(r'op_name="([^"]*)"', text)
    # Without the first part, jit(f), and the name of a function that the layer itself jits.
    return {re.sub(r"/jit\(_\w+\)", "", name.partition("/")[2]) for name in names if name.endswith(kind)}


@pytest.fixture
def model():
    return Model(nnx.context(0))


def test_operations_are_named_by_the_path_of_the_layer(model):
    names = operation_names(lambda m, x: m(x), model, X)
    assert names == {"blocks/0/inner/0/dot_general", "blocks/1/inner/0/dot_general"}


def test_a_method_between_two_calls_leaves_the_path_whole(model):
    names = operation_names(lambda m, x: m.blocks[1].inner[0](x), model, X)
    assert names == {"blocks/1/inner/0/dot_general"}


def test_names_survive_derivatives(model):
    def step(m, x):
        return nnx.grad(lambda m: (m(x) ** 2).sum())(m)

    names = operation_names(step, model, X)
    assert any("jvp" in name and "blocks/1" in name for name in names)
    assert any("transpose" in name and "blocks/0" in name for name in names)


def test_names_survive_remat():
    class Checkpointed(Block):
        @nnx.remat
        def __call__(self, x):
            return x + self.inner(x)

    def step(m, x):
        return nnx.grad(lambda m: (m(x) ** 2).sum())(m)

    names = operation_names(step, Model(nnx.context(0), Checkpointed), X)
    assert any(re.search(r"blocks/0.*inner/0", name) for name in names)
    assert any(re.search(r"blocks/1.*inner/0", name) for name in names)


def test_a_shared_layer_has_its_canonical_path(model):
    model.head = model.blocks[0].inner[0]
    names = operation_names(lambda m, x: m.blocks[0](x), model, X)
    assert names == {"blocks/0/inner/head/dot_general"}


def test_names_are_metadata_only(model):
    lowered = nnx.jit(lambda m, x: m(x)).lower(model, X)
    assert "inner" not in lowered.as_text() and "inner" in lowered.as_text(debug_info=True)


def test_eager_calls_have_no_further_frame(model):
    class Fails(nnx.Module):
        def __call__(self, x):
            raise KeyError("no")

    with pytest.raises(KeyError) as caught:
        nnx.Sequence([Fails()])(X)
    assert [entry.name for entry in caught.traceback] == [
        "test_eager_calls_have_no_further_frame",
        "__call__",
        "__call__",
    ]


def test_a_class_still_shows_its_own_call(model):
    assert inspect.isfunction(Block.__call__) and list(inspect.signature(model.blocks[0]).parameters) == ["x"]
    assert model.blocks[0].__call__.__func__.__wrapped__ is Taller.__call__


def test_an_abstract_call_stays_abstract():
    class Base(nnx.Module, abc.ABC):
        @abc.abstractmethod
        def __call__(self, x): ...

    with pytest.raises(TypeError, match="abstract"):
        Base()  # pyright: ignore[reportAbstractUsage]


def test_modules_that_leave_a_transform_open_no_scope(model):
    returned = nnx.jit(lambda m: m, stateful=False)(model)
    text = jax.jit(lambda: returned(X)).lower().as_text(debug_info=True)
    assert "inner" not in text
