"""What `nnx.generate` compiles: one function per bucket of lengths, whatever the lengths, values and weights."""

import gc
import math
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnx
from nnx.generation import programs
from nnx.generation.buckets import Pace, cache_bucket, prompt_bucket
from tests.checks import AS_OUTSIDE_THE_TESTS
from tests.generation.models import Table, counting, decoder, random_prompts


class Counted(Table):
    """A Table with its own list of traces."""

    traces = []


def make() -> Counted:
    return Counted(9.0 * np.eye(150, k=1))


def test_calls_with_random_lengths_compile_each_bucket_once_and_keep_no_memory():
    Counted.traces.clear()
    draw, model = np.random.default_rng(0), make()
    prompt_buckets, cache_buckets = set(), set()
    arrays = None
    for call in range(1000):
        length = int(draw.integers(1, 150))
        prompts = draw.integers(0, 99, (2, length))
        tokens = nnx.generate(model, prompts, max_new_tokens=8, temperature=0)
        assert tokens[:, 0].tolist() == (prompts[:, -1] + 1).tolist()
        prompt, cache = prompt_bucket(length - 1, 1024), cache_bucket(max(length + 7, prompt_bucket(length - 1, 1024)))
        prompt_buckets.add((prompt, cache))
        cache_buckets.add(cache)
        if call == 600:
            gc.collect()
            arrays = len(jax.live_arrays())
    del tokens
    gc.collect()
    assert arrays is not None and len(jax.live_arrays()) <= arrays
    written = [shape for shape in Counted.traces if shape[1] == 1]
    read = [shape for shape in Counted.traces if shape[1] > 1]
    assert len(written) == len(cache_buckets) < 8
    assert len(read) == len([pair for pair in prompt_buckets if pair[0]]) < 12


def test_other_values_weights_and_numbers_of_new_tokens_do_not_recompile():
    model, ctx = make(), nnx.context(sample=0)

    def run(temperature, top_k, top_p, min_p, penalty, stops, new):
        nnx.generate(
            model,
            [[1, 2, 3]],
            max_new_tokens=new,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=penalty,
            stop_tokens=stops,
            pad_token=new,
            ctx=ctx,
        )

    # All more than SHORT_GROUP: a GPU writes a shorter text in one group of its own.
    run(1.0, 5, 0.9, 0.1, 1.1, [7], 20)
    Counted.traces.clear()
    run(0.5, 50, 0.5, 0.2, 1.3, [7, 8, 9], 40)
    model.update_state(jax.tree.map(lambda x: x + 1, model.get_state()))
    run(2.0, 1, 1, 0, 2, (5, 6), 17)
    model = make()
    run(np.float64(2.0), jnp.int32(1), jnp.float32(0.5), 0.5, np.int64(2), np.array([5, 6]), 17)
    assert Counted.traces == []


def test_functions_with_equal_code_share_a_compiled_loop_and_others_do_not():
    model = make()

    def without(token):
        return lambda logits: logits.at[:, token].set(-jnp.inf)

    def run(token):
        return nnx.generate(model, [[1]], max_new_tokens=1, temperature=0, logits_fn=without(token)).tolist()

    assert run(2) != [[2]]
    Counted.traces.clear()
    assert run(2) != [[2]] and Counted.traces == []
    assert run(3) == [[2]] and len(Counted.traces) == 1


def test_a_stream_uses_the_compiled_loop_of_a_call_without_one():
    model = make()
    nnx.generate(model, [[1, 2]], max_new_tokens=1, temperature=0)  # one token at a time, on a GPU too
    Counted.traces.clear()
    nnx.generate(model, [[1, 2]], max_new_tokens=5, temperature=0, stream=lambda tokens: None)
    assert Counted.traces == []


def test_other_axis_rules_recompile():
    model = make()
    nnx.generate(model, [[1, 2]], max_new_tokens=5, temperature=0)
    Counted.traces.clear()
    with nnx.logical_axis_rules([("batch", None)]):
        nnx.generate(model, [[1, 2]], max_new_tokens=5, temperature=0)
    assert len(Counted.traces) == 2


EIGHT = [40, 7, 31, 40, 1, 12, 40, 3]  # rows: a GPU writes no fewer


