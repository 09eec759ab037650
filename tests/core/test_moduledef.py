"""ModuleDef: the static half of a Module. Hashable, comparable, readable, and able to build Modules."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models import Tree


class Block(nnx.Module):
    def __init__(self, width=2, mode="fast"):
        self.w = nnx.Param(jnp.ones(width))
        self.stat = nnx.BatchStat(jnp.zeros(width))
        self.mode = mode

    def __call__(self, x):
        self.stat = self.stat + 1
        return x * self.w

    def attend(self, x):
        self.stat = self.stat + 10
        return x + self.w


class Encoder(nnx.Module):
    def __init__(self, n=2):
        self.layers = [Block() for _ in range(n)]
        self.named = {"k": Block()}


class Model(nnx.Module):
    def __init__(self, n=2):
        self.encoder = Encoder(n)
        self.scale = nnx.Param(jnp.asarray(2.0))

    def __call__(self, x):
        for layer in self.encoder.layers:
            x = layer(x)
        return x * self.scale


def test_equal_structure_gives_equal_defs_of_equal_hash():
    first, second = Model().get_module_def(), Model().get_module_def()
    assert first == second
    assert hash(first) == hash(second)
    assert (first != second) is False


def test_different_structure_gives_different_defs():
    base = Block().get_module_def()
    assert base != Model().get_module_def()
    assert base != Block(mode="slow").get_module_def()
    extra = Block()
    extra.more = nnx.Param(1.0)
    assert base != extra.get_module_def()
    retyped = Block()
    del retyped.stat
    retyped.stat = nnx.Cache(jnp.zeros(2))
    assert base != retyped.get_module_def()
    remetad = Block()
    del remetad.w
    remetad.w = nnx.Param(jnp.ones(2), ("a",))
    assert base != remetad.get_module_def()
    assert base != "Block"


def test_values_and_shapes_are_not_part_of_a_moduledef():
    changed = Block()
    changed.w = jnp.zeros((5, 5))
    assert changed.get_module_def() == Block().get_module_def()
    assert Block(width=7).get_module_def() == Block(width=2).get_module_def()


def test_order_of_attributes_is_part_of_a_moduledef():
    class Free(nnx.Module):
        pass

    first, second = Free(), Free()
    first.a, first.b, first.c = nnx.Param(1.0), 2, Block()
    second.c, second.b, second.a = Block(), 2, nnx.Param(1.0)
    assert first.get_module_def() != second.get_module_def()
    (difference,) = first.get_module_def().diff(second.get_module_def())
    assert str(difference) == "(root): attributes in the order a, b, c -> attributes in the order c, b, a"
    second.b = second.d = 2
    paths = [path for path, _, _ in first.get_module_def().diff(second.get_module_def())]
    assert paths == ["d", ""]  # what only one of them has is no matter of order


def test_moduledef_distinguishes_shared_from_separate_submodules():
    shared, separate = Encoder(), Encoder()
    shared.layers[1] = shared.layers[0]
    assert shared.get_module_def() != separate.get_module_def()


def test_moduledef_is_a_pytree_without_leaves():
    moduledef = Model().get_module_def()
    assert jax.tree.leaves(moduledef) == []
    assert jax.tree.structure(moduledef) == jax.tree.structure(Model().get_module_def())
    assert jax.tree.map(lambda x: x, moduledef) == moduledef


def test_moduledef_can_be_a_dict_key_and_a_static_argument():
    moduledef = Model().get_module_def()
    assert {moduledef: 1}[Model().get_module_def()] == 1
    traces = []

    def run(moduledef, state, x):
        traces.append(1)
        return moduledef.merge(state)(x)

    jitted = jax.jit(run, static_argnums=0)
    for _ in range(2):
        state, moduledef = Model().partition()
        jitted(moduledef, state, jnp.ones(2))
    assert len(traces) == 1


def test_it_prints_readably():
    text = repr(Model().get_module_def())
    for word in ("Model", "Encoder", "Block", "scale", "Param", "BatchStat", "mode", "fast"):
        assert word in text
    assert "0x" not in text


def test_it_survives_pickling():
    m = Model()
    state, moduledef = m.partition()
    again = pickle.loads(pickle.dumps(moduledef))
    assert again == moduledef
    assert hash(again) == hash(moduledef)
    assert again.merge(state).get_module_def() == moduledef


def test_a_def_with_a_stored_bound_method_survives_pickling():
    m = Encoder()
    m.run = m.layers[0].attend
    state, moduledef = m.partition()
    again = pickle.loads(pickle.dumps(moduledef))
    assert again == moduledef
    merged = again.merge(state)
    assert merged.run.__self__ is merged.layers[0]


# diff


def diff_text(a, b) -> str:
    return str(a.get_module_def().diff(b.get_module_def()))


def test_diff_of_equal_defs_is_empty():
    assert not Model().get_module_def().diff(Model().get_module_def())


def test_diff_lists_the_paths_that_differ_and_how():
    a, b = Model(), Model()
    b.encoder.layers[1].mode = "slow"
    b.encoder.extra = nnx.Param(1.0)
    del b.scale
    text = diff_text(a, b)
    assert "encoder/layers/1/mode" in text or "encoder/layers/1" in text and "mode" in text
    assert "fast" in text and "slow" in text
    assert "encoder/extra" in text
    assert "scale" in text
    assert "encoder/layers/0" not in text


def test_diff_names_a_changed_class():
    a, b = Model(), Model()
    b.encoder.layers[0] = Encoder()
    text = diff_text(a, b)
    assert "encoder/layers/0" in text
    assert "Block" in text and "Encoder" in text


def test_diff_names_a_changed_variable_type():
    a, b = Block(), Block()
    del b.stat
    b.stat = nnx.Cache(jnp.zeros(2))
    text = diff_text(a, b)
    assert "stat" in text and "BatchStat" in text and "Cache" in text


def test_diff_names_changed_sharing():
    a, b = Encoder(), Encoder()
    b.layers[1] = b.layers[0]
    assert "layers/1" in diff_text(a, b)


@pytest.mark.parametrize("change", ["static type", "metadata", "kind"])
def test_unequal_defs_have_a_diff(change):
    a, b = Block(), Block()
    if change == "static type":
        a.n, b.n = 1, True
    elif change == "metadata":
        a.x, b.x = nnx.Param(1.0, ("a",)), nnx.Param(1.0, ("b",))
    else:
        a.x, b.x = nnx.Param(1.0), jnp.ones(1)
    assert a.get_module_def() != b.get_module_def()
    text = diff_text(a, b)
    assert ("n" if change == "static type" else "x") in text


# merge


def test_merge_builds_a_new_module_equal_to_the_old():
    m = Model()
    state, moduledef = m.partition()
    again = moduledef.merge(state)
    assert type(again) is Model
    assert again is not m
    assert again.get_state() == state
    assert again.get_module_def() == moduledef
    np.testing.assert_array_equal(again(jnp.ones(2)), m(jnp.ones(2)))


def test_merge_does_not_call_the_constructor():
    class Loud(nnx.Module):
        built = 0

        def __init__(self):
            type(self).built += 1
            self.w = nnx.Param(1.0)

    state, moduledef = Loud().partition()
    moduledef.merge(state)
    assert Loud.built == 1


def test_merge_twice_builds_two_modules():
    state, moduledef = Model().partition()
    first, second = moduledef.merge(state), moduledef.merge(state)
    first.scale = jnp.zeros(())
    assert float(second.scale) == 2.0
    assert first.encoder is not second.encoder


def test_merge_takes_several_states_and_values_of_later_ones_win():
    m = Model()
    (params, rest), moduledef = m.partition(nnx.Param, ...)
    again = moduledef.merge(params, rest, nnx.State({"scale": nnx.Param(jnp.asarray(9.0))}))
    assert float(again.scale) == 9.0
    again = moduledef.merge(nnx.State({"scale": nnx.Param(jnp.asarray(9.0))}), params, rest)
    assert float(again.scale) == 2.0


def test_merge_shares_shared_submodules_again():
    m = Encoder()
    m.layers[1] = m.layers[0]
    m.me = m
    again = m.partition().merge()
    assert again.layers[0] is again.layers[1]
    assert again.me is again


def test_extra_variables_become_attributes():
    state, moduledef = Model().partition()
    more = nnx.State({"encoder/layers/0/extra": nnx.Cache(jnp.ones(1)), "top": nnx.Param(1.0)})
    again = moduledef.merge(state, more)
    np.testing.assert_array_equal(again.encoder.layers[0].extra, [1])
    assert type(again.encoder.layers[0].variable("extra")) is nnx.Cache
    assert again.top == 1.0


def test_reading_a_variable_without_state_raises():
    m = Model()
    again = m.get_module_def().merge(m.filter(nnx.Param))
    np.testing.assert_array_equal(again.encoder.layers[0].w, [1, 1])
    assert not hasattr(again.encoder.layers[0], "stat")
    with pytest.raises(AttributeError, match="(?i)no state") as error:
        again.encoder.layers[0].stat  # noqa: B018
    assert "stat" in str(error.value)
    assert list(again.get_state()) == list(m.filter(nnx.Param))


def test_reading_a_variable_that_was_not_merged_raises_with_advice():
    m = Tree()
    merged = m.get_module_def().merge(m.filter(nnx.Param))
    with pytest.raises(AttributeError, match="no state was given") as error:
        merged.enc.stat  # noqa: B018
    for fragment in ("'stat'", "Block", "BatchStat", "update_state"):
        assert fragment in str(error.value)


def test_a_missing_variable_may_be_given_later():
    m = Block()
    again = m.get_module_def().merge(m.filter(nnx.Param))
    again.update_state(m.filter(nnx.BatchStat))
    assert type(again.variable("stat")) is nnx.BatchStat
    assert again.get_module_def() == m.get_module_def()


def test_where_a_state_disagrees_its_containers_win():
    m = Block()
    state, moduledef = m.partition()
    other = moduledef.merge(state | nnx.State({"w": nnx.Cache(jnp.zeros(2), unit="m"), "stat": jnp.ones(2)}))
    assert type(other.variable("w")) is nnx.Cache
    assert other.variable("w").unit == "m"
    np.testing.assert_array_equal(other.stat, [1, 1])


def test_merge_accepts_an_alias_of_a_shared_variable():
    m = Encoder()
    m.layers[1] = m.layers[0]
    state, moduledef = m.partition()
    again = moduledef.merge(state, nnx.State({"layers/1/w": nnx.Param(jnp.full(2, 7.0))}))
    np.testing.assert_array_equal(again.layers[0].w, [7, 7])


def test_values_of_later_states_win_also_through_aliases():
    m = Encoder()
    m.layers[1] = m.layers[0]
    _, moduledef = m.partition()
    alias, canonical = (nnx.State({f"layers/{i}/w": nnx.Param(jnp.full(2, float(i)))}) for i in (1, 0))
    np.testing.assert_array_equal(moduledef.merge(alias, canonical).layers[0].w, [0, 0])
    np.testing.assert_array_equal(moduledef.merge(canonical, alias).layers[0].w, [1, 1])


def test_merge_of_other_arguments_raises():
    with pytest.raises((TypeError, ValueError)):
        Block().get_module_def().merge(3)


# apply


def test_apply_runs_the_module_and_gives_output_and_pure():
    state, moduledef = Block().partition()
    out, pure = moduledef.apply(state)(jnp.full(2, 3.0))
    np.testing.assert_array_equal(out, [3.0, 3.0])
    assert isinstance(pure, nnx.Pure)
    new_state, new_def = pure
    assert isinstance(new_state, nnx.State)
    np.testing.assert_array_equal(new_state["stat"].value, [1, 1])
    np.testing.assert_array_equal(state["stat"].value, [0, 0])
    assert new_def == moduledef


def test_apply_with_several_states_gives_one_state():
    (params, rest), moduledef = Block().partition(nnx.Param, ...)
    _, (state, _) = moduledef.apply(params, rest)(jnp.ones(2))
    assert list(state) == ["stat", "w"]


def test_apply_follows_any_chain():
    state, moduledef = Model().partition()
    out, (new, _) = moduledef.apply(state).encoder.layers[1].attend(jnp.ones(2))
    np.testing.assert_array_equal(out, [2, 2])
    np.testing.assert_array_equal(new["encoder/layers/1/stat"].value, [10, 10])
    np.testing.assert_array_equal(new["encoder/layers/0/stat"].value, [0, 0])
    out, (new, _) = moduledef.apply(state).encoder.named["k"](jnp.ones(2))
    np.testing.assert_array_equal(new["encoder/named/k/stat"].value, [1, 1])


def test_a_chain_of_apply_can_be_kept_and_branched():
    state, moduledef = Model().partition()
    layers = moduledef.apply(state).encoder.layers
    _, first = layers[0].attend(jnp.ones(2))
    _, second = layers[1].attend(jnp.ones(2))
    np.testing.assert_array_equal(first.states["encoder/layers/1/stat"].value, [0, 0])
    np.testing.assert_array_equal(second.states["encoder/layers/1/stat"].value, [10, 10])
    np.testing.assert_array_equal(second.states["encoder/layers/0/stat"].value, [0, 0])


def test_apply_works_under_raw_jit_and_grad():
    (params, rest), moduledef = Block().partition(nnx.Param, ...)

    @jax.jit
    def grads(params):
        return jax.grad(lambda p: moduledef.apply(p, rest)(jnp.full(2, 3.0))[0].sum())(params)

    g = grads(params)
    assert type(g["w"]) is nnx.Param
    np.testing.assert_array_equal(g["w"].value, [3, 3])
