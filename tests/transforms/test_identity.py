"""Cells keep their identity through a transform: Refs, containers under several attributes, and `self` in an init.

Writing through a Ref, rebinding an attribute to another Ref and untying it are three different events. Who shares what
afterwards is asked by writing through one attribute and looking who has changed.
"""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nnx
from tests.transforms.identity_models import (
    LIFTED,
    REPEATING,
    grad,
    nested,
    ref,
    two_attributes_of_one_dict,
    value,
)

QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# Refs


@pytest.mark.parametrize("lift", LIFTED)
def test_a_new_ref_for_two_of_three_attributes_leaves_the_third(lift):
    def body(m):
        m.a = m.b = nnx.Ref(nnx.Param(value(1.0)))
        m.a = value(11.0)

    r = ref()
    m = nnx.Dict(a=r, b=r, c=r)
    lift(body)(m)
    assert [float(x) for x in (m.a, m.b, m.c, r.value)] == [11.0, 11.0, 1.0, 1.0]
    m.b = value(5.0)
    m.c = value(7.0)
    assert [float(x) for x in (m.a, m.b, m.c, r.value)] == [5.0, 5.0, 7.0, 7.0]


@pytest.mark.parametrize("lift", LIFTED)
def test_rebinding_leaves_a_module_outside_the_call_on_the_old_ref(lift):
    def body(m):
        m.a = nnx.Ref(nnx.Param(value(11.0)))

    r = ref()
    m, outside = nnx.Dict(a=r), nnx.Dict(a=r)
    lift(body)(m)
    assert (float(m.a), float(outside.a), float(r.value)) == (11.0, 1.0, 1.0)
    m.a = value(12.0)
    outside.a = value(3.0)
    assert (float(m.a), float(outside.a), float(r.value)) == (12.0, 3.0, 3.0)


@pytest.mark.parametrize("lift", LIFTED)
def test_untying_leaves_a_module_outside_the_call_on_the_old_ref(lift):
    def body(m):
        old = m.a
        del m.a
        m.a = nnx.Param(old)

    r = ref()
    m, outside = nnx.Dict(a=r), nnx.Dict(a=r)
    lift(body)(m)
    m.a = value(12.0)
    assert (float(outside.a), float(r.value)) == (1.0, 1.0)
    assert [owner for owner, _ in r.owners()] == [outside]


@pytest.mark.parametrize("lift", LIFTED)
@pytest.mark.parametrize("then", ["untie", "rebind", "static", "module"])
def test_write_through_a_ref_before_untying_reaches_its_other_owners(lift, then):
    def body(m):
        m.a = m.a + 1
        del m.a
        if then == "rebind":
            m.a = nnx.Ref(nnx.Param(value(11.0)))
        if then == "static":
            m.a = "text"
        if then == "module":
            m.a = nnx.Dict()

    r = ref()
    m, outside = nnx.Dict(a=r), nnx.Dict(a=r)
    lift(body)(m)
    assert (float(outside.a), float(r.value)) == (2.0, 2.0)
    assert [owner for owner, _ in r.owners()] == [outside]


@pytest.mark.parametrize("lift", LIFTED)
def test_writing_through_a_ref_reaches_modules_outside_the_call(lift):
    def body(m):
        m.a = m.a + 1
        m.new = nnx.Param(value(0.0))  # a structural change at the same time

    r = ref()
    m, outside = nnx.Dict(a=r), nnx.Dict(a=r)
    lift(body)(m)
    assert (float(m.a), float(outside.a), float(r.value)) == (2.0, 2.0, 2.0)
    m.a = value(5.0)
    assert float(outside.a) == 5.0


@pytest.mark.parametrize("name", REPEATING)
def test_bodies_that_run_many_times_write_through_refs(name):
    def body(m):
        m.a = jnp.minimum(m.a + 1, 2.0)

    r = ref()
    m, outside = nnx.Dict(a=r, b=r), nnx.Dict(a=r)
    REPEATING[name](body)(m)
    assert [float(x) for x in (m.a, m.b, outside.a, r.value)] == [2.0] * 4


@pytest.mark.parametrize("name", REPEATING)
@pytest.mark.parametrize("owners", ["ab", "a"])
@pytest.mark.parametrize("what", ["unties", "rebinds", "ties"])
def test_bodies_that_run_many_times_may_not_change_what_is_tied(name, owners, what):
    def body(m):
        if what == "unties":
            del m.a
            m.a = nnx.Param(value(1.0))
        else:
            setattr(m, "a" if what == "rebinds" else "plain", nnx.Ref(nnx.Param(value(1.0))))

    r = ref()
    m = nnx.Dict(plain=nnx.Param(value(0.0)), **{key: r for key in owners})
    with pytest.raises(ValueError, match=f"the body {what} an attribute: '{'plain' if what == 'ties' else 'a'}'"):
        REPEATING[name](body)(m)
    m.a = value(9.0)
    assert float(r.value) == 9.0


