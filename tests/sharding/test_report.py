"""The sharding report: how a model would lie on a mesh, before anything is allocated."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import nnx

MESH = AbstractMesh((4, 2), ("data", "model"))
RULES = [("embed", "data"), ("mlp", "model"), ("heads", "model"), ("embed", None)]


class Model(nnx.Module):
    logical_axes = {"inner/bias": ("mlp",)}

    def __init__(self):
        self.inner = nnx.Dict(kernel=nnx.Param(jnp.ones((8, 16)), ("embed", "mlp")), bias=nnx.Param(jnp.ones(16)))
        self.odd = nnx.Param(jnp.ones((6, 16), jnp.bfloat16), ("embed", "mlp"))
        self.both = nnx.Param(jnp.ones((4, 16)), ("heads", "mlp"))
        self.key = jax.random.key(0)
        self.count = nnx.BatchStat(0)


def rows(report):
    return {row.path: row for row in report.rows}


def test_every_array_has_a_row():
    found = rows(nnx.sharding_report(Model(), MESH, RULES))
    kernel = found["inner/kernel"]
    assert kernel.shape == (8, 16) and kernel.logical_axes == ("embed", "mlp")
    assert kernel.mesh_axes == P("data", "model") and kernel.shard_shape == (2, 8)
    assert kernel.bytes == 8 * 16 * 4 and kernel.bytes_per_device == 2 * 8 * 4
    assert set(found) == {"inner/kernel", "inner/bias", "odd", "both", "key", "count"}


def test_default_names_count():
    assert rows(nnx.sharding_report(Model(), MESH, RULES))["inner/bias"].mesh_axes == P("model")


def test_totals_are_those_of_the_rows():
    report = nnx.sharding_report(Model(), MESH, RULES)
    assert report.bytes == sum(row.bytes for row in report.rows)
    assert report.bytes_per_device == sum(row.bytes_per_device for row in report.rows) < report.bytes


def test_axes_that_could_not_be_divided_or_were_claimed_twice_are_listed():
    report = nnx.sharding_report(Model(), MESH, RULES)
    assert "axis 0, 'embed', of size 6 cannot be divided by mesh axis 'data' of size 4" in report.notes["odd"][0]
    assert "needs the mesh axis 'model', already claimed by 'mlp'" in report.notes["both"][0]
    assert set(report.notes) == {"odd", "both"} and not report.errors


def test_errors_are_listed_and_not_raised():
    report = nnx.sharding_report(Model(), MESH, [("embed", "data"), ("mlp", "nowhere")])
    assert set(report.errors) == {"inner/kernel", "inner/bias", "odd", "both"}
    assert "('mlp', 'nowhere')" in report.errors["inner/bias"][0]
    twice = nnx.Dict(w=nnx.Param(jnp.ones((2, 2)), ("mlp", "mlp")), v=nnx.Param(jnp.ones(2), ("mlp", "embed")))
    report = nnx.sharding_report(twice, MESH, RULES)
    assert "appears twice" in report.errors["w"][0] and "more than the array's rank" in report.errors["v"][0]


def test_the_text_is_a_table():
    text = str(nnx.sharding_report(Model(), MESH, RULES))
    lines = text.splitlines()
    assert lines[0].split() == ["path", "shape", "dtype", "logical", "axes", "mesh", "axes", "per", "device"]
    row = next(line for line in lines if line.startswith("inner/kernel"))
    assert row.split() == ["inner/kernel", "8×16", "float32", "embed,", "mlp", "data,", "model", "64", "B"]
    assert "on 8 devices (data=4 × model=2)" in text
    assert any(line.startswith("* odd: axis 0") for line in lines)


def test_it_works_on_abstract_models_of_any_size():
    huge = nnx.Dict(w=nnx.Param(jax.ShapeDtypeStruct((2**17, 2**15), jnp.bfloat16), ("mlp", "embed")))
    report = nnx.sharding_report(huge, MESH, RULES)
    assert report.bytes == 2**33 and report.bytes_per_device == 2**30
    assert "8.0 GiB in 1 arrays" in str(report) and "1.0 GiB on each" in str(report)


def test_states_and_other_trees_have_reports():
    assert set(rows(nnx.sharding_report(Model().filter(nnx.Param), MESH, RULES))) >= {"inner/kernel", "odd"}
    assert rows(nnx.sharding_report({"x": jnp.ones(3), "n": 2}, MESH, RULES))["x"].mesh_axes == P()


def test_the_model_is_left_as_it_is():
    model = Model()
    moduledef = model.get_module_def()
    nnx.sharding_report(model, MESH, RULES)
    assert model.get_module_def() == moduledef


def test_mesh_and_rules_are_taken_from_around_and_without_a_mesh_it_says_so():
    mesh = jax.make_mesh((1, 1), ("data", "model"))
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        assert rows(nnx.sharding_report(Model()))["odd"].mesh_axes == P("data", "model")
    report = nnx.sharding_report(Model(), None, RULES)
    assert "no mesh, so nothing is split" in str(report) and report.bytes_per_device == report.bytes
