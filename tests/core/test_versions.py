"""Structural changes: noting one at once, and noting one later by single assignments, come to the same."""

import weakref
from typing import Any

import jax.numpy as jnp
import pytest

import nnx
from nnx.core.module.info import MAX_FLAT_FORMS, info_of
from nnx.core.structure.flat import flat_of
from nnx.core.structure.versions import MAX_REVISIONS, STRUCTURE


def assign_all(assignments: list[tuple[Any, str, Any]]) -> None:
    for target, name, value in assignments:
        object.__setattr__(target, name, value)


def bookkeeping(module: nnx.Module) -> tuple[Any, ...]:
    info = info_of(module)
    return info.flat, info.joint, info.flats, info.order, info.restructured


def test_steps_of_a_change_have_the_effect_of_noting_it():
    noted, replayed = nnx.Dict(x=jnp.ones(1)), nnx.Dict(x=jnp.ones(1))
    flats = [flat_of(noted), flat_of(replayed)]
    assert all(flat.is_valid() and flat.may_come_back() for flat in flats)
    stamps = [STRUCTURE.stamp]
    info_of(noted).changed()
    stamps.append(STRUCTURE.stamp)
    assign_all(info_of(replayed).change_steps())
    stamps.append(STRUCTURE.stamp)
    assert bookkeeping(noted) == bookkeeping(replayed) == (None, None, (), None, True)
    assert not any(flat.is_valid() or flat.may_come_back() for flat in flats)
    assert len(set(map(id, stamps))) == 3


def test_the_steps_that_give_a_ref_its_owners_invalidate_what_has_seen_it():
    ref: Any = nnx.Ref(nnx.Param(jnp.ones(1)))
    model = nnx.Dict(a=ref, b=ref)
    flat = flat_of(model)
    owners = [owner for owner in ref.weak_owners() if owner[1] == "a"]
    steps = ref.owner_steps(owners)
    assert flat.is_valid() and len(ref.owners()) == 2
    assign_all(steps)
    assert not flat.is_valid() and ref.owners() == [(model, "a")]


def test_a_module_that_nothing_has_seen_changes_without_a_new_stamp():
    module, stamp = nnx.Dict(), STRUCTURE.stamp
    module.x = jnp.ones(1)
    assert STRUCTURE.stamp is stamp
    flat_of(module)
    module.y = jnp.ones(1)
    assert STRUCTURE.stamp is not stamp


# Revisions that come back


def add_variable(module: Any) -> None:
    module.v = nnx.Variable(jnp.ones(1))


def test_a_variable_added_and_removed_again_leads_back_to_the_same_flat_form():
    model = nnx.Dict(a=nnx.Dict(w=nnx.Param(jnp.ones(1))))
    without = flat_of(model)
    add_variable(model.a)
    with_variable = flat_of(model)
    assert with_variable is not without and not without.is_valid()
    del model.a.v
    assert flat_of(model) is without and not with_variable.is_valid()
    add_variable(model.a)
    assert flat_of(model) is with_variable and model.get_state().keys() == {"a/v", "a/w"}


def test_additions_in_another_order_lead_elsewhere_and_removals_in_any_order_lead_back():
    model = nnx.Dict(w=nnx.Param(jnp.ones(1)))
    flat = flat_of(model)
    model.x, model.y = nnx.Variable(1.0), nnx.Variable(2.0)
    both = flat_of(model)
    del model.x, model.y
    assert flat_of(model) is flat
    model.y, model.x = nnx.Variable(2.0), nnx.Variable(1.0)
    assert flat_of(model) is not both and list(model.clone()) == ["w", "y", "x"]
    del model.y, model.x
    assert flat_of(model) is flat
    model.x, model.y = nnx.Variable(1.0), nnx.Variable(2.0)
    assert flat_of(model) is both and list(model.get_state()) == ["w", "x", "y"]


