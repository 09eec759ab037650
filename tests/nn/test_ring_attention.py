"""Ring attention on eight virtual devices: exact values and gradients, and no device ever holds the whole text."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.sharding.programs import ROOT, finish, start

LIMIT = 200  # seconds
MESHES = (
    *("a ring of eight", "with data and tensor parallelism", "explicit axes", "a ring over two axes"),
    *("a ring in blocks", "explicit axes in blocks"),
)


@pytest.fixture(scope="module")
def seen():
    (output,) = finish([start(ROOT / "tests" / "nn" / "ring_program.py", devices=8)], LIMIT)
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("mesh", MESHES)
def test_output_and_gradients_are_those_of_one_device(seen, mesh):
    cases = seen["differences"][mesh]
    assert len(cases) == (8 if mesh == "a ring of eight" else 2)
    for case, differences in cases.items():
        bound = 5e-4 if "large" in case else 1e-5  # the scale multiplies the gradients' rounding as well
        assert len(differences) == 4 and max(differences) < bound, f"{case}: {differences}"


def test_inside_shard_map_each_device_passes_its_own_part(seen):
    assert seen["inside shard_map"] < 1e-6


def test_half_precision_stays_half_precision(seen):
    dtype, difference = seen["bfloat16"]
    assert dtype == "bfloat16" and difference < 0.05


def test_blocks_travel_and_nothing_is_gathered(seen):
    assert seen["long"]["kinds"] == ["collective-permute"]
    rows = (4096 // 8) * 4096 * 4  # bytes of the logits of one device's queries and all keys
    assert seen["long"]["bytes"] < rows


def test_a_causal_window_shortens_the_ring(seen):
    assert set(seen["long"]["loops"]) == {7}  # seven blocks arrive, after the device's own
    assert set(seen["window"]["loops"]) == {2}  # 600 tokens back from a block of 512


@pytest.mark.parametrize(
    ("call", "fragments"),
    {
        "bias": ("cannot add a bias", "nnx.dot_product_attention"),
        "dropout": ("cannot drop attention weights",),
        "weights": ("cannot record the attention weights",),
        "sinks": ("cannot add attention sinks",),
        "length": ("queries of shape (2, 10, 4, 8)", "'length', of size 10 cannot be divided"),
        "two lengths": ("lengths 4 and 16 are split over None and sequence", "Pad them"),
    }.items(),
)
def test_unsupported_options_of_a_ring_raise(seen, call, fragments):
    for fragment in fragments:
        assert fragment in seen["refusals"][call]


def test_without_a_mesh_it_is_plain_attention():
    layer = nnx.MultiHeadAttention(2, 8, attention_fn=nnx.ring_attention, ctx=nnx.context(0))
    plain = nnx.MultiHeadAttention(2, 8, ctx=nnx.context(0))
    x = jnp.ones((1, 3, 8))
    np.testing.assert_array_equal(layer(x, is_causal=True), plain(x, is_causal=True))
    layer.sinks = plain.sinks = nnx.Param(jnp.ones(2))
    np.testing.assert_array_equal(layer(x, is_causal=True), plain(x, is_causal=True))
