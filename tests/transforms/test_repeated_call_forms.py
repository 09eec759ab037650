"""Repeated calls with static arguments, discarded changes, trees of Modules, tied weights and sown values.

Such calls are made from a plan, like the common ones in test_repeated_calls; every difference must still be noticed.
"""

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import nnx
from tests.checks import library_functions


class Counter(nnx.Module):
    def __init__(self, start: int = 0):
        self.count = nnx.Variable(jnp.array(start))


class Tied(nnx.Module):
    def __init__(self):
        self.embed = self.head = nnx.Ref(nnx.Param(jnp.ones(3)))


def scaled(counter: Any, by: Any, how: Any = None) -> Any:
    counter.count += by
    return counter.count * (2 if how == "double" else 1)


def grow(model: Any, by: Any) -> Any:
    model.embed = model.embed + by
    return model.head.sum()


def add_all(models: Any, by: Any) -> Any:
    leaves = jax.tree.leaves(models)
    for i, model in enumerate(leaves):
        model.count += 10**i * by
    return len({id(model) for model in leaves})


ONE = jnp.array(1)


def test_no_form_of_a_repeated_call_takes_the_general_path(monkeypatch):
    tied, a, b, sown = Tied(), Counter(), Counter(), Counter()
    sown.sow(nnx.Intermediate, "seen", ONE)
    by_position, by_name = nnx.jit(scaled, static_argnums=2), nnx.jit(scaled, static_argnames="how")
    stateless, add = nnx.jit(scaled, stateful=False), nnx.jit(add_all)
    batched = nnx.jit(lambda counter, batch, how: batch["x"] + counter.count, static_argnums=2)
    lifted, plain = nnx.jit(grow), nnx.jit(lambda counter: counter.count + 1)

    calls: list[Callable[[], Any]] = [
        lambda: by_position(a, ONE, "double"),
        lambda: by_name(a, by=ONE, how="double"),
        lambda: by_name(a, ONE, how=len),
        lambda: stateless(a, ONE),
        lambda: add({"one": a, "two": [b]}, ONE),
        lambda: batched(a, {"x": ONE, "none": None}, "mode"),
        lambda: lifted(tied, ONE),
        lambda: plain(sown),
    ]
    with pytest.warns(UserWarning, match="sown values that have not been popped"):
        for call in calls:
            call()
    for _ in range(3):
        entered = [library_functions(call) for call in calls]
        assert max(map(len, entered)) < 15, entered  # the general path has hundreds
    assert int(b.count) == 40 and tied.head.tolist() == [5, 5, 5]


# Static arguments


def test_static_arguments_of_different_types_are_distinguished():
    @nnx.jit(static_argnums=1)
    def tell(counter, how):
        counter.count += 1
        return counter.count * 0 + ("int", "bool", "float", "str", "tuple").index(type(how).__name__)

    counter = Counter()
    for _ in range(3):
        assert [int(tell(counter, how)) for how in (1, True, 1.0, "1", (1,))] == [0, 1, 2, 3, 4]
    assert tell.trace_count == 5 and int(counter.count) == 15


def test_contents_of_a_static_tuple_are_distinguished():
    @nnx.jit(static_argnums=1)
    def tell(counter, how):
        return counter.count + (10 if type(how[0]) is bool else 1)

    counter = Counter()
    for _ in range(3):
        assert int(tell(counter, (1,))) == 1
        assert int(tell(counter, (True,))) == 10
        assert int(tell(counter, tuple([1]))) == 1  # equal, but not the same object
    assert tell.trace_count == 2


def test_zeros_of_different_sign_are_distinguished():
    divide = nnx.jit(lambda counter, by: counter.count / jnp.float32(by), static_argnums=1)
    counter = Counter(1)
    for zero, expected in [(0.0, jnp.inf), (-0.0, -jnp.inf)] * 3:
        assert float(divide(counter, zero)) == expected


