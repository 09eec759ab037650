"""Decoders whose layers mix tokens by latent attention or the gated delta rule, alone and next to each other."""

import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models.published import tiny_config, tiny_model, tokens_for

LATENT = {"latent_rank": 8, "query_rank": 6, "rotary_dim": 4, "value_dim": 6, "num_kv_heads": 4}
DELTA = {
    "layer_types": ("linear", "full") * 2,
    "num_layers": 4,
    **{"delta_heads": 4, "delta_key_heads": 2, "delta_key_dim": 8, "delta_value_dim": 6, "use_attention_gate": True},
}


@pytest.mark.parametrize("changes", [LATENT, DELTA], ids=["latent", "delta"])
def test_a_text_is_the_same_through_the_cache_and_when_scanned(changes):
    model, scanned = tiny_model(**changes), tiny_model(scan_layers=True, **changes)
    tokens = tokens_for(model.config, 2, 9)
    prompts, lengths = tokens[:, :6], [2, 6]
    written = nnx.generate(model, prompts, max_new_tokens=3, temperature=0, lengths=lengths)
    for row, length, text in zip(prompts, lengths, np.asarray(written), strict=True):
        whole = np.concatenate((row[:length], text))
        logits = model(jnp.asarray(whole[None]))[0, length - 1 : -1]
        # The chosen token is the best one, or as good as it.
        assert (logits.max(-1) - logits[np.arange(3), text] < 1e-4).all()
    np.testing.assert_allclose(scanned(tokens), scanned.unscanned()(tokens), atol=1e-4)


def test_a_mixer_without_its_sizes_is_refused():
    with pytest.raises(ValueError, match="latent_rank needs rotary_dim, a positive integer, got None"):
        tiny_config(latent_rank=8)
    with pytest.raises(ValueError, match="a 'linear' layer needs delta_heads, a positive integer, got None"):
        tiny_config(layer_types=("linear", "full"))
