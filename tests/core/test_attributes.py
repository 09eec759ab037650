"""What is assigned to a Module attribute decides its kind: variable, node, submodule, container or static."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.checks import assert_refused
from tests.models import Box, Count, Scale

# containers


def test_a_container_becomes_a_variable_and_reads_as_the_raw_value():
    w = jnp.ones(2)
    m = Box(w=nnx.Param(w, ("a",)), count=Count(0))
    assert m.w is w
    assert m.count == 0
    state = m.get_state()
    assert type(state["w"]) is nnx.Param
    assert state["w"].sharding == ("a",)
    assert type(state["count"]) is Count


def test_type_and_metadata_stick_to_the_attribute():
    m = Box(w=nnx.Param(1.0, ("a",), unit="m"))
    m.w = 2.0
    container = m.variable("w")
    assert type(container) is nnx.Param
    assert (container.value, container.sharding, container.unit) == (2.0, ("a",), "m")


def test_augmented_assignment_keeps_the_variable():
    m = Box(count=Count(0))
    m.count += 1
    assert m.count == 1
    assert m.get_state()["count"] == Count(1)


def test_assigning_an_equivalent_container_replaces_the_value():
    m = Box(w=nnx.Param(1.0, ("a",)))
    m.w = nnx.Param(2.0, ("a",))
    assert m.w == 2.0


@pytest.mark.parametrize(
    "other",
    [nnx.BatchStat(2.0, ("a",)), nnx.Variable(2.0, ("a",)), nnx.Param(2.0), nnx.Param(2.0, ("b",)), nnx.Node(2.0)],
)
def test_assigning_a_different_container_is_an_error_and_changes_nothing(other):
    m = Box(w=nnx.Param(1.0, ("a",)))
    before = m.get_module_def()
    with pytest.raises(ValueError, match="incompatible container|is not compatible") as error:
        m.w = other
    assert "w" in str(error.value)
    assert m.variable("w") == nnx.Param(1.0, ("a",))
    assert m.get_module_def() == before


def test_assigning_a_module_to_a_variable_is_an_error_and_changes_nothing():
    m = Box(w=nnx.Param(1.0))
    with pytest.raises((ValueError, TypeError), match="w"):
        m.w = Scale()
    assert m.variable("w") == nnx.Param(1.0)
    assert list(m.modules()) == [m]


@pytest.mark.parametrize(
    "hide",
    [lambda m: nnx.Param(m), lambda m: nnx.Cache({"k": m}), lambda m: nnx.Node([m]), lambda m: nnx.Ref(nnx.Param(m))],
    ids=["variable", "dict in variable", "node", "ref"],
)
def test_a_module_wrapped_in_a_container_is_an_error(hide):
    m = Box()
    with pytest.raises(ValueError, match=r"cannot hold a Module \(Scale\)(.|\n)*Assign the Module itself"):
        m.w = hide(Scale())
    assert not hasattr(m, "w")


def test_a_module_written_to_a_ref_or_by_replace_is_an_error():
    ref, param = nnx.Ref(nnx.Param(1.0)), nnx.Param(1.0)
    with pytest.raises(ValueError, match="Param cannot hold a Module"):
        ref.value = Scale()
    with pytest.raises(ValueError, match="Param cannot hold a Module"):
        param.replace([Scale()])
    with pytest.raises(ValueError, match="Node cannot hold Ref"):
        nnx.Node({"tied": ref})
    assert ref.variable.value == 1.0


def test_after_deletion_an_attribute_is_free_for_another_kind():
    m = Box(w=nnx.Param(1.0))
    del m.w
    assert not hasattr(m, "w")
    assert "w" not in m.get_state()
    m.w = nnx.BatchStat(2.0)
    assert type(m.variable("w")) is nnx.BatchStat


def test_deleting_a_missing_attribute_raises():
    with pytest.raises(AttributeError, match="nothing"):
        del Box().nothing


def test_reading_a_missing_attribute_raises_with_class_and_attribute():
    with pytest.raises(AttributeError, match="Box.*nothing|nothing.*Box"):
        Box().nothing  # noqa: B018


def test_a_static_container_is_static():
    m = Box(mode=nnx.Static("fast"))
    assert m.mode == "fast"
    assert "mode" not in m.get_state()
    assert m.get_module_def() == Box(mode=nnx.Static("fast")).get_module_def()
    assert m.get_module_def() != Box(mode=nnx.Static("slow")).get_module_def()


# nodes


@pytest.mark.parametrize(
    "value", [jnp.ones(2), np.ones(2), jax.ShapeDtypeStruct((2,), jnp.float32)], ids=["jax", "numpy", "shape"]
)
def test_an_array_is_a_node_and_a_bare_leaf_of_the_state(value):
    m = Box(x=value)
    assert m.x is value
    assert m.get_state()["x"] is value


def test_a_tracer_is_a_node():
    @jax.jit
    def run(x):
        m = Box(x=x)
        assert m.x is x
        assert m.get_state()["x"] is x
        return m.x + 1

    assert run(1.0) == 2.0


def test_a_typed_key_is_a_node():
    key = jax.random.key(0)
    m = Box(key=key)
    assert m.get_state()["key"] is key


def test_a_registered_node_type_is_a_node():
    class Payload:
        def __init__(self, x):
            self.x = x

    payload = Payload(1)
    assert not nnx.is_node(payload)
    assert "p" not in Box(p=payload).get_state()
    jax.tree_util.register_pytree_node(Payload, lambda p: ((p.x,), None), lambda _, children: Payload(*children))
    nnx.register_node_type(Payload)
    assert nnx.is_node(payload)
    m = Box(p=payload)
    assert m.p is payload
    assert "p" in m.get_state()
    assert jax.tree.leaves(m.get_state()) == [1]


def test_is_node_knows_the_kinds_of_data():
    assert nnx.is_node(jnp.ones(1))
    assert nnx.is_node(np.ones(1))
    assert nnx.is_node(jax.ShapeDtypeStruct((), jnp.float32))
    assert nnx.is_node(nnx.Param(1))
    assert not nnx.is_node(1)
    assert not nnx.is_node("text")


def test_a_static_attribute_may_become_a_node():
    m = Box(x=None)
    m.x = jnp.ones(2)
    assert list(m.get_state()) == ["x"]


def test_new_value_of_a_node_is_not_a_structural_change():
    m = Box(x=jnp.zeros(2))
    before = m.get_module_def()
    m.x = jnp.ones(2)
    assert m.get_module_def() == before
    np.testing.assert_array_equal(m.get_state()["x"], [1, 1])


# submodules


def test_a_module_is_a_submodule_and_reads_as_itself():
    child = Scale()
    m = Box(child=child)
    assert m.child is child
    assert list(m.get_state()) == ["child/s"]


def test_a_submodule_may_be_replaced_by_another():
    m = Box(child=Scale(1.0))
    m.child = Box(a=Scale(2.0))
    assert list(m.get_state()) == ["child/a/s"]


def test_a_submodule_in_two_places_is_one_submodule():
    child = Scale()
    m = Box(a=child, b=child)
    assert list(m.get_state()) == ["a/s"]
    again = m.partition().merge()
    assert again.a is again.b


def test_a_module_may_contain_itself():
    m = Box(s=nnx.Param(1.0))
    m.me = m
    assert list(m.get_state()) == ["s"]
    again = m.partition().merge()
    assert again.me is again


# plain containers of Modules


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_or_tuple_of_modules_becomes_a_sequence(kind):
    first, second = Scale(1.0), Scale(2.0)
    m = Box(layers=kind([first, second]))
    assert isinstance(m.layers, nnx.Sequence)
    assert m.layers[0] is first
    assert m.layers[1] is second
    assert list(m.get_state()) == ["layers/0/s", "layers/1/s"]


def test_a_dict_of_modules_becomes_a_dict():
    first = Scale()
    m = Box(heads={"first": first, "second": Scale()})
    assert isinstance(m.heads, nnx.Dict)
    assert m.heads["first"] is first
    assert list(m.get_state()) == ["heads/first/s", "heads/second/s"]


def test_a_list_of_containers_becomes_a_sequence():
    m = Box(ws=[nnx.Param(1.0), nnx.BatchStat(2.0)])
    assert isinstance(m.ws, nnx.Sequence)
    assert m.ws[0] == 1.0
    assert {path: type(leaf) for path, leaf in m.get_state().items()} == {"ws/0": nnx.Param, "ws/1": nnx.BatchStat}


def test_modules_are_found_at_any_depth():
    m = Box(blocks={"a": [Scale(), (Scale(), {"deep": Scale()})], "n": 3})
    assert isinstance(m.blocks, nnx.Dict)
    assert isinstance(m.blocks["a"], nnx.Sequence)
    assert isinstance(m.blocks["a"][1], nnx.Sequence)
    assert isinstance(m.blocks["a"][1][1], nnx.Dict)
    assert m.blocks["n"] == 3
    assert list(m.get_state()) == ["blocks/a/0/s", "blocks/a/1/0/s", "blocks/a/1/1/deep/s"]


def test_arrays_and_statics_beside_modules_are_kept():
    m = Box(parts=[Scale(), jnp.ones(2), "name", 3])
    assert list(m.get_state()) == ["parts/0/s", "parts/1"]
    again = m.partition().merge()
    assert again.parts[2] == "name"
    assert again.parts[3] == 3


@pytest.mark.parametrize("key", [1, "a/b", None, ("a", "b")])
def test_a_dict_of_modules_with_a_bad_key_is_a_clear_error_and_changes_nothing(key):
    m = Box()
    with pytest.raises((ValueError, TypeError)) as error:
        m.heads = {key: Scale()}
    assert repr(key) in str(error.value)
    assert not hasattr(m, "heads")
    assert len(m.get_state()) == 0


# filled by append in the constructor


def test_a_list_filled_by_append_in_the_constructor_becomes_a_sequence():
    class Stack(nnx.Module):
        def __init__(self, n):
            self.layers = []
            for i in range(n):
                self.layers.append(Scale(float(i)))

    m = Stack(3)
    assert isinstance(m.layers, nnx.Sequence)
    assert len(m.layers) == 3
    assert list(m.get_state()) == ["layers/0/s", "layers/1/s", "layers/2/s"]


def test_layers_filled_by_append_in_the_constructor_run_and_have_state():
    class Stack(nnx.Module):
        def __init__(self):
            self.layers = []
            for i in range(3):
                self.layers.append(Scale(float(i + 1)))

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    m = Stack()
    assert float(m(1.0)) == 6.0
    assert list(m.get_state()) == ["layers/0/s", "layers/1/s", "layers/2/s"]


def test_a_dict_filled_in_the_constructor_becomes_a_dict():
    class Heads(nnx.Module):
        def __init__(self):
            self.heads = {}
            self.heads["a"] = Scale()
            self.heads["b"] = nnx.Param(1.0)

    m = Heads()
    assert isinstance(m.heads, nnx.Dict)
    assert list(m.get_state()) == ["heads/a/s", "heads/b"]


def test_a_nested_list_filled_in_the_constructor_is_converted_too():
    class Grid(nnx.Module):
        def __init__(self):
            self.rows = [[], []]
            for row in self.rows:
                row.append(Scale())

    assert list(Grid().get_state()) == ["rows/0/0/s", "rows/1/0/s"]


def test_lists_filled_by_a_subclass_after_super_init_are_converted():
    class Base(nnx.Module):
        def __init__(self):
            self.layers = []
            self.layers.append(Scale())

    class Derived(Base):
        def __init__(self):
            super().__init__()
            self.layers.append(Scale())
            self.extra = []
            self.extra.append(Scale())

    assert list(Derived().get_state()) == ["extra/0/s", "layers/0/s", "layers/1/s"]


def test_a_list_that_stays_empty_or_holds_numbers_stays_a_plain_list():
    class Plain(nnx.Module):
        def __init__(self):
            self.empty = []
            self.sizes = []
            self.sizes.append(3)

    m = Plain()
    assert type(m.empty) is list
    assert type(m.sizes) is list
    assert len(m.get_state()) == 0


@pytest.mark.parametrize("late", [Scale(), nnx.Param(1.0), jnp.ones(1)], ids=["module", "container", "array"])
def test_the_same_append_after_construction_is_an_error_naming_the_path(late):
    m = Box(inner=Box(layers=[1, 2]))
    m.inner.layers.append(late)
    with pytest.raises((ValueError, TypeError), match="inner/layers"):
        m.partition()


# statics


@pytest.mark.parametrize(
    "value",
    [1, 1.5, True, "text", None, [1, 2], {"a": 1}, (1, "b"), {1, 2}, print, int, jnp.float32, jnp.dtype("int8")],
)
def test_other_values_are_static(value):
    m = Box(x=value)
    assert m.x is value
    assert len(m.get_state()) == 0
    assert m.get_module_def() == Box(x=value).get_module_def()
    assert m.partition().merge().x == value


# names


@pytest.mark.parametrize(
    "name",
    [
        "partition",
        "get_state",
        "get_module_def",
        "filter",
        "pop_state",
        "update_state",
        "clone",
        "apply",
        "mutable_state_dict",
        "sow",
        "for_each",
        "modules",
        "named_modules",
        "variable",
        "collections",
        "get_path",
        "set_path",
    ],
)
@pytest.mark.parametrize("value", [1, nnx.Param(1), jnp.ones(1)], ids=["static", "variable", "node"])
def test_a_name_of_modules_own_api_cannot_be_an_attribute(name, value):
    m = Box()
    with pytest.raises((AttributeError, ValueError, TypeError), match=name):
        setattr(m, name, value)
    assert callable(getattr(m, name))
    assert len(m.get_state()) == 0


@pytest.mark.parametrize("name", ["a/b", "/a", ""])
def test_a_name_that_cannot_be_a_path_segment_is_an_error(name):
    m = Box()
    with pytest.raises(ValueError, match=rf"attribute '{name}' of Box: .* segments of paths"):
        setattr(m, name, nnx.Param(1.0))
    assert len(m.get_state()) == 0


INCOMPATIBLE = "Cannot replace value from incompatible container"


@pytest.mark.parametrize(
    "does, error, says",
    [
        (
            lambda m: setattr(m.enc, "w", nnx.BatchStat(1.0)),
            ValueError,
            (INCOMPATIBLE, "'w'", "Block", "Param", "BatchStat", "delete"),
        ),
        (
            lambda m: setattr(m.enc, "w", nnx.Param(1.0, ("out",))),
            ValueError,
            (INCOMPATIBLE, "'w'", "('in',)", "('out',)"),
        ),
        (lambda m: setattr(m.enc, "w", Scale()), ValueError, ("'w'", "Param", "Scale")),
        (lambda m: setattr(m, "f", lambda x: m.enc), ValueError, ("'f'", "Tree", "method")),
        (
            lambda m: setattr(m.enc, "cache", {"k": jnp.ones(1), "name": "x"}),
            ValueError,
            ("'cache'", "['name']", "'x'"),
        ),
        (lambda m: setattr(m.enc, "filter", 1), AttributeError, ("'filter'", "Block", "another name")),
    ],
    ids=[
        "container of another type",
        "other metadata",
        "module into a variable",
        "module in a lambda",
        "data that JAX cannot take",
        "name of the API",
    ],
)
def test_a_refused_assignment_names_the_attribute_and_what_to_write_and_changes_nothing(does, error, says):
    assert_refused(does, error, says)


def test_a_subclass_may_override_a_method_in_its_class_body():
    class Own(nnx.Module):
        def filter(self, *filters):
            return "mine"

    assert Own().filter() == "mine"


def test_entries_written_directly_to_the_instance_dict_are_ignored():
    class Lazy(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))
            self.calls = 0

        @functools.cached_property
        def total(self):
            return self.w.sum()

    m = Lazy()
    before = m.get_module_def()
    assert float(m.total) == 2.0
    assert m.get_module_def() == before
    assert list(m.get_state()) == ["w"]
    for again in (m.clone(), m.partition().merge()):
        assert "total" not in vars(again)
        again.w = jnp.zeros(2)
        assert float(again.total) == 0.0
    assert float(m.total) == 2.0
