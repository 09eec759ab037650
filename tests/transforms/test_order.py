"""The order of attributes and of the items of dicts, as functions see it and as they leave it."""

import argparse
import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import nnx

ONE = jnp.ones(1)


class Model(nnx.Module):
    def __init__(self):
        self.z = nnx.Variable(jnp.zeros(()))
        self.w = nnx.Param(jnp.ones(2))
        self.kind = "model"
        self.parts = nnx.Dict(y=nnx.Param(1.0), x=nnx.Param(2.0))
        self.cache = {"value": jnp.zeros(()), "key": [{"b": jnp.zeros(()), "a": 1}]}


def order_of(m: Any) -> Any:
    return [*vars(m)], [*m.parts], [*m.cache], [*m.cache["key"][0]]


ORDER = order_of(Model())


def run_scan(f: Any, m: Any) -> None:
    nnx.scan(lambda m, carry, x: (f(m), (carry, x))[1], length=3)(m, 0.0, jnp.ones(3))


def run_custom(f: Any, m: Any) -> None:
    custom = nnx.custom_vjp(lambda m: (f(m), jnp.sum(m.w))[1])
    custom.defvjp(lambda m: (f(m), (jnp.sum(m.w), None))[1], lambda _, g: (None,))
    nnx.jit(nnx.grad(lambda m: custom(m)))(m)


ONCE = {
    "jit": lambda f, m: nnx.jit(lambda m: f(m))(m),
    "donating jit": lambda f, m: nnx.jit(lambda m: f(m), donate_argnums=0)(m),
    "remat": lambda f, m: nnx.remat(lambda m: f(m))(m),
    "grad": lambda f, m: nnx.grad(lambda m: (f(m), jnp.sum(m.w))[1])(m),
    "grad in jit": lambda f, m: nnx.jit(nnx.grad(lambda m: (f(m), jnp.sum(m.w))[1]))(m),
    "jvp": lambda f, m: nnx.jvp(lambda m: (f(m), m.w)[1], (m,), (m.filter(nnx.Param),)),
    "custom_vjp": run_custom,
    "checkify": lambda f, m: nnx.checkify(lambda m: f(m))(m),
}
MANY = {
    "scan": (3, run_scan),
    "vmap": (1, lambda f, m: nnx.vmap(lambda m, x: (f(m), x)[1], in_axes=(None, 0))(m, jnp.ones(2))),
    "cond": (1, lambda f, m: nnx.cond(True, lambda m: f(m), lambda m: None, m)),
    "switch": (1, lambda f, m: nnx.switch(1, [lambda m: None, lambda m: f(m)], m)),
    "fori_loop": (3, lambda f, m: nnx.fori_loop(0, 3, lambda i, m: (f(m), m)[1], m)),
    "while_loop": (3, lambda f, m: nnx.while_loop(lambda m: m.z < 3, lambda m: (f(m), m)[1], m)),
}


def move(m: Any) -> None:
    """Sets an attribute again, and items of dicts, anew and in place."""
    value = m.z
    del m.z
    m.z = nnx.Variable(value + 1)
    m.cache = dict(reversed(m.cache.items()))
    inner = m.cache["key"][0]
    inner["b"] = inner.pop("b") + 1


@pytest.mark.parametrize("run", ONCE.values(), ids=ONCE)
def test_body_that_runs_once_behaves_like_plain_python(run: Any):
    eager, model, seen = Model(), Model(), []
    for step in range(3):
        expected = order_of(eager)
        move(eager)
        run(lambda m: (seen.append(order_of(m)), move(m))[0], model)
        assert all(order == expected for order in seen), (step, seen)
        seen.clear()
        assert order_of(model) == order_of(eager)
        assert model.z == eager.z == model.cache["key"][0]["b"] == step + 1


