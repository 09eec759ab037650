"""Models of other libraries where one of ours is expected: the error names the bridge."""

import sys

import equinox as eqx
import flax.linen as linen
import flax.nnx as flax
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest

import nnx
from nnx.core.foreign_models import refuse_foreign_model
from tests.bridge.models import EquinoxNet, FlaxNet, LinenNet


def transform(value):
    return nnx.jit(lambda model, x: x)(value, 1.0)


def haiku_module() -> hk.Module:
    made = []
    hk.transform(lambda: made.append(hk.Linear(3))).init(jax.random.key(0))
    return made[0]


FOREIGN = {
    "from_flax": lambda: FlaxNet(flax.Rngs(0)),
    "from_linen": LinenNet,
    "from_haiku(transformed": lambda: hk.transform(lambda x: hk.Linear(3)(x)),
    "from_haiku(hk.transform_with_state(f)": haiku_module,
}


@pytest.mark.parametrize("bridge", FOREIGN)
def test_transform_names_the_bridge(bridge: str):
    with pytest.raises(TypeError, match="would be lost") as error:
        transform(FOREIGN[bridge]())
    assert f"nnx.bridge.{bridge}" in str(error.value)


@pytest.mark.parametrize("bridge", FOREIGN)
def test_attribute_names_the_bridge(bridge: str):
    with pytest.raises(TypeError, match="attribute 'model' of Dict was given") as error:
        nnx.Dict(model=FOREIGN[bridge]())
    assert f"nnx.bridge.{bridge}" in str(error.value)


def test_keras_layer_is_told_of_from_functions(monkeypatch: pytest.MonkeyPatch):
    layer = type("Layer", (), {"__module__": "keras.src.layers.layer"})
    monkeypatch.setitem(sys.modules, "keras", None)
    with pytest.raises(TypeError, match="a Keras layer.*from_functions"):
        refuse_foreign_model(type("Dense", (layer,), {"__module__": "user"})(), "nnx.jit")


LINEAR = eqx.nn.Linear(2, 3, key=jax.random.key(0))
EQUINOX = {
    "a module": LINEAR,
    "a module with functions": eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0)),
    "a list of modules": [LINEAR, LINEAR],
    "a dict of lists of modules": {"layers": [LINEAR]},
}


@pytest.mark.parametrize("value", EQUINOX.values(), ids=EQUINOX)
def test_equinox_module_as_an_attribute_names_the_bridge(value):
    with pytest.raises(TypeError, match=r"self\.encoder = nnx\.bridge\.from_equinox\(module\)"):
        nnx.Dict().encoder = value


def test_what_equinox_makes_and_nothing_trains_can_be_an_attribute():
    model = nnx.Dict()
    model.frozen = nnx.Node(LINEAR)
    model.dropout = eqx.nn.Dropout(0.5)  # no arrays: a static value
    model.moments = optax.adam(1e-3).init(eqx.filter(LINEAR, eqx.is_array))
    assert model.frozen(jnp.ones(2)).shape == (3,)
    assert set(model) == {"frozen", "dropout", "moments"}


def test_each_bridge_refuses_what_is_not_its_own():
    for make, value in [
        (nnx.bridge.from_flax, LinenNet()),
        (nnx.bridge.from_linen, FlaxNet(flax.Rngs(0))),
        (nnx.bridge.from_equinox, LinenNet()),
        (nnx.bridge.from_equinox, EquinoxNet),
        (nnx.bridge.from_haiku, hk.Linear),
    ]:
        with pytest.raises(TypeError, match=rf"nnx\.bridge\.{make.__name__} takes .*; got"):
            make(value)
    with pytest.raises(TypeError, match="takes a function apply"):
        nnx.bridge.from_functions(3, {})  # pyright: ignore[reportArgumentType]


def test_bridges_that_initialize_ask_for_keys():
    with pytest.raises(TypeError, match=r"ctx=nnx\.context\(0\).*variables=variables"):
        nnx.bridge.from_linen(LinenNet(), jnp.ones((2, 3)))
    with pytest.raises(TypeError, match=r"ctx=nnx\.context\(0\).*params=params"):
        nnx.bridge.from_haiku(hk.transform(lambda x: hk.Linear(3)(x)), jnp.ones((2, 3)))


def test_bound_linen_module_is_refused_with_the_way_to_unbind_it():
    module = linen.Dense(2)
    bound = module.bind(module.init(jax.random.key(0), jnp.ones((1, 3))))
    with pytest.raises(ValueError, match=r"module\.unbind\(\)"):
        nnx.bridge.from_linen(bound, jnp.ones((1, 3)), ctx=nnx.context(0))
