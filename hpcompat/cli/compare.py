"""``hpcompat compare``: where two recordings of ``hpcompat.record`` differ first, and how that grows."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from hpcompat.cli.compare_file import Comparison, compare_runs, load
from hpcompat.cli.compare_report import as_json, print_comparison
from hpcompat.cli.errors import CommandError

# What `--html` needs besides the extra `cli`.
PAGE_EXTRA_MODULES = frozenset({"jinja2", "matplotlib"})
EQUAL, DIFFERENT, NOT_COMPARABLE = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``hpcompat compare``."""
    parser.epilog = (
        "Exit status: 0 all tensors are equal, 1 some differ, 2 some could not be compared (missing, or of another "
        "dtype or shape)."
    )
    for name in ("A", "B"):
        parser.add_argument(name.lower(), type=Path, metavar=name, help="a directory that hpcompat.record wrote")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that differs")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with a plot of the growth")
    parser.add_argument("--limit-ulp", type=_count, default=0, metavar="N", help="elements this near are equal (0)")
    parser.add_argument(
        "--rename",
        type=_renaming,
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="read this part of a parameter's name as another, as in gamma=weight; may be repeated",
    )
    parser.add_argument("--width", type=int, metavar="COLUMNS", help="by default that of the terminal")


def run(args: argparse.Namespace) -> int:
    """Compare, print and write."""
    renamed = dict(args.rename)
    one, other = (load(directory, renamed=renamed) for directory in (args.a, args.b))
    comparison = compare_runs(one, other, limit_ulp=args.limit_ulp)
    print_comparison(comparison, console=Console(width=args.width, highlight=False))
    try:
        if args.json is not None:
            args.json.write_text(json.dumps(as_json(comparison), indent=1) + "\n", encoding="utf-8")
            print(f"wrote {args.json}")
        if args.html is not None:
            _write_page(comparison, out=args.html)
            print(f"wrote {args.html}")
    except OSError as error:
        raise CommandError(f"expected to write {error.filename!r}, but got: {error.strerror}") from error
    if comparison.problems:
        return NOT_COMPARABLE
    return DIFFERENT if comparison.first is not None else EQUAL


def _write_page(comparison: Comparison, *, out: Path) -> None:
    try:
        from hpcompat.cli.compare_page import write_page
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in PAGE_EXTRA_MODULES:
            raise
        raise CommandError(
            f"the page needs the package {package!r}, which is not installed; install it with: "
            "pip install 'hpcompat[trace]'"
        ) from error
    write_page(comparison, out=out)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of ULP, 0 or more, but got {text!r}")
    return int(text)


def _renaming(text: str) -> tuple[str, str]:
    old, separator, new = text.partition("=")
    if not (old and separator and new):
        raise argparse.ArgumentTypeError(f"expected OLD=NEW, but got {text!r}")
    return old, new
