"""Specs of whole trees: the structure of the tree, with a spec in the place of every array."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx

MESH = AbstractMesh((4, 2), ("data", "model"))  # no devices needed
RULES = [("embed", "data"), ("mlp", "model")]


class Mlp(nnx.Module):
    def __init__(self, width=8):
        self.up = nnx.Param(jnp.ones((width, 16)), ("embed", "mlp"))
        self.scale = nnx.Param(jnp.ones((width,)), P("embed"))
        self.count = nnx.BatchStat(0)
        self.buffer = jnp.zeros((3,))


def test_a_state_has_the_names_of_its_variables():
    state = Mlp().get_state()
    specs = nnx.get_partition_spec(state)
    assert {path: getattr(leaf, "value", leaf) for path, leaf in specs.items()} == {
        "up": P("embed", "mlp"),
        "scale": P("embed"),
        "count": P(),
        "buffer": P(),
    }
    assert isinstance(specs["up"], nnx.Param) and specs["up"].sharding == ("embed", "mlp")


def test_the_structure_stays_so_that_specs_fit_wherever_jax_takes_them():
    pure = Mlp().partition()
    for tree in (pure, pure.states, pure.partition(nnx.Param, ...), optax.adam(1e-3).init(pure.states)):
        assert jax.tree.structure(nnx.get_partition_spec(tree)) == jax.tree.structure(tree)
        assert jax.tree.structure(nnx.logical_to_mesh_sharding(tree, MESH, RULES)) == jax.tree.structure(tree)


def test_a_module_means_its_state():
    assert nnx.get_partition_spec(Mlp()) == nnx.get_partition_spec(Mlp().get_state())


def test_optimizer_state_follows_the_parameters():
    opt_state = optax.adam(1e-3).init(Mlp().filter(nnx.Param))
    specs = nnx.get_partition_spec(opt_state)
    assert specs[0].mu["up"].value == specs[0].nu["up"].value == P("embed", "mlp")
    assert specs[0].count == P()


def test_factored_optimizer_state_smaller_than_its_parameter_is_whole():
    params = nnx.State({"up": nnx.Param(jnp.ones((8, 16)), ("embed", "mlp"))})
    specs = nnx.get_partition_spec(optax.adafactor(1e-3, min_dim_size_to_factor=4).init(params))
    assert specs[0].v_row["up"].value == P()


def test_a_train_state_has_specs_throughout():
    params, moduledef = Mlp().filter(nnx.Param), Mlp().get_module_def()
    state = nnx.TrainState(moduledef, params=params, tx=optax.adam(1e-3))
    specs = nnx.get_partition_spec(state)
    assert specs.params["up"].value == specs.opt_state[0].mu["up"].value == P("embed", "mlp")
    assert specs.step == P()
    shardings = nnx.logical_to_mesh_sharding(specs, MESH, RULES)
    assert shardings.opt_state[0].nu["up"].value == NamedSharding(MESH, P("data", "model"))


def test_logical_specs_become_mesh_specs():
    specs = nnx.logical_to_mesh(nnx.get_partition_spec(Mlp().get_state()), RULES)
    assert specs["up"].value == P("data", "model") and specs["scale"].value == P("data") and specs["count"].value == P()
    with nnx.logical_axis_rules(RULES):
        assert nnx.logical_to_mesh(Mlp())["up"].value == P("data", "model")


def test_without_rules_nothing_is_split():
    assert nnx.logical_to_mesh(Mlp())["up"].value == P(None, None)


def test_one_spec_is_a_tree_too():
    assert nnx.logical_to_mesh(P("embed", None), RULES) == P("data", None)
    assert nnx.logical_to_mesh_sharding(P("embed"), MESH, RULES) == NamedSharding(MESH, P("data"))


def test_a_variable_that_holds_a_pytree_names_each_of_its_arrays():
    state = nnx.State({"pair": nnx.Param((jnp.ones((4, 4)), jnp.ones((8, 2))), ("embed", None))})
    assert nnx.get_partition_spec(state)["pair"].value == (P("embed", None), P("embed", None))


def test_abstract_models_have_specs():
    state = jax.eval_shape(lambda: Mlp().get_state())
    assert nnx.logical_to_mesh_sharding(state, MESH, RULES)["up"].value.spec == P("data", "model")


# Bad input

BAD = {
    "a rule naming an axis the mesh has not": (
        nnx.Param(jnp.ones((8, 8)), ("embed", "mlp")),
        [("embed", "dat")],
        ("('embed', 'dat')", "the mesh does not have", "('data', 'model')"),
    ),
    "an axis that does not divide": (
        nnx.Param(jnp.ones((6, 8)), ("embed", "mlp")),
        RULES,
        ("axis 0, 'embed', of size 6", "'data' of size 4", "('embed', 'data')", "('embed', None)"),
    ),
    "an axis that two mesh axes do not divide": (
        nnx.Param(jnp.ones((4, 8)), ("embed", "mlp")),
        [("embed", ("data", "model"))],
        ("of size 4 cannot be divided", "('data', 'model') of size 8"),
    ),
    "one name twice": (nnx.Param(jnp.ones((8, 8)), ("embed", "embed")), RULES, ("'embed' stands twice",)),
    "more names than axes": (
        nnx.Param(jnp.ones((8,)), ("embed", "mlp")),
        RULES,
        ("2 entries", "more than the array's rank", "shape is (8,)"),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_an_error_that_says_which_path_and_which_rule(case):
    variable, rules, fragments = BAD[case]
    model = nnx.Dict(encoder=nnx.Dict(kernel=variable))
    with pytest.raises(ValueError, match="^encoder/kernel: ") as error:
        nnx.logical_to_mesh_sharding(model, MESH, rules)
    assert all(fragment in str(error.value) for fragment in fragments), str(error.value)


def test_a_later_rule_is_a_second_choice_where_an_axis_does_not_divide():
    model = nnx.Dict(w=nnx.Param(jnp.ones((6, 8)), ("embed", "mlp")))
    for rule, expected in ((("embed", "model"), P("model", None)), (("embed", None), P(None, "model"))):
        specs = nnx.logical_to_mesh_sharding(model, MESH, [("embed", "data"), rule, ("mlp", "model")])
        assert specs["w"].value.spec == expected


def test_a_string_instead_of_a_tuple_is_an_error_that_shows_the_tuple():
    with pytest.raises(TypeError, match=r"bias: sharding is a tuple of axis names.*got 'embed'.*\('embed',\)"):
        nnx.get_partition_spec(nnx.State({"bias": nnx.Param(jnp.ones(3), "embed")}))


def test_paths_lead_through_records():
    state = nnx.TrainState(
        Mlp().get_module_def(), params=Mlp(width=6).filter(nnx.Param), tx=optax.adam(1e-3)
    )  # fmt: skip
    with pytest.raises(ValueError, match="^(params|opt_state/0/mu)/(up|scale): "):
        nnx.logical_to_mesh_sharding(state, MESH, RULES)
