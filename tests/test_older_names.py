"""Names and arguments of earlier versions that still work, or say what to write."""

import importlib
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models import Linear, Scale


def test_arguments_can_have_their_older_names():
    x = jnp.ones((2, 2))
    state = nnx.BatchNorm(2, ctx=nnx.context(0)).get_state()
    assert state.filter(nnx.Not(collection_filter=nnx.Param)) == state.filter(nnx.Not(nnx.Param))
    assert nnx.with_logical_constraint(x, logical_axis_resources=("batch", None)) is x
    with pytest.raises(TypeError, match="with_logical_constraint was given both 'names' and 'logical_axis_resources'"):
        nnx.with_logical_constraint(x, names=None, logical_axis_resources=None)


def test_annotations_can_be_subscripted():
    pures = nnx.Pure[Scale], nnx.Pure[nnx.State, Scale], nnx.PureModule[Scale]
    for annotation in (*pures, nnx.TrainState[Scale], nnx.Scan[Scale], nnx.Remat[Scale], nnx.Vmap[Scale]):
        assert typing.get_args(annotation) == (Scale,)
    assert isinstance(Scale().partition(), nnx.PureModule)
    assert nnx.Pure[nnx.State, Scale](*Scale().partition()).merge().s == 1


def test_parts_make_a_pure():
    state, moduledef = Scale(2.0).partition()
    assert nnx.Pure.new(state, moduledef).merge().s == 2
    pure = nnx.context(0).partition()
    assert nnx.PureContext.new(pure.keys, pure.contextdef) == pure and pure.contextdef is pure.ctxdef


def test_moduledef_knows_its_class_and_explains_former_attributes():
    moduledef = nnx.Sequence([Scale()]).get_module_def()
    assert moduledef.type is nnx.Sequence
    assert [type(module) for module in dict(moduledef.merge().named_modules()).values()] == [nnx.Sequence, Scale]
    for name in ("index", "submodules", "static_fields"):
        with pytest.raises(AttributeError, match=r"as it had in 0\.0\.8\. .*`.*moduledef\.merge\(\).*`"):
            getattr(moduledef, name)
    assert not hasattr(moduledef, "unheard")


def test_containers_can_be_copied():
    param = nnx.Param(jnp.ones(2), ("embed",))
    assert param.copy() == param and param.copy() is not param and type(param.copy()) is nnx.Param


def test_a_bare_array_has_no_axis_names():
    leaves = nnx.Dict(array=jnp.ones(2), w=nnx.Param(jnp.ones(2), ("embed",))).mutable_state_dict()
    assert leaves["array"].sharding is None and leaves["w"].sharding == ("embed",)


UNBOXED = {
    "Param": lambda: nnx.Param(jnp.ones(2), unbox_fn=jnp.sin),
    "with_metadata": lambda: nnx.with_metadata(nnx.initializers.ones, unbox_fn=jnp.sin),
    "ContainerMetadata": lambda: nnx.Param(nnx.ContainerMetadata(jnp.ones(2), {"unbox_fn": jnp.sin})),
}


@pytest.mark.parametrize("name", UNBOXED)
def test_unboxing_functions_are_explained(name):
    with pytest.raises(TypeError, match=rf"{name}\(x, unbox_fn=\.\.\.\): no function runs .* define a property"):
        UNBOXED[name]()


def test_normalize_is_standardize():
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(nnx.normalize(x), nnx.standardize(x))


def test_dropping_everything_needs_no_context():
    layer = nnx.Dropout(1.0, deterministic=False)
    assert layer(jnp.ones((2, 3), jnp.bfloat16)).tolist() == [[0.0] * 3] * 2
    assert jax.grad(lambda x: layer(x).sum())(jnp.ones(3)).tolist() == [0.0] * 3


@pytest.mark.parametrize("donate", [None, 0])
@pytest.mark.parametrize("option", [{"device": jax.devices()[-1]}, {"backend": jax.default_backend()}], ids=list)
def test_jit_takes_a_device_as_jax_does(option, donate):
    @nnx.jit(donate_argnums=donate, **option)
    def step(model, x):
        model.count += 1
        return model(x)

    def attempt(call):
        with pytest.warns(DeprecationWarning, match="device argument on jit"):
            return call()

    model, x = Linear(ctx=nnx.context(0)), jnp.ones((1, 2))
    try:
        expected = attempt(lambda: jax.jit(jnp.negative, **option)(x))
    except TypeError as removed:
        with pytest.raises(TypeError, match=str(removed).partition("got ")[2]):
            step(model, x)
        return
    assert attempt(lambda: step(model, x)).devices() == expected.devices()
    assert step(model, x).shape == (1, 3) and model.count == 4


@pytest.mark.parametrize(
    "module, name, value",
    [
        ("nnx.core.load_report", "LoadReport", nnx.LoadReport),
        ("nnx.interop.safetensors", "save_safetensors", nnx.save_safetensors),
        ("nnx.models.activations", "ACTIVATIONS", nnx.models.ACTIVATIONS),
        ("nnx.models.bert", "BertConfig", nnx.models.BertConfig),
        ("nnx.nn.attention", "MultiHeadAttention", nnx.MultiHeadAttention),
        ("nnx.nn.norm", "LayerNorm", nnx.LayerNorm),
        ("nnx.nn.resize", "AdaptiveAvgPool", nnx.AdaptiveAvgPool),
        ("nnx.nn.resize", "Upsample", nnx.Upsample),
        ("nnx.training.checkpoint", "save", nnx.save),
        ("nnx.training.checkpoint_manager", "CheckpointManager", nnx.CheckpointManager),
        ("nnx.training.manifest", "CheckpointError", nnx.CheckpointError),
    ],
)
def test_pickles_of_0_2_find_what_was_moved(module: str, name: str, value: object):
    assert getattr(importlib.import_module(module), name) is value


def test_a_module_that_never_was_is_still_missing():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("nnx.nn.unheard")
