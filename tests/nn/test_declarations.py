"""What layers declare at class level: an annotation for every attribute, so that an editor knows its type."""

import jax
import jax.numpy as jnp
import pytest

import nnx
from tests.nn.registry import LAYERS


def declared(cls: type) -> set[str]:
    return {name for base in cls.__mro__ for name in base.__dict__.get("__annotations__", ())}


@pytest.mark.parametrize("entry", LAYERS, ids=lambda entry: entry.name)
def test_every_attribute_of_a_layer_is_declared_with_its_type(entry):
    layer = nnx.eval_shape(entry.build)
    undeclared = {
        path: sorted(set(vars(module)) - declared(type(module)) - {"_nnx_info"})
        for path, module in layer.named_modules()
        if type(module).__module__.startswith("nnx.nn.")
    }
    assert not any(undeclared.values()), undeclared


def test_declarations_are_not_fields_of_a_dataclass_that_extends_a_layer():
    @nnx.dataclass
    class Scaled(nnx.Linear):
        factor: float

        def __post_init__(self):
            nnx.Linear.__init__(self, 3, 4, ctx=nnx.context(0))

        def __call__(self, inputs, out_sharding=None):
            return self.factor * super().__call__(inputs, out_sharding)

    layer = Scaled(2.0)
    plain = nnx.Linear(3, 4, ctx=nnx.context(0))
    assert jnp.array_equal(layer(jnp.ones(3)), 2.0 * plain(jnp.ones(3)))
    assert list(layer.get_state()) == ["bias", "kernel"]


def test_an_attribute_that_is_declared_but_not_set_is_missing():
    class Half(nnx.Linear):
        def __init__(self):
            self.in_features = 3

    with pytest.raises(AttributeError, match="kernel"):
        _ = Half().kernel


def test_a_layer_with_a_subclass_keeps_its_signature():
    class Narrow(nnx.OptimizedLSTMCell):
        pass

    cell = Narrow(3, 4, ctx=nnx.context(0))
    carry, y = cell(cell.initialize_carry((2, 3)), jnp.ones((2, 3)))
    assert y.shape == (2, 4) and jax.tree.map(jnp.shape, carry) == ((2, 4), (2, 4))
