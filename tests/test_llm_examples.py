"""The programs of examples/llm: a chat that streams, and a fine-tuned model that is written in its published form."""

import pathlib
import re

import jax.numpy as jnp
import numpy as np
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


@pytest.mark.timeout(TIME_LIMIT + 20)
def test_finetuning_lowers_the_loss_and_writes_a_model_that_loads(directory, tmp_path):
    output = tmp_path / "tuned"
    options = ("--steps", "30", "--batch", "4", "--length", "32", "--rate", "1e-2", "--rank", "4")
    printed = run_script(PROGRAMS / "finetune.py", str(directory), "--output", str(output), *options)
    before, after = map(float, re.findall(r"held-out loss: ([\d.]+) before, ([\d.]+) after", printed)[0])
    assert after < before - 0.1
    assert re.match(r"final .*: \d", printed.splitlines()[-1])

    model, tuned = nnx.models.from_pretrained(directory), nnx.models.from_pretrained(output)
    assert tuned.config == model.config
    assert not tuned.filter(nnx.LoRAParam)
    tokens = jnp.array([nnx.models.Tokenizer.from_pretrained(output).encode("def main():")])
    assert not np.allclose(model(tokens), tuned(tokens), atol=1e-2)

    nnx.add_lora(model, 4, where="layers/**", ctx=nnx.context(1))
    model.update_state(nnx.load(output / "adapters", model.filter(nnx.LoRAParam)))
    np.testing.assert_allclose(model(tokens), tuned(tokens), rtol=1e-3, atol=1e-3)
