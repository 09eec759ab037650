"""Donation never deletes an array that somebody else holds; what nobody else holds is really donated."""

import copy
import typing
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx
from nnx.transforms.jit import holders, jit
from tests.models import linear
from tests.transforms.test_donation import address


class Two(nnx.Module):
    def __init__(self):
        self.w, self.n = nnx.Param(jnp.zeros(4)), nnx.Variable(jnp.zeros((), jnp.int32))
        self.tree = {"a": jnp.zeros(3), "b": [jnp.zeros(2)]}


def body(m, x=1.0):
    m.w = m.w + x
    m.n = m.n + 1
    m.tree = jax.tree.map(lambda leaf: leaf + 1, m.tree)


STEP = nnx.jit(body, donate_argnums=0)


def stepped(times=2):
    """A Module whose arrays come from a donated step."""
    model = Two()
    for _ in range(times):
        STEP(model)
    return model


def aliased(step, model):
    """The bytes of the arguments whose memory the compiled step gives to its results."""
    return step.lower(model).compile().memory_analysis().alias_size_in_bytes


def arrays(held):
    tree = held.get_state() if isinstance(held, nnx.Module) else held
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def in_another_module(m):
    return nnx.Dict(w=nnx.Param(m.w), tree=m.tree)


HOLDERS = {
    "a clone": lambda m: m.clone(),
    "copy.copy": copy.copy,
    "partition": lambda m: m.partition()[0],
    "get_state": lambda m: m.get_state(),
    "a variable": lambda m: m.w,
    "a list": lambda m: [m.w, m.n],
    "another Module": in_another_module,
    "an average of integers": lambda m: nnx.EMA(m, 0.9, wrt=...),
    "a container of a tree": lambda m: m.tree["b"],
    "an array of a tree": lambda m: m.tree["b"][0],
    "a leaf of a State": lambda m: m.filter(nnx.Param)["w"],
    "a closure": lambda m: (lambda w: [lambda: w, w])(m.w)[1],
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("times", [0, 2], ids=["first call", "later call"])
def test_arrays_held_elsewhere_survive_a_donated_step(hold, times):
    model = stepped(times)
    held = hold(model)
    before = [np.array(leaf) for leaf in arrays(held)]
    assert before
    STEP(model)
    for leaf, value in zip(arrays(held), before, strict=True):
        np.testing.assert_array_equal(leaf, value)
    assert int(model.n) == times + 1 and model.w.tolist() == [times + 1.0] * 4


def test_arrays_that_nobody_else_holds_are_donated_from_the_first_call_on():
    model = Two()
    places = [address(leaf) for leaf in arrays(model)]
    for _ in range(4):
        STEP(model)
        assert [address(leaf) for leaf in arrays(model)] == places


def test_an_optimizer_and_its_model_are_donated_from_the_first_call_on():
    @nnx.jit(donate_argnums=0)
    def train(optimizer, x):
        grads = nnx.grad(lambda m: (m(x) ** 2).mean())(optimizer.model)
        optimizer.update(grads)

    optimizer = nnx.Optimizer(nnx.Linear(3, 3, ctx=nnx.context(0)), optax.adam(1e-3))
    changing = optimizer.filter(nnx.Any("opt_state", nnx.Param))
    places = [address(leaf) for leaf in jax.tree.leaves(changing) if leaf.ndim]
    del changing
    for _ in range(3):
        train(optimizer, jnp.ones((2, 3)))
    now = [address(leaf) for leaf in jax.tree.leaves(optimizer.filter(nnx.Any("opt_state", nnx.Param))) if leaf.ndim]
    assert sorted(now) == sorted(places)


def test_a_new_shape_copies_nothing():
    model = stepped()
    place = address(model.w)
    for x in (jnp.ones(4), jnp.ones((1,)), 2.0):
        STEP(model, x)
    assert address(model.w) == place


def test_an_array_in_two_cells_is_copied_once_and_then_donated():
    model = stepped()
    first = nnx.Dict(a=nnx.Param(model.w), b=nnx.Param(model.w))
    step = nnx.jit(lambda m: (setattr(m, "a", m.a + 1), setattr(m, "b", m.b + 2)), donate_argnums=0)
    step(first)
    places = [address(first.a), address(first.b)]
    step(first)
    assert [address(first.a), address(first.b)] == places
    assert (first.a[0], first.b[0], model.w[0]) == (4.0, 6.0, 2.0)


def test_a_donated_cell_that_is_also_data_is_read_as_it_was():
    model = stepped()
    step = nnx.jit(lambda m, x: setattr(m, "w", m.w + x), donate_argnums=0)
    for expected in (4.0, 8.0):
        step(model, model.w)
        assert model.w[0] == expected


def test_a_cell_tied_outside_of_the_call_is_donated_and_its_owners_see_the_step():
    ref = nnx.Ref(nnx.Param(jnp.zeros(4)))
    inside, outside, third = nnx.Dict(w=ref), nnx.Dict(w=ref), nnx.Dict(w=ref)
    step = nnx.jit(lambda m: setattr(m, "w", m.w + 1), donate_argnums=0)
    place = address(inside.w)
    for _ in range(3):
        step(inside)
        assert address(inside.w) == place and outside.w is inside.w is third.w
    held = inside.w
    del third  # one owner less does not make up for one holder more
    step(inside)
    assert held.tolist() == [3.0] * 4 and outside.w.tolist() == [4.0] * 4


def test_cells_tied_inside_the_call_are_donated_from_a_plan():
    model = nnx.Dict()
    model.a = model.b = nnx.Ref(nnx.Param(jnp.zeros(4)))
    step = nnx.jit(lambda m: setattr(m, "a", m.a + 1), donate_argnums=0)
    place = address(model.a)
    for _ in range(4):
        step(model)
    assert address(model.b) == place and model.b is model.a
    held = model.b
    step(model)
    assert held[0] == 4.0 and model.a[0] == 5.0


def test_a_view_shares_what_is_donated():
    model = stepped()
    view = model.view()
    place = address(model.w)
    STEP(view)
    STEP(model)
    assert address(model.w) == place and view.w is model.w and model.w[0] == 4.0


def test_a_donated_function_inside_another_transform_donates_nothing():
    model = linear(0, 3, 3)
    inner = nnx.jit(lambda m: setattr(m, "kernel", m.kernel * 2), donate_argnums=0)

    @nnx.jit
    def outer(m):
        before = m.kernel
        inner(m)
        return before.sum() + m.kernel.sum()

    start = float(model.kernel.sum())
    for factor in (3, 6):
        np.testing.assert_allclose(float(outer(model)), factor * start, rtol=1e-5)
    held = model.kernel
    x = jnp.ones(2)
    step = nnx.jit(lambda x: x + 1, donate_argnums=0)
    assert jax.vmap(step)(x).tolist() == [2.0, 2.0] and jax.grad(lambda x: step(x).sum())(x).tolist() == [1.0, 1.0]
    assert not x.is_deleted() and not held.is_deleted()


def test_the_array_inside_a_random_key_stays():
    model = nnx.Dict(key=nnx.Variable(jax.random.key(0)))
    data = jax.random.key_data(model.key)
    step = nnx.jit(lambda m: setattr(m, "key", jax.random.split(m.key)[0]), donate_argnums=0)
    for _ in range(2):
        step(model)
    assert data.tolist() == jax.random.key_data(jax.random.key(0)).tolist()


class Moments(typing.NamedTuple):
    mean: jax.Array
    square: typing.Any


def test_trees_of_any_node_are_counted():
    model = nnx.Dict(moments=nnx.Variable(Moments(jnp.zeros(3), {"x": jnp.zeros(2)})))
    model.state = nnx.Variable(linear().get_state())
    step = nnx.jit(lambda m: m.update_state(jax.tree.map(lambda x: x + 1, m.get_state())), donate_argnums=0)
    step(model)
    places = [address(leaf) for leaf in arrays(model)]
    step(model)
    assert [address(leaf) for leaf in arrays(model)] == places
    held = [model.moments.square, model.state["kernel"]]
    before = [np.array(leaf) for leaf in arrays(held)]
    step(model)
    for leaf, value in zip(arrays(held), before, strict=True):
        np.testing.assert_array_equal(leaf, value)


def test_the_same_copies_three_times_in_a_row_are_reported_once():
    model = nnx.Dict(w=nnx.Param(jnp.zeros(256)), b=nnx.Param(jnp.zeros(2)))

    @nnx.jit(donate_argnums=0)
    def train(model):
        model.w, model.b = model.w + 1, model.b + 1

    history = []
    for _ in range(2):
        history = [model.w]
        train(model)
    train(model)  # nobody holds anything: the row starts anew
    for _ in range(2):
        history = [model.w]
        train(model)
    text = r"train has copied 'w' of model \(1,024 bytes\) in three calls in a row: .* a clone, a State"
    with pytest.warns(UserWarning, match=text):
        history = [model.w]
        train(model)
    for _ in range(3):
        history = [model.w]
        train(model)
    assert history[0][0] == 8.0


@pytest.mark.parametrize("arguments", [(), (3.0, [])], ids=["fast path", "general path"])
def test_a_warning_of_copies_that_is_an_error_costs_nothing(arguments):
    step = nnx.jit(lambda m, *args: setattr(m, "w", m.w + 1), donate_argnums=0)
    model = nnx.Dict(w=nnx.Ref(nnx.Param(jnp.zeros(4))) if arguments else nnx.Param(jnp.zeros(4)))
    partner = nnx.Dict(w=model._nnx_info.kinds["w"]) if arguments else None  # an owner outside: no plan is made
    with pytest.raises(UserWarning, match="has copied"), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            held = model.w
            step(model, *arguments)
    assert held.tolist() == [2.0] * 4 and model.w.tolist() == [3.0] * 4
    assert partner is None or partner.w is model.w


def test_without_reference_counts_nothing_is_donated_and_one_warning_says_so(monkeypatch):
    monkeypatch.setattr(jit, "counts_tell", lambda: False)
    with pytest.warns(UserWarning, match="body donates nothing: the reference counts of this Python") as caught:
        step = nnx.jit(body, donate_argnums=0)
    model = Two()
    for _ in range(2):
        step(model)
    assert len(caught) == 1 and int(model.n) == 2
    # The program itself may not write in place. (Addresses do not tell: an allocator reuses them.)
    assert aliased(step, model) == 0 < aliased(STEP, model)


def test_counts_are_not_trusted_where_a_holder_is_not_counted(monkeypatch):
    assert holders.ALONE is not None
    monkeypatch.setattr(holders, "getrefcount", lambda value: 4)
    assert holders.measure_alone() is None
    monkeypatch.setattr(holders, "getrefcount", None)
    assert holders.measure_alone() is None
    monkeypatch.undo()
    monkeypatch.setattr("sys._is_gil_enabled", lambda: False, raising=False)
    assert holders.measure_alone() is None


@pytest.mark.parametrize("repeats", [0, 3], ids=["first call", "later call"])
def test_an_error_at_run_time_names_what_donation_has_cost(repeats):
    def check(x):
        if x > repeats:
            raise ValueError("too large")
        return x

    @nnx.jit(donate_argnums=0)
    def train(model):
        model.w = model.w + 1
        model.w = model.w + 0 * jax.pure_callback(check, jax.ShapeDtypeStruct((), jnp.float32), model.w[0])

    model = nnx.Dict(w=nnx.Param(jnp.zeros(4)))
    for _ in range(repeats):
        train(model)
    with pytest.raises(Exception, match="too large") as caught:
        train(model)
        jax.block_until_ready(model.w)
    if jax.default_backend() == "gpu":  # the call had returned before the program failed
        return
    assert model.w.is_deleted()
    (note,) = [note for note in caught.value.__notes__ if "donated" in note]
    assert note.startswith("train failed after its arguments had been donated") and "'w' of model" in note


def test_a_nan_that_jax_looks_for_costs_nothing():
    step = nnx.jit(lambda m, x: setattr(m, "w", jnp.log(m.w * x)), donate_argnums=0)
    model = nnx.Dict(w=nnx.Param(jnp.full(4, 3.0)))
    step(model, 3.0)
    before = np.array(model.w)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        step(model, -1.0)
    np.testing.assert_array_equal(model.w, before)
    step(model, 3.0)
    assert np.isfinite(np.asarray(model.w)).all()