def test_variable_removed_and_set_again_comes_last():
    model = nnx.Dict(v=nnx.Variable(1.0), w=nnx.Param(jnp.ones(1)))
    before = flat_of(model)
    for _ in range(3):
        del model.v
        model.v = nnx.Variable(1.0)
        assert flat_of(model) is not before and list(model.clone()) == ["w", "v"]


def test_a_variable_that_comes_back_with_a_dict_has_its_items_in_order():
    model = nnx.Dict(w=nnx.Param(jnp.ones(1)))
    seen = []
    step = nnx.jit(lambda m: seen.append(list(m.v[0]) if isinstance(m.v[0], dict) else None))
    for value in (jnp.ones(1), {"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0}):
        model.v = nnx.Intermediate((value,))
        step(model)
        del model.v
    assert seen == [None, ["a", "b"], ["b", "a"]]


def test_a_variable_of_another_type_leads_elsewhere():
    model = nnx.Dict(w=nnx.Param(jnp.ones(1)))
    flat_of(model)
    add_variable(model)
    flat = flat_of(model)
    del model.v
    model.v = nnx.Param(jnp.ones(1))
    assert flat_of(model) is not flat and type(model.get_state()["v"]) is nnx.Param


STRUCTURAL_CHANGES = {
    "a static value": lambda m: setattr(m, "n", m.n + 1),
    "a static value that is set back": lambda m: (setattr(m, "n", 5), setattr(m, "n", 0)),
    "a submodule": lambda m: setattr(m, "child", nnx.Dict()),
    "the class": lambda m: setattr(m, "__class__", Other),
    "a Ref": lambda m: setattr(m, "w", nnx.Ref(nnx.Param(jnp.ones(1)))),
    "a mutable tree": lambda m: setattr(m, "w", {"a": jnp.ones(1)}),
}


class Model(nnx.Module):
    def __init__(self):
        self.w, self.child, self.n = nnx.Variable(jnp.ones(1)), nnx.Dict(), 0


class Other(Model):
    pass


@pytest.mark.parametrize("change", STRUCTURAL_CHANGES.values(), ids=STRUCTURAL_CHANGES)
def test_no_flat_form_comes_back_after_another_change(change: Any):
    model = Model()
    before = flat_of(model)
    add_variable(model)
    change(model)
    del model.v
    assert not before.may_come_back() and flat_of(model) is not before


def test_a_static_value_changed_in_place_is_noticed_after_a_detour():
    model = nnx.Dict(w=nnx.Param(jnp.ones(1)))
    model.settings = [1]
    before = flat_of(model)
    add_variable(model)
    model.settings.append(2)
    del model.v
    assert flat_of(model) is not before and not before.is_valid()


def test_few_flat_forms_are_kept():
    model = nnx.Dict(w=nnx.Param(jnp.ones(1)))
    for i in range(200):
        setattr(model, f"v{i}", nnx.Variable(jnp.ones(1)))
        flat_of(model)
    info = info_of(model)
    assert len(info.flats) <= MAX_FLAT_FORMS
    series = info.watch().revision.series
    assert series is None or len(series.revisions) <= MAX_REVISIONS


def test_kept_flat_forms_do_not_keep_a_model_alive():
    model = nnx.Dict(w=nnx.Param(jnp.ones(1)), child=nnx.Dict(w=nnx.Param(jnp.ones(1))))
    child, array = weakref.ref(model.child), weakref.ref(model.child.w)
    for _ in range(3):
        add_variable(model.child)
        flat_of(model)
        model.pop_state(nnx.Variable)
        model.child.w = nnx.Param(jnp.ones(1))
        array = weakref.ref(model.child.w)
        flat_of(model)
    del model.child
    assert child() is None and array() is None


def test_attributes_are_in_order_after_a_detour():
    model = nnx.Dict(b=nnx.Param(jnp.ones(1)))
    assert list(model.get_state()) == ["b"]
    model.a = nnx.Variable(1.0)
    assert list(model.get_state()) == ["a", "b"]
    del model.a
    assert list(model.get_state()) == ["b"]
    model.c = nnx.Variable(1.0)
    assert list(model.get_state()) == ["b", "c"]
