"""The chat of examples/llm streams the answers that `nnx.generate` writes."""

import pathlib

import jax.numpy as jnp
import pytest

import nnx
from tests.models.tiny_tokenizer import TEMPLATE, byte_tokenizer, write
from tests.scripts import ROOT, run_script

PROGRAMS = ROOT / "examples" / "llm"
TIME_LIMIT = 140  # seconds for one program, on a machine that does much else


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> pathlib.Path:
    """A tiny random model with a tokenizer, as they are published."""
    config = nnx.models.DecoderConfig(
        model_type="llama",
        vocab_size=byte_tokenizer().get_vocab_size(),
        features=32,
        hidden_features=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        max_length=128,
    )
    folder = tmp_path / "tiny"
    nnx.models.save_pretrained(nnx.models.Decoder(config, ctx=nnx.context(0)), folder)
    return write(folder, chat_template=TEMPLATE)


@pytest.mark.timeout(TIME_LIMIT + 20)
def test_a_chat_streams_the_answers_that_generate_writes(directory):
    options = ("--temperature", "0", "--max-new-tokens", "12", "--system", "Be brief.")
    printed = run_script(PROGRAMS / "chat.py", str(directory), *options, standard_input="hello\nwho?\n\n")

    tokenizer, model = nnx.models.Tokenizer.from_pretrained(directory), nnx.models.from_pretrained(directory)
    messages = [{"role": "system", "content": "Be brief."}]
    for question in ("hello", "who?"):
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.chat(messages)
        tokens = nnx.generate(
            model, jnp.array([prompt]), max_new_tokens=12, temperature=0, stop_tokens=tokenizer.stop_tokens
        )
        answer = tokenizer.decode(tokens[0])
        assert f"> {answer}\n[{len(prompt)} tokens read, 12 written in " in printed
        messages.append({"role": "assistant", "content": answer})
    assert printed.count("tokens read") == 2
