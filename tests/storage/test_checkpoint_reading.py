"""Reading without a target, listing, renaming, and what has changed since a checkpoint was saved."""

import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnx


class Configured(nnx.Module):
    def __init__(self, rate: float = 0.1, *, ctx: nnx.Context):
        self.layers = [nnx.Linear(3, 4, ctx=ctx), nnx.Linear(4, 2, ctx=ctx)]
        self.dropout = nnx.Dropout(rate)
        self.activation = jax.nn.relu


def make_net(seed: int = 0, rate: float = 0.1):
    return Configured(rate, ctx=nnx.context(seed))


# Without a target


def test_without_a_target_everything_is_returned_as_numpy_arrays_and_values(tmp_path):
    net = make_net()
    nnx.save(
        tmp_path / "c",
        {
            "net": net,
            "epoch": 3,
            "name": "run",
            "half": jnp.ones(2, jnp.bfloat16),
            "rate": 0.5,
            "none": jnp.zeros((0, 2)),
        },
    )
    found = nnx.load(tmp_path / "c")
    kernel = found["net"]["layers"]["0"]["kernel"]
    assert type(kernel) is np.ndarray and (kernel == np.asarray(net.layers[0].kernel)).all()
    assert found["epoch"] == 3 and found["name"] == "run" and found["rate"] == 0.5
    assert type(found["half"]) is np.ndarray and found["half"].dtype == jnp.bfloat16
    assert found["none"].shape == (0, 2)
    renamed_too = nnx.load(tmp_path / "c", rename={"net/layers/*/**": "*/**"})
    assert sorted(renamed_too["0"]) == ["bias", "kernel"]


def test_keys_and_wide_numbers_come_back_as_they_are(tmp_path):
    nnx.save(tmp_path / "c", {"key": jax.random.split(jax.random.key(1), 2), "wide": np.arange(2, dtype=np.int64)})
    found = nnx.load(tmp_path / "c")
    assert (found["key"] == jax.random.split(jax.random.key(1), 2)).all()
    assert found["wide"].dtype == np.int64


def test_keys_that_look_like_paths_lose_nothing(tmp_path):
    nnx.save(tmp_path / "c", {"a": 1, "a/b": 2, "c": {"d": 3}, "c/e": 4})
    assert nnx.load(tmp_path / "c") == {"a": 1, "a/b": 2, "c": {"d": 3, "e": 4}}


def test_a_single_array_comes_back_as_itself(tmp_path):
    nnx.save(tmp_path / "c", jnp.arange(3))
    assert nnx.load(tmp_path / "c").tolist() == [0, 1, 2]


def test_the_entries_are_listed_without_reading_arrays(tmp_path):
    nnx.save(tmp_path / "c", {"net": make_net(), "epoch": 3, "name": "run"})
    for file in (tmp_path / "c").glob("nnx-data-*/*.bin"):
        file.write_bytes(bytes(file.stat().st_size))
    entries = nnx.checkpoint_entries(tmp_path / "c")
    assert entries["net/layers/0/kernel"] == nnx.CheckpointEntry("array", (3, 4), "float32", "Param")
    assert entries["epoch"].kind == "number" and entries["name"].kind == "text"
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        nnx.checkpoint_entries(tmp_path / "other")


# Renaming


def test_paths_are_renamed_by_pattern(tmp_path):
    nnx.save(tmp_path / "c", {"old": make_net(0), "head": jnp.ones(2)})
    target = {"new": {"net": make_net(1)}, "head": jnp.zeros(2)}
    nnx.load(tmp_path / "c", target, rename={"old/**": "new/net/**"})
    assert target["new"]["net"].get_state() == make_net(0).get_state() and (target["head"] == 1).all()


def test_a_rename_that_does_nothing_or_too_much_is_refused(tmp_path):
    nnx.save(tmp_path / "c", {"a": 1, "b": 2})
    with pytest.raises(ValueError, match=r"no path of the checkpoint matches 'x/\*\*'; its paths are: 'a', 'b'"):
        nnx.load(tmp_path / "c", {"a": 0, "b": 0}, rename={"x/**": "y/**"})
    with pytest.raises(ValueError, match="'a' and 'b' of the checkpoint to the same name, 'c'"):
        nnx.load(tmp_path / "c", {"a": 0, "b": 0}, rename={"a": "c", "b": "c"})
    with pytest.raises(ValueError, match="both sides must have the same wildcards"):
        nnx.load(tmp_path / "c", {"a": 0, "b": 0}, rename={"a/*": "b"})


