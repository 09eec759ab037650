"""Structural changes: noting one at once, and noting one later by single assignments, come to the same."""

from typing import Any

import jax.numpy as jnp

import nnx
from nnx.core.flat import flat_of
from nnx.core.module_info import info_of
from nnx.core.versions import STRUCTURE


def assign_all(assignments: list[tuple[Any, str, Any]]) -> None:
    for target, name, value in assignments:
        object.__setattr__(target, name, value)


def bookkeeping(module: nnx.Module) -> tuple[Any, ...]:
    info = info_of(module)
    return info.flat, info.joint, info.order, info.restructured, info.watch().count


def test_the_steps_of_a_change_do_what_noting_it_does():
    noted, replayed = nnx.Dict(x=jnp.ones(1)), nnx.Dict(x=jnp.ones(1))
    assert flat_of(noted).is_valid() and flat_of(replayed).is_valid()
    assert bookkeeping(noted)[1:] == bookkeeping(replayed)[1:] and bookkeeping(noted)[0] is not None
    stamps = [STRUCTURE.stamp]
    info_of(noted).changed()
    stamps.append(STRUCTURE.stamp)
    assign_all(info_of(replayed).change_steps())
    stamps.append(STRUCTURE.stamp)
    assert bookkeeping(noted) == bookkeeping(replayed) == (None, None, None, True, 1)
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
