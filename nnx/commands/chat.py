"""`python -m nnx chat DIRECTORY`: a chat with a published model in the terminal."""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

import nnx
from nnx.commands.command import Command

GREETING = """{name} is ready. Type a message; an empty line, Ctrl-D or /quit ends the chat, /new starts another one."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="a published model with its tokenizer and chat template")
    parser.add_argument("--system", help="what the model is told before the chat")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="the length of an answer (default: 512)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 takes the most likely token (default: 0.7)")
    parser.add_argument("--top-p", type=float, default=0.95, help="the probability to draw from (default: 0.95)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the answers (default: 0)")
    parser.add_argument("--dtype", help='the dtype of the weights, e.g. "bfloat16"; by default that of the files')
    parser.add_argument("--bits", type=int, choices=(4, 8), help="store the weights as integers of 4 or 8 bits")


def _run(arguments: argparse.Namespace) -> int:
    tokenizer = nnx.models.Tokenizer.from_pretrained(arguments.directory)
    model = nnx.models.from_pretrained(arguments.directory, dtype=arguments.dtype)
    if arguments.bits is not None:
        nnx.quantize(model, bits=arguments.bits)
    chat = Chat(model, tokenizer, arguments)
    if sys.stdin.isatty():
        print(GREETING.format(name=arguments.directory.resolve().name))
    while True:
        text = _read_line()
        if text in ("", "/quit"):
            return 0
        if text == "/new":
            chat.begin()
        else:
            chat.answer(text)


def _read_line() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


class Chat:
    """One chat: its messages so far, and the model that answers."""

    def __init__(self, model: Any, tokenizer: Any, options: argparse.Namespace):
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self.ctx = nnx.context(sample=options.seed)
        self.begin()

    def begin(self) -> None:
        """Forgets all messages."""
        system = self.options.system
        self.messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, text: str) -> None:
        """Adds a message to the chat, and the model's answer, which is printed as it is written."""
        self.messages.append({"role": "user", "content": text})
        options = self.options
        prompt = np.array([self.tokenizer.chat(self.messages)])
        written = Written(self.tokenizer)
        nnx.generate(
            self.model,
            prompt,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p if options.temperature else None,
            stop_tokens=self.tokenizer.stop_tokens,
            stream=written,
            ctx=self.ctx,
        )
        print()
        self.messages.append({"role": "assistant", "content": written.text})


class Written:
    """Prints the text of tokens as they come. A character of several tokens is printed when it is complete."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.text = ""
        self.has_ended = False

    def __call__(self, tokens: np.ndarray) -> None:
        token = int(tokens.reshape(-1)[0])
        self.has_ended = self.has_ended or token in self.tokenizer.stop_tokens
        if self.has_ended:  # what follows is padding
            return
        self.tokens.append(token)
        text = self.tokenizer.decode(self.tokens)
        if not text.endswith("\ufffd"):
            print(text[len(self.text) :], end="", flush=True)
            self.text = text


COMMAND = Command(
    help="chat with a published model in the terminal",
    examples={
        "chat Qwen3-4B": "with the settings of the model",
        'chat Qwen3-4B --bits 4 --system "Be brief."': "in a quarter of the memory",
    },
    add_arguments=_add_arguments,
    run=_run,
)
