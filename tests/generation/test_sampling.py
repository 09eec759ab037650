"""Each sampling rule draws from the distribution that a calculation by hand says it does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from nnx.generation import sampling
from nnx.generation.sampling import Sampling, choose, keep_likely
from nnx.sharding.target import Target
from tests.generation.models import drawing

P = np.array([0.30, 0.05, 0.20, 0.01, 0.25, 0.04, 0.15])
ROWS = 4096


def by_hand(probabilities, temperature=1.0, top_k=None, top_p=None, min_p=None) -> np.ndarray:
    """The distribution after the rules, one token at a time."""
    p = np.asarray(probabilities, np.float64) ** (1 / temperature)
    p /= p.sum()
    order = list(np.argsort(-p))
    if top_k is not None:
        order = order[:top_k]
    if top_p is not None:
        inside, total = [], 0.0
        for token in order:
            if total >= top_p:
                break
            inside.append(token)
            total += p[token] / p[order].sum()
        order = inside
    if min_p is not None:
        order = [token for token in order if p[token] >= min_p * p.max()]
    kept = np.zeros_like(p)
    kept[order] = p[order]
    return kept / kept.sum()


RULES = {
    "nothing": {},
    "a low temperature": {"temperature": 0.5},
    "a high temperature": {"temperature": 3.0},
    "top_k": {"top_k": 3},
    "top_k of one": {"top_k": 1},
    "top_k beyond the vocabulary": {"top_k": 100},
    "top_p": {"top_p": 0.6},
    "top_p of almost nothing": {"top_p": 1e-6},
    "top_p of everything": {"top_p": 1.0},
    "min_p": {"min_p": 0.4},
    "min_p of everything": {"min_p": 1.0},
    "min_p of nothing": {"min_p": 0.0},
    "top_k, then top_p": {"top_k": 4, "top_p": 0.6},
    "top_k and top_p of everything": {"top_k": 4, "top_p": 1.0},
    "all at a temperature": {"temperature": 2.0, "top_k": 6, "top_p": 0.9, "min_p": 0.5},
}


def is_drawn_from(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Whether counts are within five standard deviations of a distribution; impossible tokens must not occur."""
    total = counts.sum()
    spread = np.sqrt(total * expected * (1 - expected))
    return bool((np.abs(counts - total * expected) <= 5 * spread + 1e-9).all())


