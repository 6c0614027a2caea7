"""From the options of the command line to the plans of a run, one for each implementation."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from hpcompat_conformance import document, expected, runner, spec, waivers
from hpcompat_conformance.case import Case
from hpcompat_conformance.expected import Gap
from hpcompat_conformance.impl import Adapter, adapter_named, adapter_names
from hpcompat_conformance.results import Origin, Run

DUMP_FOLDER = "failures"


def selected(args: argparse.Namespace, *, known: Sequence[Case]) -> list[Case]:
    """The cases of the spec's version that ``--only`` leaves."""
    clauses = spec.clauses(args.spec)
    of_version = [case for case in known if case.clause in clauses]
    if args.only is None:
        return of_version
    return [case for case in of_version if args.only.search(case.id) or args.only.search(case.clause)]


def plans(args: argparse.Namespace, *, known: Sequence[Case]) -> list[runner.Plan]:
    """ValueError for anything that cannot be run or does not fit together, before anything runs."""
    if not args.impl:
        raise ValueError(f"expected --impl with one of {', '.join(adapter_names())}")
    cases = selected(args, known=known)
    if not cases:
        raise ValueError(f"expected --only to match a case, but {args.only.pattern!r} matches none: see --list")
    if args.dump_on_failure and args.out is None:
        raise ValueError("expected --out DIR beside --dump-on-failure")
    adapters = [_installed(name) for name in dict.fromkeys(args.impl)]
    own = _gap_files(args.xfails or [], implementations=[adapter.name for adapter in adapters])
    accepted = [] if args.waivers is None else waivers.load_waivers(args.waivers)
    return [
        runner.Plan(
            adapter,
            cases,
            procs=args.procs,
            gaps=_gaps(adapter.name, own=own, known=known),
            waivers=accepted,
            timeout=args.timeout,
            seed=args.seed,
            # Workers need not have this process's current directory.
            dump=(args.out / DUMP_FOLDER).absolute() if args.dump_on_failure else None,
        )
        for adapter in adapters
    ]


def complaints(plans: Sequence[runner.Plan], *, runs: Sequence[Run], known: Sequence[Case]) -> list[str]:
    """About the runs of these plans, as far as they came, and about their waivers."""
    first = plans[0]
    stale = waivers.stale_waivers(
        first.waivers, runs=runs, known=known, implementations=adapter_names(), today=first.today
    )
    return [*_interruptions(plans, runs=runs), *stale]


def _interruptions(plans: Sequence[runner.Plan], *, runs: Sequence[Run]) -> list[str]:
    came_to = {run.implementation: len(run.results) for run in runs}
    return [
        f"interrupted: {num_results} of {plan.size} results for {plan.adapter.name}"
        for plan in plans
        if (num_results := came_to.get(plan.adapter.name, 0)) < plan.size
    ]


def origin(args: argparse.Namespace, *, implementation: str) -> Origin:
    """To be called when the run begins."""
    date = datetime.now(timezone.utc).isoformat(timespec="minutes").replace("+00:00", "Z")
    command = _command(args, implementation=implementation)
    return Origin(args.spec, args.seed, tuple(args.procs), date, document.machine(), command)


def _command(args: argparse.Namespace, *, implementation: str) -> str:
    words = ["hpcompat", "conformance", "--impl", implementation, "--procs", ",".join(map(str, args.procs))]
    words += ["--spec", args.spec, "--seed", str(args.seed)]
    if args.timeout != runner.DEFAULT_TIMEOUT:
        words += ["--timeout", f"{args.timeout:g}"]
    if args.only is not None:
        words += ["--only", args.only.pattern]
    for path in args.xfails or []:
        words += ["--xfails", str(path)]
    if args.waivers is not None:
        words += ["--waivers", str(args.waivers)]
    return shlex.join(words)


def _installed(name: str) -> Adapter:
    adapter = adapter_named(name)
    missing = adapter.missing()
    if missing:
        raise ValueError(f"expected {adapter.name} to be importable, but not installed: {', '.join(missing)}")
    return adapter


def _gap_files(paths: Sequence[Path], *, implementations: Sequence[str]) -> dict[str, Path]:
    found = {}
    for path in paths:
        name = expected.implementation_of(path)
        if name not in implementations:
            raise ValueError(f"expected {path} to be about {' or '.join(implementations)}, but got {name!r}")
        found[name] = path
    return found


def _gaps(implementation: str, *, own: dict[str, Path], known: Sequence[Case]) -> list[Gap]:
    path = own.get(implementation) or expected.default_path(implementation)
    return [] if path is None else expected.load_gaps(path, known_cases=[case.id for case in known])
