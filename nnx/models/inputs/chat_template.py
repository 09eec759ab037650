"""Chat templates: the Jinja programs that turn a list of messages into the text a model was trained on.

A template comes with the checkpoint, so it is somebody else's code. It runs in Jinja's immutable sandbox: it can read
the values it is given and build a string, and can neither change them nor reach Python's objects behind them. It is
stopped after some time in its loops and macros, and when its text becomes too long. Its memory has no limit: a template
that doubles a string forty times has to be stopped by the system.
"""

import contextvars
import datetime
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nnx.core.extras import require

BAD_MESSAGES = """A chat is a list of messages, each a dict with a role: [{{'role': 'user', 'content': 'Hello'}}]. Got \
{got}."""
TEMPLATE_SYNTAX = "The chat template in {source} is not a valid Jinja template (line {line}): {reason}"
TEMPLATE_ESCAPES = """The chat template in {source} tried to leave its sandbox: {reason} A template may only read the \
messages it is given and build a text from them. Pass one you trust instead: \
Tokenizer.from_pretrained(directory, chat_template=...)."""
TEMPLATE_REFUSES = "The chat template in {source} does not accept these messages: {reason}"
TEMPLATE_RUNS_ON = """The chat template in {source} was stopped: {reason}. Pass one you trust instead: \
Tokenizer.from_pretrained(directory, chat_template=...)."""
TEMPLATE_FAILS = "The chat template in {source} failed on these messages: {kind}: {reason}"


MAX_SECONDS = 10.0
MAX_CHARACTERS = 50_000_000
_deadline: contextvars.ContextVar[float] = contextvars.ContextVar("deadline", default=float("inf"))


class _Refused(Exception):
    """Raised by a template that calls `raise_exception`."""


class _Stopped(Exception):
    """Raised in a template that takes too much time or writes too much."""


def _check_time() -> None:
    if time.monotonic() > _deadline.get():
        raise _Stopped(f"it had not finished after {MAX_SECONDS:g} seconds")


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(value: Any, **options: Any) -> str:
    # Jinja's own filter escapes `<`, `>` and `&` for HTML, and models were trained on the characters themselves.
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _environment() -> Any:
    """Returns a sandbox with the settings and functions that published templates rely on."""
    sandbox = require("jinja2.sandbox", "models", "A chat template")
    extensions = require("jinja2.ext", "models", "A chat template")

    class Generation(extensions.Extension):
        """`{% generation %}`, which marks the model's turns for training code; here, it prints its content."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Sandbox(sandbox.ImmutableSandboxedEnvironment):
        """Raises at the first unsafe access. Jinja itself prints the result as nothing, and raises if it is used."""

        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            raise sandbox.SecurityError(f"it reads {attribute!r} of a {type(obj).__name__}.")

        check_time = staticmethod(_check_time)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[extensions.loopcontrols, Generation])
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def _check_messages(messages: Any) -> None:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(BAD_MESSAGES.format(got=f"{type(messages).__name__} {messages!r}"))
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise TypeError(BAD_MESSAGES.format(got=f"message {index}: {message!r}"))


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, text: str, source: str):
        """Compiles a template.

        Args:
            text: the Jinja source.
            source: where it comes from, for error messages.

        Raises:
            ValueError: it is not valid Jinja.
        """
        environment = _environment()
        self.source = source
        self._errors = require("jinja2.exceptions", "models", "A chat template")
        nodes = require("jinja2.nodes", "models", "A chat template")
        try:
            tree = environment.parse(text)
            # Whatever can repeat itself looks at the clock first, where the template cannot change that.
            check = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
            for node in tree.find_all((nodes.For, nodes.Macro)):
                node.body.insert(0, nodes.ExprStmt(check).set_lineno(node.lineno))
            self._template = environment.from_string(tree)
        except self._errors.TemplateSyntaxError as error:
            raise ValueError(TEMPLATE_SYNTAX.format(source=source, line=error.lineno, reason=error.message)) from error

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Returns the text of a chat.

        Args:
            messages: dicts with a `role` and whatever else the template reads, usually `content`.
            **variables: anything else the template reads.

        Raises:
            TypeError: `messages` is not a list of such dicts.
            ValueError: the template refused the messages, failed on them, took too long, wrote too much, or tried to
                leave its sandbox.
        """
        _check_messages(messages)
        token = _deadline.set(time.monotonic() + MAX_SECONDS)
        written, length = [], 0
        try:
            for part in self._template.generate(messages=messages, **variables):
                written.append(part)
                length += len(part)
                if length > MAX_CHARACTERS:
                    raise _Stopped(f"it wrote more than {MAX_CHARACTERS:,} characters")
            return "".join(written)
        except _Stopped as error:
            raise ValueError(TEMPLATE_RUNS_ON.format(source=self.source, reason=error)) from error
        except _Refused as error:
            raise ValueError(TEMPLATE_REFUSES.format(source=self.source, reason=error)) from error
        except self._errors.SecurityError as error:
            raise ValueError(TEMPLATE_ESCAPES.format(source=self.source, reason=error)) from error
        except Exception as error:  # a template can fail in any way, and all that helps is the text of the error
            kind = type(error).__name__
            raise ValueError(TEMPLATE_FAILS.format(source=self.source, kind=kind, reason=error)) from error
        finally:
            _deadline.reset(token)
