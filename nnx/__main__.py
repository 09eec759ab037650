"""The command line: `python -m nnx COMMAND`. The commands are in nnx/commands."""

import os
import sys
from collections.abc import Sequence

from nnx.commands.command import command_named, make_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 if all went well, 1 after an error, 2 for wrong arguments."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        return command_named(arguments.command).run(arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if arguments.traceback:
            raise
        print(f"python -m nnx {arguments.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
