"""`model.view(...)`: a second graph on the same variables, with other static attributes."""

import copy
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx


class Block(nnx.Module):
    def __init__(self, ctx):
        self.linear = nnx.Linear(3, 3, ctx=ctx)
        self.norm = nnx.BatchNorm(3, ctx=ctx)
        self.drop = nnx.Dropout(0.5)
        self.calls = nnx.Variable(jnp.array(0))
        self.scale = 1.0

    def __call__(self, x, ctx=None):
        self.calls += 1
        return self.drop(self.norm(self.linear(x)), ctx=ctx) * self.scale


@pytest.fixture
def model():
    ctx = nnx.context(0)
    return nnx.Sequence([Block(ctx), Block(ctx)]).train()


X = jnp.arange(12.0).reshape(4, 3)
MODES = {"deterministic": True, "use_running_average": True}


# What a view is


def test_a_view_equals_the_model_with_these_attributes(model):
    before, expected = model.get_module_def(), model.clone().eval()
    view = model.view(**MODES)
    assert view.get_module_def() == expected.get_module_def()
    assert model.get_module_def() == before
    np.testing.assert_array_equal(view(X), expected(X))


def test_writes_through_either_are_seen_by_both(model):
    view = model.view(**MODES)
    model[0].linear.bias = jnp.ones(3)
    assert view[0].linear.bias is model[0].linear.bias
    view[1].linear.bias += 2
    assert model[1].linear.bias[0] == 2
    view.update_state(nnx.State({"0/calls": nnx.Variable(jnp.array(7))}))
    assert model[0].calls == 7


def test_a_view_is_an_instance_of_the_class_and_is_made_once_per_submodule(model):
    view = model.view(**MODES)
    assert isinstance(view[0], Block) and view[0] is view[0] and view[0] is not model[0]
    assert [path for path, _ in view.named_modules()] == [path for path, _ in model.named_modules()]
    assert view.get_path("0/drop") is view[0].drop


def test_shared_and_cyclic_submodules_are_shared_in_the_view():
    model = nnx.Dict(a=nnx.Dropout(0.5))
    model.b, model.me = model.a, model
    view = model.view(rate=0.1)
    assert view.a is view.b and view.me is view and view.a.rate == 0.1


def test_class_attributes_do_not_hide_variables():
    @nnx.dataclass
    class Record(nnx.Module):
        flag: bool = False
        w: jax.Array = nnx.param_field(default=None)

    model = Record(False, jnp.ones(2))
    view = model.view(flag=True)
    np.testing.assert_array_equal(view.w, jnp.ones(2))


def test_a_stored_method_is_that_of_the_view():
    class Caller(nnx.Module):
        def __init__(self):
            self.flag = False
            self.chosen = self.answer

        def answer(self):
            return self.flag

    model = Caller()
    view = model.view(flag=True)
    assert view.chosen() is True and model.chosen() is False
    assert nnx.jit(lambda m: jnp.array(m.chosen()))(view)


def test_repr_shows_the_attributes_of_the_view(model):
    assert "deterministic: True" in repr(model.view(**MODES)[0])


# Changes of structure


def test_view_has_attributes_added_to_the_model(model):
    view = model.view(**MODES)
    model.extra = nnx.Param(jnp.ones(2))
    model.head = nnx.Dropout(0.9)
    model[0].scale = 3.0
    assert view.extra is model.extra and view[0].scale == 3.0
    assert view.head.deterministic is True and view.head is not model.head
    assert list(view.get_state()) == list(model.get_state())


def test_a_replaced_submodule_is_replaced_in_the_view(model):
    view = model.view(**MODES)
    old = weakref.ref(view[0])
    model[0] = Block(nnx.context(5))
    assert view[0].linear.kernel is model[0].linear.kernel and view[0].drop.deterministic is True
    gc.collect()
    assert old() is None


def test_setting_through_the_view_sets_in_the_model(model):
    view = model.view(**MODES)
    view.extra = nnx.Param(jnp.ones(2))
    view[0].scale = 3.0
    view.again = view[1]
    assert model.extra is view.extra and model[0].scale == 3.0
    assert model.again is model[1] and view.again is view[1]
    del view.extra
    assert not hasattr(model, "extra")
    view.insert(0, view.pop(1))
    assert len(model) == 2 and model[0] is model.again


def test_the_model_never_comes_to_hold_its_view(model):
    view = model.view(**MODES)
    view.chosen = view[0].__call__
    view.pair = [view[0], nnx.Dict(inner=view[1])]
    assert model.chosen.__self__ is model[0] and view.chosen.__self__ is view[0]
    assert model.pair[0] is model[0] and model.pair[1].inner is model[1]
    assert view.pair[0] is view[0] and view.pair[1].inner is view[1]


