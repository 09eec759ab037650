"""``repr`` of a Module: an indented tree, arrays as shape and dtype."""

import jax
import jax.numpy as jnp
import numpy as np

import nnx


class Linear(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.full((2, 3), 0.123), ("in", "out"))
        self.mode = "fast"


class Model(nnx.Module):
    def __init__(self):
        self.first = Linear()
        self.second = self.first
        self.layers = [Linear() for _ in range(11)]
        self.host = np.full((4,), 7.25)


def test_repr_is_an_indented_tree():
    lines = repr(Model()).splitlines()
    assert lines[0].startswith("Model(")
    first = next(line for line in lines if "first" in line)
    inner = next(line for line in lines if "w" in line and "Param" in line)

    def indent(line):
        return len(line) - len(line.lstrip())

    assert indent(lines[0]) == 0
    assert 0 < indent(first) < indent(inner)
    assert "Linear(" in first


def test_variables_show_type_shape_dtype_and_metadata_and_statics_show_their_value():
    text = repr(Linear())
    assert "Param" in text
    assert "2, 3" in text or "2,3" in text
    assert "float32" in text
    assert "'in'" in text
    assert "'fast'" in text


class Options(nnx.Module):
    def __init__(self, size=4, bias=True, scale=None, act=jax.nn.relu, dtype=jnp.float32):
        self.size, self.bias, self.scale, self.act, self.dtype = size, bias, scale, act, jnp.dtype(dtype)
        self.kept = None


def test_flags_functions_and_dtypes_are_left_out_where_the_constructor_has_them_as_defaults():
    assert repr(Options()) == "Options(\n  size: 4\n  kept: None\n)"
    text = repr(Options(bias=False, scale=2.0, act=jax.nn.gelu, dtype=jnp.bfloat16))
    names = [line.split(":")[0].strip() for line in text.splitlines()[1:-1]]
    assert names == ["size", "bias", "scale", "act", "dtype", "kept"]
    changed = Options()
    changed.bias = 1  # equal to True, but no flag
    assert "bias: 1" in repr(changed)


def test_repr_of_a_layer_shows_its_distinguishing_settings():
    text = repr(nnx.Linear(2, 3, ctx=nnx.context(0)))
    assert text == (
        "Linear(\n  in_features: 2\n  out_features: 3\n  kernel: Param(float32[2,3])\n  bias: Param(float32[3])\n)"
    )


def test_arrays_print_as_shape_and_dtype_not_as_numbers():
    text = repr(Model())
    assert "0.123" not in text
    assert "7.25" not in text
    assert "float64" in text


def test_a_shared_submodule_prints_as_its_name_the_second_time():
    lines = repr(Model()).splitlines()
    second = next(line for line in lines if "second" in line)
    assert "Linear(...)" in second


def test_a_cycle_prints_as_its_name_the_second_time():
    m = Linear()
    m.me = m
    m.child = Linear()
    m.child.parent = m
    text = repr(m)
    assert text.count("Linear(...)") == 2


def test_attributes_are_in_the_order_of_assignment_and_items_in_numeric_order():
    text = repr(Model())
    positions = [text.index(f"{marker}") for marker in ("first", "second", "layers", "host")]
    assert positions == sorted(positions)
    keys = [line.strip().split(":")[0].split("=")[0] for line in repr(nnx.Sequence([1.5] * 12)).splitlines()]
    numbers = [int(key.strip("'\"[]() ")) for key in keys if key.strip("'\"[]() ").isdigit()]
    assert numbers in (list(range(12)), [])


def test_a_module_without_attributes_prints_on_one_line():
    assert repr(nnx.Module()) == "Module()"


def test_repr_works_inside_a_transform():
    @jax.jit
    def f(x):
        m = Linear()
        m.w = x
        text = repr(m)
        assert "Param" in text and "2, 3" in text.replace("2,3", "2, 3")
        return x

    f(jnp.ones((2, 3)))


def test_repr_of_shapes_deleted_arrays_keys_and_big_statics():
    m = nnx.Module()
    m.shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    m.key = jax.random.key(0)
    m.deleted = jnp.ones(3)
    m.deleted.delete()
    m.f = lambda x: x
    m.tree = {"k": jnp.full((2,), 0.5)}
    text = repr(m)
    assert "0.5" not in text
    for name in ("shape", "key", "deleted", "f", "tree"):
        assert name in text


