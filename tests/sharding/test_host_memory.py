"""Rules that keep arrays in the memory of the host. One device; docs/many-devices/memory.md runs on eight."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import nnx

MESH = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
RULES = [nnx.on_host(nnx.OptState), *nnx.fsdp_rules()]
X = jnp.arange(8.0).reshape(2, 4)


def make_optimizer():
    return nnx.Optimizer(nnx.Linear(4, 4, ctx=nnx.context(0)), optax.adam(0.1))


def kinds(tree):
    return {path: leaf.value.sharding.memory_kind for path, leaf in tree.get_state().items()}


def train(optimizer):
    loss, grads = nnx.value_and_grad(lambda model: (model(X) ** 2).mean())(optimizer.model)
    optimizer.update(grads)
    return loss


def test_selected_arrays_are_placed_on_the_host_and_split_as_before():
    optimizer = nnx.shard(make_optimizer(), MESH, RULES)
    found = kinds(optimizer)
    assert {path for path, kind in found.items() if kind == "pinned_host"} == {
        f"opt_state/0/{moment}/{name}" for moment in ("mu", "nu") for name in ("kernel", "bias")
    }
    assert optimizer.opt_state.get_path("0/mu/kernel").sharding.spec == P("data", None)
    built = nnx.init_sharded(lambda ctx: make_optimizer(), MESH, RULES, nnx.context(0))
    assert kinds(built) == found


@pytest.mark.parametrize("step", [train, nnx.jit(train), nnx.jit(train, donate_argnums=0)])
def test_an_update_moves_the_state_and_returns_it(step):
    plain, offloaded = make_optimizer(), nnx.shard(make_optimizer(), MESH, RULES)
    before = kinds(offloaded)
    expected = [train(plain) for _ in range(3)]
    np.testing.assert_allclose([step(offloaded) for _ in range(3)], expected, rtol=1e-5)
    assert kinds(offloaded) == before and int(offloaded.step) == 3


def test_a_compiled_update_for_an_accelerator_moves_the_state():
    optimizer = nnx.shard(make_optimizer(), MESH, RULES)
    text = nnx.jit(train).trace(optimizer).lower(lowering_platforms=("cuda",)).as_text()
    assert "pinned_host" in text and text.count("annotate_device_placement") >= 8  # four moments, in and out


def test_the_state_of_a_record_is_selected_by_path():
    params, moduledef = nnx.Linear(4, 4, ctx=nnx.context(0)).partition()
    rules = [nnx.on_host(nnx.PathMatches("opt_state/**")), *nnx.fsdp_rules()]
    record = nnx.shard(nnx.TrainState(moduledef, params=params, tx=optax.adam(0.1)), MESH, rules)
    record = record.apply_gradients(jax.tree.map(jnp.ones_like, record.params))
    assert record.opt_state[0].nu["kernel"].value.sharding.memory_kind == "pinned_host"
    assert record.params["kernel"].value.sharding.memory_kind == "device"
    assert record.opt_state[0].count.sharding.memory_kind == "device"


def test_results_return_to_the_memory_of_the_values_they_replace():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    model = nnx.shard(nnx.Dict(w=nnx.Param(jnp.ones(4))), mesh, [nnx.on_host(nnx.Param)])

    @nnx.jit
    def double(model):
        model.w = jax.device_put(2 * jax.device_put(model.w, jax.memory.Space.Device), jax.memory.Space.Host)

    double(model)
    assert model.w.sharding.memory_kind == "pinned_host" and model.w.tolist() == [2.0] * 4


def test_abstract_models_and_reports_know_the_memory():
    abstract = nnx.Optimizer(nnx.eval_shape(lambda ctx: nnx.Linear(4, 4, ctx=ctx), nnx.context(0)), optax.adam(0.1))
    assert nnx.shard(abstract, MESH, RULES).opt_state.get_path("0/mu/kernel").sharding.memory_kind == "pinned_host"
    report = nnx.sharding_report(abstract, AbstractMesh((4,), ("data",)), RULES)
    assert report.host_bytes_per_device == 2 * (4 + 1) * 4 and report.bytes_per_device == (4 + 1) * 4 + 2 * 4
    assert "28 B on each and 40 B for each on its host" in str(report)
    assert [line.split()[-1] for line in str(report).splitlines()].count("pinned_host") == 4


def test_the_first_rule_that_matches_decides():
    rules = [nnx.on_host(nnx.PathMatches("a"), "device"), nnx.on_host([nnx.Param]), ("embed", "data")]
    model = nnx.shard(nnx.Dict(a=nnx.Param(jnp.ones(2)), b=nnx.Param(jnp.ones(2), ("embed",))), MESH, rules)
    assert kinds(model) == {"a": "device", "b": "pinned_host"} and model.b.sharding.spec == P("data")
    assert nnx.on_host(nnx.Param) == nnx.on_host(nnx.Param) and hash(nnx.on_host("params"))


def test_bad_rules_are_errors():
    with pytest.raises(TypeError, match="Invalid filter 3"):
        nnx.on_host(3)
    with pytest.raises(ValueError, match="Unknown collection 'moments'"):
        nnx.on_host("moments")
    with pytest.raises(ValueError, match="memory kinds"):
        nnx.shard(nnx.Dict(w=nnx.Param(jnp.ones(2))), MESH, [nnx.on_host(nnx.Param, "nowhere")])


def test_policy_chooses_the_memory_of_an_activation():
    model = nnx.MLP(4, 8, 4, ctx=nnx.context(0))

    def gradient(policy):
        return nnx.jit(nnx.grad(lambda model, x: nnx.remat(lambda m, x: m(x), policy=policy)(model, x).sum()))

    offloading = gradient({"mlp_hidden": "pinned_host", "mlp_out": "device"})
    for a, b in zip(jax.tree.leaves(offloading(model, X)), jax.tree.leaves(gradient(None)(model, X)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert "pinned_host" in offloading.trace(model, X).lower(lowering_platforms=("cuda",)).as_text()
    on_device = gradient({"mlp_hidden": "device"}).trace(model, X).lower(lowering_platforms=("cuda",))
    assert "pinned_host" not in on_device.as_text()
    with pytest.raises(TypeError, match="a mapping from name to memory"):
        nnx.remat(model, policy={"mlp_hidden": None})
    with pytest.raises(ValueError, match="can name one memory"):
        nnx.remat(model, policy={"mlp_hidden": "pinned_host", "mlp_out": "unpinned_host"})(X)
