"""The command line: `jaxserve compile | serve | inspect | eval | bench | plan | distill | passes`."""

import argparse
import sys
from collections.abc import Sequence

from jaxserve import __version__
from jaxserve.commands import COMMANDS
from jaxserve.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, 2 for a UserError (one line on standard error), 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(prog="jaxserve", description="A compiler and server for LLMs on JAX/XLA.")
    parser.add_argument("--version", action="version", version=f"jaxserve {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    options = parser.parse_args(argv)
    try:
        return options.run(options)
    except UserError as error:
        print(f"jaxserve {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
