"""Default axis names: what a class says of the axes of its Variables."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import nnx
from tests.nn.registry import LAYERS


class Dense(nnx.Module):
    logical_axes = {"kernel": ("in", "out"), "bias": ("out",)}

    def __init__(self, din=2, dout=3, sharding=None):
        self.kernel = nnx.Param(jnp.ones((din, dout)), sharding)
        self.bias = nnx.Param(jnp.zeros(dout))


class Block(nnx.Module):
    logical_axes = {"up/kernel": ("embed", "mlp")}

    def __init__(self):
        self.up, self.down = Dense(), Dense(sharding=("mlp", None))


def names(model):
    return {path: leaf.sharding for path, leaf in model.get_state().items()}


def test_variables_without_names_get_those_of_their_class():
    model = Dense()
    assert nnx.name_axes(model) is model
    assert names(model) == {"kernel": ("in", "out"), "bias": ("out",)}


def test_an_outer_class_knows_better_and_metadata_best():
    assert names(nnx.name_axes(Block())) == {
        "up/kernel": ("embed", "mlp"),
        "up/bias": ("out",),
        "down/kernel": ("mlp", None),
        "down/bias": ("out",),
    }


def test_default_names_are_shown_only_on_request():
    assert set(names(Block()).values()) == {None, ("mlp", None)}
    assert nnx.get_partition_spec(Block())["up/kernel"] == P("embed", "mlp")
    assert nnx.get_partition_spec(Block().partition()).states["up/kernel"] == P("embed", "mlp")
    assert nnx.get_partition_spec(Block().get_state())["up/kernel"] == P()


def test_a_train_state_knows_them_throughout():
    params, moduledef = Block().partition()
    specs = nnx.get_partition_spec(nnx.TrainState(moduledef, params=params, tx=optax.adam(1e-3)))
    assert specs.params["up/kernel"] == specs.opt_state[0].mu["up/kernel"] == P("embed", "mlp")
    assert specs.opt_state[0].nu["up/bias"] == P("out")


def test_names_may_depend_on_the_instance():
    class Either(Dense):
        @property
        def logical_axes(self):
            return {"kernel": ("out", "in") if self.transposed else ("in", "out")}

        def __init__(self, transposed):
            super().__init__()
            self.transposed = transposed

    assert names(nnx.name_axes(Either(True)))["kernel"] == ("out", "in")


def test_names_apply_to_the_last_axes_so_stacked_layers_keep_them():
    def stack(key):
        return jax.vmap(lambda _: Dense().partition())(jnp.arange(5))

    model = stack(None).merge()
    assert nnx.get_partition_spec(model)["kernel"] == P(None, "in", "out")


def test_shared_variables_are_named_through_any_path():
    class Tied(nnx.Module):
        logical_axes = {"b/w": ("vocab", "embed")}

        def __init__(self):
            table = nnx.Ref(nnx.Param(jnp.ones((4, 2))))
            self.a, self.b = nnx.Dict(w=table), nnx.Dict(w=table)

    model = nnx.name_axes(Tied())
    assert model.a.variable("w").sharding == model.b.variable("w").sharding == ("vocab", "embed")
    model.a.w = jnp.zeros((4, 2))
    assert model.b.w is model.a.w


def test_named_models_have_equal_moduledefs():
    assert nnx.name_axes(Block()).get_module_def() == nnx.name_axes(Block()).get_module_def()
    assert nnx.name_axes(Block()).get_module_def() != Block().get_module_def()


def test_naming_inside_another_trace_is_an_error():
    model = Dense()
    with pytest.raises(nnx.TraceContextError, match="naming the axes"):
        jax.jit(lambda: nnx.name_axes(model).kernel)()


# The built-in layers

NAMELESS = ("Einsum", "PReLU", "SpectralNorm", "WeightNorm")  # what their axes mean is the user's to say
ENTRIES = [entry for entry in LAYERS if entry.layer_name not in NAMELESS]
WHOLE = ("router_bias",)  # each device scores all experts, so it needs all of these


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_built_in_layers_name_the_axes_of_every_variable(entry):
    pure = jax.eval_shape(lambda: entry.build().partition())
    for (path, leaf), spec in zip(pure.states.items(), nnx.get_partition_spec(pure).states.values()):
        if isinstance(leaf, nnx.Variable) and leaf.value.ndim:
            assert len(spec) == leaf.value.ndim, f"{path}: {leaf} has {spec}"
            assert any(spec) != (path in WHOLE), f"{path}: {leaf} has {spec}"


def test_attention_splits_by_heads_and_feed_forward_by_hidden_units():
    def build(ctx):
        return nnx.Dict(attention=nnx.MultiHeadAttention(4, 8, ctx=ctx), mlp=nnx.MLP(8, 32, 8, ctx=ctx))

    specs = nnx.logical_to_mesh(nnx.eval_shape(build, nnx.context(0)), nnx.tensor_parallel_rules())
    found = dict(specs)
    assert found["attention/query/kernel"] == P(None, "model", None)
    assert found["attention/out/kernel"] == P("model", None, None)
    assert found["mlp/layers/0/kernel"] == P(None, "model") and found["mlp/layers/1/kernel"] == P("model", None)


# Stacked layers: the name of the new axis among default names

EXPERTS = {"variable_axes": {nnx.Param: 0}, "split_rngs": "params"}
NAMED = {"metadata_params": {nnx.PARTITION_NAME: "expert"}}


SEEN = []  # the names of the kernel inside the body


class Step(nnx.Module):
    def __init__(self, *, ctx):
        self.conv = nnx.Conv(2, 3, (5,), ctx=ctx)
        self.free = nnx.Param(jnp.zeros(2))

    def __call__(self, x, _=None):
        SEEN.append(self.conv.variable("kernel").sharding)
        return x, None


def stacked_by(how, axis):
    """A function that runs stacked Steps, and the Module that holds them."""
    options = {**EXPERTS, "variable_axes": {nnx.PathMatches("**/kernel"): axis, nnx.Param: 0}, **NAMED}
    ctx = nnx.context(0)
    if how == "Scan":
        model = nnx.Scan(Step, length=4, **options)(ctx=ctx)
        return model, model.scan_module
    if how == "Vmap":
        model = nnx.Vmap(Step, axis_size=4, in_axes=None, **options)(ctx=ctx)
        return model, model.vmap_module
    if how == "vmap":
        model = nnx.vmap(lambda ctx: Step(ctx=ctx), axis_size=4, **options)(ctx)
        return partial(nnx.vmap(Step.__call__, axis_size=4, in_axes=(None, None, None), **options), model), model

    class Stack(Step):
        @nnx.scan(length=4, **options)
        def __init__(self, *, ctx):
            super().__init__(ctx=ctx)

        @nnx.scan(length=4, **options)
        def __call__(self, x, _):
            return super().__call__(x, _)

    model = Stack(ctx=ctx)
    return model, model


@pytest.mark.parametrize(
    ("axis", "names"),
    [(0, ("expert", None, "in", "out")), (1, (None, "expert", "in", "out")), (-1, (None, "in", "out", "expert"))],
)
@pytest.mark.parametrize("how", ["Scan", "Vmap", "scan", "vmap"])
def test_stacking_inserts_its_name_among_default_names_and_removes_it_inside(how, axis, names):
    SEEN.clear()
    run, inner = stacked_by(how, axis)
    assert inner.conv.variable("kernel").sharding == names
    assert inner.conv.variable("bias").sharding == ("expert", "out")
    assert inner.free.shape == (4, 2) and inner.variable("free").sharding is None  # nobody named it
    run(jnp.zeros(()), None)
    assert set(SEEN) == {(None, "in", "out")}
    assert inner.conv.variable("kernel").sharding == names
    assert nnx.get_partition_spec(inner)["conv/kernel"] == P(*names)


def test_nested_stacks_have_both_names():
    inner = nnx.Vmap(nnx.Linear, axis_size=3, in_axes=None, **EXPERTS, **NAMED)
    layers = {"metadata_params": {nnx.PARTITION_NAME: "layers"}}
    model = nnx.Scan(inner, length=2, **EXPERTS, **layers)(4, 5, ctx=nnx.context(0))
    kernel = model.scan_module.vmap_module.variable("kernel")
    assert kernel.sharding == ("layers", "expert", "in", "out") and kernel.value.shape == (2, 3, 4, 5)


def test_without_a_name_for_the_stacked_axis_default_names_stay_defaults():
    model = nnx.Vmap(nnx.Linear, axis_size=3, in_axes=None, **EXPERTS)(4, 5, ctx=nnx.context(0))
    assert model.vmap_module.variable("kernel").sharding is None
    assert nnx.get_partition_spec(model)["vmap_module/kernel"] == P(None, "in", "out")


def test_a_body_gives_no_names_to_the_variables_of_its_argument():
    model = nnx.Vmap(nnx.Linear, axis_size=3, in_axes=None, **EXPERTS)(4, 5, ctx=nnx.context(0))
    before = model.get_module_def()
    nnx.vmap(lambda m, x: m(x), in_axes=(None, None), **EXPERTS, **NAMED)(model.vmap_module, jnp.ones(4))
    assert model.get_module_def() == before
