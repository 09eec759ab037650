"""Wrong arguments of `nnx.generate` are errors that show what was passed and what to write."""

import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from tests.generation.models import Table, counting, drawing

MODEL = counting()


def run(prompts=((1, 2),), **options):
    return nnx.generate(MODEL, prompts, **{"max_new_tokens": 2, "temperature": 0, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    {
        "a single text": ({"prompts": [1, 2]}, r"shape \[batch, length\].*got \[1, 2\].*np.array\(\[prompt\]\)"),
        "rows of different lengths": ({"prompts": [[1, 2], [3]]}, r"got \[\[1, 2\], \[3\]\]. Pad rows"),
        "numbers that are not whole": ({"prompts": np.ones((1, 2))}, r"whole numbers, got float64\[1, 2\]"),
        "a text": ({"prompts": "Hello"}, "token ids, not text; got 'Hello'. Encode .*nnx.models.Tokenizer"),
        "texts": ({"prompts": ["a", "bc"]}, r"token ids, not text; got \['a', 'bc'\]"),
        "letters": ({"prompts": [["a"]]}, "token ids, not text; got"),
        "an empty prompt": ({"prompts": np.zeros((2, 0), int)}, r"at least one token.*got prompts of shape \(2, 0\)"),
        "no prompts": ({"prompts": np.zeros((0, 3), int)}, r"at least one token.*\(0, 3\)"),
        "an empty row": ({"prompts": [[1], [2]], "lengths": [1, 0]}, r"at least one token.*lengths=\[1, 0\]"),
        "too few lengths": ({"prompts": [[1], [2]], "lengths": [1]}, r"lengths of shape \(2,\).*got \[1\]"),
        "lengths beyond the prompt": ({"lengths": [3]}, r"from 1 to 2, got \[3\]"),
        "negative lengths": ({"lengths": [-1]}, r"from 1 to 2, got \[-1\]"),
        "lengths that are not whole": ({"lengths": [1.5]}, r"got \[1.5\]"),
        "a negative token": ({"prompts": [[1, -2]]}, "prompts of tokens, numbers from 0 to .*, got -2"),
        "a token beyond int32": ({"prompts": [[2**31]]}, "prompts of tokens, numbers from 0 to .*, got 2147483648"),
        "a pad token in words": ({"pad_token": "pad"}, "pad_token to be an int, got 'pad'"),
        "a pad token that is not whole": ({"pad_token": 1.5}, "pad_token to be an int, got 1.5"),
        "no new tokens": ({"max_new_tokens": 0}, "max_new_tokens to be a positive int, got 0"),
        "a fraction of new tokens": ({"max_new_tokens": 1.5}, "max_new_tokens to be a positive int, got 1.5"),
        "a negative temperature": ({"temperature": -1}, "temperature to be finite and at least 0, got -1"),
        "temperature NaN": ({"temperature": float("nan")}, "temperature to be finite and at least 0, got nan"),
        "no temperature": ({"temperature": None}, "temperature to be at least 0, got None"),
        "top_k of zero": ({"top_k": 0}, "top_k to be a positive int, got 0"),
        "top_k as a fraction": ({"top_k": 0.9}, "top_k to be a positive int, got 0.9"),
        "top_p of zero": ({"top_p": 0.0}, "top_p to be above 0 and at most 1, got 0.0"),
        "top_p above one": ({"top_p": 1.5}, "top_p to be above 0 and at most 1, got 1.5"),
        "min_p above one": ({"min_p": 2.0}, "min_p to be from 0 to 1, got 2.0"),
        "a penalty of zero": ({"repetition_penalty": 0}, "repetition_penalty to be finite and above 0, got 0"),
        "a stop token in words": ({"stop_tokens": "end"}, "stop_tokens to be a sequence of whole numbers, got 'end'"),
        "a negative stop token": ({"stop_tokens": [3, -1]}, r"whole numbers, got \[3, -1\]"),
        "no samples": ({"num_samples": 0}, "num_samples to be a positive int, got 0"),
        "an empty prefix": ({"prefix": []}, r"a prefix of shape \[length\] with at least one token, got \[\]"),
        "a prefix per row": ({"prefix": [[1]]}, r"a prefix of shape \[length\]"),
        "chunks of nothing": ({"prefill_chunk": 0}, "prefill_chunk to be a positive int, got 0"),
        "no Context": (
            {"temperature": 1.0},
            r"no Context was given. Pass ctx=nnx.context\(sample=0\), or temperature=0",
        ),
        "no stream": ({"temperature": 1.0, "ctx": nnx.context(0)}, "Unknown Rng Stream: sample"),
    }.values(),
    ids=lambda value: None,
)
def test_wrong_values_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        run(**options)


def test_a_model_that_cannot_generate_is_an_error_that_names_the_methods():
    with pytest.raises(TypeError, match="`init_cache.*`decode.*got Linear without `init_cache`"):
        nnx.generate(nnx.Linear(2, 2, ctx=nnx.context(0)), [[1]], max_new_tokens=1, temperature=0)


def test_a_model_whose_logits_have_another_shape_is_an_error():
    class Last(Table):
        def decode(self, tokens, cache, lengths=None):
            logits, cache = super().decode(tokens, cache, lengths)
            return logits[:, -1], cache

    with pytest.raises(ValueError, match=r"Last.decode: expected logits of shape \(1, 1, vocab\).*got \(1, 9\)"):
        nnx.generate(Last(np.eye(9)), [[1]], max_new_tokens=1, temperature=0)


def test_a_cache_with_two_batch_axes_cannot_be_repeated():
    class Square(Table):
        def init_cache(self, batch, length, dtype=None):
            return {"count": jnp.zeros(batch, jnp.int32), "pairs": jnp.zeros((batch, batch))}

    with pytest.raises(ValueError, match=r"Square.init_cache.*got shapes \(2, 2\) for a batch of 2 and \(3, 3\)"):
        nnx.generate(Square(np.eye(9)), [[1]], max_new_tokens=1, temperature=0, num_samples=2)


def test_a_stream_inside_a_transform_is_an_error():
    with pytest.raises(ValueError, match="`stream` is called while tokens are written, which is not possible inside"):
        nnx.jit(lambda model: nnx.generate(model, [[1]], max_new_tokens=1, temperature=0, stream=print))(MODEL)


def test_a_logits_fn_that_holds_a_module_is_an_error():
    layer = nnx.Linear(100, 100, ctx=nnx.context(0))
    with pytest.raises(ValueError, match="logits_fn.*Module"):
        run(logits_fn=lambda logits: layer(logits))


# Logits that are not finite


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_ends_where_its_logits_are_not_finite(bad):
    table = np.array(9.0 * np.eye(20, k=1))
    table[7, 3] = bad
    with pytest.warns(RuntimeWarning, match=r"row\(s\) 0 were NaN or infinite"):
        tokens, logprobs = nnx.generate(
            Table(table), [[5], [10]], max_new_tokens=4, temperature=0, pad_token=-1, return_logprobs=True
        )
    assert tokens.tolist() == [[6, 7, -1, -1], [11, 12, 13, 14]]
    assert jnp.isnan(logprobs).tolist() == [[False, False, True, True], [False] * 4]


def test_a_logits_fn_that_rules_out_every_token_ends_the_row():
    with pytest.warns(RuntimeWarning, match=r"row\(s\) 0, 1 were(.|\n)*logits_fn"):
        tokens = nnx.generate(
            drawing([0.5, 0.5]),
            [[0], [1]],
            max_new_tokens=2,
            pad_token=9,
            logits_fn=lambda logits: jnp.full_like(logits, -jnp.inf),
            ctx=nnx.context(sample=0),
        )
    assert tokens.tolist() == [[9, 9], [9, 9]]


def test_tokens_outside_the_vocabulary_of_a_decoder_end_the_row_with_a_warning():
    from tests.generation.models import decoder

    with pytest.warns(RuntimeWarning, match=r"row\(s\) 1 were NaN"):
        tokens = nnx.generate(decoder(), [[1, 2], [1, 61]], max_new_tokens=2, temperature=0, pad_token=-1)
    assert tokens[1].tolist() == [-1, -1] and (tokens[0] >= 0).all()
