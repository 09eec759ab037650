"""Plans by the compilers of TPUs and GPUs, where they are installed."""

import importlib.util

import jax
import jax.numpy as jnp
import optax
import pytest

import nnx

COMPILERS = {"v5e-4": ["libtpu"], "h100-4": ["jax_cuda12_plugin", "jax_cuda13_plugin"]}


@nnx.jit(donate_argnums=0)
def step(optimizer, x, ctx):
    def loss_fn(model, ctx):
        noise = jax.random.normal(ctx.make_rng("noise"), x.shape, x.dtype)
        return jnp.square(model(x + noise)).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model, ctx)
    optimizer.update(grads)
    return loss


def plan_of(name, width, rows=64):
    model = nnx.eval_shape(nnx.MLP, width, 4 * width, width, ctx=nnx.context(0))
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    return nnx.plan(step, nnx.Optimizer(model, optax.adam(1e-3)), x, nnx.context(noise=0), on=name, quick=True)


@pytest.fixture(params=COMPILERS)
def machine(request):
    names = COMPILERS[request.param]
    if not any(importlib.util.find_spec(name) for name in names):
        pytest.skip(f"none of {names} is installed")
    return request.param


def test_step_is_split_counted_and_timed(machine):
    plan = plan_of(machine, 512)
    whole = 4 * (512 * 2048 * 2 + 512 + 2048)
    assert plan.fits and 0.24 * whole < plan.parts["parameters"] < 0.27 * whole
    assert plan.flops == 5 * 2 * 16 * 512 * 2048  # on 16 of the 64 rows
    assert {traffic.kind for traffic in plan.collectives} >= {"all-gather"}
    assert 0 < plan.seconds < 1e-2 and plan.bound_by in ("memory", "interconnect")


def test_step_that_is_too_large_is_refused_with_its_size(machine):
    plan = plan_of(machine, 32768, 2**18)
    assert not plan.fits and plan.bytes > plan.target.memory
