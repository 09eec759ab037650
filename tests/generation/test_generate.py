"""`nnx.generate` writes what a model would write without a cache, and leaves the model as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from nnx.generation.buckets import pace_of
from tests.generation.models import CONFIGS, Table, counting, decoder, full_pass, random_prompts

LENGTHS = np.array([7, 1, 4])
PROMPTS = random_prompts(3, 7)


def greedy(model, prompts=PROMPTS, lengths=LENGTHS, new=6, **options):
    return nnx.generate(model, prompts, lengths=lengths, max_new_tokens=new, temperature=0, **options)


# Cached and uncached


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_tokens_are_those_of_a_full_pass_for_ragged_prompts_read_in_chunks(family):
    model = decoder(family)
    tokens = greedy(model, prefill_chunk=3)
    expected = full_pass(model, PROMPTS, LENGTHS, tokens)
    np.testing.assert_array_equal(tokens, jnp.argmax(expected, -1))


PERIODS = {"num_layers": 5, "layer_types": ("sliding", "full", "sliding", "full", "sliding")}


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {}), ("gemma2", PERIODS)], ids=["layers", "periods and tail"]
)
def test_a_scanned_model_writes_what_the_same_layers_in_a_list_write(family, changes):
    model = decoder(family, changes=changes, scan_layers=True)
    np.testing.assert_array_equal(greedy(model), greedy(model.unscanned()))


def test_prompts_read_whole_and_in_chunks_are_continued_alike():
    model = decoder()
    whole = greedy(model)
    for chunk in (1, 4):
        np.testing.assert_array_equal(greedy(model, prefill_chunk=chunk), whole)


def test_a_row_does_not_depend_on_the_other_rows():
    model = decoder()
    together = nnx.generate(model, PROMPTS, lengths=LENGTHS, max_new_tokens=5, ctx=nnx.context(sample=0))
    first = nnx.generate(model, PROMPTS[:1], max_new_tokens=5, ctx=nnx.context(sample=0))
    np.testing.assert_array_equal(first, together[:1])


def test_padding_of_the_prompts_is_ignored():
    model = decoder()
    noise = np.where(np.arange(7) < LENGTHS[:, None], PROMPTS, 60)
    wider = np.pad(noise, ((0, 0), (0, 30)), constant_values=59)
    np.testing.assert_array_equal(greedy(model, wider), greedy(model))


def test_bfloat16_models_and_caches_generate():
    model = decoder(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    tokens, logprobs = greedy(model, return_logprobs=True)
    expected = jax.nn.log_softmax(full_pass(model, PROMPTS, LENGTHS, tokens).astype(jnp.float32))
    expected = jnp.take_along_axis(expected, tokens[..., None], -1)[..., 0]
    np.testing.assert_allclose(logprobs, expected, atol=0.05)


@pytest.mark.parametrize("scan_layers", [False, True], ids=["list", "scanned"])
def test_a_model_with_lora_generates_what_the_merged_model_generates(scan_layers):
    model = decoder(scan_layers=scan_layers)
    plain = greedy(model)
    nnx.add_lora(model, rank=2, ctx=nnx.context(1))
    model.update_state(model.filter(nnx.LoRAParam).map(lambda _, x: x.replace(x.value + 0.1)))
    adapted = greedy(model)
    assert (adapted != plain).any()
    nnx.merge_lora(model)
    np.testing.assert_array_equal(greedy(model), adapted)


@pytest.mark.parametrize(("bits", "scan_layers"), [(8, False), (4, True)])
def test_a_quantized_model_generates_what_its_rounded_weights_generate(bits, scan_layers):
    model = decoder(scan_layers=scan_layers)
    nnx.quantize(model, bits, 8)
    tokens = greedy(model)
    assert model.init_cache(1, 4).layers[0].key.dtype == jnp.float32
    nnx.dequantize(model)
    np.testing.assert_array_equal(greedy(model), tokens)


def test_a_shared_prefix_counts_as_the_beginning_of_every_prompt():
    model = decoder()
    prefix = random_prompts(1, 5, seed=1)[0]
    joined = np.concatenate([np.tile(prefix, (3, 1)), PROMPTS], axis=1)
    expected = greedy(model, joined, LENGTHS + 5)
    np.testing.assert_array_equal(greedy(model, prefix=prefix), expected)
    np.testing.assert_array_equal(greedy(model, prefix=prefix, prefill_chunk=2), expected)


def test_texts_can_fill_the_context_of_a_model_with_learned_positions_and_no_more():
    model = decoder("gpt2")  # max_length=64
    prompts = random_prompts(2, 60)
    tokens = nnx.generate(model, prompts, max_new_tokens=5, temperature=0)
    expected = full_pass(model, prompts, [60, 60], tokens[:, :4])  # the text of the last token would be too long
    np.testing.assert_array_equal(tokens[:, :4], jnp.argmax(expected, -1))
    with pytest.raises(ValueError, match="max_length=64 tokens, and this call needs 65: 60 of"):
        nnx.generate(model, prompts, max_new_tokens=6, temperature=0)


# The model


def test_the_model_is_not_changed_and_its_dropout_is_off():
    class Dropping(Table):
        def __init__(self, table):
            super().__init__(table)
            self.dropout = nnx.Dropout(0.9, deterministic=False)
            self.calls = nnx.Variable(0)

        def decode(self, tokens, cache, lengths=None):
            self.calls += 1
            logits, cache = super().decode(tokens, cache, lengths)
            return self.dropout(logits), cache

    model = Dropping(9.0 * jnp.eye(30, k=1))
    before = model.get_state()
    assert nnx.generate(model, [[3, 4]], max_new_tokens=3, temperature=0).tolist() == [[5, 6, 7]]
    assert model.dropout.deterministic is False and model.get_state() == before and model.calls == 0


def test_new_weights_are_used_without_recompiling():
    model = decoder(scan_layers=True)
    greedy(model)
    other = decoder(scan_layers=True, seed=1)
    expected = greedy(other)
    model.update_state(other.get_state())
    np.testing.assert_array_equal(greedy(model), expected)


def test_generation_works_inside_jit():
    model = decoder()
    expected = greedy(model)

    @nnx.jit
    def run(model, prompts, lengths, ctx):
        drawn = nnx.generate(model, prompts, lengths=lengths, max_new_tokens=6, temperature=1e-6, ctx=ctx)
        return drawn, greedy(model, prompts, lengths)

    for found in run(model, PROMPTS, LENGTHS, nnx.context(sample=0)):
        np.testing.assert_array_equal(found, expected)


# Results


def test_rows_end_at_their_stop_tokens_and_are_padded():
    prompts = [[5, 6], [20, 21], [50, 51]]
    tokens = nnx.generate(counting(), prompts, max_new_tokens=4, temperature=0, stop_tokens=[8, 22, 99], pad_token=-7)
    assert tokens.tolist() == [[7, 8, -7, -7], [22, -7, -7, -7], [52, 53, 54, 55]]
    assert tokens.dtype == jnp.int32
    assert nnx.generate(counting(), [[5]], max_new_tokens=3, temperature=0, stop_tokens=6).tolist() == [[6, 0, 0]]
    assert nnx.generate(counting(), [[5]], max_new_tokens=3, temperature=0, stop_tokens={7}).tolist() == [[6, 7, 0]]


def test_the_loop_ends_when_every_row_has_stopped():
    class Watched(Table):
        def decode(self, tokens, cache, lengths=None):
            jax.debug.callback(lambda: calls.append(1))
            return super().decode(tokens, cache, lengths)

    calls = []
    model = Watched(9.0 * jnp.eye(100, k=1))
    nnx.generate(model, [[5], [6]], max_new_tokens=50, temperature=0, stop_tokens=[9]).block_until_ready()
    jax.effects_barrier()
    group = pace_of(50, may_stop=True, is_streamed=False, platform=jax.default_backend()).steps
    assert len(calls) == -(-4 // group) * group  # the first row needs four tokens to reach 9


def test_log_probabilities_are_those_of_the_model_before_any_rule():
    model = decoder()
    options = {"temperature": 0.3, "top_k": 5, "repetition_penalty": 1.5, "return_logprobs": True}
    tokens, logprobs = nnx.generate(
        model, PROMPTS, lengths=LENGTHS, max_new_tokens=6, ctx=nnx.context(sample=0), **options
    )
    expected = jax.nn.log_softmax(full_pass(model, PROMPTS, LENGTHS, tokens))
    np.testing.assert_allclose(logprobs, jnp.take_along_axis(expected, tokens[..., None], -1)[..., 0], atol=1e-4)
    assert logprobs.dtype == jnp.float32


def test_log_probabilities_are_zero_after_a_stop_token():
    tokens, logprobs = nnx.generate(
        counting(), [[5], [50]], max_new_tokens=4, temperature=0, stop_tokens=[7], return_logprobs=True
    )
    assert tokens.tolist() == [[6, 7, 0, 0], [51, 52, 53, 54]]
    assert (logprobs[0, 2:] == 0).all() and (logprobs[0, :2] < 0).all() and (logprobs[1] < 0).all()


def test_several_samples_per_prompt_have_an_axis():
    model = decoder()
    options = {"lengths": LENGTHS, "max_new_tokens": 6}
    texts, logprobs = nnx.generate(
        model, PROMPTS, num_samples=4, return_logprobs=True, ctx=nnx.context(sample=0), **options
    )
    assert texts.shape == logprobs.shape == (3, 4, 6)
    assert len({tuple(text) for text in texts[0].tolist()}) > 1
    for sample in range(4):
        expected = jax.nn.log_softmax(full_pass(model, PROMPTS, LENGTHS, texts[:, sample]))
        expected = jnp.take_along_axis(expected, texts[:, sample, :, None], -1)[..., 0]
        np.testing.assert_allclose(logprobs[:, sample], expected, atol=1e-4)
    assert nnx.generate(model, PROMPTS, num_samples=1, temperature=0, **options).shape == (3, 1, 6)


def test_prompts_are_read_once_for_all_samples():
    Table.traces.clear()
    nnx.generate(counting(70), [[5, 6], [7, 8]], max_new_tokens=2, num_samples=3, temperature=0)
    (prompts, length), (rows, tokens) = Table.traces
    assert (prompts, length, tokens) == (2, 16, 1) and rows >= 6  # on a GPU, rows are filled up to eight


def test_a_context_draws_other_tokens_on_each_call_and_the_same_for_the_same_seed():
    model = decoder()
    ctx, again = nnx.context(sample=0), nnx.context(sample=0)
    first, second = (nnx.generate(model, PROMPTS, max_new_tokens=8, ctx=ctx) for _ in range(2))
    assert (first != second).any()
    np.testing.assert_array_equal(nnx.generate(model, PROMPTS, max_new_tokens=8, ctx=again), first)


# Streams


def test_a_stream_receives_the_tokens_of_each_step():
    received = []
    tokens = greedy(decoder(), stream=received.append)
    np.testing.assert_array_equal(np.stack(received, axis=1), tokens)
    assert all(isinstance(step, np.ndarray) for step in received)


def test_a_stream_ends_when_every_row_has_stopped():
    received = []
    prompts, stops = [[5], [7]], [9]
    tokens = nnx.generate(
        counting(), prompts, max_new_tokens=40, temperature=0, stop_tokens=stops, stream=received.append
    )
    assert [step.tolist() for step in received] == [[6, 8], [7, 9], [8, 0], [9, 0]]
    assert tokens[0, :5].tolist() == [6, 7, 8, 9, 0]


def test_a_stream_of_samples_has_their_axis_and_an_error_in_it_ends_the_call():
    shapes = []
    nnx.generate(
        counting(), [[5], [6]], max_new_tokens=2, num_samples=3, temperature=0, stream=lambda t: shapes.append(t.shape)
    )
    assert shapes == [(2, 3), (2, 3)]

    def fails(tokens):
        raise KeyError("the receiver is gone")

    with pytest.raises(KeyError, match="the receiver is gone"):
        nnx.generate(counting(), [[5]], max_new_tokens=5, temperature=0, stream=fails)