def test_the_attributes_of_the_view_are_its_own(model):
    view = model.view(**MODES)
    view[0].drop.deterministic = None
    assert (view[0].drop.deterministic, view[1].drop.deterministic) == (None, True)
    view.train()
    model.eval()
    assert view[0].drop.deterministic is False and model[0].drop.deterministic is True


def test_pop_state_through_a_view_takes_tied_variables_along():
    ref = nnx.Ref(nnx.Param(jnp.ones(2)))
    model = nnx.Dict(a=ref, b=ref, flag=False)
    assert list(model.view(flag=True).pop_state(nnx.Param)) == ["a"]
    assert not hasattr(model, "a") and not hasattr(model, "b")


def test_a_tied_variable_written_in_a_jitted_view_reaches_every_owner():
    ref = nnx.Ref(nnx.Param(jnp.zeros(2)))
    outside = nnx.Dict(w=ref)
    model = nnx.Dict(a=ref, flag=False)
    view = model.view(flag=True)

    @nnx.jit
    def step(m):
        m.a += 1

    for count in (1, 2, 3):
        step(view)
        assert outside.w[0] == model.a[0] == view.a[0] == count


def test_a_view_of_a_view_adds_to_it(model):
    view = model.view(**MODES)
    second = view.view(scale=5.0)
    assert second[0].scale == 5.0 and view[0].scale == 1.0 and second[0].drop.deterministic is True
    second[0].drop.deterministic = False
    assert view[0].drop.deterministic is False and model[0].drop.deterministic is False
    assert second[1].linear.kernel is model[1].linear.kernel


# Errors


def test_an_attribute_that_no_submodule_has_is_an_error(model):
    with pytest.raises(ValueError, match="none of them has 'foo'.*'deterministic'"):
        model.view(foo=1)


def test_a_value_that_is_not_static_is_an_error(model):
    with pytest.raises(ValueError, match="Cannot set 'deterministic' of a view of Sequence to float32"):
        model.view(deterministic=jnp.ones(1))
    view = model.view(deterministic=True)
    with pytest.raises(ValueError, match="Cannot set 'deterministic' of a view of Dropout"):
        view[0].drop.deterministic = jnp.ones(1)


def test_the_class_of_a_view_cannot_be_assigned(model):
    with pytest.raises(TypeError, match="Assign it on the Module that it is a view of"):
        model.view(**MODES)[0].__class__ = nnx.Sequence


def test_a_view_belongs_to_the_trace_level_of_its_model(model):
    view = model.view(**MODES)
    with pytest.raises(nnx.TraceContextError):
        jax.jit(lambda: view(X))()


# Transforms


def test_a_jitted_view_updates_the_model_and_shares_what_is_compiled(model):
    @nnx.jit
    def run(m, x):
        return m(x)

    view, other = model.view(**MODES), model.clone().eval()
    run(other, X)
    expected = other(X)
    for _ in range(3):
        np.testing.assert_allclose(run(view, X), expected, rtol=1e-6)
    assert run.trace_count == 1
    assert model[0].calls == 3 and view[0].calls == 3


def test_model_and_view_passed_together_are_one_set_of_variables(model):
    model.for_each(nnx.Dropout, lambda drop: setattr(drop, "rate", 0.0))
    view = model.view(**MODES)

    def loss(m, v, x):
        m(x)
        return (v(x) ** 2).mean() + m[0].linear.kernel.sum()

    def by_state(params, m):
        m = m.clone()
        m.update_state(params)
        m(X)  # changes the statistics that the view uses
        return (m.eval()(X) ** 2).mean() + m[0].linear.kernel.sum()

    expected = jax.grad(by_state)(model.filter(nnx.Param), model)
    step = nnx.jit(lambda *args: nnx.grad(loss, argnums=(0, 1))(*args))
    for count in (2, 4, 6):
        ours, theirs = step(model, view, X)
        assert model[0].calls == count == view[0].calls
        assert len(theirs) == 0  # each variable appears once, where the first argument has it
        if count == 2:
            for path, leaf in expected.items():
                np.testing.assert_allclose(ours[path].value, leaf.value, rtol=1e-5, atol=1e-6)
    assert step.trace_count == 1


def test_two_views_without_the_model_are_one_set_of_variables(model):
    first, second = model.view(deterministic=True), model.view(deterministic=False)

    @nnx.jit
    def both(a, b):
        a[0].linear.bias += 1
        b[0].linear.bias += 1
        return a[0].drop.deterministic, b[0].drop.deterministic

    assert both(first, second) == (True, False)
    assert model[0].linear.bias[0] == 2


