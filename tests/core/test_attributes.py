"""What is assigned to a Module attribute decides its kind: variable, node, submodule, container or static."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx


class Box(nnx.Module):
    """A Module that holds whatever it is given."""

    def __init__(self, **attributes):
        for name, value in attributes.items():
            setattr(self, name, value)


class Scale(nnx.Module):
    def __init__(self, s=1.0):
        self.s = nnx.Param(jnp.asarray(s))

    def __call__(self, x):
        return x * self.s


class Count(nnx.Variable):
    pass


class Point(NamedTuple):
    x: object
    y: object


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


def test_deleting_what_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing"):
        del Box().nothing


def test_reading_what_is_not_there_is_an_attribute_error_naming_class_and_attribute():
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


def test_a_new_value_in_a_node_is_no_structural_change():
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


# pytrees of arrays


def test_a_pytree_of_arrays_is_one_node():
    cache = {"k": jnp.zeros(2), "v": [jnp.ones(2), jnp.ones(1)]}
    m = Box(cache=cache)
    assert m.cache is cache
    state = m.get_state()
    assert list(state) == ["cache"]
    assert type(state["cache"]) is nnx.Node
    assert jax.tree.structure(state["cache"].value) == jax.tree.structure(cache)


@pytest.mark.parametrize(
    "value",
    [
        [jnp.ones(1)],
        (jnp.ones(1), jnp.ones(2)),
        {"a": {"b": np.ones(1)}},
        Point(jnp.ones(1), 2),
        optax.adam(1e-3).init({"w": jnp.ones(2)}),
    ],
    ids=["list", "tuple", "dict", "namedtuple", "optax state"],
)
def test_a_pytree_keeps_its_type_through_partition_and_merge(value):
    m = Box(x=value)
    assert type(m.x) is type(value)
    assert list(m.get_state()) == ["x"]
    again = m.partition().merge()
    assert type(again.x) is type(value)
    assert jax.tree.structure(again.x) == jax.tree.structure(value)
    for mine, theirs in zip(jax.tree.leaves(again.x), jax.tree.leaves(value), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_python_numbers_beside_arrays_are_data():
    m = Box(x={"w": jnp.ones(2), "step": 3, "rate": 0.5, "on": True})
    assert len(jax.tree.leaves(m.get_state())) == 4
    assert m.get_module_def() == Box(x={"w": jnp.ones(2), "step": 4, "rate": 0.1, "on": False}).get_module_def()


@pytest.mark.parametrize("leaf", ["text", object(), print], ids=["str", "object", "function"])
def test_a_leaf_jax_cannot_take_is_an_error_at_assignment(leaf):
    m = Box(y=1)
    with pytest.raises((ValueError, TypeError), match="x"):
        m.x = {"w": jnp.ones(2), "bad": leaf}
    assert not hasattr(m, "x")
    assert len(m.get_state()) == 0


def test_pytree_values_may_be_changed_in_place():
    m = Box(cache={"k": jnp.zeros(2)})
    m.get_state()
    m.cache["k"] = jnp.ones(2)
    m.cache["new"] = jnp.ones(3)
    value = m.get_state()["cache"].value
    np.testing.assert_array_equal(value["k"], [1, 1])
    assert set(value) == {"k", "new"}


def test_pytrees_inside_variables_may_be_changed_in_place():
    m = Box(cache=nnx.Cache({"k": jnp.zeros(2)}))
    m.get_state()
    m.cache["k"] = jnp.ones(2)
    np.testing.assert_array_equal(m.get_state()["cache"].value["k"], [1, 1])


@pytest.mark.parametrize(
    "rebuild",
    [lambda m: m.clone(), lambda m: m.partition().merge(), lambda m: m.apply(None)[1]],
    ids=["clone", "partition and merge", "apply"],
)
@pytest.mark.parametrize("wrap", [lambda d: d, nnx.Cache], ids=["node", "variable"])
def test_every_rebuild_makes_fresh_containers(rebuild, wrap):
    class Callable(Box):
        def __call__(self, _):
            return None

    m = Callable(cache=wrap({"k": jnp.zeros(()), "inner": [jnp.zeros(())]}))
    again = rebuild(m)
    again.cache["k"] = jnp.ones(())
    again.cache["inner"].append(jnp.ones(()))
    assert float(m.cache["k"]) == 0.0
    assert len(m.cache["inner"]) == 1


def test_an_empty_pytree_seen_first_does_not_change_how_later_ones_are_treated():
    class Bag:
        def __init__(self, items):
            self.items = items

    jax.tree_util.register_pytree_node(Bag, lambda b: (tuple(b.items), None), lambda _, items: Bag(list(items)))
    for length in (0, 1):
        m = Box(cache=nnx.Cache(Bag([jnp.zeros(())] * length)))
        state, twin = m.get_state(), m.clone()
        m.cache.items.append(jnp.ones(()))
        assert len(m.cache.items) == length + 1
        assert len(state["cache"].value.items) == length
        assert len(twin.cache.items) == length


def test_partition_does_not_share_a_registered_node_with_the_module():
    class Cell:
        def __init__(self, x):
            self.x = x

    jax.tree_util.register_pytree_node(Cell, lambda c: ((c.x,), None), lambda _, children: Cell(*children))
    nnx.register_node_type(Cell)
    m = Box(cell=Cell(jnp.zeros(())))
    state, twin = m.get_state(), m.clone()
    m.cell.x = jnp.ones(())
    assert float(jax.tree.leaves(state)[0]) == 0.0
    assert float(twin.cell.x) == 0.0
    assert float(jax.tree.leaves(m.get_state())[0]) == 1.0


def test_partition_does_not_share_its_pytrees_with_the_module():
    m = Box(cache={"k": jnp.zeros(())})
    state, moduledef = m.partition()
    m.cache["k"] = jnp.ones(())
    assert float(state["cache"].value["k"]) == 0.0
    first, second = moduledef.merge(state), moduledef.merge(state)
    first.cache["k"] = jnp.full((), 5.0)
    assert float(second.cache["k"]) == 0.0
    assert float(state["cache"].value["k"]) == 0.0


def test_update_state_does_not_share_its_pytrees_with_the_state():
    m = Box(cache={"k": jnp.zeros(())})
    other = Box(cache={"k": jnp.ones(())}).get_state()
    m.update_state(other)
    m.cache["k"] = jnp.full((), 9.0)
    assert float(other["cache"].value["k"]) == 1.0


# statics


@pytest.mark.parametrize(
    "value",
    [1, 1.5, True, "text", None, [1, 2], {"a": 1}, (1, "b"), {1, 2}, print, int, jnp.float32, jnp.dtype("int8")],
)
def test_anything_else_is_static(value):
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


def test_a_subclass_may_override_a_method_in_its_class_body():
    class Own(nnx.Module):
        def filter(self, *filters):
            return "mine"

    assert Own().filter() == "mine"


def test_what_enters_the_instance_dict_behind_setattr_is_no_part_of_the_module():
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
