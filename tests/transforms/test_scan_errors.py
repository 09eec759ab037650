"""What `nnx.scan` and `nnx.Scan` refuse, and that the Modules are then as before."""

import jax.numpy as jnp
import pytest

import nnx
from tests.transforms.scan_models import Block, layers


def test_variable_axes_without_length_is_an_error():
    message = "Cannot use variable_axes without specifying a length"
    with pytest.raises(ValueError, match=message):
        nnx.Scan(Block, variable_axes={nnx.Param: 0})(3, ctx=nnx.context(0))
    with pytest.raises(ValueError, match=message):

        class Bad(nnx.Module):
            @nnx.scan(variable_axes={nnx.Param: 0})
            def __init__(self, *, ctx):
                self.w = nnx.Param(jnp.ones(2))

        Bad(ctx=nnx.context(0))


def test_disagreeing_lengths_list_every_length_with_its_path():
    @nnx.scan(variable_axes={nnx.Param: 0}, length=5)
    def f(m, carry, x):
        return carry, None

    m = layers()
    with pytest.raises(ValueError) as error:
        f(m, 0.0, {"tokens": jnp.ones(3)})
    message = str(error.value)
    for fragment in ("kernel", "bias", "tokens", "3", "4", "5"):
        assert fragment in message
    assert m.count == 0


def test_a_carry_that_changes_dtype_is_an_error_that_names_its_path():
    m = layers()
    with pytest.raises((TypeError, ValueError), match="total") as error:
        nnx.scan(lambda m, c, x: ({"total": c["total"] + 0.5}, None))(
            m, {"total": jnp.zeros((), jnp.int32)}, jnp.ones(2)
        )
    assert "int32" in str(error.value) and "float32" in str(error.value)


def test_a_carry_that_changes_structure_is_an_error():
    m = layers()
    with pytest.raises((TypeError, ValueError), match="carry"):
        nnx.scan(lambda m, c, x: ((c, c), None))(m, 0.0, jnp.ones(2))


@pytest.mark.parametrize(
    "change, fragments",
    [
        (lambda m: m.count + 0.5, ("int32", "float32")),
        (lambda m: jnp.zeros((3,), jnp.int32), ("(3,)", "()")),
    ],
    ids=["dtype", "shape"],
)
def test_a_carried_variable_that_changes_is_an_error_that_names_its_path(change, fragments):
    @nnx.scan
    def f(m, carry, x):
        m["inner"].count = change(m["inner"])
        return carry, None

    m = nnx.Dict(inner=layers())
    with pytest.raises((TypeError, ValueError), match="inner/count") as error:
        f(m, 0.0, jnp.ones(2))
    message = str(error.value).replace("[3]", "(3,)").replace("[]", "()")
    assert all(fragment in message for fragment in fragments)
    assert m.inner.count == 0 and m.inner.count.dtype == jnp.int32


def set_static(m):
    m.mode = "eval"


def mutate_static_list(m):
    m.tags.append("b")


def add_static(m):
    m.note = 3


def replace_submodule(m):
    m.child = nnx.Dict(w=nnx.Param(jnp.ones(2)))


def add_submodule(m):
    m.fresh = nnx.Dict()


def remove_submodule(m):
    del m.child


def add_carried_variable(m):
    m.extra = nnx.Variable(jnp.ones(()))


def delete_variable(m):
    del m.w


@pytest.mark.parametrize(
    "change, path",
    [
        (set_static, "outer/mode"),
        (mutate_static_list, "outer/tags"),
        (add_static, "outer/note"),
        (replace_submodule, "outer/child"),
        (add_submodule, "outer/fresh"),
        (remove_submodule, "outer/child"),
        (add_carried_variable, "outer/extra"),
        (delete_variable, "outer/w"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_structural_changes_in_the_body_are_errors_that_name_the_path(change, path):
    class Outer(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))
            self.child = nnx.Dict(w=nnx.Param(jnp.ones(2)))
            self.mode, self.tags = "train", ["a"]

    m = nnx.Dict(outer=Outer())
    state, moduledef = m.partition()

    @nnx.scan
    def f(m, carry, x):
        change(m.outer)
        return carry, None

    with pytest.raises(Exception, match=path):
        f(m, 0.0, jnp.ones(2))
    assert m.get_module_def() == moduledef and m.get_state() == state


def test_a_body_that_returns_no_pair_is_an_error():
    with pytest.raises((TypeError, ValueError)):
        nnx.scan(lambda m, c, x: c)(layers(), 0.0, jnp.ones(2))


def test_a_context_in_the_carry_result_is_an_error():
    with pytest.raises((TypeError, ValueError), match="Context"):
        nnx.scan(lambda m, c, x, ctx: (c, ctx))(layers(), 0.0, jnp.ones(2), nnx.context(0))


def test_an_axis_at_a_modules_place_is_an_error_that_shows_variable_axes():
    def f(m, carry, x, other):
        return carry, x

    with pytest.raises(ValueError, match=r"in_axes has the axis 0 for argument 3.*variable_axes=\{nnx.Param: 0\}"):
        nnx.scan(f, in_axes=(0, 0))(layers(), 0.0, jnp.ones(2), layers(1))
    _, ys = nnx.scan(f, in_axes=(0, None))(layers(), 0.0, jnp.ones(2), layers(1))
    assert ys.shape == (2,)
    _, ys = nnx.scan(lambda m, carry, x: (carry, carry))(layers(), 0.0, {"x": jnp.ones(2), "m": layers(1)})
    assert ys.shape == (2,)


def test_an_output_axis_at_a_modules_place_is_an_error_that_shows_variable_axes():
    def f(m, carry, x):
        return carry, (m, x)

    model = layers()
    with pytest.raises(ValueError, match=r"out_axes has the axis 0 for the collected result\[0\].*variable_axes"):
        nnx.scan(f, out_axes=(0, 0))(model, 0.0, jnp.ones(2))
    for out_axes in (0, (None, 0)):
        _, (out, ys) = nnx.scan(f, out_axes=out_axes)(model, 0.0, jnp.ones(2))
        assert out is model and ys.shape == (2,)


def test_more_in_axes_than_arguments_are_an_error():
    with pytest.raises(ValueError, match="in_axes has 3 entries, but .* was called with 1 arguments after the carry"):
        nnx.scan(lambda m, carry, x: (carry, x), in_axes=(None, None, 0))(layers(), 0.0, jnp.ones(2))
