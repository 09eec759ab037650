"""When records are equal, and what they hash by: ``nnx.dataclass`` on a Pytree."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx


@nnx.dataclass
class Record(nnx.Pytree):
    x: object
    name: str = "here"
    note: str = nnx.field(default="", compare=False)


UNEQUAL = {
    "another content": Record(jnp.zeros(2)),
    "another dtype": Record(jnp.ones(2, jnp.int32)),
    "another shape": Record(jnp.ones(3)),
    "another container": Record(nnx.Param(jnp.ones(2))),
    "static, not data": Record(1.0),
    "another static value": Record(jnp.ones(2), "there"),
    "another class": nnx.dataclass(type("Other", (Record,), {}))(jnp.ones(2)),
    "not a record": (jnp.ones(2), "here", ""),
}


@pytest.mark.parametrize("other", UNEQUAL.values(), ids=UNEQUAL)
def test_records_that_differ_are_unequal(other):
    assert Record(jnp.ones(2)) != other and other != Record(jnp.ones(2))


def test_records_with_equal_fields_are_equal():
    inner = [Record(np.ones(2)), {"a": jnp.ones(1)}]
    assert Record(jnp.ones(2), note="a") == Record(jnp.ones(2), note="b")
    assert Record(inner) == Record([Record(np.ones(2)), {"a": jnp.ones(1)}])
    assert Record(nnx.State({"w": nnx.Param(jnp.ones(2))})) == Record(nnx.State({"w": nnx.Param(jnp.ones(2))}))
    assert Record(jnp.ones(2), 1) != Record(jnp.ones(2), True)  # as static values are compared


def test_a_record_hashes_by_its_static_fields_and_can_be_a_static_argument():
    assert hash(Record(jnp.ones(2))) == hash(Record(jnp.zeros(2), note="a")) != hash(Record(jnp.ones(2), "there"))
    for transform in (jax.jit, nnx.jit):
        f = transform(lambda record, x: record.x + x, static_argnums=0)
        assert [f(Record(jnp.array(x)), 1.0).tolist() for x in (1.0, 2.0, 1.0)] == [2.0, 3.0, 2.0]


def test_comparing_tracers_raises_with_advice():
    def equal(a, b):
        assert a == a and a != b.replace(name="there")  # the content is not needed
        return a == b

    with pytest.raises(TypeError, match=r"two objects of Record: the field 'x' .* jnp\.array_equal\(a\.x, b\.x\)"):
        jax.jit(equal)(Record(jnp.ones(2)), Record(jnp.ones(2)))


def test_without_eq_a_record_is_only_equal_to_itself():
    cls = nnx.dataclass(eq=False)(type("Same", (nnx.Pytree,), {"__annotations__": {"x": int}}))
    record = cls(1)
    assert record == record and record != cls(1) and hash(record) != hash(cls(1))


def test_dataclasses_refuse_assignment_in_the_words_of_the_standard_library():
    for act, verb in ((lambda r: setattr(r, "x", 1), "assign to"), (lambda r: delattr(r, "x"), "delete")):
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"^cannot {verb} field 'x': Record is immutable"):
            act(Record(1))


def test_records_are_nodes():
    state, moduledef = nnx.Dict(w=nnx.Param(1.0)).partition()
    pure = nnx.Pure.new(state, moduledef)
    assert all(map(nnx.is_node, (state, pure, Record(1), nnx.Param(1), jnp.ones(1), optax.EmptyState())))
    assert not any(map(nnx.is_node, (1, "a", [jnp.ones(1)], moduledef, nnx.Static(1))))
