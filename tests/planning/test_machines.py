"""Names of machines, what they stand for, and every way to get one wrong."""

import importlib.metadata
import importlib.util

import jax
import pytest

import nnx


def step(x):
    return x.sum()


X = jax.ShapeDtypeStruct((8, 4), "float32")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("v9-8", r"no machine 'v9-8'.*v4-N, v5e-N, v5p-N, v6e-N, a100-N, h100-N, h200-N, cpu-N"),
        ("v5litepod-16", 'Say "v5e-16"'),
        ("v5e:16", 'Say "v5e-16"'),
        ("h100", 'Say how many: "h100-8"'),
        ("H100-8", 'Say "h100-8"'),
        ("v5e-0", "no machine"),
        ("v5e-12", "no slice of 12 v5e chips. Sizes of slices: 1, 4, 8, 16, 32, 64, 128, 256"),
        ("h100-12", "a multiple of 8"),
        ("cpu-4096", r'4096 CPU devices, and this process has \d+.*jax.config.update\("jax_num_cpu_devices", 4096\)'),
    ],
)
def test_wrong_name_is_an_error_that_says_what_to_write(name, text):
    with pytest.raises(ValueError, match=text):
        nnx.plan(step, X, on=name)


def test_list_of_machines_is_checked_before_anything_is_compiled():
    def fails(x):
        raise AssertionError("was traced")

    with pytest.raises(ValueError, match="v9-8"):
        nnx.plan(fails, X, on=["cpu-1", "v9-8"])


def test_mesh_that_does_not_fit_is_an_error_with_one_that_does():
    with pytest.raises(ValueError, match=r"has 1 devices, and v5e-16 has 16 chips. One that fits: \{'data': 16"):
        nnx.plan(step, X, on="v5e-16", mesh={"data": 1})
    with pytest.raises(ValueError, match="has 3 devices, and cpu-1 has 1 chips"):
        nnx.plan(step, X, on="cpu-1", mesh={"data": 3})


def test_neither_a_name_nor_a_mesh_and_no_step_are_errors():
    with pytest.raises(TypeError, match="the name of a machine"):
        nnx.plan(step, X, on=8)
    with pytest.raises(TypeError, match="takes the step as a function"):
        nnx.plan(X, on="cpu-1")
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices("cpu")[:1])
    with pytest.raises(TypeError, match="leave out mesh="):
        nnx.plan(step, X, on=mesh, mesh={"data": 1})


@pytest.mark.parametrize(
    ("name", "module", "extra"), [("v5e-4", "libtpu", "tpu"), ("h100-1", "jax_cuda13_plugin", "gpu")]
)
def test_missing_compiler_is_an_error_that_names_the_extra(name, module, extra):
    if any(importlib.util.find_spec(found) for found in (module, module.replace("13", "12"))):
        pytest.skip(f"{module} is installed")
    with pytest.raises(ImportError, match=f"pip install 'nnx\\[plan-{extra}\\]'"):
        nnx.plan(step, X, on=name)


def test_libtpu_of_another_version_is_an_error(monkeypatch):
    from nnx.planning import machines

    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.0.1")
    monkeypatch.setattr(machines, "require", lambda *_: None)
    with pytest.raises(ImportError, match=r"libtpu 0.0.1 is installed, but JAX .* was released with libtpu 0"):
        nnx.plan(step, X, on="v5e-4")
    with pytest.raises(ImportError, match="do not belong together"):
        monkeypatch.setattr(importlib.metadata, "version", lambda package: package)
        nnx.plan(step, X, on="h100-1")
