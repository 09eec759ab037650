"""Attributes with the names of methods: a Module may have them, and no part of the library calls a method through one.

`Named` has an attribute in place of every method that may be hidden, and its class defines the others as methods of its
own that fail. Everything the library does with a Module has to work on it nevertheless.
"""

import copy
import dataclasses
import pickle
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import nnx

METHODS = sorted(
    name
    for name, value in vars(nnx.Module).items()
    if isinstance(value, (types.FunctionType, property)) and not name.startswith("_")
)
RESERVED = (
    "apply clone filter for_each get_module_def get_state mutable_state_dict partition pop_state sow update_state"
)
RESERVED_REASON = "it is the name of a method of nnx.Module.* Choose another name"
HIDEABLE = sorted(set(METHODS) - set(RESERVED.split()))


def misuse(self, *args, **kwargs):
    raise AssertionError("called through the instance")


Overridden = type("Overridden", (nnx.Module,), dict.fromkeys(METHODS, misuse) | {"apply": property(misuse)})


class Named(Overridden):
    def __init__(self, *, ctx):
        for name in HIDEABLE:  # whatever will be added gets a name as well
            setattr(self, name, f"the attribute {name}")
        self.variable = nnx.Param(jnp.ones(4), ("embed",))
        self.modules = [nnx.Linear(4, 4, ctx=ctx)]
        self.named_modules = {"norm": nnx.BatchNorm(4, ctx=ctx)}
        self.train = nnx.Dropout(0.0, deterministic=True)
        self.collections = nnx.BatchStat(jnp.zeros(()))
        self.view = jnp.ones(4)
        self.eval, self.freeze = False, ["a", "b"]

    def __call__(self, x):
        self.collections = self.collections + 1
        norm = self.named_modules["norm"]
        x = norm(self.train(self.modules[0](x)), use_running_average=True)
        return jnp.where(self.eval, 0, x * self.variable + self.view)


def named(ctx=None):
    return Named(ctx=nnx.context(0) if ctx is None else ctx)


def loss(model, x):
    return (model(x) ** 2).sum()


X = jnp.ones((2, 4))
Module = nnx.Module


def test_every_method_is_hidden_or_overridden():
    assert {"train", "variable", "view", "load_state"} <= set(HIDEABLE) and "apply" in vars(nnx.Module)
    assert {kind for kind in map(type, map(vars(named()).get, HIDEABLE))} >= {str, bool, list, nnx.Dropout}
    assert [name for name in METHODS if vars(Overridden)[name] is vars(Module)[name]] == []


def test_the_class_reaches_the_methods():
    model = named()
    assert Module.variable(model, "variable").sharding == ("embed",)
    assert Module.collections(model) == {"params", "batch_stats"}
    assert dict(Module.named_modules(model))["modules/0"] is Module.get_path(model, "modules/0") is model.modules[0]
    assert len(list(Module.modules(model))) == 6
    Module.train(model)
    assert model.train.deterministic is False and Module.eval(model).train.deterministic is True
    assert Module.view(model, eval=True).eval is True and model.eval is False
    Module.freeze(model, nnx.PathMatches("variable"))
    assert Module.variable(Module.unfreeze(model), "variable").metadata.get("frozen") is None
    Module.set_path(model, "variable", jnp.zeros(4))
    assert not Module.load_state(model, Module.get_state(model).arrays())
    seen = []
    Module.for_each(model, nnx.Linear, seen.append)
    assert seen == [model.modules[0]]
    leaf = Module.mutable_state_dict(model)["variable"]
    leaf.value = leaf.value + 1
    assert model.variable.tolist() == [1, 1, 1, 1]
    out, new = Module.apply.fget(model)(X)
    assert new.collections == 1 and model.collections == 0


def test_popped_attributes_can_be_put_back():
    model = named()
    taken = Module.pop_state(model, nnx.Variable)
    assert model.variable == misuse.__get__(model)
    Module.update_state(model, taken)
    assert model.variable.tolist() == [1, 1, 1, 1]


def vmapped(model):
    return nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(model, X)


def custom():
    @nnx.custom_vjp
    def f(model, x):
        return loss(model, x)

    f.defvjp(lambda m, x: (loss(m, x), (m, x)), lambda kept, g: (nnx.grad(loss, stateful=False)(*kept), None))
    return nnx.grad(f)(named(), X)


