"""Every family computes what `transformers` computes: logits, and 32 greedy tokens through the cache."""

import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models import golden_files
from tests.models.published import (
    ALL_GOLDENS,
    GOLDENS,
    WRITERS,
    golden_arrays,
    golden_model,
    golden_text,
    relative_error,
)

families = pytest.mark.parametrize("name", WRITERS)


def test_weights_are_the_same_everywhere():
    drawn = golden_files.noise("model.layers.0.mlp.up_proj.weight", 2, 3, seed=1)
    np.testing.assert_array_equal(drawn.astype(np.float32), drawn)
    np.testing.assert_array_equal(drawn * 2**23, [[6089588, 7806197, 5352975], [-1801863, 6830133, -5937226]])
    many = golden_files.noise("many", 100_000)
    assert abs(many.mean()) < 0.01 and abs((many**2).mean() - 1 / 3) < 0.01
    assert many.min() < -0.999 < 0.999 < many.max() and len(np.unique(many)) > 99_000


def test_shapes_are_folded_without_loss():
    experts = {f"h.{layer}.mlp.experts.{i}.up.weight": (3, 4) for layer in (1, 2) for i in range(4)}
    shapes = {"embed.weight": (5, 4), "h.0.mlp.up.weight": (9, 4), **experts, "h.2.norm.weight": (4,)}
    folded = golden_files.folded(shapes)
    assert folded["h.{1-2}.mlp.experts.{0-3}.up.weight"] == [3, 4] and len(folded) == 4
    assert golden_files.unfolded(folded) == shapes
    del shapes["h.1.mlp.experts.2.up.weight"]  # no longer every pair of numbers
    assert golden_files.unfolded(golden_files.folded(shapes)) == shapes


def test_every_family_has_a_golden():
    assert set(ALL_GOLDENS.values()) == set(nnx.models.ARCHITECTURES)


@pytest.mark.parametrize("name", GOLDENS)
def test_logits_agree_without_and_with_a_cache(name):
    # Called operation by operation: families share nearly all compiled operations, but no compiled model.
    model, (inputs, expected) = golden_model(name), golden_arrays(name)
    tokens = jnp.asarray(inputs["tokens"])
    out = model(tokens)
    assert out.dtype == jnp.float32
    assert relative_error(out, expected["logits"]) < 1e-4
    if not model.config.causal:
        with pytest.raises(ValueError, match="in a .* model every token sees all others"):
            model.decode(tokens, model.init_cache(2, 24))
    elif name not in WRITERS:  # those write a text below
        np.testing.assert_allclose(model.decode(tokens, model.init_cache(2, 24))[0], out, atol=2e-4)


@families
def test_greedy_tokens_through_the_cache_are_identical(name):
    model, (inputs, expected) = golden_model(name), golden_arrays(name)
    rows, length = inputs["tokens"].shape
    decode = nnx.jit(lambda model, tokens, cache: model.decode(tokens, cache))
    logits, cache = model.decode(jnp.asarray(inputs["tokens"]), model.init_cache(rows, length + 32))
    assert relative_error(logits, expected["logits"]) < 1e-4
    written = [logits[:, -1].argmax(-1)]
    for _ in range(31):
        logits, cache = decode(model, written[-1][:, None], cache)
        written.append(logits[:, -1].argmax(-1))
    np.testing.assert_array_equal(np.stack(written, axis=1), golden_text(name))
    assert decode.trace_count == 1
