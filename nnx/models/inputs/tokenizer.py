"""The tokenizer of a published model: text to tokens, tokens to text, and a chat to the tokens of its template.

*Special tokens* are single tokens that mark structure, such as the beginning of a text or the end of a turn. A *chat
template* writes them between the messages of a chat (`chat_template`).
"""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Never, NoReturn

import jax
import numpy as np

from nnx.core.extras import require
from nnx.core.hints import transformers
from nnx.core.hints.hints import add_hints
from nnx.core.hints.table import TOKENIZER
from nnx.models.files.directory import read_json
from nnx.models.files.generation_defaults import generation_defaults
from nnx.models.inputs.chat_template import ChatTemplate
from nnx.storage.files import local_path

NO_DIRECTORY = """There is no directory {directory}. A tokenizer is read from a local directory that holds \
tokenizer.json; nothing is downloaded."""
NO_TOKENIZER = """{directory} has no tokenizer.json; it holds {files}. Other formats (tokenizer.model, vocab.json) \
have to be converted first: load the directory with transformers' AutoTokenizer and save it again."""
BAD_FILE = "{file} cannot be read: {reason}"
BAD_TEMPLATES = "its chat_template is neither a text nor a list of {'name': ..., 'template': ...}."
NO_TEMPLATE = """{source} has no chat template, neither in tokenizer_config.json nor in chat_template.jinja: its model \
may not have been trained to chat. Use encode for plain text, or pass a template: \
Tokenizer.from_pretrained(directory, chat_template=...)."""
NOT_CALLED = "A Tokenizer is not called, as one of transformers is. Here: {hint}."
NOT_TEXT = "encode takes one text, a str. Got {got}."
NOT_TOKENS = """decode takes the tokens of one text: a list or a one-dimensional array of integers, none of them \
negative. Got {got}."""

