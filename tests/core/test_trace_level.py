"""Mutating a Module from another trace level than its own is an error; reading is allowed."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.checks import assert_refused

MESSAGE = "Cannot mutate Module from different trace level"


class Layer(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.mode = "fast"
        self.table = jnp.zeros(2)


class Model(nnx.Module):
    def __init__(self):
        self.layer = Layer()
        self.layers = [Layer()]
        self.named = {"a": Layer()}


def under_scan(f):
    return lambda x: jax.lax.scan(lambda c, y: (f(c), y), x, jnp.arange(2))[0]


RAW_TRANSFORMS = {
    "jit": jax.jit,
    "vmap": jax.vmap,
    "scan": under_scan,
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "value_and_grad": lambda f: jax.value_and_grad(lambda x: f(x).sum()),
    "cond": lambda f: lambda x: jax.lax.cond(x.sum() > 0, f, lambda y: y, x),
    "while": lambda f: lambda x: jax.lax.while_loop(lambda c: c.sum() < 0, f, x),
    "checkpoint": jax.checkpoint,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "linearize": lambda f: lambda x: jax.linearize(f, x),
    "eval_shape": lambda f: lambda x: jax.eval_shape(f, x),
    "jit of grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
    "vmap of jit": lambda f: jax.vmap(jax.jit(f)),
}


def set_variable(m):
    m.layer.w = jnp.zeros(2)


def set_static(m):
    m.layer.mode = "slow"


def set_node(m):
    m.layer.table = jnp.ones(2)


def set_new(m):
    m.layer.new = 1


def delete(m):
    del m.layer.w


def pop(m):
    m.pop_state(nnx.Param)


def update(m):
    m.update_state(jax.tree.map(lambda x: x + 1, m.filter(nnx.Param)))


def add_by_update(m):
    m.update_state(nnx.State({"layer/new": nnx.Param(1.0)}))


def sow(m):
    m.layer.sow(nnx.Intermediate, "h", 1)


def append(m):
    m.layers.append(Layer())


def set_item(m):
    m.layers[0] = Layer()


def delete_item(m):
    del m.layers[0]


def set_key(m):
    m.named["b"] = Layer()


def delete_key(m):
    del m.named["a"]


def set_path(m):
    m.set_path("layer/w", jnp.zeros(2))


def set_leaf(m):
    m.mutable_state_dict()["layer/w"].value = jnp.zeros(2)


MUTATIONS = [
    set_variable,
    set_static,
    set_node,
    set_new,
    delete,
    pop,
    update,
    add_by_update,
    sow,
    append,
    set_item,
    delete_item,
    set_key,
    delete_key,
    set_path,
    set_leaf,
]


def run_and_expect_error(transform, mutate):
    m = Model()
    state, moduledef = m.partition()

    def f(x):
        mutate(m)
        return x * 2.0

    with pytest.raises(nnx.TraceContextError, match=MESSAGE) as error:
        transform(f)(jnp.ones(2))
    after, moduledef_after = m.partition()
    assert moduledef_after == moduledef
    assert all(a is b for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True))
    mutate(m)
    return str(error.value)


@pytest.mark.parametrize("name", RAW_TRANSFORMS)
def test_mutation_is_an_error_inside_every_transform(name):
    run_and_expect_error(RAW_TRANSFORMS[name], set_variable)


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_every_mutation_is_an_error_and_changes_nothing(mutate):
    run_and_expect_error(jax.jit, mutate)


@pytest.mark.parametrize("mutate", [set_variable, delete, pop], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["vmap", "scan", "grad"])
def test_set_delete_and_pop_are_errors_under_the_named_transforms(name, mutate):
    run_and_expect_error(RAW_TRANSFORMS[name], mutate)


def test_message_names_attribute_and_class_and_gives_advice():
    text = run_and_expect_error(jax.jit, set_variable)
    assert "Layer" in text
    assert "w" in text.replace("nnx", "").split("Layer", 1)[1] or "'w'" in text
    assert "nnx." in text or "argument" in text


def test_message_of_pop_gives_advice():
    text = run_and_expect_error(jax.jit, pop)
    assert "Model" in text or "Layer" in text


def under_jit(use):
    return lambda m: jax.jit(lambda x: (use(m), x)[1])(1.0)


@pytest.mark.parametrize(
    "does, error, says",
    [
        (
            under_jit(lambda m: setattr(m.enc, "w", jnp.zeros(2))),
            nnx.TraceContextError,
            (MESSAGE, "'w'", "Block", "nnx.jit"),
        ),
        (under_jit(lambda m: delattr(m.enc, "w")), nnx.TraceContextError, (MESSAGE, "'w'", "Block", "nnx.jit")),
        (under_jit(lambda m: m.pop_state(nnx.Param)), nnx.TraceContextError, (MESSAGE, "pop_state", "nnx.jit")),
        (
            under_jit(lambda m: m.update_state(m.get_state())),
            nnx.TraceContextError,
            (MESSAGE, "update_state", "nnx.jit"),
        ),
        (lambda m: jax.jit(lambda x: x)(m), ValueError, ("Tree", "nnx.jit", "partition", "merge")),
    ],
    ids=["set", "delete", "pop", "update", "passed to raw jit"],
)
def test_a_change_at_another_level_names_what_was_changed_and_what_to_do(does, error, says):
    assert_refused(does, error, says)


def test_the_error_is_importable_and_an_exception():
    assert issubclass(nnx.TraceContextError, Exception)


@pytest.mark.parametrize("name", RAW_TRANSFORMS)
def test_reading_is_allowed_inside_every_transform(name):
    m = Model()

    def f(x):
        assert m.layer.mode == "fast"
        assert len(m.get_state()) == 6
        assert m.get_module_def() == m.partition().moduledef
        return x * m.layer.w + m.layers[0].table

    RAW_TRANSFORMS[name](f)(jnp.ones(2))


def test_a_captured_module_may_be_cloned_inside_and_the_clone_changed():
    m = Model()

    @jax.jit
    def f(x):
        twin = m.clone()
        twin.layer.w = twin.layer.w * x
        return twin.layer.w

    np.testing.assert_array_equal(f(jnp.full(2, 3.0)), [3, 3])
    np.testing.assert_array_equal(m.layer.w, [1, 1])


def test_apply_of_a_captured_module_works_inside():
    class Counter(nnx.Module):
        def __init__(self):
            self.n = nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.n = self.n + x
            return self.n

    m = Counter()
    assert float(jax.jit(lambda x: m.apply(x)[0])(2.0)) == 2.0
    assert float(m.n) == 0.0


def test_a_module_made_inside_may_be_changed_inside():
    @jax.jit
    def f(x):
        m = Model()
        m.layer.w = x
        m.layers.append(Layer())
        m.pop_state(nnx.PathMatches("named/**"))
        m.update_state(jax.tree.map(lambda w: w + 1, m.filter(nnx.Param)))
        return m.layer.w

    np.testing.assert_array_equal(f(jnp.zeros(2)), [1, 1])


def test_a_module_merged_inside_may_be_changed_inside():
    @jax.jit
    def f(pure):
        m = pure.merge()
        m.layer.w = m.layer.w + 1
        return m.partition()

    m = f(Model().partition()).merge()
    np.testing.assert_array_equal(m.layer.w, [2, 2])
    m.layer.w = jnp.zeros(2)


def test_a_module_that_escaped_from_a_transform_cannot_be_changed():
    escaped = []

    @jax.jit
    def f(x):
        m = Layer()
        m.w = x
        escaped.append(m)
        return x

    f(jnp.ones(2))
    with pytest.raises(nnx.TraceContextError, match=MESSAGE):
        escaped[0].w = jnp.zeros(2)


def test_an_inner_level_cannot_change_a_module_of_the_outer_level():
    @jax.jit
    def outer(x):
        m = Layer()

        def inner(y):
            m.w = y
            return y.sum()

        return jax.grad(inner)(x)

    with pytest.raises(nnx.TraceContextError, match=MESSAGE):
        outer(jnp.ones(2))


def test_after_an_error_the_module_can_be_changed_again_outside():
    m = Layer()
    with pytest.raises(nnx.TraceContextError):
        jax.jit(lambda x: setattr(m, "w", x))(1.0)
    m.w = jnp.zeros(2)
    np.testing.assert_array_equal(m.w, [0, 0])


# a Module is not a pytree


def test_a_module_is_a_leaf_to_jax():
    m = Model()
    assert jax.tree.leaves(m) == [m]


@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        jax.grad,
        jax.value_and_grad,
        jax.vmap,
        jax.checkpoint,
        jax.jacfwd,
        jax.jacrev,
        lambda f: lambda m: jax.eval_shape(f, m),
        lambda f: lambda m: jax.lax.cond(True, f, f, m),
        lambda f: lambda m: jax.lax.scan(lambda c, x: (c, f(c)), m, jnp.arange(2)),
        lambda f: lambda m: jax.make_jaxpr(f)(m),
    ],
    ids=[
        *("jit", "grad", "value_and_grad", "vmap", "checkpoint", "jacfwd", "jacrev"),
        *("eval_shape", "cond", "scan", "jaxpr"),
    ],
)
def test_passing_a_module_to_a_raw_transform_is_an_error_that_teaches(transform):
    with pytest.raises(ValueError, match="nnx.jit") as error:
        transform(lambda m: m.w.sum())(Layer())
    assert "partition" in str(error.value)
    assert "Layer" in str(error.value)


def test_a_module_inside_a_list_given_to_jit_is_the_same_error():
    with pytest.raises(ValueError, match="nnx.jit"):
        jax.jit(lambda ms: ms[0].w)([Layer()])


def test_returning_a_module_from_a_raw_transform_is_the_same_error():
    with pytest.raises((ValueError, TypeError)):
        jax.jit(lambda x: Layer())(1.0)


def test_a_captured_module_is_differentiated_around():
    m = Layer()
    np.testing.assert_array_equal(jax.grad(lambda x: (x * m.w).sum())(jnp.ones(2)), [1, 1])


def test_a_module_may_be_changed_from_another_thread():
    m = Model()
    errors = []

    def work():
        try:
            set_variable(m)
            append(m)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    assert len(m.layers) == 2
    np.testing.assert_array_equal(m.layer.w, [0, 0])


def test_a_module_may_be_changed_where_jit_is_disabled():
    m = Layer()

    def f(x):
        m.w = x
        return x

    with jax.disable_jit():
        jax.jit(f)(jnp.zeros(2))
    np.testing.assert_array_equal(m.w, [0, 0])


def test_nothing_leaks_a_tracer():
    with jax.checking_leaks():

        @jax.jit
        def step(pure, x):
            m = pure.merge()
            m.layer.w = m.layer.w + x
            m.layers.append(Layer())
            m.layer.sow(nnx.Intermediate, "h", x)
            m.named["b"] = Layer()
            m.update_state(jax.tree.map(lambda w: w * 2, m.filter(nnx.Param)))
            popped = m.pop_state(nnx.Intermediate)
            repr(m)
            return m.clone().partition(), popped

        pure, _ = step(Model().partition(), jnp.ones(2))
    np.testing.assert_array_equal(pure.merge().layer.w, [4, 4])
