"""Every family computes what `transformers` computes: logits, and 32 greedy tokens through the cache."""

import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.models.published import ALL_GOLDENS, GOLDEN, GOLDENS, golden_model

families = pytest.mark.parametrize("name", GOLDENS)


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / name / "golden.npz") as arrays:
        return dict(arrays)


def relative_error(out, expected) -> float:
    return float(np.abs(np.asarray(out) - expected).max() / np.abs(expected).max())


def test_every_family_has_a_golden():
    assert set(ALL_GOLDENS.values()) == set(nnx.models.ARCHITECTURES)


@families
def test_logits_agree(name):
    expected = golden(name)
    out = golden_model(name)(expected["tokens"])
    assert out.dtype == jnp.float32
    assert relative_error(out, expected["logits"]) < 1e-4


@families
def test_greedy_tokens_through_the_cache_are_identical(name):
    model, expected = golden_model(name), golden(name)
    rows, length = expected["tokens"].shape
    decode = nnx.jit(lambda model, tokens, cache: model.decode(tokens, cache))
    logits, cache = decode(model, expected["tokens"], model.init_cache(rows, length + 32))
    assert relative_error(logits, expected["logits"]) < 1e-4
    written = [logits[:, -1].argmax(-1)]
    for _ in range(31):
        logits, cache = decode(model, written[-1][:, None], cache)
        written.append(logits[:, -1].argmax(-1))
    np.testing.assert_array_equal(np.stack(written, axis=1), expected["greedy"])
    assert decode.trace_count == 2
