"""Traps found when the design was reviewed, each a test."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


class Box(nnx.Module):
    def __init__(self, **attributes):
        for name, value in attributes.items():
            setattr(self, name, value)


class Layer(nnx.Module):
    def __init__(self, w=1.0):
        self.w = nnx.Param(jnp.asarray(w))

    def __call__(self, x):
        return x * self.w


# in-place change of a dict-valued node


def test_an_in_place_change_of_a_dict_valued_node_reaches_the_next_jitted_step():
    traces = []

    @jax.jit
    def total(pure):
        traces.append(1)
        return sum(jax.tree.leaves(pure.merge().cache))

    m = Box(cache={"k": jnp.asarray(1.0)})
    assert float(total(m.partition())) == 1.0
    m.cache["k"] = jnp.asarray(5.0)
    assert float(total(m.partition())) == 5.0
    assert len(traces) == 1
    m.cache["v"] = jnp.asarray(2.0)
    assert float(total(m.partition())) == 7.0
    del m.cache["k"]
    assert float(total(m.partition())) == 2.0


def test_an_in_place_change_inside_a_jitted_step_comes_out():
    @jax.jit
    def step(pure):
        m = pure.merge()
        m.cache["k"] = m.cache["k"] + 1
        m.cache["new"] = m.cache["k"] * 2
        return m.partition()

    m = Box(cache={"k": jnp.asarray(1.0)})
    m.update_state(step(m.partition()))
    assert float(m.cache["k"]) == 2.0
    assert float(m.cache["new"]) == 4.0


# functions that capture


def test_a_lambda_that_captures_self_is_an_error_naming_the_attribute_and_the_cure():
    class Captures(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(1.0)
            self.forward = lambda x: x * self.w

    with pytest.raises((ValueError, TypeError), match="forward") as error:
        Captures()
    assert "method" in str(error.value)


def test_a_bound_method_stored_as_an_attribute_follows_its_module():
    class Chooses(nnx.Module):
        def __init__(self):
            self.layer = Layer(2.0)
            self.run = self.layer.__call__
            self.own = self.plain

        def plain(self, x):
            return self.layer(x) + 1

    state, moduledef = Chooses().partition()

    @jax.jit
    def step(state, x):
        m = moduledef.merge(state)
        m.layer.w = m.layer.w * 2
        return m.run(x), m.own(x)

    assert [float(y) for y in step(state, 3.0)] == [12.0, 13.0]


# one, one and true


@pytest.mark.parametrize("a, b", [(1, 1.0), (1, True), (1.0, True), (0, False), (0.0, -0.0)])
def test_one_and_one_point_zero_and_true_are_different_static_values(a, b):
    traces = []

    @jax.jit
    def step(pure):
        m = pure.merge()
        traces.append(m.n)
        return m.w * m.n

    for value in (a, b, a, b):
        m = Box(n=value, w=nnx.Param(jnp.asarray(1)))
        step(m.partition())
        assert type(m.partition().merge().n) is type(value)
    assert [type(n) for n in traces] == [type(a), type(b)]


# static lists


def test_a_static_list_mutated_between_calls_is_seen():
    @jax.jit
    def step(pure):
        m = pure.merge()
        return jnp.asarray(sum(m.sizes))

    m = Box(sizes=[1, 2])
    assert int(step(m.partition())) == 3
    m.sizes.append(10)
    assert int(step(m.partition())) == 13
    m.sizes[0] = 5
    assert int(step(m.partition())) == 17


def test_a_static_list_mutated_inside_a_failing_trace_leaves_the_model_alone():
    m = Box(sizes=[1, 2])
    before = m.get_module_def()

    @jax.jit
    def step(pure):
        inner = pure.merge()
        inner.sizes.append(10)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        step(m.partition())
    assert m.sizes == [1, 2]
    assert m.get_module_def() == before
    assert before.merge(m.get_state()).sizes == [1, 2]


def test_two_equal_models_keep_their_static_lists_separate():
    a, b = Box(sizes=[1, 2]), Box(sizes=[1, 2])
    assert a.get_module_def() == b.get_module_def()
    a2, b2 = a.partition().merge(), b.partition().merge()
    a2.sizes.append(3)
    a.sizes.append(4)
    assert b.sizes == [1, 2]
    assert b2.sizes == [1, 2]
    assert b.get_module_def().merge(b.get_state()).sizes == [1, 2]
    assert a.get_module_def() != b.get_module_def()


# constructors


def test_layers_filled_by_append_in_the_constructor():
    class Stack(nnx.Module):
        def __init__(self):
            self.layers = []
            for i in range(3):
                self.layers.append(Layer(float(i + 1)))

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    m = Stack()
    assert float(m(1.0)) == 6.0
    assert list(m.get_state()) == ["layers/0/w", "layers/1/w", "layers/2/w"]


def test_layers_zero_to_eleven_are_in_numeric_order():
    m = Box(layers=[Layer(float(i)) for i in range(12)])
    state = m.get_state()
    assert list(state) == [f"layers/{i}/w" for i in range(12)]
    assert [float(leaf) for leaf in jax.tree.leaves(state)] == [float(i) for i in range(12)]
    assert [float(layer.w) for layer in m.clone().layers] == [float(i) for i in range(12)]


# tied tables


def test_a_tied_tables_canonical_path_and_an_update_through_its_alias():
    table = nnx.Ref(nnx.Param(jnp.ones((3, 2))))
    m = Box(decoder=Box(out=Box(kernel=table)), embed=Box(table=table))
    assert list(m.get_state()) == ["embed/table"]
    m.update_state(nnx.State({"decoder/out/kernel": nnx.Param(jnp.zeros((3, 2)))}))
    np.testing.assert_array_equal(m.embed.table, jnp.zeros((3, 2)))
    np.testing.assert_array_equal(m.decoder.out.kernel, jnp.zeros((3, 2)))
    assert list(m.get_state()) == ["embed/table"]
    merged = m.get_module_def().merge(nnx.State({"decoder/out/kernel": nnx.Param(jnp.full((3, 2), 5.0))}))
    np.testing.assert_array_equal(merged.embed.table, jnp.full((3, 2), 5.0))


# a dataclass Module with a default on a field that holds a Ref


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
