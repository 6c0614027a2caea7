"""The command line: ``hpcompat conformance`` and ``python -m hpcompat_conformance``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hpcompat_conformance import document, planning, rendering, report, runner, spec
from hpcompat_conformance.case import Case, all_cases
from hpcompat_conformance.document import Document
from hpcompat_conformance.impl import adapter_names
from hpcompat_conformance.mutants import command as mutants
from hpcompat_conformance.results import Run
from hpcompat_conformance.tables import print_table

BAD_USAGE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    what = parser.add_argument_group("what to run")
    names = ", ".join(adapter_names())
    what.add_argument(
        "--impl", type=_words, action="extend", metavar="NAME,...", help=f"implementations under test: {names}"
    )
    what.add_argument("--procs", type=_numbers, default=runner.DEFAULT_PROCS, metavar="N,...", help="default: 1,2,4")
    what.add_argument("--spec", default=spec.VERSION, metavar="VERSION", help=f"of {', '.join(spec.versions())}")
    what.add_argument("--only", type=_pattern, metavar="REGEX", help="only cases whose id or clause matches")
    what.add_argument("--seed", type=int, default=runner.DEFAULT_SEED, help="of parameters and inputs")
    what.add_argument("--timeout", type=float, default=runner.DEFAULT_TIMEOUT, metavar="SECONDS", help="per case")
    what.add_argument("--list", action="store_true", help="list the cases and stop")
    expectations = parser.add_argument_group("what to expect")
    expectations.add_argument(
        "--xfails", type=Path, action="append", metavar="FILE", help="expected gaps, instead of the suite's own"
    )
    expectations.add_argument("--waivers", type=Path, metavar="FILE", help="failures to live with until a date")
    reports = parser.add_argument_group("reports")
    formats = ", ".join(rendering.FORMATS)
    reports.add_argument(
        "--report", type=_formats, action="extend", default=[], metavar="FORMAT,...", help=f"write {formats} into --out"
    )
    reports.add_argument("--out", type=Path, metavar="DIR", help="where reports and dumps go")
    reports.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    reports.add_argument(
        "--dump-on-failure", action="store_true", help="write both values of each failed comparison into --out"
    )
    reports.add_argument(
        "--merge", type=Path, nargs="+", metavar="JSON", help="report on results of earlier runs; run nothing"
    )
    reports.add_argument("--spec-page", type=Path, metavar="FILE", help="write the spec as Markdown and stop")
    reports.add_argument(
        "--public-reports-page", type=Path, metavar="FILE", help="write the public reports as Markdown and stop"
    )
    mutants.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0 if every case ended as expected, 1 if not, 2 for a request that makes no sense."""
    console = Console()
    try:
        return _run(args, console=console)
    except (ValueError, OSError) as error:
        complaint = f"error: {escape(str(error))}"
        Console(stderr=True).print(complaint, highlight=False, soft_wrap=True)
        return BAD_USAGE


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m hpcompat_conformance``."""
    parser = argparse.ArgumentParser(
        prog="hpcompat conformance", description="Check implementations of the FSDP2 API against the spec."
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


def _run(args: argparse.Namespace, *, console: Console) -> int:
    if args.mutants is not None:
        return mutants.run(args, cases=planning.selected(args, known=all_cases()))
    if args.list:
        cases = planning.selected(args, known=all_cases())
        print_table(console, _listing(cases, version=args.spec))
        console.print(report.coverage_text(all_cases(), version=args.spec), highlight=False, soft_wrap=True)
        return 0
    if args.spec_page is not None:
        args.spec_page.write_text(rendering.spec_page(args.spec), encoding="utf-8")
        return 0
    if args.public_reports_page is not None:
        args.public_reports_page.write_text(rendering.public_reports_page(args.spec), encoding="utf-8")
        return 0
    if args.report and args.out is None:
        raise ValueError("expected --out DIR beside --report")
    # Before the run: a package that is missing must not cost the results.
    writers = [rendering.writer(name) for name in dict.fromkeys(args.report)]
    if args.merge:
        outcome = document.merge([document.read(path) for path in args.merge])
    else:
        outcome = _run_all(args, console=console)
    _conclude(outcome, console=console)
    if args.json is not None:
        document.write(outcome, args.json)
    for write in writers:
        for path in write(outcome, args.out):
            console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    return 0 if outcome.ok else 1


def _run_all(args: argparse.Namespace, *, console: Console) -> Document:
    known = all_cases()
    plans = planning.plans(args, known=known)
    runs: list[Run] = []
    with report.LiveProgress(console, total=sum(plan.size for plan in plans)) as progress:
        for plan in plans:
            progress.turn_to(plan.adapter.name)
            origin = planning.origin(args, implementation=plan.adapter.name)
            runs.append(replace(runner.run(plan, listener=progress), origin=origin))
            if len(runs[-1].results) < plan.size:  # Ctrl-C
                break
    for one in runs:
        print_table(console, report.summary_table(one))
    console.print(report.coverage_text(known, version=args.spec), highlight=False, soft_wrap=True)
    return Document(runs, planning.complaints(plans, runs=runs, known=known))


def _conclude(outcome: Document, *, console: Console) -> None:
    print_table(console, report.slowest_table(outcome.runs))
    for one in outcome.runs:
        console.print(report.totals_text(one), highlight=False, soft_wrap=True)
    for text in outcome.complaints:
        console.print(f"[bold red]COMPLAINT[/] {escape(text)}", highlight=False, soft_wrap=True)


def _listing(cases: Sequence[Case], *, version: str) -> Table:
    table = Table(title=f"{len(cases)} cases, spec {version}", title_justify="left")
    for heading in ("clause", "case", "procs", "requires", "reports"):
        table.add_column(heading, overflow="fold")
    for case in cases:
        procs = ",".join(map(str, case.procs))
        table.add_row(case.clause, case.id, procs, "\n".join(case.requires), " ".join(case.reports))
    return table


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _formats(text: str) -> list[str]:
    words = _words(text)
    unknown = [word for word in words if word not in rendering.FORMATS]
    if unknown or not words:
        raise argparse.ArgumentTypeError(f"expected formats out of {', '.join(rendering.FORMATS)}, but got {text!r}")
    return words


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
