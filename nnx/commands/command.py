"""What a command of `python -m nnx` is, and the list of them."""

import argparse
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

COMMANDS: dict[str, str] = {
    "inspect": "nnx.commands.inspect",
    "convert": "nnx.commands.convert",
    "chat": "nnx.commands.chat",
    "doctor": "nnx.commands.doctor",
    "plan": "nnx.commands.plan",
}
"""The module of each command, whose `COMMAND` it is."""


class Command(NamedTuple):
    """One command.

    Attributes:
        help: what it does, in one line.
        examples: command lines, each with what it does.
        add_arguments: a function that adds the arguments to a parser.
        run: a function of the parsed arguments that returns the exit status.
    """

    help: str
    examples: dict[str, str]
    add_arguments: Callable[[argparse.ArgumentParser], Any]
    run: Callable[[argparse.Namespace], int]


def command_named(name: str) -> Command:
    """Returns a command."""
    return importlib.import_module(COMMANDS[name]).COMMAND


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    commands = {name: command_named(name) for name in COMMANDS}
    parser = argparse.ArgumentParser(
        prog="python -m nnx",
        description="NNX on the command line.",
        epilog=_examples({line: text for command in commands.values() for line, text in command.examples.items()}),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traceback", action="store_true", help="show the whole traceback of an error")
    chosen = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, command in commands.items():
        own = chosen.add_parser(
            name,
            help=command.help,
            description=f"{command.help[:1].upper()}{command.help[1:]}.",
            epilog=_examples(command.examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(own)
    return parser


def _examples(examples: dict[str, str]) -> str:
    width = max(map(len, examples))
    return "examples:\n" + "\n".join(f"  python -m nnx {line:{width}}  {text}" for line, text in examples.items())
