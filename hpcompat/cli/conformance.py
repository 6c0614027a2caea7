"""``hpcompat conformance``: the command line of the conformance suite, which comes with an extra of its own."""

from __future__ import annotations

import argparse
import importlib
from typing import Protocol, cast

from hpcompat.cli.errors import CommandError

SUITE = "hpcompat_conformance"
# The packages of the extra `conformance`.
EXTRA_MODULES = frozenset({SUITE, "pytest", "rich", "numpy", "packaging", "jinja2", "junitparser"})


class SuiteCommand(Protocol):
    """What the suite's command line offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the suite's options."""
    _suite().add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the suite; the status is 0 when every case ended as expected."""
    return _suite().run(args)


def _suite() -> SuiteCommand:
    # Not an import statement: the suite depends on hpcompat, and hpcompat must type-check without it.
    try:
        return cast(SuiteCommand, importlib.import_module(f"{SUITE}.cli"))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_MODULES:
            raise
        raise CommandError(
            f"the conformance suite needs {package!r}, which is not installed; "
            "install it with: pip install 'hpcompat[conformance]'"
        ) from error
