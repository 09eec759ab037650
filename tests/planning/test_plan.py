"""Plans of small steps, by the compiler for CPUs, which is always here."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx


class Model(nnx.Module):
    def __init__(self, width, *, ctx):
        self.up = nnx.Linear(width, 4 * width, ctx=ctx)
        self.down = nnx.Linear(4 * width, width, ctx=ctx)
        self.count = nnx.Variable(0)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@nnx.jit(donate_argnums=0)
def train_step(optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: jnp.square(model(x)).mean())(optimizer.model)
    optimizer.update(grads)
    return loss


def build():
    return nnx.Optimizer(Model(16, ctx=nnx.context(0)), optax.adam(1e-3))


PARAMETERS = 4 * (16 * 64 + 64 + 64 * 16 + 16)
X = jax.ShapeDtypeStruct((8, 16), "float32")


@pytest.fixture(scope="module")
def plan():
    return nnx.plan(train_step, nnx.eval_shape(build), X, on="cpu-1")


def test_arguments_are_counted_by_kind(plan):
    assert plan.parts["parameters"] == PARAMETERS
    assert 2 * PARAMETERS <= plan.parts["optimizer state"] < 2 * PARAMETERS + 64  # and Adam's counter
    assert plan.parts["batch"] == 8 * 16 * 4
    assert plan.parts["other state"] == 4
    assert sum(plan.parts.values()) >= plan.arguments > PARAMETERS  # unused arguments are not passed


def test_operations_are_those_of_the_step(plan):
    product = 2 * 8 * 16 * 64
    assert plan.flops == 5 * product  # two forward, three backward: the input needs no gradient


def test_donated_arguments_lend_their_memory_to_results(plan):
    assert plan.donated >= 3 * PARAMETERS
    undonated = nnx.plan(lambda *args: train_step(*args), nnx.eval_shape(build), X, on="cpu-1")
    assert undonated.donated == 0 and undonated.results >= 3 * PARAMETERS
    assert "nnx.jit(step, donate_argnums=0)" in str(undonated)


def test_largest_arrays_have_the_path_of_their_submodule(plan):
    assert {"up", "down"} <= {array.path for array in plan.largest}
    assert [b.bytes for b in plan.largest] == sorted((b.bytes for b in plan.largest), reverse=True)


def test_real_modules_are_neither_used_nor_changed(plan):
    optimizer = build()
    before = jax.tree.leaves(optimizer.get_state())
    found = nnx.plan(train_step, optimizer, np.zeros((8, 16), np.float32), on="cpu-1")
    assert found.bytes == plan.bytes and found.parts == plan.parts
    assert all(a is b for a, b in zip(before, jax.tree.leaves(optimizer.get_state())))


def test_model_and_optimizer_that_share_it_are_counted_once(plan):
    optimizer = nnx.eval_shape(build)

    @nnx.jit(donate_argnums=0)
    def step(optimizer, model, x):
        assert optimizer.model is model
        return train_step(optimizer, x)

    assert nnx.plan(step, optimizer, optimizer.model, X, on="cpu-1").parts == plan.parts


def test_train_state_and_context_are_arguments_too():
    (params, rest), moduledef = Model(16, ctx=nnx.context(0)).partition(nnx.Param, ...)
    state = nnx.TrainState(moduledef, params=params, tx=optax.adam(1e-3), rest=rest)

    def step(state, x, ctx, scale):
        noise = jax.random.normal(ctx.make_rng("noise"), x.shape) * scale
        grads = jax.grad(lambda params: jnp.square(state.apply(params, "rest")(x + noise)[0]).mean())(state.params)
        return state.apply_gradients(grads)

    found = nnx.plan(step, state, X, on="cpu-1", ctx=nnx.context(noise=0), scale=2)
    assert found.parts["parameters"] == PARAMETERS
    assert found.parts["optimizer state"] >= 2 * PARAMETERS


def test_text_html_and_table_show_the_plan(plan, tmp_path):
    text = str(plan)
    assert text.startswith("train_step on cpu-1: 1 chip of cpu, data=1, compiled in ")
    assert "optimizer state" in text and "largest temporary arrays" in text
    assert "optimizer state" in plan._repr_html_()
    plans = nnx.plan(train_step, nnx.eval_shape(build), X, on=["cpu-1", "cpu-1"])
    assert str(plans).count("cpu-1") == 2 and plans._repr_html_().count("<tr>") == 3
    assert plans.plot(tmp_path / "plans.svg").stat().st_size > 1000


def test_mesh_of_devices_is_a_machine_on_which_placed_modules_stay():
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices("cpu")[:1])
    placed = nnx.shard(nnx.eval_shape(build), mesh, nnx.fsdp_rules())
    kernel = placed.model.up.kernel.sharding
    assert nnx.plan(train_step, placed, X, on=mesh, rules=nnx.data_parallel_rules()).parts["parameters"] == PARAMETERS
    assert placed.model.up.kernel.sharding == kernel
    assert nnx.plan(train_step, nnx.eval_shape(build), X, on=mesh).target.name == "cpu-1"


def test_step_that_needs_values_is_an_error_that_says_so():
    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        nnx.plan(lambda x: x if x.sum() > 0 else -x, X, on="cpu-1")
    assert "no values" in "".join(caught.value.__notes__)


def test_a_product_that_needs_a_gpu_to_be_tuned_is_left_to_cublas(monkeypatch):
    compile, given = jax.stages.Lowered.compile, []

    def compile_as_without_a_gpu(lowered, options=None):
        given.append(options)
        if len(given) == 1:
            raise jax.errors.JaxRuntimeError("INTERNAL: No supported config found for HLO: %gemm_fusion_dot.72 = ...")
        return compile(lowered, options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_as_without_a_gpu)
    assert nnx.plan(train_step, nnx.eval_shape(build), X, on="cpu-1").compiled is not None
    assert given == [None, {"xla_gpu_enable_triton_gemm": False}]
