"""The tokenizer of a published directory: encoding, decoding, chat templates, and what it says about damaged files."""

import datetime
import json
import pickle
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from nnx.models.inputs.chat_template import (
    BAD_MESSAGES,
    TEMPLATE_ESCAPES,
    TEMPLATE_FAILS,
    TEMPLATE_REFUSES,
    TEMPLATE_SYNTAX,
)
from nnx.models.inputs.tokenizer import (
    BAD_FILE,
    BAD_TEMPLATES,
    NO_DIRECTORY,
    NO_TEMPLATE,
    NO_TOKENIZER,
    NOT_TEXT,
    NOT_TOKENS,
    Tokenizer,
)
from tests.models.tiny_tokenizer import SPECIAL, TEMPLATE, byte_tokenizer, write

HELLO = [{"role": "user", "content": "hello"}]


def chat_text(template: str, messages: list = HELLO, **variables: object) -> str:
    """The text that a template makes of some messages."""
    tokenizer = Tokenizer(byte_tokenizer(), special_tokens={"bos_token": "<s>"}, chat_template=template)
    return tokenizer.chat_text(messages, **variables)


def message_of(template: str, **parts: object) -> str:
    """A named message with its fields filled in; those that are not given match anything."""
    text = template.split("{reason}")[0]
    return text.format(**parts)


# Text and tokens


def test_a_text_survives_encoding_and_decoding(tmp_path):
    tokenizer = Tokenizer.from_pretrained(write(tmp_path))
    tokens = tokenizer.encode("Grüße, 世界!\n")
    assert all(isinstance(token, int) and 0 <= token < tokenizer.vocab_size for token in tokens)
    assert tokenizer.decode(tokens) == "Grüße, 世界!\n"


def test_special_tokens_are_added_and_skipped_on_request(tmp_path):
    tokenizer = Tokenizer.from_pretrained(write(tmp_path))
    begin = tokenizer.encode("<s>", add_special_tokens=False)
    assert len(begin) == 1
    assert tokenizer.encode("a") == begin + tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.decode(tokenizer.encode("a"), skip_special_tokens=False) == "<s>a"


def test_tokens_of_arrays_are_decoded(tmp_path):
    tokenizer = Tokenizer.from_pretrained(write(tmp_path))
    tokens = tokenizer.encode("abc")
    assert tokenizer.decode(np.array(tokens)) == tokenizer.decode(jnp.array(tokens)) == "abc"
    assert tokenizer.decode([]) == ""


def test_ids_beyond_the_vocabulary_have_no_text(tmp_path):
    tokenizer = Tokenizer.from_pretrained(write(tmp_path))
    assert tokenizer.decode([*tokenizer.encode("abc"), tokenizer.vocab_size + 7]) == "abc"


@pytest.mark.parametrize("tokens", [[[1, 2]], [1.5], [-1], 3, "abc"], ids=repr)
def test_tokens_that_are_no_list_of_ids_are_refused(tokens):
    with pytest.raises(ValueError, match=NOT_TOKENS.split("{got}")[0][:40]):
        Tokenizer(byte_tokenizer()).decode(tokens)


@pytest.mark.parametrize("text", [["a"], b"a", None], ids=repr)
def test_text_that_is_not_a_string_is_refused(text):
    with pytest.raises(TypeError, match=NOT_TEXT.split("{got}")[0]):
        Tokenizer(byte_tokenizer()).encode(text)


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_pretrained(tmp_path).decode(Tokenizer.from_pretrained(tmp_path).encode("123456")) == "123456"
    assert len(Tokenizer.from_pretrained(tmp_path).encode("123456")) == 7