@dataclasses.dataclass(unsafe_hash=True)
class Config:
    factor: int = 2


def test_a_static_argument_that_is_changed_in_place_is_noticed():
    scale = nnx.jit(lambda counter, config: counter.count * config.factor, static_argnames="config")
    counter, config = Counter(1), Config()
    for _ in range(3):
        assert int(scale(counter, config=config)) == 2
    config.factor = 5
    for _ in range(3):
        assert int(scale(counter, config=config)) == 5


def test_a_static_argument_that_cannot_be_hashed_is_an_error_on_every_call():
    scale = nnx.jit(lambda counter, sizes: counter.count * len(sizes), static_argnums=1)
    counter = Counter(1)
    for _ in range(2):
        assert int(scale(counter, (1, 2))) == 2
    for _ in range(2):
        with pytest.raises(ValueError, match="must be hashable"):
            scale(counter, [1, 2])
        with pytest.raises(ValueError, match="must be hashable"):
            scale(counter, (1, [2]))


def test_a_static_function_is_freed_with_the_jitted_function_though_the_module_lives_on():
    counter = Counter()

    def use():
        def activation(x):
            return x + len(lifted.__name__) * 0  # refers back to the jitted function

        def step(counter, activation):
            counter.count = activation(counter.count)

        lifted = nnx.jit(step, static_argnums=1)
        for _ in range(3):
            lifted(counter, activation)
        return weakref.ref(step), weakref.ref(activation)

    freed = use()
    gc.collect()
    assert [weak() for weak in freed] == [None, None]


# stateful=False


def test_changes_are_discarded_on_every_call_and_new_values_are_seen():
    @nnx.jit(stateful=False)
    def peek(counter, by):
        counter.count += by
        counter.sow(nnx.Intermediate, "seen", by)
        counter.extra = nnx.Variable(by)
        return counter.count

    counter = Counter()
    for i in range(4):
        assert int(peek(counter, ONE)) == i + 1
        assert list(counter.get_state()) == ["count"] and int(counter.count) == i
        counter.count += 1
    assert peek.trace_count == 1


def test_a_returned_module_is_another_one_on_every_call():
    @nnx.jit(stateful=False)
    def changed(counter):
        counter.count += 1
        return counter

    counter = Counter()
    others = [changed(counter) for _ in range(3)]
    assert len({id(module) for module in (counter, *others)}) == 4
    assert [int(other.count) for other in others] == [1, 1, 1] and int(counter.count) == 0


def test_changes_that_are_discarded_are_not_computed():
    step = nnx.jit(scaled, stateful=False)
    assert len(step.trace(Counter(), ONE).jaxpr.jaxpr.outvars) == 1


# Modules and data in trees


def test_modules_that_swap_places_in_a_tree_are_distinguished():
    a, b, add = Counter(), Counter(), nnx.jit(add_all)
    for _ in range(3):
        assert add({"x": a, "y": [b]}, ONE) == 2
        assert add({"x": b, "y": [a]}, ONE) == 2
    assert int(a.count) == int(b.count) == 33 and add.trace_count == 1


def test_one_module_in_two_places_of_a_tree_is_one_module_inside():
    a, b, add = Counter(), Counter(), nnx.jit(add_all)
    for _ in range(3):
        assert add([a, b], ONE) == 2
        assert add([a, a], ONE) == 1
    assert (int(a.count), int(b.count)) == (3 + 33, 30)


def test_another_tree_around_the_same_modules_is_noticed():
    @nnx.jit
    def total(models, batch):
        models = models if isinstance(models, dict) else {"first": models[0], "second": models[1]}
        return models["first"].count * 10 + models["second"].count + (0 if batch["y"] is None else batch["y"])

    a, b = Counter(1), Counter(2)
    for _ in range(3):
        assert int(total({"first": a, "second": b}, {"x": ONE, "y": None})) == 12
        assert int(total({"second": a, "first": b}, {"x": ONE, "y": None})) == 21
        assert int(total([a, b], {"x": ONE, "y": 100})) == 112
        assert int(total((a, b), {"x": 100, "y": ONE})) == 13


