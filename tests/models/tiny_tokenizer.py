"""A tokenizer of bytes with a chat template, made on the fly."""

import json
import pathlib

import tokenizers

SPECIAL = ["<pad>", "<s>", "</s>", "<user>", "<assistant>", "<end>"]
TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {{- "<" + message.role + ">" + message.content + "<end>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<assistant>" }}
{%- endif %}"""


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer whose tokens are single bytes behind the special tokens; it begins every text with `<s>`."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", begin)])
    return tokenizer


def write(directory: pathlib.Path, **config: object) -> pathlib.Path:
    """Writes a tokenizer and a tokenizer_config.json with these fields."""
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    fields = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))
    return directory
