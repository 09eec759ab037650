"""nnx.plot_model: a picture of the Modules of a model, and of where values go."""

import xml.etree.ElementTree as xml

import jax
import jax.numpy as jnp
import pytest

import nnx


class Residual(nnx.Module):
    def __init__(self, *, ctx):
        self.norm = nnx.LayerNorm(4, ctx=ctx)
        self.first = nnx.Linear(4, 8, ctx=ctx)
        self.second = nnx.Linear(8, 4, ctx=ctx)

    def __call__(self, x):
        return x + self.second(nnx.relu(self.first(self.norm(x))))


class Net(nnx.Module):
    def __init__(self, *, ctx):
        self.unused = nnx.Linear(4, 4, ctx=ctx)
        self.blocks = [Residual(ctx=ctx) for _ in range(3)]
        self.head = nnx.Linear(4, 2, ctx=ctx)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def texts(picture):
    root = xml.fromstring(picture.svg)
    return ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]


def test_arrows_follow_the_values_also_around_residual_connections():
    picture = nnx.plot_model(Residual(ctx=nnx.context(0)), jnp.ones((2, 4)))
    assert picture.edges == {
        ("input", "norm"), ("norm", "first"), ("first", "second"), ("second", "output"), ("input", "output")
    }  # fmt: skip


@pytest.mark.parametrize("wrap", [nnx.jit, nnx.remat], ids=["jit", "remat"])
def test_arrows_are_the_same_through_a_transform(wrap):
    class Wrapped(Residual):
        def __call__(self, x):
            return wrap(lambda module, x: Residual.__call__(module, x))(self, x)

    plain, wrapped = (nnx.plot_model(cls(ctx=nnx.context(0)), jnp.ones((2, 4))) for cls in (Residual, Wrapped))
    assert wrapped.edges == plain.edges


def test_boxes_have_shapes_and_parameters_and_equal_items_are_drawn_once():
    picture = nnx.plot_model(Net(ctx=nnx.context(0)), jnp.ones((2, 4)))
    shown = texts(picture)
    assert shown.count("first Linear") == 1 and "0-2 (3 times) Residual" in shown
    assert "float32[2,8]   40 parameters" in shown and "head Linear" in shown and "unused Linear" in shown
    assert ("blocks/0/second", "head") in picture.edges and not any("unused" in edge for edge in picture.edges)


def test_depth_draws_what_is_below_as_one_box(tmp_path):
    picture = nnx.plot_model(Net(ctx=nnx.context(0)), jnp.ones((2, 4)), depth=1, path=tmp_path / "new" / "net.svg")
    assert picture.edges == {("input", "blocks"), ("blocks", "head"), ("head", "output")}
    assert (tmp_path / "new" / "net.svg").read_text() == picture.svg == picture._repr_svg_()


def test_without_inputs_there_are_boxes_and_no_arrows_and_nothing_is_allocated():
    large = nnx.eval_shape(nnx.Linear, 10**6, 10**6, ctx=nnx.context(0))
    picture = nnx.plot_model(large)
    assert picture.edges == set() and "1,000,001,000,000 parameters" in texts(picture)
    assert nnx.plot_model(large, jax.ShapeDtypeStruct((1, 10**6), jnp.float32)).edges == {
        ("input", "(root)"), ("(root)", "output")
    }  # fmt: skip


def test_names_are_escaped():
    assert "<&> Identity" in texts(nnx.plot_model(nnx.Dict({"<&>": nnx.Identity()})))