def scanned():
    class Step(Named):
        def __call__(self, x, _):
            return super().__call__(x), None

    options = {"variable_axes": {nnx.Variable: 0, nnx.buffers: 0}, "split_rngs": "params", "length": 2}
    model = nnx.Scan(Step, **options)(ctx=nnx.context(0))
    nnx.jit(lambda m: m(X, None)[0])(model)
    return model.scan_module.collections.tolist()


def optimized():
    optimizer = nnx.Optimizer(named(), optax.inject_hyperparams(optax.adam)(learning_rate=0.1))

    @nnx.jit
    def step(optimizer):
        optimizer.update(nnx.grad(loss)(optimizer.model, X))

    step(optimizer)
    optimizer.learning_rate = 0.2
    ema = nnx.EMA(optimizer.model, decay=0.5)
    ema.update(optimizer.model)
    return ema.averaged(optimizer.model)


def train_state():
    state, rest, moduledef = (*(pure := Module.partition(named(), nnx.Param, ...)).states, pure.moduledef)
    state = nnx.TrainState(moduledef, params=state, tx=optax.sgd(0.1), rest=rest)
    return state.apply_gradients(jax.grad(lambda p: state.apply(p, "rest")(X)[0].sum())(state.params)).step


class Measure(nnx.Average, Overridden):
    pass


def measured():
    def of_member(metric, x):
        metric.update(values=x)
        metric.reduce("members")

    metrics = nnx.MultiMetric(first=Measure(), second=Measure())
    metrics.update(values=X)
    metrics.merge(copy.deepcopy(metrics))
    nnx.vmap(of_member, in_axes=(None, 0), axis_name="members")(metrics.first, X)
    return metrics.compute()


def saved(tmp_path):
    nnx.save(tmp_path / "a", {"model": named()})
    nnx.load(tmp_path / "a", {"model": named()})
    nnx.save_safetensors(tmp_path / "b.safetensors", Module.get_state(named()))
    nnx.load_safetensors(tmp_path / "b.safetensors", named())
    nnx.load_torch_state_dict(named(), {"variable": np.ones(4)}, strict=False)
    nnx.export(tmp_path / "c", named(), X)
    return nnx.load_exported(tmp_path / "c")(X)


def placed():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    rules = [("embed", "data"), ("in", None), ("out", None), ("norm", None)]
    model = nnx.shard(nnx.name_axes(named()), mesh, rules)
    nnx.init_sharded(lambda ctx: named(ctx), mesh, rules, nnx.context(0))
    nnx.logical_to_mesh_sharding(model, mesh, rules)
    mapped = nnx.shard_map(lambda m, x: m(x), mesh=mesh, in_specs=({nnx.Variable: P()}, P("data")), out_specs=P("data"))
    mapped(named(), X)
    return nnx.get_partition_spec(model), str(nnx.sharding_report(model, mesh, rules))


def surgery():
    model = named()
    nnx.set_dtypes(model, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    nnx.quantize(model, where=nnx.Linear)
    nnx.dequantize(model)
    nnx.add_lora(model, 2, where=nnx.Linear, ctx=nnx.context(0))
    nnx.merge_lora(model)
    nnx.set_mode(model, training=True)
    return model


def inspected():
    model = named()
    print(model, repr(model), nnx.summary(model, X), nnx.count_params(model))
    nnx.capture(Named.__call__, where=nnx.Linear, grads=False)(model, X)
    nnx.intercept(Named.__call__, lambda path, module, call, *args: call(*args), where=nnx.Linear)(model, X)
    return nnx.find_nans(Named.__call__)(model, X)


def copied():
    model = named()
    for other in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model)), Module.clone(model)):
        assert vars(other).keys() == vars(model).keys() and other.eval is False
    return Module.partition(model).merge()


class Layer(nnx.Linear, Overridden):
    pass


class Cell(nnx.GRUCell, Overridden):
    pass


class Heads(nnx.MultiHeadAttention, Overridden):
    pass


def layers():
    ctx = nnx.context(0)
    nnx.WeightNorm(Layer(4, 4, ctx=ctx), ctx=ctx)(X)
    nnx.SpectralNorm(Layer(4, 4, ctx=ctx), ctx=ctx)(X, update_stats=True)
    nnx.RNN(Cell(4, 4, ctx=ctx))(X[None])
    return Heads(2, 4, decode=False, ctx=ctx)(X[None], sow_weights=True)


class Writer(nnx.models.Decoder, Overridden):
    pass


def generated():
    config = nnx.models.DecoderConfig(
        model_type="llama", vocab_size=8, features=8, hidden_features=8, num_layers=2, num_heads=2, max_length=8
    )
    model = Writer(config, scan_layers=True, ctx=nnx.context(0))
    return nnx.generate(model, np.ones((1, 3), np.int32), max_new_tokens=2, temperature=0)


