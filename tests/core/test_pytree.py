"""``nnx.Pytree``: immutable records whose fields are leaves or static."""

import collections
import dataclasses
import pickle
import types
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx

T = TypeVar("T")


class Record(nnx.Pytree):
    def __init__(self, x, y, name="r"):
        self.x = nnx.TreeNode(x)
        self.y = y
        self.name = name


def key_paths(tree):
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def test_fields_holding_containers_or_nodes_are_leaves_and_the_others_static():
    record = Record(1, jnp.ones(2), "a")
    assert record.x == 1
    assert isinstance(record.y, jax.Array)
    assert record.name == "a"
    leaves = jax.tree.leaves(record)
    assert len(leaves) == 2
    assert leaves[0] == 1
    assert jax.tree.structure(Record(2, jnp.zeros(3), "a")) == jax.tree.structure(record)
    assert jax.tree.structure(Record(1, jnp.ones(2), "b")) != jax.tree.structure(record)


@pytest.mark.parametrize("container", [nnx.Node, nnx.Param, nnx.Variable, nnx.TreeNode])
def test_attributes_unbox_and_mapping_boxes_again(container):
    class Holds(nnx.Pytree):
        def __init__(self, x):
            self.x = container(x)

    record = jax.tree.map(lambda x: x + 1, Holds(3))
    assert type(record) is Holds
    assert record.x == 4
    assert jax.tree.map(lambda x: x + 1, record).x == 5


def test_metadata_of_a_container_are_kept():
    class Holds(nnx.Pytree):
        def __init__(self, x):
            self.x = nnx.Param(x, ("a",))

    structure = jax.tree.structure(Holds(1))
    assert "a" in str(structure) or structure == jax.tree.structure(Holds(2))
    containers = jax.tree.leaves(Holds(1), is_leaf=lambda x: isinstance(x, nnx.Param))
    assert containers == [nnx.Param(1, ("a",))]


def test_a_pytree_in_a_pytree():
    outer = Record(Record(1, jnp.ones(1)), jnp.ones(1))
    assert len(jax.tree.leaves(outer)) == 3
    assert jax.tree.map(lambda x: x * 2, outer).x.x == 2


def test_a_pytree_is_a_node_by_itself():
    class Outer(nnx.Pytree):
        def __init__(self, inner):
            self.inner = inner

    assert len(jax.tree.leaves(Outer(Record(1, jnp.ones(1))))) == 2


def test_pytree_passes_through_jit():
    record = jax.jit(lambda r: r.replace(y=r.y * 2))(Record(1, jnp.ones(2)))
    assert type(record) is Record
    np.testing.assert_array_equal(record.y, [2, 2])
    assert record.name == "r"


def test_replace_returns_a_changed_copy():
    before = Record(1, jnp.ones(2))
    after = before.replace(x=5, name="new")
    assert (after.x, after.name) == (5, "new")
    assert (before.x, before.name) == (1, "r")
    assert jax.tree.leaves(after)[0] == 5


def test_replace_of_unknown_fields_is_an_error_naming_them():
    with pytest.raises(ValueError, match="Trying to replace unknown fields") as error:
        Record(1, jnp.ones(2)).replace(z=1, x=2)
    assert "z" in str(error.value)


def test_assignment_after_init_is_an_error():
    record = Record(1, jnp.ones(2))
    for name in ("x", "name", "new"):
        with pytest.raises(AttributeError, match="is immutable, trying to update field") as error:
            setattr(record, name, 2)
        assert name in str(error.value)
        assert "Record" in str(error.value)
    assert record.x == 1


def test_a_mutable_pytree_allows_assignment_but_no_new_fields():
    class Mutable(nnx.Pytree, mutable=True):
        def __init__(self, x):
            self.x = nnx.Node(x)
            self.n = 1

    record = Mutable(1)
    record.x = 5
    record.n = 2
    assert (record.x, record.n) == (5, 2)
    assert jax.tree.leaves(record) == [5]
    with pytest.raises(AttributeError, match="Cannot add new fields to") as error:
        record.new = 1
    assert "new" in str(error.value) or "Mutable" in str(error.value)
    again = jax.tree.map(lambda x: x + 1, record)
    again.x = 9
    assert record.x == 5


