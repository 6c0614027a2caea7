"""The ``hpcompat`` command: one file per subcommand, imported only when it is the one that was asked for.

A command's module has ``add_arguments(parser)`` and ``run(args) -> int``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from hpcompat.cli.errors import CommandError

__all__ = ["main"]

COMMANDS = {
    "launch": "start a training script on N processes",
    "info": "show versions, devices, backends and their capabilities",
    "trace": "look at what hpcompat.trace recorded",
    "compare": "find where two recordings of hpcompat.record differ first",
    "conformance": "run the conformance suite on an implementation",
}
# What the extra `cli` brings; a command that needs more reports that itself.
CLI_EXTRA_MODULES = frozenset({"numpy", "rich", "safetensors"})


class Command(Protocol):
    """What each command's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: that of the process) and return the exit status; 2 is a usage error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    try:
        return _run(chosen if chosen in COMMANDS else None, arguments)
    except CommandError as error:
        print(f"hpcompat {chosen}: error: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in CLI_EXTRA_MODULES:
            raise
        print(
            f"hpcompat {chosen}: error: this needs the package {package!r}, which is not installed; "
            "install it with: pip install 'hpcompat[cli]'",
            file=sys.stderr,
        )
    return 2


def _run(chosen: str | None, arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="hpcompat", description="One FSDP2-style API over PyTorch and MindSpore.")
    parser.add_argument("--version", action="version", version=f"hpcompat {importlib.metadata.version('hpcompat')}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    command: Command | None = None
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == chosen:
            command = cast(Command, importlib.import_module(f"hpcompat.cli.{name}"))
            command.add_arguments(subparser)
    args = parser.parse_args(arguments)
    # Parsing succeeds only with a known command as the first word, which is then the chosen one.
    assert command is not None
    return command.run(args)
