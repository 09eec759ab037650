"""Default initial values are those of jax.nn.initializers, compiled, whichever way they are drawn."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from nnx.nn.embed import default_embedding_init, default_position_init
from nnx.nn.lora import default_a_init
from nnx.nn.support import draws
from nnx.nn.support.draws import DefaultInitializer, fan_in_initializer, normal_initializer
from nnx.nn.support.parameters import default_kernel_init, kernel_init_for

THEIRS = jax.nn.initializers
PAIRS = {
    "lecun_normal": (default_kernel_init, THEIRS.lecun_normal()),
    "he_uniform": (default_a_init, THEIRS.he_uniform()),
    "embedding": (default_embedding_init, THEIRS.variance_scaling(1.0, "fan_in", "normal", out_axis=0)),
    "positions": (default_position_init, THEIRS.normal(0.02)),
    "other deviation": (normal_initializer(1.7), THEIRS.normal(1.7)),
    "axes and gain": (
        kernel_init_for(default_kernel_init, (-3,), (-2,), gain=0.37),
        THEIRS.variance_scaling(0.37, "fan_in", "truncated_normal", (-3,), (-2,), ()),
    ),
    "experts": (
        fan_in_initializer(1.0, "truncated_normal", batch_axis=0),
        THEIRS.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=0),
    ),
}
SHAPES = [(3, 4, 2), (1, 1, 1), (7, 1, 37), (3, 3, 16, 32)]
DTYPES = [np.dtype(name) for name in ("float32", "float16", "bfloat16")]


def bits(value):
    found = np.asarray(value)
    return found.dtype, found.shape, found.tobytes()


@pytest.fixture
def blocks(monkeypatch):
    """Counts the blocks that were drawn."""
    drawn, draw = [], draws._block
    monkeypatch.setattr(draws, "_block", lambda *args: drawn.append(args) or draw(*args))
    return drawn


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_values_are_those_of_the_initializer_of_jax(name, dtype, blocks):
    ours, theirs = PAIRS[name]
    compiled = jax.jit(theirs, static_argnums=(1, 2))
    for shape in SHAPES:
        assert bits(ours(jax.random.key(3), shape, dtype)) == bits(compiled(jax.random.key(3), shape, dtype))
    assert len(blocks) == len(SHAPES)


def test_the_front_of_every_block_is_that_of_a_draw():
    compiled = jax.jit(THEIRS.lecun_normal(), static_argnums=(1, 2))
    for size in (*draws.BLOCK_SIZES[:-1], draws.LARGEST + 1):
        shape = (3, size // 3)
        key = jax.random.key(size)
        expected = bits(compiled(key, shape, np.dtype("float32")))
        assert bits(default_kernel_init(key, shape, np.dtype("float32"))) == expected


def test_keys_of_the_older_form_draw_from_blocks(blocks):
    expected = jax.jit(THEIRS.lecun_normal(), static_argnums=(1, 2))(jax.random.PRNGKey(5), (3, 4), np.dtype("float32"))
    assert bits(default_kernel_init(jax.random.PRNGKey(5), (3, 4), np.dtype("float32"))) == bits(expected)
    assert len(blocks) == 1


def other_generator():
    return jax.random.key(0, impl="rbg")


@pytest.mark.parametrize("key", [other_generator, lambda: jax.device_put(jax.random.key(0), jax.devices()[0])])
def test_other_keys_do_not_draw_from_blocks(key, blocks):
    expected = jax.jit(THEIRS.lecun_normal(), static_argnums=(1, 2))(key(), (3, 4), np.dtype("float32"))
    value = default_kernel_init(key(), (3, 4), np.dtype("float32"))
    assert bits(value) == bits(expected)
    assert value.committed == expected.committed
    assert not blocks


def test_draws_that_depend_on_their_shape_are_not_cut(blocks):
    with jax.threefry_partitionable(False):
        expected = jax.jit(THEIRS.lecun_normal(), static_argnums=(1, 2))(
            jax.random.key(1), (5, 3), jnp.dtype("float32")
        )
        assert bits(default_kernel_init(jax.random.key(1), (5, 3), jnp.dtype("float32"))) == bits(expected)
    assert not blocks


@pytest.mark.parametrize("around", ["jit", "vmap", "eval_shape", "mesh", "guard", "disable_jit", "large", "often"])
def test_where_blocks_are_not_for_the_initializer_is_compiled(around, blocks, monkeypatch):
    key, shape, dtype = jax.random.key(0), (3, 5), np.dtype("float32")
    draw = DefaultInitializer(THEIRS.lecun_normal(), "truncated_normal", lambda shape, dtype: pytest.fail("no block"))
    expected = jax.jit(THEIRS.lecun_normal(), static_argnums=(1, 2))(key, shape, dtype)
    if around == "jit":
        value = jax.jit(lambda key: draw(key, shape, dtype))(key)
    elif around == "vmap":
        value = jax.vmap(lambda key: draw(key, shape, dtype))(key[None])[0]
    elif around == "eval_shape":
        assert jax.eval_shape(lambda key: draw(key, shape, dtype), key).shape == shape
        return
    elif around == "mesh":
        with jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))):
            value = draw(key, shape, dtype)
    elif around == "guard":
        with jax.transfer_guard("disallow"):
            value = draw(key, shape, dtype)
    elif around == "disable_jit":
        with jax.disable_jit():
            value, expected = draw(key, shape, dtype), THEIRS.lecun_normal()(key, shape, dtype)
    elif around == "large":
        monkeypatch.setattr(draws, "LARGEST", 14)
        value = draw(key, shape, dtype)
    else:
        monkeypatch.setattr(draws, "OWN_PROGRAM_AFTER", 0)
        value = draw(key, shape, dtype)
    assert bits(value) == bits(expected)
    assert not blocks


def test_values_go_to_the_default_device_without_being_committed(blocks):
    value = default_kernel_init(jax.random.key(0), (3, 4), np.dtype("float32"))
    zeros = nnx.initializers.zeros(None, (3,), np.dtype("float32"))
    assert len(blocks) == 1
    for array in (value, zeros):
        assert array.devices() == {jax.devices()[0]} and not array.committed and not array.weak_type


def test_a_donated_step_updates_initial_values_in_place():
    donated = jax.jit(lambda x: x + 1, donate_argnums=0)
    kernel = default_kernel_init(jax.random.key(0), (8, 8), np.dtype("float32"))
    for value in (kernel, nnx.initializers.zeros(None, (8, 8), np.dtype("float32"))):
        address = value.unsafe_buffer_pointer()
        assert donated(value).unsafe_buffer_pointer() == address


@pytest.mark.parametrize("name, value", [("zeros", 0), ("ones", 1)])
def test_zeros_and_ones_are_the_same_from_numpy_and_compiled(name, value, monkeypatch):
    make = getattr(nnx.initializers, name)
    for shape, dtype in itertools.product([(), (3,), (2, 0), (2, 3)], DTYPES):
        from_numpy = make(None, shape, dtype)
        assert bits(from_numpy) == bits(jnp.full(shape, value, dtype))
        assert bits(jax.jit(make, static_argnums=(0, 1, 2))(None, shape, dtype)) == bits(from_numpy)


def test_small_zeros_and_ones_compile_nothing():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nnx.initializers, "_filled_by_program", lambda *args: pytest.fail("compiled"))
        for size in range(50):
            nnx.initializers.zeros(None, (size, 61), np.dtype("float32"))


def test_layers_of_different_shapes_share_programs(blocks):
    ctx = nnx.context(0)
    for width in range(3, 40, 4):
        nnx.Linear(width, 2 * width + 1, ctx=ctx)
        nnx.Conv(width, 5, (3,), ctx=ctx)
    kinds = {args[2:] for args in blocks}
    assert len(blocks) == 20 and len(kinds) <= 2, kinds


def test_refused_shapes_are_refused_as_by_jax():
    with pytest.raises(ValueError, match="dimensional"):
        default_kernel_init(jax.random.key(0), (3,), np.dtype("float32"))
