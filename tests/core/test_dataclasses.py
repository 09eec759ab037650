"""Dataclass Modules: ``nnx.dataclass`` with its fields, and the standard decorator."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models import Box, Count


@nnx.dataclass
class Linear(nnx.Module):
    w: jax.Array = nnx.param_field()
    b: jax.Array = nnx.var_field(nnx.BatchStat, sharding=("out",))
    x: jax.Array = nnx.node_field()
    mode: str = nnx.static_field(default="fast")
    n: int = nnx.field(default=3)

    def __call__(self, x):
        return x @ self.w + self.b


def linear(**changes):
    arguments = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3), "x": jnp.ones(1)}
    return Linear(**(arguments | changes))


def test_fields_wrap_what_the_constructor_received():
    m = linear()
    state = m.get_state()
    assert list(state) == ["b", "w", "x"]
    assert type(state["w"]) is nnx.Param
    assert type(state["b"]) is nnx.BatchStat
    assert state["b"].sharding == ("out",)
    assert isinstance(m.w, jax.Array)
    assert (m.mode, m.n) == ("fast", 3)


def test_decorated_module_is_a_dataclass():
    assert dataclasses.is_dataclass(Linear)
    assert [f.name for f in dataclasses.fields(Linear)] == ["w", "b", "x", "mode", "n"]
    np.testing.assert_array_equal(linear()(jnp.ones((1, 2))), [[2, 2, 2]])
    assert Linear(jnp.ones((2, 3)), jnp.zeros(3), jnp.ones(1), "slow").mode == "slow"


def test_equivalent_container_is_used_unchanged():
    m = linear(w=nnx.Param(jnp.zeros((2, 3))), b=nnx.BatchStat(jnp.ones(3), ("out",)))
    np.testing.assert_array_equal(m.w, jnp.zeros((2, 3)))
    np.testing.assert_array_equal(m.b, [1, 1, 1])


@pytest.mark.parametrize("bad", [{"w": nnx.BatchStat(1.0)}, {"b": nnx.Param(1.0)}, {"x": nnx.Param(1.0)}])
def test_an_incompatible_container_is_an_error(bad):
    with pytest.raises(ValueError, match="is not compatible with return type|incompatible container"):
        linear(**bad)


def test_param_field_takes_a_default():
    @nnx.dataclass
    class Scaled(nnx.Module):
        s: float = nnx.param_field(2.0)

    assert Scaled().s == 2.0
    assert type(Scaled().get_state()["s"]) is nnx.Param
    assert Scaled(3.0).s == 3.0
    assert type(Scaled(3.0).get_state()["s"]) is nnx.Param


def test_var_field_takes_a_default_and_metadata():
    @nnx.dataclass
    class Counted(nnx.Module):
        n: int = nnx.var_field(Count, default=0, sharding=("a",))

    m = Counted()
    assert m.n == 0
    assert type(m.variable("n")) is Count
    assert m.variable("n").sharding == ("a",)


def test_a_dataclass_module_with_a_default_on_a_field_that_holds_a_ref():
    @nnx.dataclass
    class Tied(nnx.Module):
        w: jax.Array = nnx.param_field(jnp.zeros(()))
        n: int = 1

    ref = nnx.Ref(nnx.Param(jnp.asarray(3.0)))
    a, b = Tied(ref), Tied(ref)
    plain = Tied()
    a.w = jnp.asarray(5.0)
    assert float(b.w) == 5.0
    assert float(plain.w) == 0.0
    m = Box(a=a, b=b, c=plain)
    assert list(m.get_state()) == ["a/w", "c/w"]
    del a.w
    assert float(b.w) == 5.0
    assert not hasattr(a, "w") or float(a.w) == 0.0
    again = m.clone()
    assert list(again.get_state()) == list(m.get_state())


def test_a_plain_default_on_a_field_that_holds_a_ref():
    @nnx.dataclass
    class Tied(nnx.Module):
        w: object = None

    ref = nnx.Ref(nnx.Param(jnp.asarray(3.0)))
    a, b = Tied(ref), Tied(ref)
    b.w = jnp.asarray(4.0)
    assert float(a.w) == 4.0
    assert Tied().w is None
    popped = Box(a=a, b=b)
    popped.pop_state(nnx.Param)
    assert list(popped.get_state()) == []
    assert list(popped.clone().get_state()) == []


def test_field_takes_a_default_factory():
    @nnx.dataclass
    class Holds(nnx.Module):
        sizes: list = nnx.field(default_factory=list)
        w: jax.Array = nnx.param_field(default_factory=lambda: jnp.ones(2))

    a, b = Holds(), Holds()
    a.sizes.append(1)
    assert b.sizes == []
    assert type(a.variable("w")) is nnx.Param


def test_a_static_field_is_static():
    @nnx.dataclass
    class Fixed(nnx.Module):
        n: int = nnx.static_field()

    assert Fixed(3).n == 3
    assert len(Fixed(3).get_state()) == 0
    assert Fixed(3).get_module_def() != Fixed(4).get_module_def()


def test_a_node_field_of_a_number_is_data():
    @nnx.dataclass
    class Data(nnx.Module):
        n: int = nnx.node_field()

    assert Data(3).n == 3
    assert jax.tree.leaves(Data(3).get_state()) == [3]
    assert Data(3).get_module_def() == Data(4).get_module_def()


def test_plain_fields_take_modules_and_containers():
    @nnx.dataclass
    class Outer(nnx.Module):
        inner: Linear
        w: jax.Array
        n: int = 0

    m = Outer(linear(), nnx.Param(jnp.ones(1)))
    assert list(m.get_state()) == ["inner/b", "inner/w", "inner/x", "w"]


def test_nnx_dataclass_means_identity():
    a, b = linear(), linear()
    assert a != b
    assert a == a
    assert len({a, b}) == 2


def test_nnx_dataclass_takes_the_options_of_the_standard_one():
    @nnx.dataclass(kw_only=True)
    class Named(nnx.Module):
        a: int
        b: int = 2

    assert Named(a=1).b == 2
    with pytest.raises(TypeError):
        Named(1)


def test_post_init_runs():
    @nnx.dataclass
    class Derived(nnx.Module):
        n: int

        def __post_init__(self):
            self.w = nnx.Param(jnp.ones(self.n))

    assert Derived(3).w.shape == (3,)


def test_lists_filled_in_post_init_become_sequences():
    @nnx.dataclass
    class Stack(nnx.Module):
        n: int

        def __post_init__(self):
            self.layers = []
            for _ in range(self.n):
                self.layers.append(linear())

    assert isinstance(Stack(2).layers, nnx.Sequence)


def test_inheritance():
    @nnx.dataclass
    class Base(nnx.Module):
        w: jax.Array = nnx.param_field()

    @nnx.dataclass
    class Derived(Base):
        b: jax.Array = nnx.param_field()
        mode: str = "x"

    m = Derived(jnp.ones(1), jnp.ones(2))
    assert list(m.get_state()) == ["b", "w"]


@nnx.dataclass(frozen=True)
class Frozen(nnx.Module):
    w: jax.Array = nnx.param_field()
    n: int = 1


def test_frozen_forbids_assignment_by_users():
    m = Frozen(jnp.ones(2))
    with pytest.raises(AttributeError, match="w"):
        m.w = jnp.zeros(2)
    with pytest.raises(AttributeError, match="n"):
        m.n = 2
    with pytest.raises(AttributeError, match="w"):
        del m.w
    with pytest.raises(AttributeError):
        m.new = 1
    np.testing.assert_array_equal(m.w, [1, 1])


def test_frozen_modules_are_still_updated_and_rebuilt():
    m = Frozen(jnp.ones(2))
    m.update_state(jax.tree.map(lambda x: x + 1, m.get_state()))
    np.testing.assert_array_equal(m.w, [2, 2])
    again = m.partition().merge()
    assert type(again) is Frozen
    np.testing.assert_array_equal(again.w, [2, 2])
    assert m.clone().n == 1
    m.pop_state(nnx.Param)
    assert not hasattr(m, "w")


def test_frozen_and_post_init_modules_can_be_built():
    @nnx.dataclass(frozen=True)
    class Frozen(nnx.Module):
        layers: list = nnx.field(default_factory=lambda: [linear(), linear()])

    m = Frozen()
    assert isinstance(m.layers, nnx.Sequence)


# the standard decorator


@dataclasses.dataclass
class Standard(nnx.Module):
    w: object
    n: int = 3
    tags: list = dataclasses.field(default_factory=list)


def test_standard_dataclass_decorator_works():
    m = Standard(nnx.Param(jnp.ones(2)))
    assert isinstance(m.w, jax.Array)
    assert list(m.get_state()) == ["w"]
    again = m.partition().merge()
    assert type(again) is Standard
    assert again.n == 3
    assert again.get_module_def() == m.get_module_def()
    assert pickle.loads(pickle.dumps(m)).n == 3


def test_standard_dataclass_keeps_its_equality_and_nnx_uses_identity():
    @dataclasses.dataclass
    class Same(nnx.Module):
        n: int = 0

    a, b = Same(), Same()
    assert a == b
    m = nnx.Module()
    m.a, m.b = a, b
    a.w = nnx.Param(1.0)
    b.w = nnx.Param(2.0)
    assert list(m.get_state()) == ["a/w", "b/w"]
    assert len(list(m.modules())) == 3
    again = m.clone()
    assert again.a is not again.b
    seen = []
    m.for_each(Same, seen.append)
    assert len(seen) == 2


def test_equality_that_raises_is_never_called():
    class Rude(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(1.0)

        def __eq__(self, other):
            raise RuntimeError("asked")

        __hash__ = None

    m = nnx.Module()
    m.a, m.b = Rude(), Rude()
    m.c = m.a
    assert list(m.get_state()) == ["a/w", "b/w"]
    m.clone()
    m.a = Rude()
    m.layers = [m.b]
    assert m.get_module_def() == m.clone().get_module_def()


def test_the_standard_decorator_may_be_frozen():
    @dataclasses.dataclass(frozen=True, eq=False)
    class Frozen(nnx.Module):
        w: object
        n: int = 1

    m = Frozen(nnx.Param(jnp.ones(2)))
    with pytest.raises(AttributeError):
        m.n = 2
    m.update_state(jax.tree.map(lambda x: x + 1, m.get_state()))
    np.testing.assert_array_equal(m.w, [2, 2])


def test_nnx_fields_work_under_the_standard_decorator():
    @dataclasses.dataclass(eq=False)
    class Mixed(nnx.Module):
        w: jax.Array = nnx.param_field()
        b: jax.Array = nnx.var_field(nnx.BatchStat, sharding=("out",))

    m = Mixed(jnp.ones(2), jnp.zeros(2))
    assert type(m.variable("w")) is nnx.Param
    assert m.variable("b").sharding == ("out",)
    with pytest.raises(ValueError, match="is not compatible with return type|incompatible container"):
        Mixed(nnx.BatchStat(1.0), jnp.zeros(2))


@pytest.mark.parametrize("default", [[1], {"a": 1}, {1}])
@pytest.mark.parametrize("field", [nnx.field, nnx.static_field, nnx.node_field, nnx.param_field])
def test_a_mutable_default_which_instances_would_share_is_an_error(field, default):
    with pytest.raises(ValueError, match="all instances would share(.|\n)*default_factory=lambda: ") as error:
        field(default=default)
    assert repr(default) in str(error.value)


def test_a_default_container_is_copied():
    @nnx.dataclass
    class Holds(nnx.Module):
        cache: dict = nnx.node_field(default_factory=lambda: {"k": jnp.zeros(())})
        w: object = nnx.Param(1.0)

    a, b = Holds(), Holds()
    a.cache["k"] = jnp.ones(())
    a.w = 5.0
    assert float(b.cache["k"]) == 0.0
    assert b.w == 1.0
    assert type(a.variable("w")) is nnx.Param
    a.pop_state(nnx.Param)
    assert not hasattr(a, "w")


# Options of the standard library


@pytest.mark.parametrize(
    "field",
    [
        nnx.field(metadata={"unit": "m"}),
        nnx.node_field(metadata={"unit": "m"}),
        nnx.static_field(metadata={"unit": "m"}),
        nnx.param_field(metadata={"unit": "m"}),
        nnx.var_field(nnx.BatchStat, metadata={"unit": "m"}),
    ],
)
def test_metadata_are_those_of_the_field(field):
    cls = nnx.dataclass(type("Held", (nnx.Module,), {"__annotations__": {"x": object}, "x": field}))
    assert dataclasses.fields(cls)[0].metadata["unit"] == "m"
    leaf = cls(jnp.ones(2)).get_state().get("x")
    assert getattr(leaf, "metadata", {}).get("unit") is None  # not those of the Variable


def test_a_field_can_name_a_collection():
    @nnx.dataclass
    class Norm(nnx.Module):
        mean: jax.Array = nnx.var_field("batch_stats", sharding=("features",))
        seen: int = nnx.var_field("sightings", 0)

    model = Norm(jnp.ones(2))
    assert type(model.variable("mean")) is nnx.BatchStat and model.variable("mean").sharding == ("features",)
    assert list(model.filter("sightings")) == ["seen"]


def test_eq_true_compares_modules_by_their_fields():
    @nnx.dataclass(eq=True)
    class Equal(nnx.Module):
        w: jax.Array = nnx.param_field()
        child: nnx.Module | None = None

    child = Box()
    assert Equal(jnp.ones(2), child) == Equal(jnp.ones(2), child) != Equal(jnp.zeros(2), child)
    assert Equal(jnp.ones(2), child) != Equal(jnp.ones(2), Box()) and Equal.__hash__ is None
    assert nnx.jit(lambda model: model.w.sum())(Equal(jnp.ones(2))) == 2
    hashable = nnx.dataclass(eq=True, unsafe_hash=True)(type("Hashable", (Equal,), {}))
    assert hash(hashable(jnp.ones(2))) == hash(hashable(jnp.zeros(2)))
    assert linear() != linear() and linear().__hash__ is not None


def test_order_compares_fields():
    @nnx.dataclass(eq=True, order=True)
    class Version(nnx.Module):
        major: int
        minor: int

    assert Version(1, 2) < Version(1, 3) <= Version(2, 0)
    with pytest.raises(ValueError, match="eq must be true if order is true"):
        nnx.dataclass(order=True)(type("Unordered", (nnx.Module,), {}))


def test_equality_defined_by_the_class_is_kept():
    @nnx.dataclass(eq=True)
    class Own(nnx.Pytree):
        x: int

        def __eq__(self, other):
            return "mine"

        def __hash__(self):
            return 7

    assert (Own(1) == Own(2)) == "mine" and hash(Own(1)) == 7


def test_slots_are_refused():
    with pytest.raises(TypeError, match="slots=True makes a second class .* Leave it out"):
        nnx.dataclass(slots=True)(Box)


def test_positional_patterns_match_the_fields():
    match linear():
        case Linear(w, b):
            assert w.shape == (2, 3) and b.shape == (3,)


def test_a_field_has_one_default_and_a_type_of_variables():
    for make in (nnx.field, nnx.node_field, nnx.static_field, nnx.param_field):
        with pytest.raises(ValueError, match="cannot specify both default and default_factory"):
            make(default=1, default_factory=int)
    for wrong in (3, nnx.Linear, nnx.Node):
        with pytest.raises(TypeError, match="nnx.var_field takes a type of Variables, such as nnx.BatchStat"):
            nnx.var_field(wrong)  # pyright: ignore[reportArgumentType]
