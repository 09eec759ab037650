"""Rotary embeddings: relative positions, layouts, and scalings for long contexts."""

import functools
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.nn.arrays import numpy_normal

HEAD_DIM = 16


def turned_by_hand(vector: np.ndarray, position: float, base: float = 10000.0) -> np.ndarray:
    """Rotates the pairs (0, d/2), (1, d/2 + 1) … of one vector."""
    half = len(vector) // 2
    out = np.empty(len(vector))
    for i in range(half):
        angle = position * base ** (-2 * i / len(vector))
        out[i] = vector[i] * math.cos(angle) - vector[i + half] * math.sin(angle)
        out[i + half] = vector[i + half] * math.cos(angle) + vector[i] * math.sin(angle)
    return out


def frequencies_of(scaling: nnx.RotaryScaling | None, dim: int = HEAD_DIM) -> np.ndarray:
    """The angle per token of each pair, read off the rotation of a unit vector by one token."""
    x = jnp.concatenate([jnp.ones(dim // 2), jnp.zeros(dim // 2)]).reshape(1, 1, dim)
    out = np.asarray(nnx.apply_rotary(x, jnp.array([1]), scaling=scaling))[0, 0]
    return np.arctan2(out[dim // 2 :], out[: dim // 2])


PLAIN = 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)


def test_rotation_agrees_with_the_definition():
    x = numpy_normal(5, 1, HEAD_DIM)
    out = nnx.RotaryEmbedding(HEAD_DIM)(x)
    expected = np.stack([turned_by_hand(np.asarray(x[i, 0]), i) for i in range(5)])
    np.testing.assert_allclose(out[:, 0], expected, atol=1e-5)


def test_products_depend_on_distance_alone():
    query, key = numpy_normal(1, 1, HEAD_DIM), numpy_normal(1, 1, HEAD_DIM, seed=1)

    def product(i: int, j: int) -> float:
        q, k = nnx.apply_rotary(query, jnp.array([i])), nnx.apply_rotary(key, jnp.array([j]))
        return float(jnp.sum(q * k))

    assert product(7, 3) == pytest.approx(product(104, 100), abs=1e-4)
    assert product(7, 3) != pytest.approx(product(7, 4), abs=1e-2)


def test_positions_may_be_per_row_or_shared():
    rotary = nnx.RotaryEmbedding(HEAD_DIM)
    x = numpy_normal(2, 3, 4, HEAD_DIM)
    shared = rotary(x, jnp.array([4, 5, 6]))
    np.testing.assert_array_equal(rotary(x, jnp.array([[4, 5, 6], [4, 5, 6]])), shared)
    np.testing.assert_array_equal(rotary(x, jnp.array([[4, 5, 6]])), shared)
    per_row = rotary(x, jnp.array([[4, 5, 6], [0, 1, 2]]))
    np.testing.assert_array_equal(per_row[0], shared[0])
    np.testing.assert_allclose(per_row[1], rotary(x)[1], atol=1e-6)


def test_interleaved_pairs_are_neighbours():
    x = numpy_normal(3, 2, HEAD_DIM)
    apart = jnp.concatenate([x[..., 0::2], x[..., 1::2]], -1)
    expected = nnx.apply_rotary(apart)
    out = nnx.RotaryEmbedding(HEAD_DIM, interleaved=True)(x)
    np.testing.assert_allclose(jnp.concatenate([out[..., 0::2], out[..., 1::2]], -1), expected, atol=1e-6)


def test_features_past_rotary_dim_pass_through():
    x = numpy_normal(3, 2, HEAD_DIM)
    out = nnx.RotaryEmbedding(HEAD_DIM, rotary_dim=4)(x)
    np.testing.assert_array_equal(out[..., 4:], x[..., 4:])
    np.testing.assert_allclose(out[..., :4], nnx.apply_rotary(x[..., :4]), atol=1e-6)


def test_angles_are_exact_in_bfloat16():
    x = jnp.ones((1, 1, HEAD_DIM), jnp.bfloat16)
    out = nnx.apply_rotary(x, jnp.array([1001]))
    assert out.dtype == jnp.bfloat16
    expected = nnx.apply_rotary(x.astype(jnp.float32), jnp.array([1001]))
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=1e-2)


def test_linear_scaling_shrinks_positions():
    x = numpy_normal(1, 1, HEAD_DIM)
    scaled = nnx.apply_rotary(x, jnp.array([8]), scaling=nnx.LinearScaling(4.0))
    np.testing.assert_allclose(scaled, nnx.apply_rotary(x, jnp.array([2])), atol=1e-6)


def test_ntk_scaling_keeps_the_fastest_and_divides_the_slowest():
    scaled = frequencies_of(nnx.NTKScaling(4.0))
    assert scaled[0] == pytest.approx(PLAIN[0], rel=1e-5)
    assert scaled[-1] == pytest.approx(PLAIN[-1] / 4.0, rel=1e-4)
    assert (np.diff(PLAIN / scaled) > 0).all()


def test_yarn_keeps_fast_divides_slow_and_sharpens():
    scaling = nnx.YaRNScaling(factor=8.0, original_max_length=128)
    ratio = PLAIN / frequencies_of(scaling)
    assert ratio[0] == pytest.approx(1.0, rel=1e-4)
    assert ratio[-1] == pytest.approx(8.0, rel=1e-3)
    assert (np.diff(ratio) > -1e-3).all()
    out = nnx.apply_rotary(jnp.ones((1, 1, HEAD_DIM)), jnp.array([0]), scaling=scaling)
    np.testing.assert_allclose(out, 0.1 * math.log(8.0) + 1.0, rtol=1e-5)


def test_the_ramp_of_yarn_can_start_and_end_between_features():
    settings = {"factor": 4.0, "original_max_length": 64, "beta_fast": 4.0, "beta_slow": 1.0}
    plain = nnx.RotaryScaling().frequencies(16, 500.0)
    # Feature i turns `64 * 500 ** (-i / 8) / (2 pi)` times; the ramp is linear in i between 4 turns and 1 turn.
    first, last = (8 * np.log(64 / (2 * np.pi * turns)) / np.log(500.0) for turns in (4.0, 1.0))
    divided = np.clip((np.arange(8) - first) / (last - first), 0, 1)
    exact = nnx.YaRNScaling(**settings, truncate=False).frequencies(16, 500.0)
    np.testing.assert_allclose(exact, plain * (1 - divided * 3 / 4), rtol=1e-12)
    assert not np.allclose(exact, nnx.YaRNScaling(**settings).frequencies(16, 500.0), rtol=1e-3)


def test_yarn_attention_factor_can_be_given():
    scaling = nnx.YaRNScaling(factor=8.0, original_max_length=128, attention_factor=1.0)
    out = nnx.apply_rotary(jnp.ones((1, 1, HEAD_DIM)), jnp.array([0]), scaling=scaling)
    np.testing.assert_allclose(out, 1.0)


def test_llama3_scaling_follows_its_bands():
    scaling = nnx.Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=256)
    scaled = frequencies_of(scaling)
    for plain, got in zip(PLAIN, scaled):
        wavelength = 2 * math.pi / plain
        if wavelength < 256 / 4:
            expected = plain
        elif wavelength > 256:
            expected = plain / 8
        else:
            smooth = (256 / wavelength - 1) / 3
            expected = (1 - smooth) * plain / 8 + smooth * plain
        assert got == pytest.approx(expected, rel=1e-4)


# The frequencies of `transformers` 5.22, for heads of 8 features and a context length of 64 in training.
LONG = nnx.LongRoPEScaling((1.0, 1.1, 1.5, 2.0), (1.5, 4.0, 12.0, 30.0), original_max_length=64, factor=8.0)
DYNAMIC = nnx.DynamicNTKScaling(4.0, original_max_length=64)
BY_LENGTH = [
    (LONG, 64, [1.0, 0.09090909361839294, 0.006666666828095913, 0.0005000000237487257]),
    (LONG, 65, [0.6666666865348816, 0.02500000037252903, 0.0008333333535119891, 3.333333370392211e-05]),
    (DYNAMIC, 64, [1.0, 0.10000000149011612, 0.009999999776482582, 0.0010000000474974513]),
    (DYNAMIC, 65, [1.0, 0.0979994609951973, 0.00960389431566, 0.0009411764913238585]),
    (DYNAMIC, 200, [1.0, 0.047216322273015976, 0.002229380654171109, 0.00010526315600145608]),
]


@pytest.mark.parametrize(("scaling", "length", "expected"), BY_LENGTH)
def test_frequencies_that_depend_on_the_length_are_those_of_transformers(scaling, length, expected):
    np.testing.assert_allclose(scaling.frequencies_for(8, 10000.0, length), expected, rtol=1e-6)
    known = jax.jit(lambda length: scaling.frequencies_for(8, 10000.0, length))(jnp.array([length, 3]))
    np.testing.assert_allclose(known[0], expected, rtol=1e-5)
    np.testing.assert_allclose(known[1], scaling.frequencies(8, 10000.0), rtol=1e-6)


def test_long_rope_multiplies_queries_and_keys_as_transformers_does():
    assert LONG.amplitude == pytest.approx(1.224744871391589, rel=1e-7)


def test_the_length_of_a_text_is_that_of_its_last_position_unless_given():
    scaling = nnx.DynamicNTKScaling(4.0, original_max_length=4)
    x, turn = numpy_normal(2, 6, 1, 8), functools.partial(nnx.apply_rotary, scaling=scaling)
    whole = turn(x)
    np.testing.assert_allclose(turn(x, jnp.arange(6)), whole, atol=1e-6)
    np.testing.assert_allclose(turn(x[:, :3], text_length=6), whole[:, :3], atol=1e-6)
    assert abs(turn(x[:, :3]) - whole[:, :3]).max() > 0.01
    np.testing.assert_allclose(turn(x[:, :3]), nnx.apply_rotary(x[:, :3]), atol=1e-6)
    # Rows of a batch have their own lengths.
    rows = turn(x, jnp.array([[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 3, 3]]))
    np.testing.assert_allclose(rows[0], whole[0], atol=1e-6)
    np.testing.assert_allclose(rows[1, :4], nnx.apply_rotary(x[1, :4]), atol=1e-6)


def test_rotary_has_no_state_and_equal_settings_make_equal_definitions():
    one, two = (nnx.RotaryEmbedding(HEAD_DIM, scaling=nnx.NTKScaling(2.0)) for _ in range(2))
    assert len(one.get_state()) == 0
    assert one.get_module_def() == two.get_module_def()
    assert one.get_module_def() != nnx.RotaryEmbedding(HEAD_DIM, scaling=nnx.NTKScaling(3.0)).get_module_def()
    again = pickle.loads(pickle.dumps(one))
    x = numpy_normal(3, 2, HEAD_DIM)
    np.testing.assert_array_equal(again(x), one(x))


def test_odd_rotary_dim_is_refused():
    with pytest.raises(ValueError, match="rotary_dim to be even and within 2..head_dim=16, got 3"):
        nnx.RotaryEmbedding(HEAD_DIM, rotary_dim=3)


def test_wrong_head_dim_raises_with_expected_and_given():
    with pytest.raises(ValueError, match=r"RotaryEmbedding: expected .* head_dim=16\], got \(3, 2, 8\)"):
        nnx.RotaryEmbedding(HEAD_DIM)(jnp.ones((3, 2, 8)))


@pytest.mark.parametrize("shape", [(2,), (3, 3), (2, 1, 3), ()])
def test_wrong_positions_say_expected_and_got(shape):
    with pytest.raises(ValueError, match=r"expected positions of shape \(2, 3\)"):
        nnx.apply_rotary(jnp.ones((2, 3, 1, HEAD_DIM)), jnp.zeros(shape, jnp.int32))


@pytest.mark.parametrize("rotary_dim", [3, 6, 0])
def test_the_function_refuses_the_sizes_that_the_layer_refuses(rotary_dim):
    with pytest.raises(ValueError, match=f"apply_rotary rotates pairs.*within 2..head_dim=4, got {rotary_dim}"):
        nnx.apply_rotary(jnp.ones((3, 1, 4)), rotary_dim=rotary_dim)
