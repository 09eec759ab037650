"""`set_dtypes`: a model whose dtypes are changed equals one that was constructed with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.nn.registry import LAYERS, Entry

WITH_DTYPES = [entry for entry in LAYERS if entry.dtypes]


def dtypes_of(model: nnx.Module) -> dict[str, object]:
    return {path: leaf.dtype for path, leaf in model.get_state().items()}


@pytest.mark.parametrize("entry", WITH_DTYPES, ids=lambda entry: entry.name)
def test_every_layer_equals_one_constructed_with_the_dtypes(entry: Entry):
    for dtype, param_dtype in ((jnp.bfloat16, jnp.float16), (jnp.float16, jnp.float32)):
        given = {"dtype": dtype, "param_dtype": param_dtype}
        expected = entry.build(**{name: given[name] for name in entry.dtypes})
        layer = entry.build()
        nnx.set_dtypes(layer, **{name: given[name] for name in entry.dtypes})
        assert layer.get_module_def() == expected.get_module_def()
        assert dtypes_of(layer) == dtypes_of(expected)


def model() -> nnx.Sequence:
    ctx = nnx.context(0)
    return nnx.Sequence([nnx.Linear(2, 3, ctx=ctx), nnx.BatchNorm(3, ctx=ctx), nnx.Linear(3, 1, ctx=ctx)])


def test_each_dtype_is_set_by_itself():
    net = model()
    nnx.set_dtypes(net, dtype="bfloat16")
    assert net[0].dtype == jnp.bfloat16 and net[0].param_dtype == jnp.float32
    assert net.eval()(jnp.ones((4, 2))).dtype == jnp.bfloat16
    nnx.set_dtypes(net, param_dtype=jnp.float16)
    assert net[0].dtype == jnp.bfloat16 and net[0].kernel.dtype == jnp.float16


def test_the_values_are_rounded_and_running_statistics_stay_in_float32():
    net = model()
    kernel = net[0].kernel
    nnx.set_dtypes(net, param_dtype=jnp.bfloat16)
    np.testing.assert_array_equal(net[0].kernel, kernel.astype(jnp.bfloat16))
    assert net[1].scale.dtype == jnp.bfloat16 and net[1].mean.dtype == jnp.float32


@pytest.mark.parametrize("where", ["0", nnx.Linear, lambda path, module: path == "0", ["0"]])
def test_where_selects_layers(where):
    net = model()
    nnx.set_dtypes(net, dtype=jnp.float16, param_dtype=jnp.float16, where=where)
    assert net[0].kernel.dtype == jnp.float16 and net[0].dtype == jnp.float16
    assert net[1].scale.dtype == jnp.float32 and net[1].dtype is None
    assert (net[2].kernel.dtype == jnp.float16) == (where is nnx.Linear)


def test_parameters_of_the_users_own_modules_are_cast_and_other_state_is_not():
    class Scale(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.ones(2))
            self.count = nnx.Variable(jnp.zeros((), int))
            self.seen = nnx.BatchStat(jnp.zeros(2))
            self.table = jnp.ones(2)

    module = Scale()
    nnx.set_dtypes(module, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    assert dtypes_of(module) == {
        "count": jnp.int32,
        "scale": jnp.bfloat16,
        "seen": jnp.float32,
        "table": jnp.float32,
    }
    assert not hasattr(module, "dtype")


def test_shared_parameters_stay_shared_and_metadata_stay():
    table = nnx.Ref(nnx.Param(jnp.ones(2), ("embed",)))
    module = nnx.Dict(a=nnx.Dict(w=table), b=nnx.Dict(w=table))
    nnx.set_dtypes(module, param_dtype=jnp.bfloat16)
    assert module.a.w is module.b.w and module.a.w.dtype == jnp.bfloat16
    assert module.b.variable("w").sharding == ("embed",)


def test_abstract_models_can_be_changed():
    net = nnx.eval_shape(model)
    nnx.set_dtypes(net, param_dtype=jnp.bfloat16)
    assert isinstance(net[0].kernel, jax.ShapeDtypeStruct) and net[0].kernel.dtype == jnp.bfloat16


def test_undoing_set_dtypes_reuses_a_compiled_function():
    net = model()
    step = nnx.jit(lambda m, x: m[0](x))
    assert step(net, jnp.ones(2)).dtype == jnp.float32
    nnx.set_dtypes(net, param_dtype=jnp.bfloat16)
    nnx.set_dtypes(net, param_dtype=jnp.float32)
    step(net, jnp.ones(2))
    assert step.trace_count == 1


def test_wrong_arguments_are_refused_before_anything_changes():
    net = model()
    before = net.get_module_def()
    with pytest.raises(ValueError, match="give at least one of `dtype`"):
        nnx.set_dtypes(net)
    with pytest.raises(ValueError, match="param_dtype must be a floating-point dtype, got int8"):
        nnx.set_dtypes(net, dtype=jnp.float16, param_dtype=jnp.int8)
    with pytest.raises(ValueError, match="where='encoder' selects nothing in this Sequence"):
        nnx.set_dtypes(net, dtype=jnp.float16, where="encoder")
    with pytest.raises(TypeError, match="takes a Module, got State"):
        nnx.set_dtypes(net.get_state(), dtype=jnp.float16)  # pyright: ignore[reportArgumentType]
    assert net.get_module_def() == before
