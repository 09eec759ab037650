"""One array in two Params: `head.kernel = embed.embedding` ties nothing, and what trains or shows the model says so."""

import warnings

import jax.numpy as jnp
import optax
import pytest

import nnx


class Tied(nnx.Module):
    def __init__(self, tie, *, ctx):
        self.embed = nnx.Embed(5, 5, ctx=ctx)
        self.blocks = [nnx.Linear(5, 5, ctx=ctx)]
        tie(self.embed, self.blocks[0])


def by_assignment(embed, head):
    head.kernel = embed.embedding


def by_ref(embed, head):
    embed.embedding = head.kernel = nnx.Ref(embed.variable("embedding"))


def loss(model):
    return (model.blocks[0].kernel + model.embed.embedding).sum()


USES = {
    "nnx.Optimizer": lambda model: nnx.Optimizer(model, optax.sgd(0.1)),
    "nnx.summary": lambda model: nnx.summary(model),
    "nnx.grad": lambda model: nnx.grad(loss)(model),
    "nnx.grad in nnx.jit": nnx.jit(lambda model: nnx.grad(loss)(model)),
    "nnx.value_and_grad in nnx.jit twice": nnx.jit(nnx.jit(lambda model: nnx.value_and_grad(loss)(model)[0])),
}
each = pytest.mark.parametrize("use", USES.values(), ids=USES)


@each
def test_an_assigned_array_warns_with_both_paths_and_the_ref_to_write(use):
    model = Tied(by_assignment, ctx=nnx.context(0))
    with pytest.warns(UserWarning, match="'blocks/0/kernel' and 'embed/embedding' are two Variables") as record:
        use(model)
    assert "ref = nnx.Ref(model.blocks[0].variable('kernel'))" in str(record[0].message)
    assert "model.blocks[0].kernel = model.embed.embedding = ref" in str(record[0].message)
    assert record[0].filename == __file__


@each
def test_untied_weights_warn_once_per_model(use):
    model = Tied(by_assignment, ctx=nnx.context(0))
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        use(model), use(model)
    assert len(record) <= 1


@each
@pytest.mark.parametrize("tie", [by_ref, lambda embed, head: None], ids=["a Ref", "nothing shared"])
def test_a_real_tie_does_not_warn(use, tie):
    use(Tied(tie, ctx=nnx.context(0)))


@each
def test_advice_of_the_warning_works(use):
    model = Tied(by_assignment, ctx=nnx.context(0))
    ref = nnx.Ref(model.blocks[0].variable("kernel"))
    model.blocks[0].kernel = model.embed.embedding = ref
    use(model)
    model = Tied(by_assignment, ctx=nnx.context(0))
    model.embed.embedding = jnp.copy(model.embed.embedding)
    use(model)


def test_an_array_in_three_places_is_one_warning_with_one_ref_to_write():
    array = jnp.zeros(2)
    model = nnx.Dict({name: nnx.Param(array) for name in "abc"})
    with pytest.warns(UserWarning, match="'a', 'b' and 'c' are 3 Variables that hold one array") as record:
        nnx.Optimizer(model, optax.sgd(0.1))
    assert len(record) == 1 and "\n    model.a = model.b = model.c = ref\n" in str(record[0].message)


@each
def test_layers_that_start_as_clones_do_not_warn(use):
    model = Tied(lambda embed, head: None, ctx=nnx.context(0))
    block = nnx.Sequence([nnx.Linear(5, 5, ctx=nnx.context(0)), nnx.Embed(3, 2, ctx=nnx.context(0))])
    model.stack = [block, block.clone(), block.clone()]
    use(model)


@each
def test_a_frozen_variable_is_not_trained_apart(use):
    model = Tied(by_assignment, ctx=nnx.context(0))
    model.embed.freeze(...)
    use(model)


def test_a_model_under_two_arguments_of_grad_does_not_warn():
    model = Tied(lambda embed, head: None, ctx=nnx.context(0))
    nnx.grad(lambda a, b: loss(a) + loss(b), argnums=(0, 1))(model, model.clone())