@pytest.mark.parametrize("rule", RULES)
def test_the_kept_tokens_have_the_probabilities_computed_by_hand(rule):
    values = {"temperature": 1.0, **RULES[rule]}
    kept = jax.nn.softmax(keep_likely(jnp.log(jnp.asarray(P))[None], Sampling(**values)))[0]
    np.testing.assert_allclose(kept, by_hand(P, **RULES[rule]), atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_the_same_holds_for_large_vocabularies(rule):
    p = np.random.default_rng(0).dirichlet(np.full(5000, 0.1), 4).clip(1e-30)
    p /= p.sum(-1, keepdims=True)
    values = {"temperature": 1.0, **RULES[rule]}
    kept = jax.nn.softmax(keep_likely(jnp.log(jnp.asarray(p, jnp.float32)), Sampling(**values)))
    expected = np.stack([by_hand(row, **RULES[rule]) for row in p])
    assert np.abs(np.asarray(kept) - expected).sum(-1).max() < 1e-3  # rounding may decide about a token at the border


@pytest.fixture(params=["cpu", "gpu"])
def digits(request, monkeypatch):
    """Thresholds are found bit by bit on a CPU, and in longer digits on a GPU."""
    monkeypatch.setattr(sampling, "target", lambda: Target(request.param, "", 1, certain=True))


def threshold_by_sorting(logits, rules):
    """The lowest logit that may be drawn, by sorting one row in float64."""
    descending = np.sort(logits)[::-1].astype(np.float64)
    probabilities = np.exp((descending - descending[0]) / rules["temperature"])
    if "top_k" in rules:
        probabilities[descending < descending[min(rules["top_k"], len(descending)) - 1]] = 0  # keeps ties
    before = np.cumsum(probabilities / probabilities.sum()) - probabilities / probabilities.sum()
    return descending[(probabilities > 0) & (before < rules.get("top_p", 2))].min()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
@pytest.mark.usefixtures("digits")
def test_thresholds_are_those_of_a_sorted_row(dtype):
    # Many ties in half precision, both zeros, tokens that are ruled out, and rows of one sign only.
    random = np.random.default_rng(0)
    logits = random.normal(size=(4, 3000)) * [[3.0], [1.0], [0.1], [5.0]]
    logits = np.concatenate([logits, -abs(logits[:1]) - 1, abs(logits[:1]) + 1])
    logits[1, ::3], logits[2, :40], logits[2, 40:80] = -np.inf, 0.0, -0.0
    logits = jnp.asarray(logits, dtype)
    for rules in ({"top_k": 17}, {"top_k": 1}, {"top_p": 0.7}, {"top_k": 200, "top_p": 0.35}, {"top_k": 4000}):
        rules = {"temperature": 0.75, **rules}
        kept = jnp.isfinite(jax.jit(keep_likely)(logits, Sampling(**rules)))
        expected = [row >= threshold_by_sorting(row, rules) for row in np.asarray(logits, np.float32)]
        np.testing.assert_array_equal(kept, np.asarray(expected) & np.isfinite(np.asarray(logits, np.float32)))


@pytest.mark.usefixtures("digits")
def test_logits_in_half_precision_are_drawn_with_the_probabilities_computed_by_hand():
    logits = jnp.log(jnp.asarray(P)).astype(jnp.bfloat16)
    rules = {"temperature": 1.5, "top_k": 6, "top_p": 0.9}
    rows = jnp.broadcast_to(logits, (20 * ROWS, len(P)))
    tokens = jax.jit(choose)(rows, Sampling(**rules), jax.random.split(jax.random.key(0), len(rows))).token
    expected = by_hand(np.exp(np.asarray(logits, np.float64)), **rules)
    assert is_drawn_from(np.bincount(tokens, minlength=len(P)), expected)


@pytest.mark.parametrize("rule", ["nothing", "a high temperature", "top_k", "top_p", "min_p", "all at a temperature"])
def test_tokens_are_drawn_with_the_probabilities_computed_by_hand(rule):
    tokens = nnx.generate(
        drawing(P), np.zeros((ROWS, 1), int), max_new_tokens=2, ctx=nnx.context(sample=0), **RULES[rule]
    )
    expected = by_hand(P, **RULES[rule])
    for column in np.asarray(tokens).T:
        assert is_drawn_from(np.bincount(column, minlength=len(P)), expected)
    # The two columns are independent: so are their pairs.
    pairs = np.bincount(np.asarray(tokens) @ [len(P), 1], minlength=len(P) ** 2)
    assert is_drawn_from(pairs, np.outer(expected, expected).ravel())


def test_samples_of_one_prompt_are_independent():
    texts = nnx.generate(
        drawing(P), np.zeros((ROWS // 2, 1), int), max_new_tokens=1, num_samples=2, ctx=nnx.context(sample=1)
    )
    pairs = np.bincount(np.asarray(texts)[..., 0] @ [len(P), 1], minlength=len(P) ** 2)
    assert is_drawn_from(pairs, np.outer(P, P).ravel())


def test_temperature_zero_takes_the_most_likely_token_with_any_thresholds():
    options = {"top_k": 3, "top_p": 0.5, "min_p": 0.1}
    assert nnx.generate(drawing(P), [[1]], max_new_tokens=3, temperature=0, **options).tolist() == [[0, 0, 0]]


def test_tiny_temperatures_do_not_overflow():
    kept = keep_likely(jnp.array([[1e30, -1e30, 5.0, 1e30]]), Sampling(temperature=1e-38))
    assert kept.tolist() == [[0.0, -np.inf, -np.inf, 0.0]]


def test_a_temperature_of_zero_that_is_only_known_at_run_time_is_greedy():
    kept = jax.jit(lambda t: keep_likely(jnp.log(jnp.asarray(P))[None], Sampling(temperature=t)))(0.0)
    assert jnp.isfinite(kept).tolist() == [[True] + 6 * [False]]


def test_tokens_of_equal_probability_are_kept_or_dropped_together():
    tied = jnp.log(jnp.array([[0.4, 0.2, 0.2, 0.2]]))
    for rule in ({"top_k": 2}, {"top_p": 0.5}):
        assert jnp.isfinite(keep_likely(tied, Sampling(temperature=1.0, **rule))).all()
    assert jnp.isfinite(keep_likely(tied, Sampling(temperature=1.0, top_p=0.4))).tolist() == [[True] + 3 * [False]]


def test_a_repetition_penalty_divides_positive_logits_and_multiplies_negative_ones():
    logits = jnp.array([[2.0, -2.0, 3.0, -1.0]])
    seen = jnp.array([[True, True, False, False]])
    found = []
    choose(logits, Sampling(repetition_penalty=4.0), None, seen, lambda x: found.append(x) or x)
    assert found[0].tolist() == [[0.5, -8.0, 3.0, -1.0]]


def test_the_penalty_applies_to_tokens_of_prefix_prompt_and_answer_but_not_to_padding():
    model = drawing([0.25, 0.24, 0.23, 0.22, 0.06])
    options = {"max_new_tokens": 3, "temperature": 0, "repetition_penalty": 100.0}
    # Tokens are written once each, most likely first, without those that occurred before. The padding is token 0.
    assert nnx.generate(model, [[1], [4]], **options).tolist() == [[0, 2, 3], [0, 1, 2]]
    assert nnx.generate(model, [[1, 0], [4, 2]], lengths=[1, 2], **options).tolist() == [[0, 2, 3], [0, 1, 3]]
    assert nnx.generate(model, [[1], [4]], prefix=[0, 2], **options).tolist()[0][0] == 3


def test_a_penalty_of_one_changes_nothing():
    model, options = drawing(P), {"max_new_tokens": 8}
    plain = nnx.generate(model, [[1]], ctx=nnx.context(sample=3), **options)
    penalized = nnx.generate(model, [[1]], repetition_penalty=1.0, ctx=nnx.context(sample=3), **options)
    np.testing.assert_array_equal(plain, penalized)


def test_a_logits_fn_rules_tokens_out():
    banned = jnp.array([True, False, True, False, False, False, False])

    def without_banned(logits):
        return jnp.where(banned, -jnp.inf, logits)

    prompts = np.zeros((ROWS, 1), int)
    tokens = nnx.generate(
        drawing(P), prompts, max_new_tokens=1, logits_fn=without_banned, temperature=2.0, ctx=nnx.context(sample=0)
    )
    expected = by_hand(np.where(banned, 0, P), temperature=2.0)
    assert is_drawn_from(np.bincount(np.asarray(tokens)[:, 0], minlength=len(P)), expected)


def test_a_logits_fn_that_changes_the_shape_is_an_error():
    with pytest.raises(
        ValueError, match=r"logits_fn to return logits of shape \(1, 7\), as it received them, got \(1,"
    ):
        nnx.generate(drawing(P), [[0]], max_new_tokens=1, temperature=0, logits_fn=lambda logits: logits[:, :3])
