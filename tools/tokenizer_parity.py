"""Compares `nnx.models.Tokenizer` with the tokenizers of `transformers` on texts and on chat templates.

The templates are written here and use, between them, what published ones do: whitespace control, roles that must
alternate, dates, tools as JSON, loop variables, namespaces, slices and filters.
"""

import json
import pathlib
from typing import Any

import tokenizers
import transformers

import nnx

SPECIAL = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<tool>", "</tool>"]
TEXTS = ["", "a", " leading", "trailing ", "Grüße, 世界! 🙂", "one\n\n\ttwo", "<s> spelled </s> out", "x" * 300]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells <the> weather & wind of a city, übermorgen too.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hello"}],
    "turns": [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": "Hi <there> & welcome"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Grüße 🙂"},
    ],
    "call": [
        {"role": "user", "content": "Weather in Bonn?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}],
        },
        {"role": "tool", "name": "weather", "content": "rain"},
    ],
}
OPTIONS: list[dict[str, Any]] = [{}, {"add_generation_prompt": True}, {"tools": [WEATHER]}, {"enable_thinking": False}]
REFUSED = "refused"
TEMPLATES = {
    "turns": """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
{{ '<|system|>\\nYou help.<|end|>\\n' }}
    {% endif %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|assistant|>\\n' }}
{% endif %}""",
    "trimmed": """{{- bos_token }}
{%- set ns = namespace(users=0) %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|system|>Today is ' ~ strftime_now('%d %b %Y') ~ '. ' ~ system }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.users = ns.users + 1 %}{% endif %}
    {%- if message.content is string %}
        {{- '<|' ~ message.role ~ '|>' ~ (message.content | trim) ~ eos_token }}
    {%- endif %}
{%- endfor %}
{{- ns.users }}{{ pad_token }}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}""",
    "tools": """{%- if tools %}
    {{- '<|system|>Tools:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}{{ '\\n' if not loop.last }}
    {%- endfor %}
    {{- tools | tojson(indent=2) }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '<tool>' + call.name + call.arguments | tojson + '</tool>' }}
        {%- endfor %}
        {%- continue %}
    {%- endif %}
    {{- '<|' + message.role + '|>' + message.content }}
{%- endfor %}
{%- if enable_thinking is defined and not enable_thinking %}{{ ' quickly' }}{% endif %}""",
    "strict": """{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate.') }}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content }}{% endgeneration %}
    {%- else %}
        {{- message.content | upper }}
    {%- endif %}
{%- endfor %}""",
}


def write_tokenizer(folder: pathlib.Path, template: str) -> None:
    """Writes a tokenizer of bytes and pairs of bytes, as a published directory has it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(3 * TEXTS + [str(CHATS)], trainer)
    begin = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[begin])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False, "special": True},
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def outcome(render: Any, *arguments: Any, **options: Any) -> Any:
    """Returns what a function returns, or `REFUSED` if it raises."""
    try:
        return render(*arguments, **options)
    except Exception:
        return REFUSED


def check_texts(folder: pathlib.Path) -> int:
    """Compares the tokens of texts and the texts of tokens; returns how many comparisons agreed, all of them."""
    ours = nnx.models.Tokenizer.from_pretrained(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        for special in (True, False):
            tokens = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == tokens, (folder, text)
            expected = theirs.decode(tokens, skip_special_tokens=special)
            assert ours.decode(tokens, skip_special_tokens=special) == expected, (folder, text)
    return 4 * len(TEXTS)


def check_chats(folder: pathlib.Path) -> int:
    """Compares the texts and tokens of chats; returns how many comparisons agreed, all of them."""
    ours = nnx.models.Tokenizer.from_pretrained(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for chat, messages in CHATS.items():
        for change in OPTIONS:
            options = {"add_generation_prompt": False, **change}
            expected = outcome(theirs.apply_chat_template, messages, tokenize=False, **options)
            assert outcome(ours.chat_text, messages, **options) == expected, (folder, chat, options)
            if expected != REFUSED:
                tokens = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
                assert ours.chat(messages, **options) == tokens, (folder, chat, options)
    return len(CHATS) * len(OPTIONS)


def compare_tokenizers(folder: pathlib.Path) -> int:
    """Compares texts and chats of every template; returns how many comparisons agreed, all of them."""
    count = 0
    for name, template in TEMPLATES.items():
        write_tokenizer(folder / name, template)
        count += check_texts(folder / name) + check_chats(folder / name)
    return count