def test_structural_changes_in_a_jitted_view_reach_the_model(model):
    view = model.view(**MODES)

    @nnx.jit
    def surgery(m):
        m.extra = nnx.Param(jnp.zeros(1))
        m[0].scale = 2.0
        m[1].drop.deterministic = None
        m.head = nnx.Dropout(0.1)
        m.sow(nnx.Intermediate, "seen", 1.0)
        del m[0].calls

    surgery(view)
    assert model.extra.shape == (1,) and model[0].scale == 2.0 and not hasattr(model[0], "calls")
    assert model[1].drop.deterministic is False and view[1].drop.deterministic is None
    assert model.head.deterministic is None and view.head.deterministic is True
    assert view.pop_state(nnx.Intermediate)["seen"].value == (1.0,)


def test_changing_the_structure_of_one_of_a_pair_is_an_error(model):
    view = model.view(**MODES)
    ties = "was given a Module together with a view of it.*'extra' of Sequence was added"
    with pytest.raises(ValueError, match=ties):
        nnx.jit(lambda m, v: setattr(v, "extra", nnx.Param(jnp.ones(1))))(model, view)
    with pytest.raises(ValueError, match="'0/scale' of Block was replaced"):
        nnx.jit(lambda m, v: setattr(m[0], "scale", 2.0))(model, view)
    with pytest.raises(ValueError, match="'0/calls' of Block was deleted"):
        nnx.jit(lambda m, v: delattr(m[0], "calls"))(model, view)
    assert not hasattr(model, "extra") and model[0].scale == 1.0


def test_structural_changes_elsewhere_keep_a_pair_tied(model):
    view, other = model.view(**MODES), nnx.Dict(n=nnx.Variable(jnp.array(0)))

    @nnx.jit
    def step(m, v, other):
        other.new = nnx.Variable(jnp.array(1))
        m[0].calls += 10

    step(model, view, other)
    assert other.new == 1 and view[0].calls == 10 and model[0].calls is view[0].calls


def test_a_view_made_inside_works_inside_and_cannot_leave(model):
    out = nnx.jit(lambda m, x: m.view(**MODES)(x))(model, X)
    assert model[0].calls == 1
    np.testing.assert_allclose(out, model.clone().eval()(X), rtol=1e-6)
    with pytest.raises(ValueError, match="cannot leave the transform it was made in"):
        nnx.jit(lambda m: m.view(**MODES))(model)


def test_a_module_can_hold_a_model_and_its_view(model):
    both = nnx.Dict(model=model, evaluated=model.view(**MODES))
    assert len(both.get_state()) == len(model.get_state())
    nnx.jit(lambda m: m.evaluated(X))(both)
    assert model[0].calls == 1
    copied = both.clone()
    copied.model[0].calls = jnp.array(5)
    assert copied.evaluated[0].calls == 5 and model[0].calls == 1


# Copies, and others who hold a Module


def test_clone_and_merge_make_ordinary_modules(model):
    view = model.view(**MODES)
    for made in (view.clone(), view.partition().merge()):
        assert type(made[0]) is Block and made[0].drop.deterministic is True
        made[0].calls += 1
        assert model[0].calls == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_deep_copies_and_pickles_keep_model_and_view_together(model, copied):
    view = model.view(**MODES)
    view[0].drop.deterministic = None
    for pair in (copied((model, view)), copied((view, model))[::-1]):
        pair[0][0].calls = jnp.array(9)
        assert pair[1][0].calls == 9 and model[0].calls == 0
        assert pair[1][0].drop.deterministic is None and pair[1][1].drop.deterministic is True
        assert pair[0][1].drop.deterministic is False


def test_a_shallow_copy_is_an_ordinary_module(model):
    copied = copy.copy(model.view(deterministic=True)[0].drop)
    assert type(copied) is nnx.Dropout and copied.deterministic is True


def test_an_optimizer_of_a_view_trains_the_model(model):
    optimizer = nnx.Optimizer(model.view(**MODES), optax.sgd(1.0))
    ema = nnx.EMA(model, 0.5)
    before = model[0].linear.bias
    optimizer.update(jax.tree.map(jnp.ones_like, model.filter(nnx.Param)))
    np.testing.assert_allclose(model[0].linear.bias, before - 1)
    ema.update(optimizer.model)
    np.testing.assert_allclose(ema.averaged(model)[0].linear.bias, before - 0.5)


def test_deleted_view_does_not_keep_its_model_alive(model):
    view = model.view(**MODES)
    nnx.jit(lambda m: m(X))(view)
    gone = weakref.ref(view)
    del view
    gc.collect()
    assert gone() is None
