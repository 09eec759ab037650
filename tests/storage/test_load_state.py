"""`Module.load_state`: a mapping of arrays goes into a Module completely, or the error lists all that does not fit."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx


class Net(nnx.Module):
    def __init__(self):
        ctx = nnx.context(0)
        self.layers = [nnx.Linear(2, 3, ctx=ctx), nnx.BatchNorm(3, ctx=ctx)]
        self.steps = nnx.Variable(0)
        self.table = np.arange(3)


def numbers(model: nnx.Module, scale: float = 2.0) -> dict[str, np.ndarray]:
    """New values for everything in a model, as NumPy arrays."""
    return {path: np.asarray(scale * np.asarray(x) + 1, np.asarray(x).dtype) for path, x in model.get_state().items()}


def same(model: nnx.Module, values: dict[str, Any]) -> None:
    assert list(model.get_state()) == sorted(values, key=list(model.get_state()).index)
    for path, value in model.get_state().items():
        np.testing.assert_array_equal(np.asarray(value), values[path])


# What fits


def test_a_flat_mapping_a_nested_one_and_a_state_load_the_same():
    source = Net()
    values = numbers(source)
    nested = nnx.State(values).to_nested()
    source.update_state(nnx.State({path: jnp.asarray(v) if path != "table" else v for path, v in values.items()}))
    below = {path.removeprefix("layers/"): v for path, v in values.items() if path.startswith("layers/")}
    mixed = {"layers": below, "steps": values["steps"], "table": values["table"]}
    for mapping in (values, nested, source.get_state(), mixed):
        model = Net()
        report = model.load_state(mapping)
        assert not report and report == nnx.LoadReport(source="mapping")
        same(model, values)


def test_types_and_structure_stay_so_nothing_recompiles():
    model = Net()
    before = model.get_module_def()
    model.load_state(numbers(model))
    assert model.get_module_def() == before
    assert type(model.layers[0].kernel) is type(Net().layers[0].kernel)
    assert type(model.table) is np.ndarray and type(model.steps) is int


def test_later_changes_to_the_arrays_do_not_reach_the_model():
    model = Net()
    values = numbers(model)
    model.load_state(values)
    expected = {path: value.copy() for path, value in values.items()}
    for value in values.values():
        value[...] = 0
    same(model, expected)


def test_shared_variables_can_be_given_under_any_name_or_all():
    def tied() -> nnx.Dict:
        table = nnx.Ref(nnx.Param(jnp.zeros(2)))
        return nnx.Dict(embed=table, head=nnx.Dict(kernel=table))

    one, two = np.ones(2, np.float32), np.full(2, 2.0, np.float32)
    for mapping in ({"embed": one}, {"head/kernel": one}, {"embed": one, "head": {"kernel": one.copy()}}):
        model = tied()
        assert not model.load_state(mapping)
        np.testing.assert_array_equal(model.embed, one)
        np.testing.assert_array_equal(model.head.kernel, one)
    with pytest.raises(ValueError, match="'head/kernel' is .* a different value from 'embed'"):
        tied().load_state({"embed": one, "head/kernel": two})


def test_variables_that_hold_pytrees_are_loaded_whole():
    model = nnx.Dict(cache={"k": jnp.zeros(2), "n": jnp.zeros((), int)}, seen=nnx.Intermediate((1.0, 2.0)))
    model.load_state({"cache": {"k": np.ones(2, np.float32), "n": np.int32(3)}, "seen": (3.0, 4.0)})
    np.testing.assert_array_equal(model.cache["k"], [1.0, 1.0])
    assert int(model.cache["n"]) == 3 and model.seen == (3.0, 4.0)
    with pytest.raises(ValueError, match="'seen' is .* in the mapping"):
        model.load_state({"cache": model.cache, "seen": (3.0,)})


def test_typed_keys_are_loaded():
    model = nnx.Dict(key=nnx.Variable(jax.random.key(0)))
    model.load_state({"key": jax.random.key(7)})
    assert model.variable("key") == nnx.Variable(jax.random.key(7))
    with pytest.raises(ValueError, match="'key' is np.uint32"):
        model.load_state({"key": np.zeros(2, np.uint32)})


def test_abstract_models_and_models_without_state_are_filled():
    model = Net()
    values = numbers(model)
    abstract = nnx.eval_shape(Net)
    abstract.load_state(values, cast=True)
    same(abstract, values)
    rebuilt = model.get_module_def().merge(model.filter(nnx.Param))
    with pytest.raises(ValueError, match="missing from the mapping: 'layers/1/mean'"):
        rebuilt.load_state({path: values[path] for path in model.filter(nnx.Param)})
    rebuilt.load_state(values)
    same(rebuilt, values)


def test_devices_and_shardings_of_the_model_are_kept():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    model = nnx.Dict(w=nnx.Param(jax.device_put(jnp.zeros(2), sharding)), b=nnx.Param(jnp.zeros(2)))
    model.load_state({"w": np.ones(2, np.float32), "b": np.ones(2, np.float32)})
    assert model.w.committed and model.w.sharding == sharding
    assert not model.b.committed


def test_load_state_works_inside_jit():
    model = nnx.Linear(2, 3, ctx=nnx.context(0))

    @nnx.jit
    def load(model, kernel, bias):
        model.load_state({"kernel": kernel, "bias": bias}, cast=True)

    load(model, jnp.ones((2, 3), jnp.bfloat16), jnp.ones(3))
    np.testing.assert_array_equal(model.kernel, np.ones((2, 3)))
    assert model.kernel.dtype == jnp.float32


# What does not


def wrong(model: nnx.Module) -> dict[str, Any]:
    values: dict[str, Any] = numbers(model)
    del values["layers/1/mean"]
    values["layers/2/kernel"] = np.ones(1)
    values["layers/0/kernel"] = np.ones((3, 2), np.float32)
    values["layers/0/bias"] = np.ones(3, np.float16)
    return values


def test_one_error_lists_everything_and_nothing_is_changed():
    model = Net()
    before = model.get_state()
    with pytest.raises(ValueError) as raised:
        model.load_state(wrong(model))
    text = str(raised.value)
    assert "does not fit this Net, and nothing was changed" in text
    assert "missing from the mapping: 'layers/1/mean'" in text
    assert "in the mapping, but not in the target: 'layers/2/kernel'" in text
    assert "'layers/0/kernel' is np.float32[3,2] in the mapping and Param(float32[2,3]) in the target" in text
    assert "'layers/0/bias' is np.float16[3] in the mapping" in text
    assert "strict=False" in text and "cast=True" in text
    assert model.get_state() == before


def test_without_strict_fitting_entries_are_loaded_and_the_rest_reported():
    model = Net()
    before, values = model.get_state(), wrong(model)
    report = model.load_state(values, strict=False)
    assert report.missing == ["layers/1/mean"]
    assert report.unexpected == ["layers/2/kernel"]
    assert list(report.mismatched) == ["layers/0/bias", "layers/0/kernel"]
    fitting = [path for path in before if path in values and path not in report.mismatched]
    same(model, {path: values[path] if path in fitting else np.asarray(before[path]) for path in before})


def test_cast_converts_dtypes_but_not_shapes():
    model = nnx.Dict(w=nnx.Param(jnp.zeros(2, jnp.bfloat16)), n=nnx.Variable(1))
    model.load_state({"w": np.ones(2), "n": np.float64(3.0)}, cast=True)
    assert model.w.dtype == jnp.bfloat16 and model.n == 3 and type(model.n) is int
    with pytest.raises(ValueError, match=r"'w' is np.float64\[3\]"):
        model.load_state({"w": np.ones(3), "n": 1}, cast=True)


def test_a_container_of_another_type_does_not_fit():
    model = nnx.Dict(w=nnx.Param(jnp.zeros(2)))
    with pytest.raises(ValueError, match=r"'w' is BatchStat\(float32\[2\]\) in the mapping and Param"):
        model.load_state({"w": nnx.BatchStat(jnp.ones(2))})
    model.load_state({"w": nnx.Param(jnp.ones(2), ("embed",))})  # metadata are those of the model
    assert model.variable("w").sharding is None


def test_values_without_data_do_not_fit():
    model = nnx.Dict(w=nnx.Param(jnp.zeros(2)))
    for value in (jax.ShapeDtypeStruct((2,), jnp.float32), "text", [0.0, 1.0], None):
        with pytest.raises(ValueError, match="'w' is "):
            model.load_state({"w": value})


def test_argument_that_is_not_a_mapping_is_refused():
    model = nnx.Dict(w=nnx.Param(jnp.zeros(2)))
    with pytest.raises(TypeError, match=r"got a Module; pass its get_state\(\)"):
        model.load_state(model)
    with pytest.raises(TypeError, match="load_state takes a State, or a flat or nested mapping"):
        model.load_state([jnp.ones(2)])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="got 0 below 'layers'"):
        model.load_state({"layers": {0: jnp.ones(2)}})
    with pytest.raises(ValueError, match="the mapping has 'a/w' twice"):
        nnx.Dict(a=model).load_state({"a/w": jnp.ones(2), "a": {"w": jnp.ones(2)}})


def test_the_trace_level_is_checked():
    model = nnx.Dict(w=nnx.Param(jnp.zeros(2)))
    with pytest.raises(nnx.TraceContextError):
        jax.jit(lambda w: model.load_state({"w": w}))(jnp.ones(2))


FITS = {
    "array": (jnp.ones(2), jnp.zeros(2), False, True),
    "other dtype": (jnp.ones(2), jnp.zeros(2, jnp.float16), False, False),
    "other dtype, cast": (jnp.ones(2), jnp.zeros(2, jnp.float16), True, True),
    "number for its array": (1, jnp.zeros((), jnp.int32), False, True),
    "number for another array": (1, jnp.zeros((), jnp.float32), False, False),
}


@pytest.mark.parametrize(("value", "place", "cast", "fit"), FITS.values(), ids=FITS)
def test_checkpoints_and_mappings_agree_on_what_fits(value, place, cast, fit, tmp_path):
    nnx.save(tmp_path / "saved", nnx.Dict(v=nnx.Variable(value)))
    for load in (
        lambda model: model.load_state({"v": value}, cast=cast),
        lambda model: nnx.load(tmp_path / "saved", model, cast=cast),
    ):
        model = nnx.Dict(v=nnx.Variable(place))
        with contextlib.nullcontext() if fit else pytest.raises(ValueError, match="'v'"):
            load(model)
        assert (model.v == place).all() != fit


COMPLEX = {"number": 1 + 2j, "array": np.array([1 + 2j], np.complex64), "scalar": np.complex64(1 + 2j)}
REAL_PLACES = {
    "number": [1.0, jnp.zeros(()), np.zeros((), np.float32), 1, True],
    "array": [jnp.zeros(1), np.zeros(1, np.float32), jnp.zeros(1, int)],
    "scalar": [1.0, jnp.zeros(()), np.zeros(()), np.float32(0)],
}


@pytest.mark.parametrize("cast", [False, True])
def test_nothing_complex_is_loaded_into_a_real_place(tmp_path, cast):
    for sort, value in COMPLEX.items():
        nnx.save(tmp_path / sort, {"w": value})
        nnx.save_safetensors(tmp_path / f"{sort}.safetensors", nnx.State({"w": nnx.Variable(value)}))
        for place in REAL_PLACES[sort]:
            model, target = nnx.Dict(w=nnx.Variable(place)), {"w": place}
            with pytest.raises(ValueError, match="whose imaginary part would be lost"):
                model.load_state({"w": value}, cast=cast)
            with pytest.raises(nnx.CheckpointError, match="whose imaginary part would be lost"):
                nnx.load(tmp_path / sort, target, cast=cast)
            with pytest.raises(nnx.CheckpointError, match="whose imaginary part would be lost"):
                nnx.load_safetensors(tmp_path / f"{sort}.safetensors", model, cast=cast)
            assert model.w is place and target["w"] is place


@pytest.mark.parametrize("value, place", [(1.5, 0), (2, 0.0), (True, 0), (2, False), (1.5, 0j)])
def test_a_cast_number_has_the_type_of_its_place(tmp_path, value, place):
    loads = {
        "load_state": lambda model, source: nnx.Module.load_state(model, source.get_state(), cast=True),
        "load": lambda model, source: (nnx.save(tmp_path / "a", source), nnx.load(tmp_path / "a", model, cast=True)),
    }
    for load in loads.values():
        model = nnx.Dict(w=nnx.Variable(place))
        load(model, nnx.Dict(w=nnx.Variable(value)))
        assert type(model.w) is type(place) and model.w == type(place)(value)


def test_real_and_complex_values_are_loaded_into_complex_places():
    model = nnx.Dict(number=nnx.Variable(0j), array=nnx.Param(jnp.zeros(1, jnp.complex64)))
    model.load_state({"number": 1 + 2j, "array": np.array([1j], ">c8")}, cast=True)
    assert model.number == 1 + 2j and model.array.tolist() == [1j]
    model.load_state({"number": 2.0, "array": np.ones(1, np.float32)}, cast=True)
    assert type(model.number) is complex and model.array.tolist() == [1]
    with pytest.raises(ValueError, match="whose imaginary part would be lost"):
        nnx.Dict(w=nnx.Param(jnp.zeros(1))).load_state({"w": np.array([1j], ">c8")}, cast=True)
