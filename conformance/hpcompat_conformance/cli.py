"""The command line: ``hpcompat conformance`` and ``python -m hpcompat_conformance``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hpcompat_conformance import expected, report, runner, spec
from hpcompat_conformance.case import Case, all_cases
from hpcompat_conformance.impl import adapter_named, adapter_names

BAD_USAGE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--impl", help=f"the implementation under test: {', '.join(adapter_names())}")
    parser.add_argument("--procs", type=_numbers, default=(1, 2, 4), metavar="N,N,...", help="default: 1,2,4")
    parser.add_argument("--only", type=_pattern, metavar="REGEX", help="only cases whose id or clause matches")
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--xfails", type=Path, metavar="FILE", help="expected gaps, instead of the suite's own")
    parser.add_argument("--timeout", type=float, default=runner.DEFAULT_TIMEOUT, metavar="SECONDS", help="per case")
    parser.add_argument("--seed", type=int, default=runner.DEFAULT_SEED, help="of parameters and inputs")


def run(args: argparse.Namespace) -> int:
    """0 if every case ended as expected, 1 if not, 2 for a request that makes no sense."""
    console = Console()
    complaints = Console(stderr=True)
    known = all_cases()
    cases = [case for case in known if args.only is None or _matches(case, pattern=args.only)]
    if args.list:
        console.print(_listing(cases))
        return 0
    try:
        plan = _plan(args, cases=cases, known=known)
    except (ValueError, OSError) as error:
        complaints.print(f"error: {escape(str(error))}", highlight=False, soft_wrap=True)
        return BAD_USAGE
    with report.LiveProgress(console, total=plan.size) as progress:
        outcome = runner.run(plan, listener=progress)
    console.print(report.summary_table(outcome))
    console.print(report.totals_text(outcome), highlight=False)
    if args.json is not None:
        report.write_json(outcome, path=args.json)
    return 0 if outcome.ok else 1


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m hpcompat_conformance``."""
    parser = argparse.ArgumentParser(
        prog="hpcompat conformance", description="Check an implementation of the FSDP2 API against the spec."
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


def _plan(args: argparse.Namespace, *, cases: Sequence[Case], known: Sequence[Case]) -> runner.Plan:
    if args.impl is None:
        raise ValueError(f"expected --impl with one of {', '.join(adapter_names())}")
    if not cases:
        raise ValueError(f"expected --only to match a case, but {args.only.pattern!r} matches none: see --list")
    adapter = adapter_named(args.impl)
    missing = adapter.missing()
    if missing:
        raise ValueError(f"expected {adapter.name} to be importable, but not installed: {', '.join(missing)}")
    path = args.xfails or expected.default_path(adapter.name)
    gaps = [] if path is None else expected.load_gaps(path, known_cases=[case.id for case in known])
    return runner.Plan(adapter, cases, procs=args.procs, gaps=gaps, timeout=args.timeout, seed=args.seed)


def _listing(cases: Sequence[Case]) -> Table:
    table = Table(title=f"{len(cases)} cases, spec {spec.VERSION}", title_justify="left")
    for heading in ("clause", "case", "procs", "requires", "reports"):
        table.add_column(heading, overflow="fold")
    for case in cases:
        procs = ",".join(map(str, case.procs))
        table.add_row(case.clause, case.id, procs, "\n".join(case.requires), " ".join(case.reports))
    return table


def _matches(case: Case, *, pattern: re.Pattern[str]) -> bool:
    return bool(pattern.search(case.id) or pattern.search(case.clause))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected positive numbers such as 1,2,4, but got {text!r}")
    return numbers


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, but got {text!r}: {error}") from error