# What `print` shows


class Block(nnx.Module):
    def __init__(self, size):
        self.inner = nnx.Linear(size, size, ctx=nnx.context(0))
        self.conv = nnx.Conv(size, size, (3, 3), use_bias=False, ctx=nnx.context(0))


def test_print_has_one_line_per_layer_and_one_entry_for_equal_items():
    model = nnx.Dict(blocks=[Block(2), Block(2), Block(2), Block(4)], scale=0.5)
    linear = "Linear({0}, {0}, kernel: Param(float32[{0},{0}]), bias: Param(float32[{0}]))"
    conv = "Conv({0}, {0}, (3, 3), use_bias: False, kernel: Param(float32[3,3,{0},{0}]))"
    expected = f"""\
Dict(
  blocks: Sequence(
    0-2: Block(
      inner: {linear.format(2)}
      conv: {conv.format(2)}
    )
    3: Block(
      inner: {linear.format(4)}
      conv: {conv.format(4)}
    )
  )
  scale: 0.5
)"""
    assert str(model) == expected
    assert len(repr(model).splitlines()) > 40


def test_a_layer_prints_on_one_line_of_at_most_100_columns():
    ctx = nnx.context(0)
    model = nnx.Dict(
        down=nnx.Conv(64, 128, (3, 3), strides=2, padding="VALID", ctx=ctx),
        norm=nnx.BatchNorm(64),
        attention=nnx.MultiHeadAttention(4, 64, ctx=ctx),
    )
    lines = str(model).splitlines()
    assert lines[1].strip() == (  # too long even so
        "down: Conv(64, 128, (3, 3), strides: (2, 2), padding: 'VALID', kernel: float32[3,3,64,128], ...)"
    )
    assert lines[2].strip() == (  # too long in full: without the types of the Variables
        "norm: BatchNorm(64, scale: float32[64], bias: float32[64], mean: float32[64], var: float32[64])"
    )
    assert lines[11].strip() == "query: LinearGeneral((64,), (4, 16), kernel: float32[64,4,16], bias: float32[4,16])"
    model.text, model.tail = "x" * 300, nnx.Dict(name="n" * 60, other="o" * 60)
    deep = nnx.Dict(block=nnx.Dict(a_layer_with_a_long_name=model))
    assert max(map(len, str(deep).splitlines())) <= 100
    assert f"tail: Dict(name: '{'n' * 60}', ...)" in str(deep)


def test_a_line_starts_like_the_call_of_the_constructor_as_far_as_its_arguments_are_attributes():
    class Half(nnx.Module):
        def __init__(self, size, seed, scale=2.0, *, bias):
            self.bias, self.scale, self.size = bias, scale, size

    assert str(Half(3, 0, bias=1)) == "Half(3, bias: 1)"
    assert str(Half(3, 0, 4.0, bias=1)) == "Half(3, bias: 1, scale: 4.0)"


def test_print_shows_sharing_and_cycles():
    model = nnx.Dict(a=nnx.Dropout(0.5))
    model.b, model.me = model.a, model
    assert str(model) == "Dict(\n  a: Dropout(0.5)\n  b: Dropout(...)\n  me: Dict(...)\n)"


def test_items_that_differ_or_are_not_next_to_each_other_are_not_one_entry():
    a, b = nnx.Dropout(0.5), nnx.Dropout(0.25)
    text = str(nnx.Sequence([a, b, nnx.Dropout(0.25), a, jnp.sin, jnp.sin]))
    labels = [line.split(":")[0].strip() for line in text.splitlines()[1:-1]]
    assert labels == ["0", "1-2", "3", "4-5"]


def test_print_of_a_class_with_its_own_repr_is_that_repr():
    class Named(nnx.Module):
        def __repr__(self):
            return "mine"

    assert str(Named()) == "mine"


def test_print_of_a_deep_model_does_not_recurse():
    model = nnx.Dict(n=1)
    for _ in range(3000):
        model = nnx.Dict(inner=model)
    assert str(model).count("Dict(") == 3001


def test_print_of_a_view_shows_its_values():
    model = nnx.Sequence([nnx.Dropout(0.5)])
    assert "deterministic: True" in str(model.view(deterministic=True)) and "deterministic" not in str(model)
