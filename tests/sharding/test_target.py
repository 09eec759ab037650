"""What a program is compiled for: meshes, blocks, arrays, and the default backend."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec, use_abstract_mesh

from nnx.sharding.target import compiling_for, lowered_on, target

H100 = AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")


def test_default_backend_is_a_guess():
    found = target()
    assert found.platform == jax.default_backend() and not found.certain


def test_arrays_say_where_they_are():
    assert target(jnp.ones(2)).certain


def test_devices_of_a_mesh_decide():
    x = jnp.ones(2)
    with use_abstract_mesh(AbstractMesh((4,), ("data",), abstract_device=H100)):
        assert target(x) == ("gpu", "9.0", 4, True)
        with compiling_for("tpu"):
            assert target().platform == "gpu"


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_an_argument_on_a_mesh_is_enough(kind):
    mesh = AbstractMesh((4,), ("data",), axis_types=(kind,), abstract_device=H100)
    found = []
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    jax.eval_shape(lambda x: found.append(target(x)), x)
    assert found == [("gpu", "9.0", 4, True)]


@pytest.mark.parametrize(
    "kind, capability",
    [("Tesla T4", "7.5"), ("NVIDIA A100-SXM4-40GB", "8.0"), ("NVIDIA GH200 480GB", "9.0"), ("NVIDIA X1", "")],
)
def test_kinds_of_gpus_have_capabilities(kind, capability):
    with compiling_for("cuda", kind):
        assert target() == ("gpu", capability, 1, True)


def test_unknown_platforms_are_refused():
    with pytest.raises(ValueError, match="expected one of the platforms any, cpu, gpu, tpu.*got 'npu'"):
        compiling_for("npu").__enter__()


def test_traces_are_kept_per_target():
    found = []

    @jax.jit
    def f(x):
        found.append(target(x).platform)
        return x

    for platform in ("cpu", "tpu", "cpu", "tpu"):
        with compiling_for(platform):
            f.lower(1.0)
    assert found == ["cpu", "tpu"]


def test_a_mesh_without_devices_gets_those_of_the_block():
    with use_abstract_mesh(AbstractMesh((2,), ("data",))), compiling_for("tpu"):
        assert target() == ("tpu", "", 2, True)
        assert jax.sharding.get_abstract_mesh().shape == {"data": 2}


def test_a_guess_is_corrected_when_the_program_is_lowered():
    def double(x):
        return lowered_on(target(x)._replace(platform="gpu"), jnp.sin, jnp.cos, x)

    traced = jax.jit(double).trace(1.0)
    for platform, used, other in (("cuda", "sine", "cosine"), ("tpu", "cosine", "sine"), ("cpu", "cosine", "sine")):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert f"stablehlo.{used}" in text and f"stablehlo.{other}" not in text