# The names under which a tokenizer's files list special tokens, and under which templates read them.
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _read_text(file: pathlib.Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(BAD_FILE.format(file=file, reason=error)) from error


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if there is no file."""
    return read_json(file) if file.exists() else {}


def _read_tokenizer(directory: pathlib.Path) -> Any:
    """Returns the `tokenizers.Tokenizer` of a directory."""
    package = require("tokenizers", "models", "A tokenizer")
    if not directory.is_dir():
        raise FileNotFoundError(NO_DIRECTORY.format(directory=directory))
    file = directory / "tokenizer.json"
    if not file.exists():
        names = ", ".join(sorted(entry.name for entry in directory.iterdir())) or "nothing"
        raise FileNotFoundError(NO_TOKENIZER.format(directory=directory, files=names))
    try:
        tokenizer = package.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises no other type
        raise ValueError(BAD_FILE.format(file=file, reason=error)) from error
    # The file may hold the settings of whoever trained on it. A text is never cut or padded behind the user's back.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _special_tokens(*configs: dict[str, Any]) -> dict[str, str]:
    """Returns the text of the special tokens that some configs name; the first config that names one wins."""
    found = {}
    for name in _SPECIAL:
        token = next((config[name] for config in configs if config.get(name) is not None), None)
        if isinstance(token, dict):  # with its settings, as in {"content": "<s>", "lstrip": false, ...}
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def _chat_templates(directory: pathlib.Path, config: dict[str, Any]) -> dict[str, str]:
    """Returns the chat templates of a directory by name; most have one, `"default"`, or none."""
    file = directory / "chat_template.jinja"
    if file.exists():
        return {"default": _read_text(file)}
    given = config.get("chat_template")
    if given is None:  # a file of its own, which processors of some versions of transformers write
        given = _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    try:
        return {entry["name"]: entry["template"] for entry in given or ()}
    except (KeyError, TypeError) as error:
        raise ValueError(BAD_FILE.format(file=directory / "tokenizer_config.json", reason=BAD_TEMPLATES)) from error


class Tokenizer:
    """A published model's tokenizer and chat template.

    Needs the extra `models` (the packages `tokenizers` and `jinja2`).

    Attributes:
        special_tokens: the text of each special token by its name, such as `{"eos_token": "</s>"}`.
        stop_tokens: the ids that end a text, for the argument of `nnx.generate` with that name.
        vocab_size: the number of tokens. A model's embedding is often a little larger.

    >>> import tokenizers
    >>> words = tokenizers.models.WordLevel({"<user>": 0, "hello": 1, "<end>": 2, "<assistant>": 3})
    >>> in_memory = tokenizers.Tokenizer(words)
    >>> in_memory.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    >>> template = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}<assistant>"
    >>> tokenizer = nnx.models.Tokenizer(in_memory, chat_template=template)
    >>> tokenizer.chat_text([{"role": "user", "content": "hello"}])
    '<user> hello <end> <assistant>'
    >>> tokenizer.chat([{"role": "user", "content": "hello"}])
    [0, 1, 2, 3]
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        special_tokens: Mapping[str, str] | None = None,
        stop_tokens: Sequence[int] = (),
        chat_template: str | Mapping[str, str] | None = None,
        source: str = "this tokenizer",
    ):
        """Wraps a tokenizer that is already in memory; `from_pretrained` reads one from files.

        Args:
            tokenizer: a `tokenizers.Tokenizer`.
            special_tokens: the text of each special token by its name.
            stop_tokens: ids that end a text, in addition to `special_tokens["eos_token"]`.
            chat_template: a Jinja template, or several by name: `"tool_use"` is taken for chats with tools,
                `"default"` for the others.
            source: where it comes from, for error messages.
        """
        self._tokenizer = tokenizer
        self._source = source
        self._templates = {"default": chat_template} if isinstance(chat_template, str) else dict(chat_template or {})
        self._compiled: dict[str, ChatTemplate] = {}
        self.special_tokens = dict(special_tokens or {})
        self.vocab_size: int = tokenizer.get_vocab_size()
        end = tokenizer.token_to_id(self.special_tokens.get("eos_token", ""))
        ends = [*([] if end is None else [end]), *stop_tokens]
        self.stop_tokens: tuple[int, ...] = tuple(dict.fromkeys(ends))

    def __repr__(self) -> str:
        return f"Tokenizer({self._source!r}, vocab_size={self.vocab_size})"

    def __getstate__(self) -> dict[str, Any]:
        # Processes that prepare data receive a pickled tokenizer. Compiled templates cannot be pickled.
        return {**vars(self), "_compiled": {}}

    @classmethod
    def from_pretrained(
        cls, directory: str | os.PathLike[str], *, chat_template: str | Mapping[str, str] | None = None
    ) -> "Tokenizer":
        """Reads the tokenizer of a Hugging Face directory.

        Nothing is fetched from a network, and no code from the directory runs, except for the chat template, which
        `chat` runs in a sandbox.

        Args:
            directory: a directory with `tokenizer.json` and, for chats, `tokenizer_config.json` or
                `chat_template.jinja`.
            chat_template: a template to use in place of the directory's.

        Raises:
            FileNotFoundError: there is no such directory, or it has no `tokenizer.json`.
            ValueError: one of the files is damaged; the message names it.
        """
        folder = local_path(directory)
        tokenizer = _read_tokenizer(folder)
        config = _read_json(folder / "tokenizer_config.json")
        return cls(
            tokenizer,
            special_tokens=_special_tokens(config, _read_json(folder / "special_tokens_map.json")),
            stop_tokens=generation_defaults(folder)["stop_tokens"],
            chat_template=_chat_templates(folder, config) if chat_template is None else chat_template,
            source=str(folder),
        )

    def __call__(self, *args: Never, **kwargs: Never) -> NoReturn:
        raise TypeError(NOT_CALLED.format(hint=transformers.NOT_CALLED))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the tokens of a text.

        A special token that is spelled out in the text becomes that token.

        Args:
            text: the text.
            add_special_tokens: whether to add what the tokenizer puts around a text, mostly a token at its beginning.
        """
        if not isinstance(text, str):
            raise TypeError(NOT_TEXT.format(got=f"{type(text).__name__} {text!r}"))
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens: Sequence[int] | np.ndarray | jax.Array, *, skip_special_tokens: bool = True) -> str:
        """Returns the text of some tokens.

        Ids the tokenizer does not know, which a model with a larger embedding can produce, are left out.

        Args:
            tokens: the ids of one text: a list, or a numpy or JAX array with one dimension.
            skip_special_tokens: whether to leave out special tokens.
        """
        ids = np.asarray(tokens)
        if ids.ndim != 1 or (ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0)):
            got = repr(tokens) if ids.ndim == 1 else f"an array of shape {ids.shape}"
            raise ValueError(NOT_TOKENS.format(got=got))
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=skip_special_tokens)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Returns the tokens of a chat, ready for the model to answer.

        Args:
            messages: dicts with a `role` ("system", "user", "assistant", ...) and a `content`, oldest first.
            tools: the functions the model may call, as JSON schemas.
            add_generation_prompt: whether to end with the beginning of an answer. Use `False` for training on whole
                chats.
            **variables: anything else the template reads, such as `enable_thinking=False`.

        Raises:
            TypeError: `messages` is not a list of dicts with roles.
            ValueError: there is no template, or it refused the messages, failed on them, or tried to leave its
                sandbox.
        """
        text = self.chat_text(messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)  # the template has written them

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Returns the text whose tokens `chat` returns; the arguments are the same."""
        template = self._template("tool_use" if tools and "tool_use" in self._templates else "default")
        values = {
            **self.special_tokens,
            "documents": None,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        return template.render(messages, **values)

    def _template(self, name: str) -> ChatTemplate:
        """Returns a template, compiled on first use."""
        if name not in self._templates:
            raise ValueError(NO_TEMPLATE.format(source=self._source))
        if name not in self._compiled:
            self._compiled[name] = ChatTemplate(self._templates[name], self._source)
        return self._compiled[name]


add_hints(Tokenizer, TOKENIZER)
