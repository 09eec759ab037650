"""Specs of whole trees: the structure of the tree, with a spec in the place of every array."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
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
        self.plain = nnx.Node(jnp.zeros((2,)))


def test_a_state_has_the_names_of_its_variables():
    state = Mlp().get_state()
    specs = nnx.get_partition_spec(state)
    assert isinstance(specs, nnx.State)
    assert dict(specs) == {"up": P("embed", "mlp"), "scale": P("embed"), "count": P(), "buffer": P(), "plain": P()}


def specs_of(tree, specs):
    """What JAX makes of specs as a prefix of a tree: one per array."""
    return jax.tree.leaves(jax.tree.map(lambda spec, part: [spec] * len(jax.tree.leaves(part)), specs, tree))


def test_the_specs_are_a_prefix_so_that_they_fit_wherever_jax_takes_them():
    pure = Mlp().partition()
    record = nnx.TrainState(pure.moduledef, params=pure.states, tx=optax.adam(1e-3))
    for tree in (pure, pure.states, pure.partition(nnx.Param, ...), optax.adam(1e-3).init(pure.states), record):
        for specs in (nnx.get_partition_spec(tree), nnx.logical_to_mesh_sharding(tree, MESH, RULES)):
            assert len(specs_of(tree, specs)) == len(jax.tree.leaves(tree))
            variables = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, nnx.Variable))
            assert not any(isinstance(leaf, nnx.Variable) for leaf in variables)


def test_jax_takes_the_shardings_of_a_record():
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    pure = Mlp().partition()
    record = nnx.TrainState(pure.moduledef, params=pure.states, tx=optax.adam(1e-3))
    shardings = nnx.logical_to_mesh_sharding(nnx.get_partition_spec(record), mesh, RULES)
    jitted = jax.jit(lambda x: x, in_shardings=(shardings,), out_shardings=shardings)(jax.device_put(record, shardings))
    assert jitted.opt_state[0].mu["up"].value.sharding == NamedSharding(mesh, P("data", "model"))


def test_a_module_means_its_state():
    assert nnx.get_partition_spec(Mlp()) == nnx.get_partition_spec(Mlp().get_state())


def test_optimizer_state_follows_the_parameters():
    opt_state = optax.adam(1e-3).init(Mlp().filter(nnx.Param))
    specs = nnx.get_partition_spec(opt_state)
    assert specs[0].mu["up"] == specs[0].nu["up"] == P("embed", "mlp")
    assert specs[0].count == P()


def test_factored_optimizer_state_has_the_names_of_the_axes_it_kept():
    model = nnx.Dict(up=nnx.Param(jnp.ones((8, 16)), ("embed", "mlp")), out=nnx.Param(jnp.ones((8, 8)), ("a", "b")))
    params, moduledef = model.partition()
    record = nnx.TrainState(moduledef, params=params, tx=optax.adafactor(1e-3, min_dim_size_to_factor=4))
    specs = nnx.get_partition_spec(record).opt_state[0]
    assert specs.v_row["up"] == P("embed") and specs.v_col["up"] == P("mlp")
    assert specs.v_row["out"] == P("a") and specs.v_col["out"] == P("b")  # square: optax is asked, not the shape
    assert specs.v["up"] == P()
    alone = nnx.get_partition_spec(record.opt_state)[0]  # without the parameters nothing is known
    assert alone.v_row["up"] == P()


def test_factored_moments_of_square_parameters_have_the_axes_that_the_names_say():
    params, moduledef = nnx.Dict(w=nnx.Param(jnp.ones((3, 8, 8)), ("layers", "a", "b"))).partition()
    record = nnx.TrainState(moduledef, params=params, tx=optax.adafactor(1e-3, min_dim_size_to_factor=4))
    specs = nnx.get_partition_spec(record).opt_state[0]
    assert specs.v_row["w"] == P("layers", "a") and specs.v_col["w"] == P("layers", "b")
    by_row = jax.tree.map(lambda w: jnp.broadcast_to(jnp.arange(8.0)[:, None], w.shape), params)
    moments = record.apply_gradients(by_row).opt_state[0]
    assert jnp.ptp(moments.v_row["w"].value[0]) > 1 and jnp.ptp(moments.v_col["w"].value[0]) < 1e-6
    assert record.moment_axes()["0/v_row/w"] == (0, 1) and record.moment_axes()["0/v_col/w"] == (0, 2)


def test_factored_optimizer_state_that_does_not_divide_stays_whole():
    params, moduledef = nnx.Dict(up=nnx.Param(jnp.ones((8, 9)), ("embed", "mlp"))).partition()
    record = nnx.TrainState(moduledef, params=params, tx=optax.adafactor(1e-3, min_dim_size_to_factor=4))
    rules = [("embed", "data"), ("mlp", "data")]  # of the parameter itself, "embed" claims the mesh axis
    shardings = nnx.logical_to_mesh_sharding(record, MESH, rules)
    assert shardings.params["up"].spec == P("data", None)
    assert shardings.opt_state[0].v_row["up"].spec == P("data")
    assert shardings.opt_state[0].v_col["up"].spec == P(None)


def test_a_train_state_has_specs_throughout():
    params, moduledef = Mlp().filter(nnx.Param), Mlp().get_module_def()
    state = nnx.TrainState(moduledef, params=params, tx=optax.adam(1e-3))
    specs = nnx.get_partition_spec(state)
    assert specs.params["up"] == specs.opt_state[0].mu["up"] == P("embed", "mlp")
    assert specs.step == P()
    shardings = nnx.logical_to_mesh_sharding(specs, MESH, RULES)
    assert shardings.opt_state[0].nu["up"] == NamedSharding(MESH, P("data", "model"))


def test_logical_specs_become_mesh_specs():
    specs = nnx.logical_to_mesh(nnx.get_partition_spec(Mlp().get_state()), RULES)
    assert specs["up"] == P("data", "model") and specs["scale"] == P("data") and specs["count"] == P()
    with nnx.logical_axis_rules(RULES):
        assert nnx.logical_to_mesh(Mlp())["up"] == P("data", "model")


def test_without_rules_nothing_is_split():
    assert nnx.logical_to_mesh(Mlp())["up"] == P(None, None)


def test_one_spec_is_a_tree_too():
    assert nnx.logical_to_mesh(P("embed", None), RULES) == P("data", None)
    assert nnx.logical_to_mesh_sharding(P("embed"), MESH, RULES) == NamedSharding(MESH, P("data"))


def test_a_variable_that_holds_a_pytree_names_each_of_its_arrays():
    state = nnx.State({"pair": nnx.Param((jnp.ones((4, 4)), jnp.ones((8, 2))), ("embed", None))})
    assert nnx.get_partition_spec(state)["pair"] == (P("embed", None), P("embed", None))


def test_abstract_models_have_specs():
    state = jax.eval_shape(lambda: Mlp().get_state())
    assert nnx.logical_to_mesh_sharding(state, MESH, RULES)["up"].spec == P("data", "model")


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
    "one name twice": (nnx.Param(jnp.ones((8, 8)), ("embed", "embed")), RULES, ("'embed' appears twice",)),
    "more names than axes": (
        nnx.Param(jnp.ones((8,)), ("embed", "mlp")),
        RULES,
        ("2 entries", "more than the array's rank", "shape is (8,)"),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_raises_with_path_and_rule(case):
    variable, rules, fragments = BAD[case]
    model = nnx.Dict(encoder=nnx.Dict(kernel=variable))
    with pytest.raises(ValueError, match="^encoder/kernel: ") as error:
        nnx.logical_to_mesh_sharding(model, MESH, rules)
    assert all(fragment in str(error.value) for fragment in fragments), str(error.value)


def test_a_later_rule_is_a_second_choice_where_an_axis_does_not_divide():
    model = nnx.Dict(w=nnx.Param(jnp.ones((6, 8)), ("embed", "mlp")))
    for rule, expected in ((("embed", "model"), P("model", None)), (("embed", None), P(None, "model"))):
        specs = nnx.logical_to_mesh_sharding(model, MESH, [("embed", "data"), rule, ("mlp", "model")])
        assert specs["w"].spec == expected


def test_a_string_instead_of_a_tuple_is_an_error_that_shows_the_tuple():
    bias = nnx.Param(nnx.ContainerMetadata(jnp.ones(3), {"sharding": "embed"}))
    with pytest.raises(TypeError, match=r"bias: sharding is a tuple of axis names.*got 'embed'.*\('embed',\)"):
        nnx.get_partition_spec(nnx.State({"bias": bias}))


def test_paths_lead_through_records():
    state = nnx.TrainState(
        Mlp().get_module_def(), params=Mlp(width=6).filter(nnx.Param), tx=optax.adam(1e-3)
    )  # fmt: skip
    with pytest.raises(ValueError, match="^(params|opt_state/0/mu)/(up|scale): "):
        nnx.logical_to_mesh_sharding(state, MESH, RULES)