def test_a_copy_made_inside_is_tied_outside():
    @nnx.jit
    def body(m):
        return copy.copy(m)

    r = ref()
    m = nnx.Dict(a=r)
    twin = body(m)
    twin.a = value(4.0)
    assert (float(m.a), float(r.value)) == (4.0, 4.0)


def test_deleting_and_making_an_attribute_again_inside_one_branch_counts():
    def make_again(m):
        del m.w
        m.w = nnx.Param(value(5.0))

    m = nnx.Dict(w=nnx.Param(value(1.0)))
    nnx.cond(True, make_again, lambda m: None, m)
    assert float(m.w) == 5.0


def test_tied_and_untied_models_keep_equal_moduledefs_and_their_own_traces():
    def body(m):
        del m.a
        m.a = nnx.Param(value(7.0))

    f, r = nnx.jit(body), ref()
    tied, outside, plain = nnx.Dict(a=r), nnx.Dict(a=r), nnx.Dict(a=nnx.Param(value(1.0)))
    assert tied.get_module_def() == plain.get_module_def()
    f(plain)
    f(tied)
    assert (float(tied.a), float(plain.a), float(outside.a)) == (7.0, 7.0, 1.0)


def test_donation_spares_what_a_ref_that_was_left_still_holds():
    @nnx.jit(donate_argnums=0)
    def body(m):
        m.a = nnx.Ref(nnx.Param(m.a * 2))

    r = nnx.Ref(nnx.Param(jnp.ones((64,))))
    m, outside = nnx.Dict(a=r), nnx.Dict(a=r)
    body(m)
    assert float(outside.a.sum()) == 64.0
    assert float(m.a.sum()) == 128.0


def test_the_variable_of_a_tied_attribute_keeps_type_and_metadata_inside():
    seen = []

    @nnx.jit
    def body(m):
        seen.append(m.variable("a"))
        m.a = m.a + 1

    r = nnx.Ref(nnx.Param(value(1.0), ("embed",)))
    m = nnx.Dict(a=r)
    body(m)
    assert type(seen[0]) is nnx.Param
    assert seen[0].sharding == ("embed",)
    assert float(m.variable("a").value) == 2.0


def test_shardings_of_a_returned_module_keep_the_values_of_refs_that_were_left():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    @nnx.jit(out_shardings=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    def body(m):
        m.a = m.a + 1
        m.a = nnx.Ref(nnx.Param(value(11.0)))
        return m

    r = ref()
    m, outside = nnx.Dict(a=r, w=nnx.Param(value(0.0))), nnx.Dict(a=r)
    assert body(m) is m
    assert (float(m.a), float(outside.a)) == (11.0, 2.0)


def test_shard_map_keeps_the_values_of_refs_that_were_left():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def body(m):
        m.a = m.a + 1
        m.a = nnx.Ref(nnx.Param(value(11.0)))

    r = ref()
    m, outside = nnx.Dict(a=r), nnx.Dict(a=r)
    specs = jax.sharding.PartitionSpec()
    nnx.shard_map(body, mesh=mesh, in_specs=(specs,), out_specs=specs)(m)
    assert (float(m.a), float(outside.a)) == (11.0, 2.0)


# Results without effects


@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat])
def test_writes_to_a_pure_result_reach_all_its_tied_attributes(transform):
    def body(m):
        m.a = m.a + 1
        return m

    r = ref()
    m = nnx.Dict(a=r, b=r, child=nnx.Dict(c=r))
    result = transform(body, stateful=False)(m)
    assert (float(result.b), float(result.child.c), float(m.a)) == (2.0, 2.0, 1.0)
    result.b = value(5.0)
    assert (float(result.a), float(result.child.c), float(m.a)) == (5.0, 5.0, 1.0)


def test_a_pure_result_shares_no_container_and_no_numpy_array_with_the_caller():
    m = nnx.Dict(var=nnx.Variable({"k": np.zeros(2)}), array=np.zeros(2), w=nnx.Param(value(1.0)))
    m.tree = [jnp.zeros(()), np.zeros(2)]
    for lift in (nnx.jit, nnx.remat, lambda f, stateful: lambda m: pure_grad(f, m)):
        result = lift(lambda m: m, stateful=False)(m)
        assert result is not m
        result.var["k"] = result.tree[0] = jnp.ones(())
        result.array = result.array + 1
        if isinstance(result.tree[1], np.ndarray):
            result.tree[1][0] = 1
        assert m.var["k"].tolist() == m.array.tolist() == m.tree[1].tolist() == [0.0, 0.0]
        assert float(m.tree[0]) == 0.0


def pure_grad(f, m):
    _, result = nnx.grad(lambda m: (m.w, f(m)), has_aux=True, stateful=False)(m)
    assert not np.shares_memory(result.array, m.array)
    return result