def test_mutability_is_inherited():
    class Mutable(nnx.Pytree, mutable=True):
        def __init__(self):
            self.x = nnx.Node(1)

    class Derived(Mutable):
        pass

    record = Derived()
    record.x = 2
    assert record.x == 2


def test_pytree_works_with_nnx_dataclass():
    @nnx.dataclass
    class Data(nnx.Pytree):
        x: int = nnx.node_field()
        y: jax.Array
        n: int = nnx.static_field(default=3)
        w: float = nnx.param_field(1.0)

    record = Data(1, jnp.ones(2))
    assert (record.x, record.n, record.w) == (1, 3, 1.0)
    assert len(jax.tree.leaves(record)) == 3
    assert record.replace(n=4).n == 4
    with pytest.raises(AttributeError, match="is immutable, trying to update field"):
        record.x = 2
    assert jax.tree.map(lambda x: x, record).n == 3


def test_pytree_works_with_inheritance():
    class Derived(Record):
        def __init__(self, x, y, z):
            super().__init__(x, y)
            self.z = nnx.Node(z)

    record = Derived(1, jnp.ones(1), 3)
    assert len(jax.tree.leaves(record)) == 3
    assert jax.tree.map(lambda x: x * 2, record).z == 6
    with pytest.raises(AttributeError, match="is immutable, trying to update field"):
        record.z = 1


def test_pytree_works_with_generics():
    class Box(nnx.Pytree, Generic[T]):
        def __init__(self, x: T):
            self.x = nnx.Node(x)

    record = Box[int](3)
    assert type(record) is Box
    assert jax.tree.leaves(record) == [3]


def test_pytree_works_with_a_custom_new():
    class Custom(nnx.Pytree):
        def __new__(cls, x):
            self = super().__new__(cls)
            cls.made = getattr(cls, "made", 0) + 1
            return self

        def __init__(self, x):
            self.x = nnx.Node(x)

    record = Custom(3)
    assert Custom.made == 1
    assert jax.tree.map(lambda x: x + 1, record).x == 4
    assert jax.tree.leaves(record) == [3]


def test_key_paths():
    assert key_paths(Record(1, jnp.ones(1)))[0] == ".x.value"
    assert ".y" in key_paths(Record(1, jnp.ones(1)))[1]


def test_field_order_does_not_depend_on_assignment_order():
    class Ordered(nnx.Pytree):
        def __init__(self, names):
            for name in names:
                setattr(self, name, nnx.Node(name))

    first, second = Ordered("abc"), Ordered("cab")
    assert jax.tree.leaves(first) == jax.tree.leaves(second) == ["a", "b", "c"]
    assert jax.tree.structure(first) == jax.tree.structure(second)


def test_it_survives_pickling():
    record = pickle.loads(pickle.dumps(Record(1, np.ones(2))))
    assert type(record) is Record
    assert record.x == 1
    assert len(jax.tree.leaves(record)) == 2
    with pytest.raises(AttributeError, match="is immutable, trying to update field"):
        record.x = 2


def test_it_prints_readably():
    text = repr(Record(1, jnp.ones((2, 3)), "a"))
    assert "Record" in text and "x" in text and "name" in text
    assert "float32" in text


def test_a_pytree_on_a_module_is_data():
    m = nnx.Module()
    m.record = Record(1, jnp.ones(1))
    assert list(m.get_state()) == ["record"]
    assert len(jax.tree.leaves(m.get_state())) == 2
    assert type(m.partition().merge().record) is Record


def test_jax_may_put_any_leaf_into_it():
    structure = jax.tree.structure(Record(1, jnp.ones(1)))
    for leaf in (None, object(), "text", 0):
        assert jax.tree.unflatten(structure, [leaf, leaf]).x is leaf


# node types


class Payload:
    def __init__(self, x):
        self.x = x


def test_registering_a_node_type_opens_the_set():
    jax.tree_util.register_pytree_node(Payload, lambda p: ((p.x,), None), lambda _, xs: Payload(*xs))

    class Holds(nnx.Pytree):
        def __init__(self, x):
            self.x = x

    assert not nnx.is_node(Payload(1))
    assert jax.tree.leaves(Holds(Payload(1))) == []
    nnx.register_node_type(Payload)
    assert nnx.is_node(Payload(1))
    assert jax.tree.leaves(Holds(Payload(1))) == [1]


