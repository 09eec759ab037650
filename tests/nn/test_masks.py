"""Mask builders: which query sees which key."""

import jax.numpy as jnp
import numpy as np
import pytest

import nnx


def rows(mask) -> list[list[int]]:
    """The last two axes of a mask whose other axes have size one."""
    return np.asarray(mask).reshape(mask.shape[-2:]).astype(int).tolist()


def test_attention_mask_has_one_axis_for_heads():
    mask = nnx.make_attention_mask(jnp.ones((2, 3)), jnp.ones((2, 5)))
    assert mask.shape == (2, 1, 3, 5)
    assert mask.dtype == jnp.float32


def test_attention_mask_applies_the_pairwise_function():
    mask = nnx.make_attention_mask(jnp.array([1, 2]), jnp.array([2, 1]), jnp.equal, dtype=bool)
    assert rows(mask) == [[0, 1], [1, 0]]
    assert mask.dtype == bool


def test_every_builder_makes_float32_masks_unless_told_otherwise():
    x = jnp.zeros(3)
    builders = {
        "make_attention_mask": lambda **options: nnx.make_attention_mask(x, x, **options),
        "make_causal_mask": lambda **options: nnx.make_causal_mask(x, **options),
        "make_sliding_window_mask": lambda **options: nnx.make_sliding_window_mask(x, 2, **options),
        "make_padding_mask": lambda **options: nnx.make_padding_mask(jnp.array([2]), 3, **options),
        "make_segment_mask": lambda **options: nnx.make_segment_mask(jnp.array([1, 1, 2]), **options),
        "combine_masks": lambda **options: nnx.combine_masks(jnp.ones((1, 3, 3)), **options),
    }
    assert {name: make().dtype for name, make in builders.items()} == dict.fromkeys(builders, jnp.float32)
    assert {name: make(dtype=bool).dtype for name, make in builders.items()} == dict.fromkeys(builders, bool)


def test_extra_batch_dims_come_first():
    assert nnx.make_attention_mask(jnp.ones(3), jnp.ones(3), extra_batch_dims=2).shape == (1, 1, 1, 3, 3)
    assert nnx.make_causal_mask(jnp.ones((4, 3)), extra_batch_dims=1).shape == (1, 4, 1, 3, 3)


def test_causal_mask_shows_the_past_and_the_token_itself():
    assert rows(nnx.make_causal_mask(jnp.zeros((1, 3)))) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_window_counts_the_token_itself():
    assert rows(nnx.make_sliding_window_mask(jnp.zeros(3), 1)) == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert rows(nnx.make_sliding_window_mask(jnp.zeros(3), 2)) == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


def test_window_without_causality_looks_both_ways():
    assert rows(nnx.make_sliding_window_mask(jnp.zeros(3), 2, causal=False)) == [[1, 1, 0], [1, 1, 1], [0, 1, 1]]


def test_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match="expected window >= 1, got 0"):
        nnx.make_sliding_window_mask(jnp.zeros(3), 0)


def test_padding_mask_hides_keys_past_the_length():
    mask = nnx.make_padding_mask(jnp.array([0, 2, 3]), 3)
    assert mask.shape == (3, 1, 1, 3)
    assert mask[:, 0, 0].astype(int).tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_packed_documents_do_not_see_each_other_nor_the_padding():
    mask = nnx.make_segment_mask(jnp.array([[1, 1, 2, 0]]))
    assert rows(mask) == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]


def test_segments_of_keys_may_differ_from_those_of_queries():
    assert rows(nnx.make_segment_mask(jnp.array([1, 2]), jnp.array([2, 2, 1]))) == [[0, 0, 1], [1, 1, 0]]


def test_combined_mask_is_true_where_all_are():
    causal = nnx.make_causal_mask(jnp.zeros((2, 3)))
    mask = nnx.combine_masks(causal, None, nnx.make_padding_mask(jnp.array([1, 3]), 3), dtype=bool)
    assert mask is not None and mask.dtype == bool
    assert mask[0, 0].astype(int).tolist() == [[1, 0, 0], [1, 0, 0], [1, 0, 0]]
    assert mask[1, 0].astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_no_masks_combine_to_none():
    assert nnx.combine_masks() is None
    assert nnx.combine_masks(None, None) is None


def test_masks_of_different_rank_are_refused_with_their_shapes():
    with pytest.raises(ValueError, match=r"same number of axes.*\(1, 3, 3\), \(3, 3\)"):
        nnx.combine_masks(jnp.ones((1, 3, 3)), jnp.ones((3, 3)))