def test_a_new_attribute_of_a_module_in_a_tree_is_seen():
    total = nnx.jit(lambda models: sum(getattr(model, "extra", 0) + model.count for model in models))
    a, b = Counter(), Counter()
    for _ in range(2):
        assert int(total([a, b])) == 0
    b.extra = nnx.Variable(jnp.array(5))
    for _ in range(2):
        assert int(total([a, b])) == 5


def test_contexts_in_a_tree_draw_new_keys_on_every_call():
    @nnx.jit
    def draw(tree):
        tree["model"].count += 1
        return jax.random.bits(tree["ctx"].make_rng("noise"))

    def keys():
        model, ctx = Counter(), nnx.context(noise=3)
        return [int(draw({"model": model, "ctx": ctx})) for _ in range(4)]

    assert len(set(keys())) == 4 and keys() == keys()


def test_writing_to_modules_in_a_tree_under_a_raw_vmap_is_an_error():
    a, b, add = Counter(), Counter(), nnx.jit(add_all)
    for _ in range(2):
        add([a, b], ONE)
    with pytest.raises(nnx.TraceContextError, match="Cannot mutate Module from different trace level"):
        jax.vmap(lambda by: add([a, b], by))(jnp.arange(3))
    assert (int(a.count), int(b.count)) == (2, 20)


# Tied weights


def test_all_owners_of_a_ref_get_the_new_value_as_one_array():
    model, step = Tied(), nnx.jit(grow)
    for i in range(2, 6):
        assert float(step(model, 1.0)) == 3 * i
        assert model.embed is model.head and model.embed.tolist() == [i] * 3


def test_attribute_untied_between_calls_is_no_longer_updated():
    model, step = Tied(), nnx.jit(grow)
    for _ in range(2):
        step(model, 1.0)
    del model.head
    model.head = nnx.Param(jnp.zeros(3))
    for _ in range(2):
        assert float(step(model, 1.0)) == 0
    assert model.embed.tolist() == [5] * 3


def test_an_owner_outside_the_call_is_written_to_and_not_kept_alive():
    ref: Any = nnx.Ref(nnx.Param(jnp.ones(3)))
    model, outside, step = nnx.Dict(embed=ref, head=ref), nnx.Dict(), nnx.jit(grow)
    for _ in range(2):
        step(model, 1.0)
    outside.tied = ref
    for _ in range(2):
        step(model, 1.0)
    assert outside.tied is model.embed is ref.value and outside.tied.tolist() == [5] * 3
    weak = weakref.ref(outside)
    gc.disable()
    try:
        del outside
        assert weak() is None
    finally:
        gc.enable()
    for _ in range(3):
        step(model, 1.0)
    assert model.head.tolist() == [8] * 3 and ref.value is model.head


# Sown values


def test_sown_values_that_stay_are_reported_once_and_cost_no_trace():
    @nnx.jit
    def step(counter):
        counter.count += 1
        return len(getattr(counter, "seen", ()))

    counter = Counter()
    counter.sow(nnx.Intermediate, "seen", ONE)
    with pytest.warns(UserWarning, match="have not been popped: seen"):
        assert step(counter) == 1
    for _ in range(3):
        assert step(counter) == 1
    assert step.trace_count == 1
    counter.pop_state(nnx.Intermediate)
    assert step(counter) == 0 and int(counter.count) == 5


def test_another_function_reports_sown_values_too():
    counter = Counter()
    counter.sow(nnx.Intermediate, "seen", ONE)
    for step in (nnx.jit(lambda counter: counter.count), nnx.jit(lambda counter: counter.count)):
        with pytest.warns(UserWarning, match="have not been popped: seen"):
            step(counter)
        step(counter)