# flax serialization


def test_flax_serialization_works_on_it():
    serialization = pytest.importorskip("flax.serialization")
    record = Record(np.ones(2), np.zeros(3), "a")
    saved = serialization.to_state_dict(record)
    restored = serialization.from_state_dict(Record(np.zeros(2), np.ones(3), "a"), saved)
    assert type(restored) is Record
    np.testing.assert_array_equal(restored.x, [1, 1])
    np.testing.assert_array_equal(restored.y, [0, 0, 0])
    assert restored.name == "a"


def test_flax_bytes_round_trip():
    serialization = pytest.importorskip("flax.serialization")
    record = Record(np.ones(2), np.zeros(3))
    restored = serialization.from_bytes(Record(np.zeros(2), np.ones(3)), serialization.to_bytes(record))
    np.testing.assert_array_equal(restored.x, [1, 1])


def test_flax_serialization_reports_missing_and_unknown_fields():
    serialization = pytest.importorskip("flax.serialization")
    record = Record(np.ones(2), np.zeros(3))
    saved = serialization.to_state_dict(record)
    without = {name: value for name, value in saved.items() if name != "x"}
    with pytest.raises(ValueError, match="Missing field") as error:
        serialization.from_state_dict(record, without)
    assert "x" in str(error.value)
    with pytest.raises(ValueError, match="Unknown field") as error:
        serialization.from_state_dict(record, saved | {"strange": 1})
    assert "strange" in str(error.value)


def test_static_fields_may_hold_unhashable_values():
    class Holds(nnx.Pytree):
        def __init__(self, sizes):
            self.sizes = sizes
            self.x = nnx.Node(1)

    traces = []

    @jax.jit
    def run(record):
        traces.append(record.sizes)
        return record.x + len(record.sizes)

    assert run(Holds([1, 2])) == 3
    assert run(Holds([1, 2])) == 3
    assert run(Holds([1])) == 2
    assert len(traces) == 2


def auxiliary_data(record):
    return jax.tree.structure(record).node_data()[1]


class Layer(nnx.Pytree, mutable=True):
    def __init__(self, x, **static):
        self.x = jnp.asarray(x)
        for name, value in static.items():
            setattr(self, name, value)


def test_a_record_with_immutable_static_fields_freezes_them_once():
    record = Layer(1.0, name="a", sizes=(1, 2), activation=jnp.tanh)
    assert auxiliary_data(record) is auxiliary_data(record)
    rebuilt = jax.tree.map(lambda x: x + 1, record)
    assert auxiliary_data(rebuilt) is auxiliary_data(record)
    record.name = "b"
    assert auxiliary_data(record) != auxiliary_data(rebuilt)
    assert auxiliary_data(record) == auxiliary_data(Layer(2.0, name="b", sizes=(1, 2), activation=jnp.tanh))
    assert auxiliary_data(rebuilt.replace(name="b")) == auxiliary_data(record)


def test_a_mutable_static_field_is_looked_at_whenever_a_record_is_flattened():
    record = Layer(1.0, sizes=[1, 2])
    before = auxiliary_data(record)
    record.sizes.append(3)
    assert auxiliary_data(record) != before


def test_one_list_in_two_static_fields_is_not_two_equal_lists():
    sizes = [1, 2]
    assert auxiliary_data(Layer(1.0, a=sizes, b=sizes)) != auxiliary_data(Layer(1.0, a=[1, 2], b=[1, 2]))


def test_a_static_field_that_holds_a_module_is_an_error_that_names_the_field():
    record = Layer(1.0, layers=[])
    record.layers.append(nnx.Dict())
    with pytest.raises(ValueError, match=r"The static value Layer\.layers\[0\] is a Module \(Dict\)"):
        jax.tree.leaves(record)


def test_namespace_of_arrays_is_a_node_only_if_registered():
    assert not nnx.is_node(types.SimpleNamespace(x=jnp.ones(1)))


# Records in fields are data by their type


class Inner(nnx.Pytree):
    def __init__(self, size):
        self.size = size
        self.scale = nnx.Node(size)


class Holder(nnx.Pytree):
    def __init__(self, value):
        self.value = value