# What has changed


def test_a_changed_setting_is_reported_by_name(tmp_path):
    nnx.save(tmp_path / "c", {"net": make_net(0)})
    target = {"net": make_net(1, rate=0.5)}
    with pytest.warns(UserWarning, match=r"net/dropout\.rate was 0\.1 when the checkpoint was saved, and is 0\.5"):
        nnx.load(tmp_path / "c", target)
    assert target["net"].get_state() == make_net(0).get_state()
    target["net"].activation = jax.nn.gelu
    report = nnx.LoadReport()
    nnx.load(tmp_path / "c", target, report=report)
    assert report.changed["net/dropout.rate"] == ("0.1", "0.5") and "net.activation" in report.changed
    assert not report  # it fits all the same


def test_modes_and_another_class_are_not_reported(tmp_path):
    nnx.save(tmp_path / "c", make_net(0))
    net = make_net(1)
    nnx.set_mode(net, training=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nnx.load(tmp_path / "c", net)
        nnx.load(tmp_path / "c", nnx.eval_shape(make_net))


def trained(tx, steps: int = 1):
    model = nnx.Linear(2, 3, ctx=nnx.context(0))
    optimizer = nnx.Optimizer(model, tx)
    for _ in range(steps):
        optimizer.update(jax.tree.map(jnp.ones_like, model.filter(nnx.Param)))
    return optimizer


def test_an_added_clipping_is_reported_and_the_state_that_fits_is_loaded(tmp_path):
    before = trained(optax.adam(1e-3), steps=3)
    nnx.save(tmp_path / "c", before)
    after = trained(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))
    with pytest.raises(nnx.CheckpointError, match="opt_state/1/0/mu(.|\n)*clip_by_global_norm\\(max_norm=1\\)"):
        nnx.load(tmp_path / "c", after)
    report = nnx.LoadReport()
    nnx.load(tmp_path / "c", after, strict=False, report=report)
    assert report.missing == report.unexpected == []
    assert report.moved["opt_state/1/0/mu/kernel"] == "opt_state/0/mu/kernel"
    assert "clip_by_global_norm(max_norm=1)" in report.changed["tx"][1]
    assert (after.opt_state["1"]["0"]["mu"]["kernel"] == before.opt_state["0"]["mu"]["kernel"]).all()
    assert after.opt_state["1"]["0"]["count"] == 3 and after.step == 3


def test_ambiguous_counts_are_not_mixed_up(tmp_path):
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    nnx.save(tmp_path / "c", trained(optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(schedule)), steps=5))
    after = trained(optax.chain(optax.clip(1.0), optax.scale_by_adam(), optax.scale_by_schedule(schedule)), steps=1)
    report = nnx.LoadReport()
    nnx.load(tmp_path / "c", after, strict=False, report=report)
    # both counts moved: Adam's to Adam's, though the old path of one is the new path of the other
    assert report.moved["opt_state/1/count"] == "opt_state/0/count"
    assert report.moved["opt_state/2/count"] == "opt_state/1/count"
    without = trained(optax.scale_by_adam(), steps=1)
    report = nnx.LoadReport()
    nnx.load(tmp_path / "c", without, strict=False, report=report)
    assert any("count" in path for path in report.missing) and without.opt_state["count"] == 1


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, "float32"])
def test_a_config_with_a_field_named_dtype_does_not_stop_a_save(tmp_path, dtype):
    model = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    model.config = types.SimpleNamespace(dtype=dtype)
    nnx.save(tmp_path / "model", model)
    assert (nnx.load(tmp_path / "model")["w"] == 1).all()


def test_a_changed_dtype_of_a_layer_is_reported(tmp_path):
    nnx.save(tmp_path / "layer", nnx.Linear(2, 2, dtype=jnp.bfloat16, ctx=nnx.context(0)))
    report = nnx.LoadReport()
    target = nnx.Linear(2, 2, dtype=np.dtype("float16"), ctx=nnx.context(0))
    nnx.load(tmp_path / "layer", target, report=report)
    assert report.changed["dtype"] == ("bfloat16", "float16")


