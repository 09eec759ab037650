"""The sharding report: how a model would lie on a mesh, before anything is allocated."""

import jax
import jax.numpy as jnp
import pytest
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


def test_text_uses_the_singular_for_one_device():
    text = str(nnx.sharding_report(Model(), AbstractMesh((1,), ("data",)), nnx.fsdp_rules()))
    assert "on 1 device (data=1)" in text


def test_mesh_axes_another_dimension_has_are_no_remark_if_a_rule_leaves_the_axis_whole():
    model = nnx.eval_shape(lambda ctx: nnx.MLP(16, 64, 16, ctx=ctx), nnx.context(0))
    report = nnx.sharding_report(model, AbstractMesh((8,), ("data",)), nnx.fsdp_rules())
    assert not report.notes and not report.findings


def test_rules_mesh_axes_and_names_in_constraints_without_effect_are_findings():
    rules = [("embed", "data"), ("mpl", "data"), ("batch", "data"), ("sequence", "data"), ("kv_heads", "modle")]
    with jax.sharding.use_abstract_mesh(MESH), pytest.warns(UserWarning, match="'lenght'.*Did you mean 'length'"):
        jax.eval_shape(
            lambda x: nnx.with_logical_constraint(x, ("batch", "sequence", "lenght"), rules),
            jax.ShapeDtypeStruct((4, 4, 2), jnp.float32),
        )
    found = nnx.sharding_report(Model(), MESH, rules).findings
    assert [text.split(",")[0] for text in found] == [
        "no array has the axis name of the rule ('mpl'",
        "no array has the axis name of the rule ('kv_heads'",
        "the mesh has no axis 'modle'",
        "no rule uses the mesh axis 'model' of size 2",
        "no rule has the axis name 'lenght'",
    ]
    assert "Did you mean 'mlp'?" in found[0] and "Did you mean 'model'?" in found[2] and "?" not in found[1]
    assert "? no rule uses the mesh axis 'model'" in str(nnx.sharding_report(Model(), MESH, rules))


def test_large_arrays_that_no_rule_leaves_whole_on_purpose_are_findings():
    def big(*names, rows=4096):
        return nnx.Param(jax.ShapeDtypeStruct((rows, 2048), jnp.float32), names or None)

    model = nnx.Dict(split=big("embed"), whole=big("norm"), odd=big("embed", rows=4098), none=big(), new=big("rows"))
    rules = [("embed", "data"), ("embed", None), ("norm", None), ("x", "model")]
    found = {text.split(":")[0]: text for text in nnx.sharding_report(model, MESH, rules).findings if "MiB" in text}
    assert set(found) == {"odd", "none", "new"}
    assert found["none"].endswith("32.0 MiB whole on each of 8 devices: it has no axis names.")
    assert found["new"].endswith("no rule decides 'rows'.") and "no rule fits its sizes (4098, 2048)" in found["odd"]


def test_report_compares_the_model_with_the_memory_of_a_device():
    huge = nnx.Dict(
        split=nnx.Param(jax.ShapeDtypeStruct((2**13, 2**15), jnp.float32), ("mlp", "embed")),
        whole=nnx.Param(jax.ShapeDtypeStruct((2**13, 2**15), jnp.float32), ("norm", "norm2")),
    )
    rules = [*RULES, ("norm", None), ("norm2", None)]

    def report(gib):
        return nnx.sharding_report(huge, MESH, rules, device_memory=int(gib * 2**30))

    assert report(2).free_per_device == 2**30 - 2**27
    assert "1.1 GiB on each of 2.0 GiB, which leaves 896.0 MiB for everything else" in str(report(2))
    assert "but they have 1.0 GiB: fully split, 256.0 MiB on each would fit" in str(report(1))
    assert "even fully split, this takes at least 21 devices" in str(report(0.1))
    assert nnx.sharding_report(huge, MESH, rules).free_per_device is None


def test_report_works_on_abstract_models_of_any_size():
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


def test_mesh_and_rules_come_from_the_surrounding_blocks_or_it_raises():
    mesh = jax.make_mesh((1, 1), ("data", "model"))
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        assert rows(nnx.sharding_report(Model()))["odd"].mesh_axes == P("data", "model")
    report = nnx.sharding_report(Model(), None, RULES)
    assert "no mesh, so nothing is split" in str(report) and report.bytes_per_device == report.bytes