def test_a_pure_result_holds_one_container_where_the_model_does():
    for body in (lambda m: m, lambda m: (m.p.update(k=value(5.0)), m)[1]):
        m = two_attributes_of_one_dict()
        result = nnx.jit(body, stateful=False)(m)
        assert result.p is result.q
        assert result.p is not m.p
        assert float(m.q["k"]) == 1.0


# Random graphs and bodies

ATTRIBUTES = ["a", "b", "k/a", "k/b", "l/a"]  # of the Module in the call
OUTSIDE = ["x", "y"]
places = st.sampled_from(ATTRIBUTES)
bindings = st.lists(st.integers(-1, 2), min_size=7, max_size=7)  # per attribute: a Ref by number, or -1 for none
REBINDING = ["untie", "delete", "new ref", "new ref for two", "swap children", "copy child"]


def build(plan):
    """A Module, one outside of the call, and the Refs that tie them."""
    refs = [ref(10.0 * (i + 1)) for i in range(3)]
    m, outside = nnx.Dict(k=nnx.Dict(), l=nnx.Dict()), nnx.Dict()
    for i, (place, number) in enumerate(zip([*ATTRIBUTES, *OUTSIDE], plan, strict=True)):
        owner = m if i < len(ATTRIBUTES) else outside
        owner.set_path(place, nnx.Param(value(i)) if number < 0 else refs[number])
    return m, outside, refs


def has(m, place):
    *parents, name = place.split("/")
    return all(p in m for p in parents) and name in (m[parents[0]] if parents else m)


def run(m, program):
    for step, (op, place, other) in enumerate(program):
        *parents, name = place.split("/")
        owner = m[parents[0]] if parents else m
        if op == "write":
            if has(m, place):
                m.set_path(place, m.get_path(place) * 2 + step)
        elif op == "untie":
            if has(m, place):
                old = m.get_path(place)
                del owner[name]
                owner[name] = nnx.Param(old)
        elif op == "delete":
            if has(m, place):
                del owner[name]
        elif op == "new ref":
            m.set_path(place, ref(100.0 + step))
        elif op == "new ref for two":
            new = ref(100.0 + step)
            m.set_path(place, new)
            m.set_path(other, new)
        elif op == "swap children":
            m.k, m.l = m.l, m.k
        else:
            m.l = copy.copy(m.k)


def programs(ops):
    return st.lists(st.tuples(st.sampled_from(ops), places, places), min_size=1, max_size=5)


def portrait(m, outside=None, refs=()):
    """All values, then who changes when one attribute after the other is written."""
    spots = [(m, place) for place in ATTRIBUTES if has(m, place)]
    spots += [(outside, place) for place in OUTSIDE] if outside is not None else []

    def values():
        return [float(owner.get_path(place)) for owner, place in spots] + [float(r.value) for r in refs]

    seen = [[f"{place}: {type(owner.get_path(place)).__name__}" for owner, place in spots], values()]
    for i, (owner, place) in enumerate(spots):
        owner.set_path(place, value(1000.0 + i))
        seen.append(values())
    return seen


def eager(plan, program, times=1):
    m, outside, refs = build(plan)
    for _ in range(times):
        run(m, program)
    return portrait(m, outside, refs)


@QUICK
@given(bindings, programs(["write", "write", *REBINDING]))
def test_any_body_ties_and_unties_as_in_eager_python(plan, program):
    def body(m):
        run(m, program)

    compiled = nnx.jit(body)
    for times in (1, 1, 2):  # traced, replayed on a model of the same structure, and called again on the same model
        m, outside, refs = build(plan)
        for _ in range(times):
            compiled(m)
        assert portrait(m, outside, refs) == eager(plan, program, times)
    for lift in (grad, nested):
        m, outside, refs = build(plan)
        lift(body)(m)
        assert portrait(m, outside, refs) == eager(plan, program)


@QUICK
@given(bindings, programs(["write", "write", *REBINDING]))
def test_pure_body_returns_the_result_of_eager_python_on_a_copy(plan, program):
    def body(m):
        run(m, program)
        return m

    m, outside, refs = build(plan)
    result = nnx.jit(body, stateful=False)(m)
    expected = copy.deepcopy(m)  # keeps the Refs that only the outside shares
    run(expected, program)
    assert portrait(result) == portrait(expected)
    assert portrait(m, outside, refs) == portrait(*build(plan))


@settings(QUICK, max_examples=15)
@given(bindings, programs(["write"]))
def test_any_body_that_runs_many_times_writes_as_in_eager_python(plan, program):
    def body(m):
        run(m, program)

    for name, times in (("scan", 2), ("vmap", 1), ("cond", 1), ("fori_loop", 2)):
        m, outside, refs = build(plan)
        REPEATING[name](body)(m)
        assert portrait(m, outside, refs) == eager(plan, program, times)
