"""Constraints by axis names: on arrays, and on what is stored in a Variable. One device; see test_devices for eight."""

import copy
import pickle

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import nnx

RULES = [("batch", "data"), ("embed", "data")]
BIG = AbstractMesh((4, 2), ("data", "model"))
X = jnp.ones((6, 8))


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
def mesh(request):
    return jax.make_mesh((1,), ("data",), axis_types=(request.param,))


def spec_of(x):
    return P(*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec)))


def is_constrained(f, *args):
    """Whether the traced function places something; on one device the compiled result no longer shows it."""
    text = str(jax.make_jaxpr(f)(*args))
    return "sharding_constraint" in text or "reshard" in text


def test_without_a_mesh_or_without_rules_it_is_the_same_array(mesh):
    assert nnx.with_logical_constraint(X, ("batch", None)) is X
    assert nnx.with_logical_constraint(X, ("batch", None), rules=RULES) is X
    assert nnx.with_logical_constraint(X, ("batch", None), mesh=mesh) is X
    assert nnx.with_logical_constraint(X, None, rules=RULES, mesh=mesh) is X


def test_under_a_mesh_and_rules_the_array_is_placed(mesh):
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        assert spec_of(nnx.with_logical_constraint(X, ("batch", None))) == P("data", None)
        assert is_constrained(jax.jit(lambda x: nnx.with_logical_constraint(x, (None, "embed")) * 2), X)


def test_mesh_and_rules_may_be_given(mesh):
    assert spec_of(nnx.with_logical_constraint(X, ("batch", None), RULES, mesh)) == P("data", None)


def test_every_array_of_a_pytree_is_constrained(mesh):
    placed = nnx.with_logical_constraint({"a": X, "b": (X,)}, ("batch", None), RULES, mesh)
    assert [spec_of(leaf) for leaf in jax.tree.leaves(placed)] == [P("data", None)] * 2


def test_the_constraint_is_batched_and_differentiated(mesh):
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        f = jax.jit(jax.vmap(lambda x: nnx.with_logical_constraint(x, ("batch", None)) ** 2))
        assert f(jnp.ones((3, 6, 8))).shape == (3, 6, 8)
        gradient = jax.jit(jax.grad(lambda x: nnx.with_logical_constraint(x, ("batch", None)).sum()))(X)
        assert (gradient == 1).all()


def test_manual_axes_are_left_to_shard_map():
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rules = [("batch", "data"), ("embed", "model")]

    def f(x):
        return nnx.with_logical_constraint(x, ("batch", "embed"), rules)

    for manual in ({"data", "model"}, {"data"}):
        mapped = jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names=manual)
        assert jax.jit(mapped)(X).shape == X.shape


def test_a_name_without_a_rule_falls_back_as_asked(mesh):
    def constrain(fallback):
        return nnx.with_logical_constraint(X, ("batch", "unheard"), RULES, mesh, fallback)

    assert spec_of(constrain(nnx.RulesFallback.AXIS_IS_UNSHARDED)) == P("data", None)
    assert constrain(nnx.RulesFallback.NO_CONSTRAINT) is X
    with pytest.raises(ValueError, match="No rule has a mesh axis for the axis name 'unheard'") as error:
        constrain(nnx.RulesFallback.RAISE_ERROR)
    assert "('batch', 'data')" in str(error.value) and "another fallback" in str(error.value)


def test_a_name_whose_mesh_axis_is_taken_counts_as_without_a_rule(mesh):
    with pytest.raises(ValueError, match="already claimed by 'batch'"):
        nnx.with_logical_constraint(X, ("batch", "embed"), RULES, mesh, nnx.RulesFallback.RAISE_ERROR)