def test_a_changed_learning_rate_is_reported(tmp_path):
    nnx.save(tmp_path / "c", trained(optax.adam(1e-3)))
    report = nnx.LoadReport()
    nnx.load(tmp_path / "c", trained(optax.adam(1e-2)), report=report)
    assert "0.001" in report.changed["tx"][0] and "0.01" in report.changed["tx"][1]
    same = nnx.LoadReport()
    nnx.load(tmp_path / "c", trained(optax.adam(1e-3), steps=2), report=same)
    assert not same.changed


def test_a_schedule_that_has_run_is_still_the_same(tmp_path):
    def make():
        return optax.adamw(optax.cosine_decay_schedule(1e-2, 100))

    nnx.save(tmp_path / "c", trained(make(), steps=2))
    report = nnx.LoadReport()
    nnx.load(tmp_path / "c", trained(make(), steps=0), report=report)
    assert not report.changed


# Filled in place


def test_nested_dicts_and_lists_are_filled_in_place(tmp_path):
    def make(n):
        return {"a": {"b": [n, {"c": jnp.full(2, n)}]}, "t": ({"d": n},), "n": [n]}

    nnx.save(tmp_path / "c", make(5))
    target = make(0)
    inner, items, in_tuple, numbers = target["a"], target["a"]["b"], target["t"][0], target["n"]
    assert nnx.load(tmp_path / "c", target) is target
    assert target["a"] is inner and inner["b"] is items and items[0] == 5 and (items[1]["c"] == 5).all()
    assert target["t"][0] is in_tuple and in_tuple == {"d": 5} and target["n"] is numbers and numbers == [5]
    as_list = [{"x": 0}]
    nnx.save(tmp_path / "l", [{"x": 7}])
    assert nnx.load(tmp_path / "l", as_list) is as_list and as_list == [{"x": 7}]


# Only a part


def test_only_a_part_is_loaded_without_a_warning(tmp_path):
    nnx.save(tmp_path / "c", {"model": make_net(0), "ema": make_net(1), "head": {"w": jnp.ones(2)}, "epoch": 3})
    model = make_net(5)
    nnx.load(tmp_path / "c", {"model": model}, only="model")
    assert model.get_state() == make_net(0).get_state()
    whole = {"model": make_net(6), "ema": make_net(7), "head": {"w": jnp.zeros(2)}, "epoch": 0, "new": 1}
    nnx.load(tmp_path / "c", whole, only=["ema", "epoc*"])
    assert whole["epoch"] == 3 and not whole["head"]["w"].any() and whole["new"] == 1
    assert whole["ema"].get_state() == make_net(1).get_state() and whole["model"].get_state() == make_net(6).get_state()
    assert sorted(nnx.load(tmp_path / "c", only="head")) == ["head"]
    nnx.load(tmp_path / "c", {"new": {"model": model}}, rename={"ema/**": "new/model/**"}, only="new/model")
    assert model.get_state() == make_net(1).get_state()


def test_what_is_missing_in_the_part_is_still_an_error(tmp_path):
    nnx.save(tmp_path / "c", {"model": nnx.Dict(w=nnx.Param(jnp.ones(2))), "epoch": 3})
    with pytest.raises(nnx.CheckpointError, match="missing from the checkpoint: 'model/b'"):
        nnx.load(tmp_path / "c", {"model": nnx.Dict(w=nnx.Param(jnp.ones(2)), b=nnx.Param(jnp.ones(1)))}, only="model")
    with pytest.raises(nnx.CheckpointError, match="in the checkpoint, but not in the target: 'model/w'"):
        nnx.load(tmp_path / "c", {"model": {"b": 1}}, only="model")
    with pytest.raises(ValueError, match="only='modle' matches no path of the target; its paths are: 'epoch'"):
        nnx.load(tmp_path / "c", {"epoch": 0}, only="modle")


def test_a_changed_setting_outside_of_the_part_is_not_reported(tmp_path):
    nnx.save(tmp_path / "c", {"a": make_net(0), "b": make_net(0)})
    nnx.load(tmp_path / "c", {"a": make_net(0), "b": make_net(1, rate=0.5)}, only="a")