USES = {
    "jit": lambda: nnx.jit(loss)(named(), X),
    "donation": lambda: nnx.jit(loss, donate_argnums=0)(named(), X),
    "lower": lambda: nnx.jit(loss).lower(named(), X),
    "eval_shape": lambda: nnx.eval_shape(named),
    "grad": lambda: nnx.value_and_grad(loss)(named(), X),
    "vjp": lambda: nnx.vjp(loss, named(), X),
    "jvp": lambda: nnx.jvp(loss, (named(), X), (Module.filter(named(), nnx.Param), X)),
    "jacrev": lambda: nnx.jacrev(lambda m: m(X).sum(0))(named()),
    "custom_vjp": custom,
    "vmap": lambda: vmapped(named()),
    "scan": scanned,
    "remat": lambda: nnx.grad(nnx.remat(loss))(named(), X),
    "Remat": lambda: nnx.Remat(Named)(ctx=nnx.context(0))(X),
    "cond": lambda: nnx.cond(True, loss, lambda m, x: x.sum(), named(), X),
    "loop": lambda: nnx.fori_loop(0, 2, lambda i, v: (v[0], v[1] + v[0](X)), (named(), X)),
    "checkify": lambda: nnx.checkify(loss)(named(), X),
    "optimizer": optimized,
    "train state": train_state,
    "metric": measured,
    "sharding": placed,
    "surgery": surgery,
    "inspection": inspected,
    "copies": copied,
    "layers": layers,
    "generation": generated,
}


@pytest.mark.parametrize("use", USES)
def test_the_library_calls_no_method_through_the_instance(use):
    USES[use]()


def test_files_hold_such_a_module(tmp_path):
    assert saved(tmp_path).shape == (2, 4)


# Which assignments are errors


class Empty(nnx.Module):
    pass


@pytest.mark.parametrize("name", HIDEABLE)
def test_assigned_from_outside_the_name_of_a_method_is_probably_a_forgotten_call(name):
    with pytest.raises(AttributeError, match=f"attribute '{name}' of Empty: it is the name of a method") as error:
        setattr(Empty(), name, False)
    assert f"write `.{name}(...)`" in str(error.value) and f"`nnx.Module.{name}(module)`" in str(error.value)
    assert nnx.Dict({name: 1})[name] == 1 and callable(getattr(nnx.Dict({name: 1}), name))


@pytest.mark.parametrize("name", RESERVED.split())
def test_the_methods_that_programs_call_on_any_module_are_never_attributes(name):
    class InConstructor(nnx.Module):
        def __init__(self):
            setattr(self, name, 1)

    with pytest.raises(AttributeError, match=f"attribute '{name}' of InConstructor.*{RESERVED_REASON}"):
        InConstructor()


DECORATORS = {
    "nnx": nnx.dataclass,
    "nnx, frozen": nnx.dataclass(frozen=True),
    "standard": dataclasses.dataclass(eq=False),
    "standard, frozen": dataclasses.dataclass(eq=False, frozen=True),
}


@pytest.mark.parametrize("decorator", DECORATORS.values(), ids=DECORATORS)
def test_fields_of_dataclasses_may_have_the_names(decorator):
    @decorator
    class Field(nnx.Module):
        view: str
        train: bool = False
        variable: jax.Array = nnx.param_field(default_factory=lambda: jnp.ones(2))

    model = Field("nchw")
    assert (model.view, model.train, model.variable.tolist()) == ("nchw", False, [1, 1])
    assert list(Module.get_state(model)) == ["variable"]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'view'|no value for 'view'"):
        Field()


def test_a_frozen_dataclass_may_not_hide_them_either():
    @dataclasses.dataclass(frozen=True)
    class Frozen(nnx.Module):
        filter: int

    with pytest.raises(AttributeError, match=f"attribute 'filter' of Frozen.*{RESERVED_REASON}"):
        Frozen(1)


def test_standard_dataclass_with_a_method_as_default_raises_with_advice():
    @dataclasses.dataclass
    class Field(nnx.Module):
        train: bool

    with pytest.raises(TypeError, match="Field was given no value for 'train'.*Use @nnx.dataclass, or write `train: "):
        Field()


def test_an_attribute_that_has_the_name_already_is_assigned_anywhere():
    model = named()
    model.eval = True
    nnx.jit(lambda m: setattr(m, "variable", m.variable * 2))(model)
    assert model.eval is True and model.variable.tolist() == [2, 2, 2, 2]
