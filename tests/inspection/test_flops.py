"""What `nnx.summary` counts as a floating-point operation, where it is not one per number."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import nnx


class Apply(nnx.Module):
    """A function as a Module, so that `nnx.summary` can count it."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *inputs):
        return self.function(*inputs)


def flops(function, *inputs):
    return nnx.summary(Apply(function), *inputs).flops


MATRIX = jnp.ones((4, 4), jnp.complex64)


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda x: jax.lax.dot_general(x, x, (((1,), (0,)), ((), ()))), 8 * 4**3),
        (lambda x: jax.lax.mul(x, x), 6 * 16),
        (lambda x: jax.lax.add(x, x), 2 * 16),
        (lambda x: jax.lax.reduce_sum(x, (0,)), 2 * 16),
    ],
    ids=["product", "multiplication", "addition", "sum"],
)
def test_complex_numbers_count_by_their_real_parts(function, expected):
    assert flops(function, MATRIX) == expected


def test_a_pooling_function_counts_once_per_entry_of_a_window():
    x = jnp.ones((2, 6, 3))
    windows = 2 * 5 * 3
    assert flops(lambda x: nnx.pool(x, 0.0, jax.lax.add, (2,), 1, "VALID"), x) == windows * 2
    assert flops(lambda x: nnx.pool(x, 0.0, lambda a, b: a + 2 * b, (2,), 1, "VALID"), x) == windows * 2 * 2


def test_the_body_of_a_shard_map_counts_once_per_device_of_its_own_axes():
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    abstract = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=mesh.axis_types)

    def body(x):
        return x @ x.T

    x = jnp.ones((8, 3))
    for axes, repetitions, rows in (({"data"}, 2, 4), ({"data", "model"}, 8, 4)):
        split = PartitionSpec("data")
        with jax.sharding.use_abstract_mesh(abstract):
            mapped = jax.shard_map(body, in_specs=split, out_specs=split, axis_names=axes)
            assert flops(mapped, x) == repetitions * 2 * rows * rows * 3
