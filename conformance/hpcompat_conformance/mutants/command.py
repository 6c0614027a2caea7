"""``hpcompat conformance --mutants``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from rich.console import Console

from hpcompat_conformance import runner
from hpcompat_conformance.case import Case
from hpcompat_conformance.impl import adapter_named
from hpcompat_conformance.mutants import show
from hpcompat_conformance.mutants.plant import Mutant, all_mutants
from hpcompat_conformance.mutants.run import DEFAULT_TIMEOUT, MutantPlan, MutantRun, must_pass
from hpcompat_conformance.tables import print_table

# Mutants are bugs planted in this one.
IMPLEMENTATION = "hpcompat-torch"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the option. `run` also goes by the suite's ``procs``, ``spec``, ``seed``, ``timeout``, ``list`` and
    ``json``."""
    group = parser.add_argument_group("negative controls")
    group.add_argument(
        "--mutants",
        nargs="?",
        const="",
        type=_pattern,
        metavar="REGEX",
        help=f"run the must-pass set against mutants of {IMPLEMENTATION}: all, or those whose name matches; fails "
        f"unless {100 * show.KILLED_AT_LEAST:.0f} %% are killed",
    )


def run(args: argparse.Namespace, *, cases: Sequence[Case]) -> int:
    """0 if enough mutants were killed, 1 if not. ValueError for a request that makes no sense."""
    console = Console()
    mutants = [mutant for mutant in all_mutants() if args.mutants.search(mutant.name)]
    if args.list:
        print_table(console, show.listing(mutants))
        return 0
    plan = _plan(args, mutants=mutants, cases=cases)
    with MutantRun(plan) as mutant_run, show.MutantProgress(console, total=len(mutants)) as progress:
        verdicts = list(mutant_run.verdicts(progress))
    print_table(console, show.kill_table(verdicts, plan=plan))
    console.print(show.totals_text(verdicts), highlight=False)
    if args.json is not None:
        show.write_json(verdicts, plan=plan, path=args.json)
    return 0 if show.is_enough(verdicts) else 1


def _plan(args: argparse.Namespace, *, mutants: Sequence[Mutant], cases: Sequence[Case]) -> MutantPlan:
    if not mutants:
        raise ValueError(f"expected --mutants to match a mutant, but {args.mutants.pattern!r} matches none")
    adapter = adapter_named(IMPLEMENTATION)
    missing = adapter.missing()
    if missing:
        raise ValueError(f"expected {adapter.name} to be importable, but not installed: {', '.join(missing)}")
    timeout = DEFAULT_TIMEOUT if args.timeout == runner.DEFAULT_TIMEOUT else args.timeout
    if not must_pass(cases, version=args.spec):
        raise ValueError("expected --only to leave a case of a must clause, but got none: see --list")
    return MutantPlan(adapter, mutants, cases, procs=args.procs, timeout=timeout, seed=args.seed, version=args.spec)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, but got {text!r}: {error}") from error