@pytest.mark.parametrize(("lengths", "operation"), [([40] * 8, "dynamic-update-slice"), (EIGHT, "scatter")])
def test_the_loop_writes_its_caches_in_place(lengths, operation):
    model, compiled = decoder(), []

    def recording_write(*args, **kwargs):
        compiled.append(programs.write.lower(*args, **kwargs).compile(AS_OUTSIDE_THE_TESTS))
        return programs.write(*args, **kwargs)

    with mock.patch("nnx.generation.generate.write", recording_write):
        nnx.generate(model, random_prompts(8, 40), lengths=lengths, max_new_tokens=70, temperature=0)
    text = compiled[0].as_text()
    # By size, because a GPU writes the cache with its axes in another order.
    results = re.findall(rf" = f32\[([\d,]+)\]\S* {operation}\(", text)
    assert any(math.prod(map(int, shape.split(","))) == 8 * 128 * 2 * 8 for shape in results)
    assert not re.search(r"f32\[8,128,2,8\]\S* copy\(", text)
    memory = compiled[0].memory_analysis()
    assert memory.alias_size_in_bytes > 0.99 * memory.output_size_in_bytes


def test_steps_without_a_check_in_between_write_the_same_texts():
    model = counting()
    options = {"max_new_tokens": 70, "temperature": 0, "stop_tokens": [40, 67], "return_logprobs": True}
    expected = nnx.generate(model, [[5], [50], [80]], **options)
    for pace in (Pace(8, False), Pace(128, True)):
        with mock.patch("nnx.generation.generate.pace_of", return_value=pace):
            found = nnx.generate(model, [[5], [50], [80]], **options)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert found[0].shape == (3, 70)


def test_steps_beyond_the_last_token_do_no_harm_at_the_end_of_the_context():
    model, prompts = decoder("gpt2"), random_prompts(2, 61)  # learned positions for 64 tokens
    options = {"max_new_tokens": 4, "temperature": 0, "return_logprobs": True}
    expected = nnx.generate(model, prompts, **options)
    with mock.patch("nnx.generation.generate.pace_of", return_value=Pace(8, True)):
        found = nnx.generate(model, prompts, **options)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_surplus_rows_do_not_change_the_result():
    model, prompts = decoder(), random_prompts(2, 5)
    received = []
    expected = nnx.generate(model, prompts, max_new_tokens=4, ctx=nnx.context(sample=0))
    with mock.patch("nnx.generation.programs.rows_to_run", lambda rows, *sizes: 8):
        with nnx.logical_axis_rules([("unused", None)]):  # another key, so that it is traced again
            ours = nnx.generate(model, prompts, max_new_tokens=4, ctx=nnx.context(sample=0))
            nnx.generate(model, prompts, max_new_tokens=4, ctx=nnx.context(sample=0), stream=received.append)
    np.testing.assert_array_equal(ours, expected)
    np.testing.assert_array_equal(np.stack(received, 1), expected)


@pytest.mark.parametrize("stop_tokens", [(), (40,)])
def test_a_stream_without_checks_delivers_every_token_once(stop_tokens):
    options = {"max_new_tokens": 5, "temperature": 0, "stop_tokens": stop_tokens}
    expected, received = nnx.generate(counting(), [[37], [50]], **options), []
    with mock.patch("nnx.generation.generate.pace_of", return_value=Pace(1, True)):
        found = nnx.generate(counting(), [[37], [50]], stream=received.append, **options)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.stack(received, 1), expected)


def test_weights_that_are_already_in_a_list_are_not_copied():
    listed, scanned = decoder().partition(), decoder(scan_layers=True).partition()
    prompts = programs.Prompt(random_prompts(2, 5), np.array([5, 5], np.int32))
    setup = programs.Setup(64, 64, 64, num_samples=1, logprobs=False, penalty=False, aligned=True, rules=())
    assert programs.read(listed, prompts, None, np.int32(0), setup=setup)[1] is None
    unstacked = programs.read(scanned, prompts, None, np.int32(0), setup=setup)[1]
    assert unstacked is not None and list(unstacked.states) == list(listed.states)