RECORDS = {
    "a State of numbers": (nnx.State({"a": 1, "b/c": nnx.BatchStat(2)}), [1, 2]),
    "an empty State": (nnx.State({}), []),
    "a Pure of numbers": (nnx.Dict(n=nnx.BatchStat(3)).partition(), [3]),
    "a Pytree of numbers": (Inner(4), [4]),
    "the empty state of an optax transformation": (optax.EmptyState(), []),
    "an optax state of numbers": (optax.ScaleByScheduleState(count=5), [5]),  # type: ignore[arg-type]
    "the state of a chain": ((optax.EmptyState(), (optax.ScaleByScheduleState(count=6),)), [6]),  # type: ignore[arg-type]
    "several States": ([nnx.State({"a": 7}), {"more": nnx.State({"b": 8})}], [7, 8]),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_field_that_holds_a_record_is_a_node_even_without_arrays(name):
    record, leaves = RECORDS[name]
    holder = Holder(record)
    assert jax.tree.leaves(holder) == leaves
    assert jax.tree.structure(holder).num_nodes > 2  # also where it is empty: the field is a child
    doubled = jax.tree.map(lambda x: 2 * x, holder)
    assert jax.tree.leaves(doubled) == [2 * leaf for leaf in leaves]
    assert type(doubled.value) is type(record)
    assert jax.tree.leaves(Holder(jnp.ones(1)).replace(value=record)) == leaves


def test_other_values_of_the_same_shape_stay_static():
    Sizes = collections.namedtuple("Sizes", "width depth")
    for value in (Sizes(1, 2), (1, 2), optax.sgd(0.1), optax.adam, (optax.sgd(0.1),), {"a": [1]}):
        assert jax.tree.leaves(Holder(value)) == []
        assert jax.tree.structure(Holder(value)).num_nodes == 1


@pytest.mark.parametrize("name", RECORDS)
def test_records_in_fields_survive_flax_serialization(name):
    serialization = pytest.importorskip("flax.serialization")
    record, leaves = RECORDS[name]
    target = jax.tree.map(lambda x: 0, Holder(record))
    restored = serialization.from_bytes(target, serialization.to_bytes(Holder(record)))
    assert jax.tree.leaves(restored) == leaves
    assert jax.tree.structure(restored) == jax.tree.structure(Holder(record))


def test_flax_serialization_of_a_state_reports_missing_and_unknown_paths():
    serialization = pytest.importorskip("flax.serialization")
    holder = Holder(nnx.State({"a/b": 1}))
    with pytest.raises(ValueError, match="Missing field 'a/b' in the state dict of a State; its fields are: none"):
        serialization.from_state_dict(holder, {"value": {}})
    with pytest.raises(ValueError, match="Unknown field 'c' in the state dict of a State, which has the fields a/b"):
        serialization.from_state_dict(holder, {"value": {"a/b": 1, "c": 2}})


# Frozen dataclasses


@dataclasses.dataclass(frozen=True, eq=False)
class Frozen(nnx.Pytree):
    x: jax.Array
    scale: jax.Array = nnx.param_field(1.0, sharding=("embed",))
    name: str = "a"

    def __post_init__(self):
        object.__setattr__(self, "norm", jnp.sum(self.x))


class Thawed(Frozen):
    pass


@pytest.mark.parametrize("cls", [Frozen, Thawed])
def test_a_frozen_dataclass_is_a_record_like_any_other(cls):
    record = cls(jnp.ones(2))
    assert key_paths(record) == [".norm.value", ".scale.value", ".x.value"]
    assert record.replace(name="b").name == "b" and record.name == "a"
    copy = pickle.loads(pickle.dumps(record))
    for frozen in (record, copy):
        for name in ("x", "name", "other"):
            with pytest.raises(AttributeError, match=f"is immutable, trying to update field '{name}'"):
                setattr(frozen, name, 2)
        with pytest.raises(dataclasses.FrozenInstanceError, match="is immutable, trying to update field 'x'"):
            del frozen.x


def test_a_mutable_class_can_be_a_frozen_dataclass():
    @nnx.dataclass(frozen=True)
    class Point(nnx.Pytree, mutable=True):
        x: int

    with pytest.raises(AttributeError, match="is immutable, trying to update field 'x'"):
        Point(1).x = 2
