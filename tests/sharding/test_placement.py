"""Placing a Module on a mesh and building it there. One device; see test_devices for eight."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx

RULES = [("embed", "data"), ("mlp", "model")]


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
def mesh(request):
    return jax.make_mesh((1, 1), ("data", "model"), axis_types=(request.param,) * 2)


class Mlp(nnx.Module):
    logical_axes = {"bias": ("mlp",)}

    def __init__(self, *, ctx):
        self.kernel = nnx.Param(jax.random.normal(ctx.make_rng("params"), (4, 6)), ("embed", "mlp"))
        self.bias = nnx.Param(jnp.zeros(6))
        self.count = nnx.BatchStat(0)
        self.buffer = np.ones(3)


def test_shard_places_a_module_in_place(mesh):
    model = Mlp(ctx=nnx.context(0))
    before = np.asarray(model.kernel)
    assert nnx.shard(model, mesh, RULES) is model
    assert model.kernel.sharding == NamedSharding(mesh, P("data", "model"))
    assert model.bias.sharding.spec == P("model") and model.buffer.sharding.spec == P()
    assert (np.asarray(model.kernel) == before).all() and model.count == 0


def test_shard_takes_mesh_and_rules_from_around(mesh):
    model = Mlp(ctx=nnx.context(0))
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        nnx.shard(model)
    assert model.kernel.sharding.spec == P("data", "model")


def test_without_a_mesh_shard_does_nothing():
    model = Mlp(ctx=nnx.context(0))
    kernel, moduledef = model.kernel, model.get_module_def()
    assert nnx.shard(model, None, RULES).kernel is kernel and model.get_module_def() == moduledef


def test_shard_writes_default_names_into_the_metadata(mesh):
    model = nnx.shard(Mlp(ctx=nnx.context(0)), mesh, RULES)
    assert model.variable("bias").sharding == ("mlp",) and model.variable("kernel").sharding == ("embed", "mlp")
    assert model.variable("count").sharding is None


def test_sharding_twice_moves_nothing(mesh):
    model = nnx.shard(Mlp(ctx=nnx.context(0)), mesh, RULES)
    kernel = model.kernel
    assert nnx.shard(model, mesh, RULES).kernel is kernel


def test_tied_variables_stay_tied(mesh):
    table = nnx.Ref(nnx.Param(jnp.ones((4, 2)), ("embed", None)))
    model = nnx.Dict(a=nnx.Dict(w=table), b=nnx.Dict(w=table))
    nnx.shard(model, mesh, RULES)
    assert model.a.w is model.b.w and model.a.w.sharding.spec == P("data", None)


def test_trees_are_placed_as_copies(mesh):
    state = Mlp(ctx=nnx.context(0)).filter(nnx.Param)
    placed = nnx.shard(state, mesh, RULES)
    assert placed["kernel"].value.sharding.spec == P("data", "model") and placed == state


def test_abstract_modules_learn_their_shardings(mesh):
    pure = jax.eval_shape(lambda: Mlp(ctx=nnx.context(0)).partition())
    model = nnx.shard(pure.merge(), mesh, RULES)
    assert model.kernel.sharding == NamedSharding(mesh, P("data", "model"))


def test_errors_name_the_path_and_change_nothing(mesh):
    model = nnx.Dict(layer=Mlp(ctx=nnx.context(0)))
    kernel = model.layer.kernel
    with pytest.raises(ValueError, match=r"^layer/bias: the rule \('mlp', 'modle'\).*Did you mean 'model'\?"):
        nnx.shard(model, mesh, [("mlp", "modle")])
    assert model.layer.kernel is kernel and model.layer.variable("bias").sharding is None


def test_a_mesh_without_devices_is_an_error():
    with pytest.raises(TypeError, match="mesh with devices is needed.*nnx.sharding_report"):
        nnx.shard(Mlp(ctx=nnx.context(0)), AbstractMesh((1,), ("data",)), RULES)


def test_a_module_is_not_built_again(mesh):
    with pytest.raises(TypeError, match="got a Module.*use nnx.shard"):
        nnx.init_sharded(Mlp(ctx=nnx.context(0)), mesh, RULES, nnx.context(0))


# Building


def build(ctx):
    return Mlp(ctx=ctx)


def test_init_sharded_has_the_numbers_of_the_constructor(mesh):
    model = nnx.init_sharded(build, mesh, RULES, nnx.context(0))
    assert isinstance(model, Mlp) and model.kernel.sharding == NamedSharding(mesh, P("data", "model"))
    assert model.variable("bias").sharding == ("mlp",)
    assert (np.asarray(model.kernel) == np.asarray(build(nnx.context(0)).kernel)).all()


def test_without_a_mesh_the_model_is_simply_built():
    assert (nnx.init_sharded(build, None, RULES, nnx.context(0)).kernel == build(nnx.context(0)).kernel).all()


def test_a_sharded_constructor_draws_no_key_that_another_thread_draws_meanwhile():
    ctx, others = nnx.context(0), []

    def build_slowly(inner):
        thread = threading.Thread(target=lambda: others.append(jax.random.key_data(ctx.make_rng("params"))))
        thread.start()
        thread.join()
        return nnx.Dict(key=nnx.Variable(jax.random.key_data(inner.make_rng("params"))))

    model = nnx.init_sharded(build_slowly, jax.make_mesh((1,), ("data",)), [], ctx)
    keys = [*others, model.key, jax.random.key_data(ctx.make_rng("params"))]
    assert len({tuple(np.asarray(key).tolist()) for key in keys}) == len(keys)


def test_context_continues_as_after_the_constructor(mesh):
    ctx, plain = nnx.context(0, noise=1), nnx.context(0, noise=1)
    plain.make_rng("params"), ctx.make_rng("params")
    for _ in range(2):
        model, expected = nnx.init_sharded(build, mesh, RULES, ctx), build(plain)
        assert (np.asarray(model.kernel) == np.asarray(expected.kernel)).all()
    assert repr(ctx) == repr(plain)
    assert ctx.make_rng("params") == plain.make_rng("params") and ctx.make_rng("noise") == plain.make_rng("noise")


def test_mesh_and_rules_hold_inside_the_constructor(mesh):
    seen = []

    def spy(ctx):
        seen.append((nnx.get_logical_axis_rules(), jax.sharding.get_abstract_mesh().axis_names))
        return build(ctx)

    nnx.init_sharded(spy, mesh, RULES, nnx.context(0))
    assert set(seen) == {(tuple(RULES), ("data", "model"))}
    assert nnx.get_logical_axis_rules() == () and jax.sharding.get_abstract_mesh().empty


def test_mesh_and_rules_are_taken_from_around(mesh):
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        assert nnx.init_sharded(build, None, None, nnx.context(0)).kernel.sharding.spec == P("data", "model")


def test_the_built_module_is_an_ordinary_one(mesh):
    model = nnx.init_sharded(build, mesh, RULES, nnx.context(0))
    model.kernel = model.kernel * 2
    model.extra = nnx.Param(jnp.ones(2))
    assert len(model.get_state()) == 5


def test_a_pytree_may_be_built(mesh):
    state = nnx.init_sharded(lambda ctx: build(ctx).filter(nnx.Param), mesh, RULES, nnx.context(0))
    assert state["kernel"].value.sharding == NamedSharding(mesh, P("data", "model"))


def test_several_modules_are_built_in_one(mesh):
    def pair(ctx):
        model = nnx.name_axes(build(ctx))
        return nnx.Dict(model=model, optimizer=nnx.Optimizer(model, optax.adam(1e-3)))

    both = nnx.init_sharded(pair, mesh, RULES, nnx.context(0))
    assert both.optimizer.model is both.model
    state = both.get_state()
    for path in ("model/bias", "optimizer/opt_state/0/mu/bias"):
        assert state[path].value.sharding == NamedSharding(mesh, P("model"))
    with pytest.raises(TypeError, match=r"nnx.Dict\(model=model, optimizer=optimizer\)"):
        nnx.init_sharded(lambda ctx: (build(ctx), build(ctx)), mesh, RULES, nnx.context(0))


def test_bad_rules_are_found_before_anything_is_allocated(mesh):
    with pytest.raises(ValueError, match=r"kernel: the rule \('embed', 'nowhere'\)"):
        nnx.init_sharded(build, mesh, [("embed", "nowhere")], nnx.context(0))


def test_a_seed_instead_of_a_context_is_an_error():
    with pytest.raises(TypeError, match=r"nnx.context\(0\)"):
        nnx.init_sharded(build, None, RULES, 0)
