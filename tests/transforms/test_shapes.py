"""`nnx.eval_shape` and `nnx.shard_map`: Modules of shapes, and Modules cut up over a mesh."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import nnx
from tests.models import Count
from tests.sharding.programs import environment


class Linear(nnx.Module):
    def __init__(self, din, dout, *, ctx):
        self.kernel = nnx.Param(jax.random.normal(ctx.make_rng("params"), (din, dout)), ("din", "dout"))
        self.count = Count(jnp.zeros((), jnp.int32))
        self.dout = dout

    def __call__(self, x):
        self.count += 1
        return x @ self.kernel


class Shared(nnx.Module):
    def __init__(self, *, ctx):
        self.a = Linear(2, 4, ctx=ctx)
        self.b = self.a


# eval_shape


def test_eval_shape_of_a_constructor_gives_a_module_of_shapes():
    model = nnx.eval_shape(Linear, 2, 3, ctx=nnx.context(0))
    assert isinstance(model, Linear) and model.dout == 3
    assert isinstance(model.kernel, jax.ShapeDtypeStruct)
    assert model.kernel.shape == (2, 3) and model.kernel.dtype == jnp.float32
    assert isinstance(model.variable("kernel"), nnx.Param) and model.variable("kernel").sharding == ("din", "dout")


def test_eval_shape_allocates_nothing():
    model = nnx.eval_shape(Linear, 1_000_000, 1_000_000, ctx=nnx.context(0))
    assert model.kernel.shape == (1_000_000, 1_000_000)


def test_eval_shape_keeps_sharing():
    model = nnx.eval_shape(Shared, ctx=nnx.context(0))
    assert model.a is model.b
    assert list(model.get_state()) == ["a/count", "a/kernel"]


def test_a_module_of_shapes_can_be_filled():
    ctx = nnx.context(0)
    model = nnx.eval_shape(lambda ctx: Linear(2, 3, ctx=ctx), ctx)
    real = Linear(2, 3, ctx=nnx.context(1))
    model.update_state(real.get_state())
    np.testing.assert_array_equal(model(jnp.ones((1, 2))), jnp.ones((1, 2)) @ real.kernel)
    assert model.get_module_def() == real.get_module_def()


def test_eval_shape_of_a_function_of_modules_changes_nothing():
    model = Linear(2, 3, ctx=nnx.context(0))
    kernel = model.kernel
    out = nnx.eval_shape(lambda m, x: {"y": m(x)}, model, jax.ShapeDtypeStruct((5, 2), jnp.float32))
    assert out["y"].shape == (5, 3) and isinstance(out["y"], jax.ShapeDtypeStruct)
    assert model.count == 0 and model.kernel is kernel


def test_eval_shape_takes_modules_of_shapes():
    model = nnx.eval_shape(Linear, 2, 3, ctx=nnx.context(0))
    out = nnx.eval_shape(lambda m, *, x: m(x), model, x=jnp.ones((5, 2)))
    assert out.shape == (5, 3)


def test_the_context_given_to_eval_shape_still_works():
    ctx = nnx.context(0)
    nnx.eval_shape(Linear, 2, 3, ctx=ctx)
    assert Linear(2, 3, ctx=ctx).kernel.shape == (2, 3)


# shard_map, on a mesh of one device


def one_device_mesh():
    return Mesh(np.array(jax.devices()[:1]), ("data",))


def test_shard_map_takes_specs_per_filter():
    mesh, model = one_device_mesh(), Linear(2, 4, ctx=nnx.context(0))
    f = nnx.shard_map(
        lambda m, x: m(x),
        mesh=mesh,
        in_specs=({nnx.Param: PartitionSpec(None, "data"), ...: PartitionSpec()}, PartitionSpec()),
        out_specs=PartitionSpec(None, "data"),
    )
    x = jnp.ones((3, 2))
    np.testing.assert_allclose(f(model, x), x @ model.kernel, rtol=1e-6)
    assert model.count == 1 and not isinstance(model.count, jax.core.Tracer)


def test_shard_map_takes_one_spec_per_module():
    mesh, model = one_device_mesh(), Linear(2, 4, ctx=nnx.context(0))
    f = nnx.shard_map(
        lambda m, x: m(x), mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("data")), out_specs=PartitionSpec("data")
    )
    x = jnp.ones((3, 2))
    np.testing.assert_allclose(f(model, x), x @ model.kernel, rtol=1e-6)


def test_shard_map_works_inside_jit_and_updates_the_module():
    mesh, model = one_device_mesh(), Linear(2, 4, ctx=nnx.context(0))
    kernel = model.kernel

    def body(m, x):
        grads = nnx.grad(lambda m: m(x).sum())(m)
        m.kernel = m.kernel - jax.lax.psum(grads["kernel"].value, "data")

    step = nnx.jit(
        nnx.shard_map(body, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("data")), out_specs=PartitionSpec())
    )
    step(model, jnp.ones((4, 2)))
    np.testing.assert_allclose(model.kernel, kernel - 4, rtol=1e-5)
    assert model.count == 1


def test_shard_map_leaves_the_module_alone_after_an_exception():
    mesh, model = one_device_mesh(), Linear(2, 4, ctx=nnx.context(0))

    def body(m):
        m.count += 1
        raise KeyError("boom")

    with pytest.raises(KeyError, match="boom"):
        nnx.shard_map(body, mesh=mesh, in_specs=(PartitionSpec(),), out_specs=PartitionSpec())(model)
    assert model.count == 0


def test_a_lifted_jit_runs_on_a_module_placed_on_a_mesh():
    mesh, model = one_device_mesh(), Linear(2, 4, ctx=nnx.context(0))
    sharding = NamedSharding(mesh, PartitionSpec(None, "data"))
    model.kernel = jax.device_put(model.kernel, sharding)

    @nnx.jit(donate_argnums=0)
    def step(m):
        m.kernel = m.kernel * 2

    step(model)
    assert model.kernel.sharding.is_equivalent_to(sharding, 2)


# Several devices, in a process of their own


MANY_DEVICES = """
    import jax, jax.numpy as jnp, numpy as np, nnx
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    class Count(nnx.Variable):
        pass

    class Linear(nnx.Module):
        def __init__(self, din, dout, *, ctx):
            self.kernel = nnx.Param(jax.random.normal(ctx.make_rng("params"), (din, dout)))
            self.count = Count(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.count += 1
            return x @ self.kernel

    assert len(jax.devices()) == 4
    mesh = Mesh(np.array(jax.devices()), ("data",))
    columns, whole = NamedSharding(mesh, P(None, "data")), NamedSharding(mesh, P())
    x = jnp.arange(16.0).reshape(8, 2)

    # shard_map with specs per filter: each device holds one column block
    model = Linear(2, 4, ctx=nnx.context(0))
    shapes = []
    def body(m, x):
        shapes.append(m.kernel.shape)
        m.kernel = m.kernel * 2
        return m(x)
    specs = {nnx.Param: P(None, "data"), ...: P()}
    f = nnx.shard_map(body, mesh=mesh, in_specs=(specs, P()), out_specs=P(None, "data"))
    kernel = np.asarray(model.kernel)
    np.testing.assert_allclose(f(model, x), x @ (2 * kernel), rtol=1e-5)
    assert set(shapes) == {(2, 1)}
    np.testing.assert_allclose(model.kernel, 2 * kernel, rtol=1e-6)
    assert model.kernel.sharding.is_equivalent_to(columns, 2) and model.count == 1

    # data parallel: the batch is cut, gradients are summed
    model = Linear(2, 4, ctx=nnx.context(0))
    def gradient(m, x):
        grads = nnx.grad(lambda m: m(x).sum())(m)
        return jax.tree.map(lambda g: jax.lax.psum(g, "data"), grads)
    spec = dict(mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    grads = nnx.jit(nnx.shard_map(gradient, **spec))(model, x)
    np.testing.assert_allclose(grads["kernel"].value, np.tile(x.sum(0)[:, None], (1, 4)), rtol=1e-5)

    # jit builds a Module already sharded, per filter, and a sharded step keeps it so
    make = nnx.jit(lambda ctx: Linear(2, 4, ctx=ctx), out_shardings={nnx.Param: columns, ...: whole})
    model = make(nnx.context(0))
    assert model.kernel.sharding.is_equivalent_to(columns, 2)
    assert {shard.data.shape for shard in model.kernel.addressable_shards} == {(2, 1)}

    step = nnx.jit(lambda m, x: m(x), in_shardings=({nnx.Param: columns, ...: whole}, whole), out_shardings=columns)
    y = step(model, x)
    assert y.sharding.is_equivalent_to(columns, 2)
    np.testing.assert_allclose(y, x @ np.asarray(model.kernel), rtol=1e-5)
    print("all good")
"""


def test_shardings_and_shard_map_over_several_devices():
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MANY_DEVICES)],
        env=environment(devices=4),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0 and "all good" in result.stdout, result.stderr[-3000:]