@pytest.mark.parametrize(("times", "run"), MANY.values(), ids=MANY)
def test_a_body_that_runs_many_times_keeps_the_order_and_its_changes(times: int, run: Any):
    model, seen = Model(), []
    run(lambda m: (seen.append(order_of(m)), move(m))[0], model)
    assert seen and all(order == ORDER for order in seen)
    assert order_of(model) == ORDER
    assert model.z == model.cache["key"][0]["b"] == times
    assert model.get_module_def() == Model().get_module_def()


@pytest.mark.parametrize(("times", "run"), MANY.values(), ids=MANY)
def test_an_ordered_dict_in_another_order_is_not_another_carry(times: int, run: Any):
    model = Model()
    model.cache = collections.OrderedDict(value=jnp.zeros(()), key=[{"b": jnp.zeros(()), "a": 1}])

    def body(m: Any) -> None:
        m.z += 1
        m.cache = collections.OrderedDict(reversed(m.cache.items()))

    run(body, model)
    assert order_of(model) == ORDER and model.z == times and type(model.cache) is collections.OrderedDict


class Table(dict):
    """A dict with attributes."""


def settings() -> list[Any]:
    """One value of every sort that has items or attributes in an order."""
    table = Table(b=1, a=2)
    table.y, table.x = 1, 2  # type: ignore[attr-defined]
    counts = collections.defaultdict(int, b=1, a={"d": 1, "c": [2]})
    config = argparse.Namespace(b=1, a={"d": 1, "c": 2})
    return [{"b": 1, "a": 2}, [{"b": [1]}, {"b": 1, "a": 2}], table, counts, config]


def dicts_in(value: Any) -> list[Any]:
    """The dicts in a value, `__dict__`s included."""
    found = [value] if isinstance(value, dict) else []
    found += [vars(value)] if hasattr(value, "__dict__") else []
    inner = [*value] if isinstance(value, list) else [item for held in found for item in held.values()]
    return [*found, *(one for item in inner for one in dicts_in(item))]


@pytest.mark.parametrize(("times", "run"), MANY.values(), ids=MANY)
def test_static_values_in_another_order_are_the_same_for_a_body_that_runs_many_times(times: int, run: Any):
    def body(m: Any) -> None:
        m.z += 1
        for held in dicts_in(m.settings):
            if held:
                first = next(iter(held))
                held[first] = held.pop(first)
        m.other = dict(reversed(m.other.items()))

    model, like = Model(), settings()
    model.settings, model.other = settings(), {"b": 1, "a": [2]}
    held = dicts_in(model.settings)
    run(body, model)
    assert model.z == times and all(now is before for now, before in zip(dicts_in(model.settings), held, strict=True))
    assert [[*one] for one in held] == [[*one] for one in dicts_in(like)] and [*model.other] == ["b", "a"]
    model.settings = [collections.OrderedDict(b=1, a=2)]
    with pytest.raises(ValueError, match="the body changes the static attribute 'settings'"):
        run(lambda m: m.settings[0].move_to_end("b"), model)


def there_and_back(m: Any) -> None:
    """Changes nearly everything a Module has, and changes it back."""
    m.new = nnx.Ref(nnx.Param(jnp.ones(1)))
    del m.new
    m.new, m.kind = Model(), "other"
    del m.new
    m.kind = "mo" + "del"
    m.__class__ = type("Child", (Model,), {})
    m.__class__ = Model
    m.parts, m.layers = m.layers, m.parts
    m.parts, m.layers = m.layers, m.parts
    m.layers.append(Model())
    m.layers.pop()
    m.sow(nnx.Intermediate, "seen", m.z)
    m.pop_state(nnx.Intermediate)
    value = m.w
    del m.w
    m.w = nnx.BatchStat(value)
    del m.w
    m.w = nnx.Param(value)
    m.method, m.function = m.layers[0].get_state, functools.partial(jnp.clip, min=0.0)
    m.cache = jax.tree.map(lambda leaf: leaf, m.cache)
    m.config = argparse.Namespace(sizes=[1, 2], rate=0.5)
    m.config.sizes[:] = [1, 2]
    m.config.sizes.append(m.config.sizes.pop())