def test_special_tokens_and_stop_tokens_come_from_the_files(tmp_path):
    write(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<pad>", "pad_token": "<pad>"}))
    ids = {token: byte_tokenizer().token_to_id(token) for token in SPECIAL}
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    assert tokenizer.stop_tokens == (ids["</s>"],)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids["</s>"], ids["<end>"]]}))
    assert Tokenizer.from_pretrained(tmp_path).stop_tokens == (ids["</s>"], ids["<end>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids["<end>"]}))
    assert Tokenizer.from_pretrained(tmp_path).stop_tokens == (ids["</s>"], ids["<end>"])


# Chats


def test_a_chat_is_encoded_with_one_token_for_each_special_token(tmp_path):
    tokenizer = Tokenizer.from_pretrained(write(tmp_path, chat_template=TEMPLATE))
    tokens = tokenizer.chat(HELLO)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "<s><user>hello<end><assistant>"
    assert len(tokens) == len("hello") + 4
    whole = tokenizer.chat([*HELLO, {"role": "assistant", "content": "hi"}], add_generation_prompt=False)
    assert tokenizer.decode(whole, skip_special_tokens=False) == "<s><user>hello<end><assistant>hi<end>"


def test_a_template_in_its_own_file_wins(tmp_path):
    write(tmp_path, chat_template="from the config")
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_pretrained(tmp_path).chat_text(HELLO) == "from the file"
    assert Tokenizer.from_pretrained(tmp_path, chat_template="given").chat_text(HELLO) == "given"


def test_named_templates_are_chosen_by_whether_there_are_tools(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
    tokenizer = Tokenizer.from_pretrained(write(tmp_path, chat_template=named))
    assert tokenizer.chat_text(HELLO) == "plain"
    assert tokenizer.chat_text(HELLO, tools=[{"name": "clock"}]) == "clock"


def test_lines_that_hold_only_a_block_leave_no_trace():
    assert (
        chat_text("{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}")
        == "hello\n"
    )


def test_templates_have_the_functions_that_published_ones_call():
    assert chat_text("{{ strftime_now('%Y') }}") in {str(datetime.datetime.now().year + i) for i in (-1, 0)}
    assert chat_text("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert chat_text("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "ahellob"
    assert chat_text("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}") == "2"


def test_tools_are_written_as_plain_json():
    tool = {"name": "größer", "text": "a < b & c"}
    assert json.loads(chat_text("{{ tools[0] | tojson }}", tools=[tool])) == tool
    assert chat_text("{{ tools[0] | tojson }}", tools=[tool]) == json.dumps(tool, ensure_ascii=False)
    assert chat_text("{{ tools | tojson(indent=4) }}", tools=[tool]) == json.dumps([tool], ensure_ascii=False, indent=4)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i %}{% endfor %}{% endfor %}",
        "{% macro twice() %}{{ twice() }}{{ twice() }}{% endmacro %}{{ twice() }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages[0].content }}{% endfor %}{% endfor %}",
    ],
    ids=["loops", "macros", "output"],
)
def test_a_template_that_runs_on_is_stopped(template, monkeypatch):
    monkeypatch.setattr("nnx.models.inputs.chat_template.MAX_SECONDS", 0.2)
    monkeypatch.setattr("nnx.models.inputs.chat_template.MAX_CHARACTERS", 1000)
    with pytest.raises(ValueError, match="was stopped: it (had not finished after|wrote more than 1,000)|recursion"):
        chat_text(template)
    assert chat_text("{% for i in range(9) %}{{ i }}{% endfor %}") == "012345678"


def test_a_chat_without_tools_tells_the_template_so():
    assert chat_text("{{ tools is none }}{{ tools is defined }}") == "TrueTrue"


def test_other_variables_reach_the_template():
    template = "{{ enable_thinking if enable_thinking is defined else 'unset' }}"
    assert chat_text(template) == "unset"
    assert chat_text(template, enable_thinking=False) == "False"


def test_a_special_token_the_tokenizer_does_not_have_is_empty():
    assert chat_text("[{{ eos_token }}]") == "[]"


def test_a_tokenizer_that_has_chatted_can_be_pickled(tmp_path):
    tokenizer = Tokenizer.from_pretrained(write(tmp_path, chat_template=TEMPLATE))
    tokens = tokenizer.chat(HELLO)
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.chat(HELLO) == tokens
    assert copy.stop_tokens == tokenizer.stop_tokens


def test_a_tokenizer_prints_where_it_comes_from(tmp_path):
    assert str(tmp_path) in repr(Tokenizer.from_pretrained(write(tmp_path)))


# Bad input


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing is downloaded") as error:
        Tokenizer.from_pretrained(tmp_path / "absent")
    assert str(error.value) == NO_DIRECTORY.format(directory=tmp_path / "absent")


def test_a_directory_without_a_tokenizer_lists_its_files(tmp_path):
    (tmp_path / "tokenizer.model").write_text("")
    with pytest.raises(FileNotFoundError) as error:
        Tokenizer.from_pretrained(tmp_path)
    assert str(error.value) == NO_TOKENIZER.format(directory=tmp_path, files="tokenizer.model")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b'{"a": ', b"[1, 2]", b"\xff\xfe\x00"], ids=["cut", "list", "bytes"])
def test_a_damaged_file_is_named(tmp_path, name, content):
    (write(tmp_path) / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        Tokenizer.from_pretrained(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / name} cannot be read")


@pytest.mark.parametrize("template", [3, {"default": "x"}, [{"name": "default"}]], ids=repr)
def test_a_template_of_another_type_is_named(tmp_path, template):
    with pytest.raises(ValueError) as error:
        Tokenizer.from_pretrained(write(tmp_path, chat_template=template))
    assert str(error.value) == BAD_FILE.format(file=tmp_path / "tokenizer_config.json", reason=BAD_TEMPLATES)


def test_chat_without_a_template_raises_with_advice(tmp_path):
    with pytest.raises(ValueError) as error:
        Tokenizer.from_pretrained(write(tmp_path)).chat(HELLO)
    assert str(error.value) == NO_TEMPLATE.format(source=tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append('x') }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self._TemplateReference__context.environment }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox_or_change_the_messages(template):
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(ValueError) as error:
        chat_text(template, messages)
    assert str(error.value).startswith(message_of(TEMPLATE_ESCAPES, source="this tokenizer"))
    assert messages == HELLO


def test_a_template_that_refuses_the_messages_is_quoted():
    with pytest.raises(ValueError) as error:
        chat_text("{{ raise_exception('Roles must alternate') }}")
    assert str(error.value) == TEMPLATE_REFUSES.format(source="this tokenizer", reason="Roles must alternate")


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages[0].content + 1 }}", "{{ range(10**9) | list }}"])
def test_a_template_that_fails_is_blamed(template):
    with pytest.raises(ValueError) as error:
        chat_text(template)
    assert str(error.value).startswith(TEMPLATE_FAILS.split("{kind}")[0].format(source="this tokenizer"))


def test_template_with_a_syntax_error_raises_with_its_line():
    with pytest.raises(ValueError) as error:
        chat_text("hello\n{% if %}")
    assert str(error.value).startswith(message_of(TEMPLATE_SYNTAX, source="this tokenizer", line=2))


@pytest.mark.parametrize("messages", ["hello", HELLO[0], None, ["hello"], [{"content": "hello"}]], ids=repr)
def test_messages_that_are_no_list_of_dicts_are_refused(messages):
    with pytest.raises(TypeError, match="A chat is a list of messages") as error:
        chat_text(TEMPLATE, messages)
    assert str(error.value).startswith(BAD_MESSAGES.split("{got}")[0].format())


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_a_missing_package_names_the_extra(monkeypatch, tmp_path, package):
    write(tmp_path, chat_template="x")
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"nnx\[models\]"):
        Tokenizer.from_pretrained(tmp_path).chat(HELLO)
