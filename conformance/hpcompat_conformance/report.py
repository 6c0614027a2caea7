"""Showing a run: live, as a table, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hpcompat_conformance import spec
from hpcompat_conformance.case import Case
from hpcompat_conformance.results import BAD_KINDS, KINDS, Result, Run

STYLES = {"pass": "green", "xfail": "yellow", "skip": "cyan"}


class LiveProgress:
    """A bar with the running case under which each failure is printed as it comes. Use as a context manager."""

    def __init__(self, console: Console, *, total: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[counts]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._counts = dict.fromkeys(KINDS, 0)
        self._task = self._progress.add_task("starting", total=total, counts="")

    def __enter__(self) -> LiveProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def started(self, case: Case, *, procs: int) -> None:
        """The bar shows the case."""
        self._progress.update(self._task, description=f"{case.id} on {procs}")

    def finished(self, result: Result) -> None:
        """The bar advances."""
        self._counts[result.result] += 1
        counts = " ".join(f"[{style_of(kind)}]{kind} {n}[/]" for kind, n in self._counts.items() if n)
        self._progress.update(self._task, advance=1, counts=counts)
        if result.result in BAD_KINDS:
            self._progress.console.print(failure_text(result), highlight=False)


def style_of(kind: str) -> str:
    """The colour of a result."""
    return STYLES.get(kind, "bold red")


def failure_text(result: Result) -> str:
    """A result with its clause and message, as rich markup."""
    clause = spec.clauses()[result.clause]
    head = f"[{style_of(result.result)}]{result.result.upper()}[/] {result.id} on {result.procs}"
    return f"{head}\n  {clause.id}: {escape(clause.sentence)}\n{escape(result.message)}\n"


def summary_table(run: Run) -> Table:
    """One row for each clause that was looked at, one column for each number of processes."""
    procs = sorted({result.procs for result in run.results})
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    table = Table(title=f"{run.implementation} ({versions}) against spec {spec.VERSION}", title_justify="left")
    for heading in ("clause", "level", "sentence", *(f"on {n}" for n in procs)):
        table.add_column(heading, overflow="fold")
    for identity, clause in spec.clauses().items():
        of_clause = [result for result in run.results if result.clause == identity]
        if of_clause:
            cells = [_cell([result.result for result in of_clause if result.procs == n]) for n in procs]
            table.add_row(identity, clause.level, escape(clause.sentence), *cells)
    return table


def _cell(kinds: list[str]) -> str:
    counts = {kind: kinds.count(kind) for kind in KINDS if kind in kinds}
    return " ".join(f"[{style_of(kind)}]{kind}{f' {n}' if n > 1 else ''}[/]" for kind, n in counts.items())


def totals_text(run: Run) -> str:
    """The totals on one line, as rich markup."""
    seconds = sum(result.seconds for result in run.results)
    parts = [f"[{style_of(kind)}]{n} {kind}[/]" for kind, n in run.totals.items() if n]
    return f"{', '.join(parts) or 'nothing was run'} in {seconds:.1f} s"


def write_json(run: Run, *, path: Path) -> None:
    """``{"impl", "versions", "spec", "totals": {kind: n}, "cases": [{"id", "clause", "procs", "result", "seconds",
    "message"}]}``"""
    content = {
        "impl": run.implementation,
        "versions": dict(run.versions),
        "spec": spec.VERSION,
        "totals": run.totals,
        "cases": [asdict(result) for result in run.results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