@pytest.mark.parametrize(("times", "run"), MANY.values(), ids=MANY)
def test_what_a_body_changes_and_changes_back_costs_it_no_other_change(times: int, run: Any):
    model = Model()
    model.layers, model.config = nnx.Sequence([Model()]), argparse.Namespace(sizes=[1, 2], rate=0.5)
    model.method, model.function = model.layers[0].get_state, functools.partial(jnp.clip, min=0.0)
    before = model.get_module_def()

    def body(m: Any) -> None:
        there_and_back(m)
        m.z += 1
        there_and_back(m)

    run(body, model)
    assert model.z == times and model.get_module_def() == before


def test_a_condition_that_only_changes_order_is_not_refused():
    def condition(m: Any) -> Any:
        m.cache = dict(reversed(m.cache.items()))
        held = m.kind
        del m.kind
        m.kind = held
        return m.z < 2

    model = Model()
    nnx.while_loop(condition, lambda m: (setattr(m, "z", m.z + 1), m)[1], model)
    assert model.z == 2 and order_of(model) == ORDER


@pytest.mark.parametrize("first", [True, False])
def test_branches_that_add_in_different_orders_use_that_of_the_first(first: bool):
    def one(m: Any) -> Any:
        m.d, m.c = nnx.Variable({"q": 1.0, "p": 1.0}), nnx.Variable(1.0)
        return nnx.Dict(v=nnx.Variable(1.0), u=nnx.Variable(2.0))

    def other(m: Any) -> Any:
        m.c, m.d = nnx.Variable(2.0), nnx.Variable({"p": 2.0, "q": 2.0})
        return nnx.Dict(u=nnx.Variable(2.0), v=nnx.Variable(1.0))

    model = Model()
    new = nnx.cond(first, one, other, model)
    assert [*vars(model)] == [*ORDER[0], "d", "c"] and [*model.d] == ["q", "p"] and [*new] == ["v", "u"]
    assert model.c == model.d["q"] == (1 if first else 2) and (new.v, new.u) == (1, 2)


def test_a_scan_adds_stacked_variables_behind_the_others_in_order():
    def body(m: Any, carry: Any, x: Any) -> Any:
        m.t, m.s = nnx.Intermediate({"n": x, "m": x}), nnx.Intermediate(x)
        return carry, x

    model = Model()
    nnx.scan(body, variable_axes={nnx.Intermediate: 0}, length=2)(model, 0.0, jnp.ones(2))
    assert [*vars(model)] == [*ORDER[0], "t", "s"] and [*model.t] == ["n", "m"] and model.s.shape == (2,)


def test_constructors_under_scan_and_vmap_keep_the_order():
    for lift in (nnx.Vmap, nnx.Scan):
        size = {"axis_size" if lift is nnx.Vmap else "length": 2}
        model: Any = lift(Model, variable_axes={...: 0}, **size)()
        inner = model.vmap_module if lift is nnx.Vmap else model.scan_module
        assert order_of(inner) == ORDER


def test_added_attributes_are_in_order_on_first_and_later_calls():
    def add(m: Any) -> None:
        m.v, m.kind2, m.u, m.more, m.t = nnx.Variable(1.0), "k", nnx.Ref(nnx.Param(1.0)), Model(), jnp.ones(1)
        m.cache["aa"] = jnp.ones(())

    step, eager = nnx.jit(add), Model()
    add(eager)
    for _ in range(3):
        model = Model()
        step(model)
        assert order_of(model) == order_of(eager) and order_of(model.more) == ORDER
        assert model.get_module_def() == eager.get_module_def()
    assert step.trace_count == 1


def test_records_of_a_layer_are_in_order_at_every_call():
    @nnx.jit
    def step(m: Any) -> None:
        m.sow(nnx.Intermediate, "late", m.z)
        m.sow(nnx.Intermediate, "early", {"b": m.z, "a": m.z})

    model = Model()
    for _ in range(4):
        step(model)
        assert [*vars(model)] == [*ORDER[0], "late", "early"] and [*model.early[0]] == ["b", "a"]
        model.pop_state(nnx.Intermediate)
    assert step.trace_count == 1