@pytest.mark.parametrize(
    ("names", "rules", "message"),
    [
        (("batch", "batch"), RULES, "'batch' appears twice"),
        (("batch", "a", "b"), RULES, r"3 entries, more than the array's rank: its shape is \(6, 8\)"),
        (("batch", None), [("batch", "nowhere")], r"\('batch', 'nowhere'\) names the mesh axis 'nowhere'"),
        (("batch", None), RULES, r"axis 0, 'batch', of size 6 cannot be divided by mesh axis 'data' of size 4"),
    ],
)
def test_bad_constraints_are_errors_that_show_array_and_rule(names, rules, message):
    with pytest.raises(ValueError, match=message) as error:
        nnx.with_logical_constraint(X, names, rules, BIG)
    assert "shape (6, 8)" in str(error.value)


# Variables with a constraint of their own


class Layer(nnx.Module):
    def __init__(self, *, ctx, **options):
        init = nnx.with_logical_partitioning(jax.nn.initializers.ones, ("embed", "mlp"), **options)
        self.kernel = nnx.Param(init(ctx.make_rng("params"), (4, 6)))
        self.bias = nnx.Param(jnp.zeros(6))


def test_the_variable_has_the_names():
    variable = Layer(ctx=nnx.context(0)).variable("kernel")
    assert variable.sharding == ("embed", "mlp") and isinstance(variable, nnx.Param)


def test_without_a_mesh_the_assigned_value_is_kept():
    layer, value = Layer(ctx=nnx.context(0)), jnp.zeros((4, 6))
    with nnx.logical_axis_rules(RULES):
        layer.kernel = value
    assert layer.kernel is value


def test_the_constraint_is_applied_on_assignment(mesh):
    layer = Layer(ctx=nnx.context(0))
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        layer.kernel = jnp.zeros((4, 6))
    assert spec_of(layer.kernel) == P("data", None)


def test_the_constraint_is_applied_when_the_module_is_rebuilt(mesh):
    pure = Layer(ctx=nnx.context(0)).partition()
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        assert is_constrained(lambda pure: pure.merge().kernel, pure)
    assert not is_constrained(lambda pure: pure.merge().kernel, pure)


def test_constraint_may_be_given_its_own_mesh_and_rules(mesh):
    layer = Layer(ctx=nnx.context(0), mesh=mesh, rules=RULES)
    assert spec_of(layer.kernel) == P("data", None)


def test_the_constraint_survives_copies_and_leaves_moduledefs_equal():
    first, second = Layer(ctx=nnx.context(0)), Layer(ctx=nnx.context(1))
    assert first.get_module_def() == second.get_module_def()
    for copied in (first.clone(), copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert copied.get_module_def() == first.get_module_def()


def test_stand_ins_for_arrays_are_stored_as_they_are(mesh):
    pure = Layer(ctx=nnx.context(0)).partition()
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        shapes = jax.eval_shape(lambda: pure)
        assert shapes.merge().kernel.shape == (4, 6)
        specs = nnx.get_partition_spec(pure)
        assert specs.merge().kernel == P("embed", "mlp")


@pytest.mark.parametrize("stack", [nnx.Scan, nnx.Vmap])
def test_stacked_layers_keep_their_constraint_with_and_without_the_stacked_axis(mesh, stack):
    class Step(Layer):
        def __call__(self, x, _=None):
            assert self.variable("kernel").sharding == ("embed", "mlp")
            return x, self.kernel.sum()

    size = {"length": 3} if stack is nnx.Scan else {"axis_size": 3, "in_axes": None}
    named = {"metadata_params": {nnx.PARTITION_NAME: "layers"}, "variable_axes": {nnx.Param: 0}, "split_rngs": "params"}
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        model = stack(Step, **size, **named)(ctx=nnx.context(0))
        assert nnx.get_partition_spec(model)[next(iter(model.get_state()))[:-4] + "kernel"] == P(
            "layers", "embed", "mlp"
        )
        _, sums = nnx.jit(lambda model, x: model(x, None))(model, jnp.ones(2))
    assert sums.tolist() == [24.0] * 3


def test_gradients_carry_the_names_and_the_constraint():
    pure = Layer(ctx=nnx.context(0)).partition()
    grads = jax.grad(lambda state: pure.moduledef.merge(state).kernel.sum())(pure.states)
    assert grads["kernel"].sharding == ("embed", "mlp") and (grads["kernel"].value == 1).all()