def test_a_function_sees_the_order_that_the_callers_dict_has():
    seen: list[Any] = []
    step = nnx.jit(lambda m: seen.append([*m.cache]))
    model, other = nnx.Dict(cache={"b": ONE, "a": ONE}), nnx.Dict(cache={"a": ONE, "b": ONE})
    step(model), step(model)
    assert seen == [["b", "a"]]
    step(other), step(nnx.Dict(cache={"a": ONE, "b": ONE}))
    assert seen == [["b", "a"], ["a", "b"]]
    model.cache["b"] = model.cache.pop("b")
    step(model)
    model.cache = {"b": ONE, "a": ONE}
    step(model)
    assert len(seen) == step.trace_count == 2  # each order has its trace


@pytest.mark.parametrize("before", [jnp.ones(1), [jnp.ones(1)], (jnp.ones(1),)], ids=["array", "list", "tuple"])
def test_dict_is_found_wherever_it_is_held(before: Any):
    seen: list[Any] = []

    def note(m: Any) -> None:
        found = m.value[-1] if isinstance(m.value, list | tuple) else m.value
        seen.append([*found] if isinstance(found, dict) else None)

    step, model = nnx.jit(note), nnx.Dict(value=nnx.Variable(before))
    step(model)
    for items in ({"a": 1.0, "b": 1.0}, {"b": 1.0, "a": 1.0}):
        model.value = (1.0, items)
        step(model), step(model)
    model.value = [1.0]
    step(model)
    model.value.append({"b": 1.0, "a": 1.0})  # in place
    step(model)
    assert seen == [None, ["a", "b"], ["b", "a"], None, ["b", "a"]]


def test_explained_recompiles_name_the_order():
    step = nnx.jit(lambda m: None, explain_recompiles=True)
    model = Model()
    step(model)
    value = model.w
    del model.w
    model.w = nnx.Param(value)
    with pytest.warns(UserWarning, match="attributes in the order z, w, kind, parts, cache -> "):
        step(model)
    model.cache = dict(reversed(model.cache.items()))
    with pytest.warns(UserWarning, match="the order of the items in 'cache'"):
        step(model)


def test_a_dict_under_a_ref_keeps_its_order_for_owners_outside_of_the_call():
    ref: Any = nnx.Ref(nnx.Variable({"b": jnp.zeros(()), "a": jnp.zeros(())}))
    inside, outside = nnx.Dict(v=ref), nnx.Dict(v=ref)

    @nnx.jit
    def step(m: Any, last: Any) -> None:
        m.v = {key: value + 1 for key, value in m.v.items()}

    for _ in range(3):
        step(inside, 0)
    assert [*outside.v] == ["b", "a"] and outside.v is inside.v and outside.v["a"] == 3

    @nnx.jit
    def release(m: Any) -> None:
        m.v = {key: value + 1 for key, value in m.v.items()}
        del m.v

    release(inside)
    assert [*outside.v] == ["b", "a"] and outside.v["b"] == 4


def test_output_shardings_leave_dicts_in_order():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    model = Model()
    nnx.jit(lambda m: m, out_shardings=sharding)(model)
    assert order_of(model) == ORDER


def test_discarded_changes_leave_the_order_and_returned_modules_have_theirs():
    model = Model()
    returned = nnx.jit(lambda m: (move(m), m)[1], stateful=False)(model)
    eager = Model()
    move(eager)
    assert order_of(model) == ORDER and order_of(returned) == order_of(eager)


def test_a_dict_reordered_in_a_call_that_discards_changes_stays_as_it_is_in_every_call():
    model = nnx.Dict()
    model.tree = {"a": jnp.ones(2), "b": jnp.zeros(2)}

    @nnx.jit(stateful=False)
    def reorder(model):
        model.tree["a"] = model.tree.pop("a")
        return model.tree["a"].sum()

    for _ in range(3):  # the last call repeats the first from its plan
        assert reorder(model) == 2 and list(model.tree) == ["a", "b"]
