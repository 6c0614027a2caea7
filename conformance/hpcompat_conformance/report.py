"""Showing a run in the terminal: live, and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hpcompat_conformance import spec
from hpcompat_conformance.case import Case
from hpcompat_conformance.results import BAD_KINDS, KINDS, Result, Run

STYLES = {"pass": "green", "xfail": "yellow", "skip": "cyan", "waived": "magenta"}
NUM_SLOWEST = 10
_Bar = TypeVar("_Bar", bound="LiveBar")


class LiveBar:
    """A bar that is on the screen while it is in use as a context manager."""

    _progress: Progress

    def __enter__(self: _Bar) -> _Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class LiveProgress(LiveBar):
    """A bar with the running case under which each failure is printed as it comes."""

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
        self._implementation = ""

    def turn_to(self, implementation: str) -> None:
        """The next cases run on that implementation."""
        self._implementation = f"{implementation}: "

    def started(self, case: Case, *, procs: int) -> None:
        """The bar shows the case."""
        self._progress.update(self._task, description=f"{self._implementation}{case.id} on {procs}")

    def finished(self, result: Result) -> None:
        """The bar advances."""
        self._counts[result.result] += 1
        counts = " ".join(f"[{style_of(kind)}]{kind} {n}[/]" for kind, n in self._counts.items() if n)
        self._progress.update(self._task, advance=1, counts=counts)
        if result.result in BAD_KINDS:
            text = self._implementation + failure_text(result)
            self._progress.console.print(text, highlight=False, soft_wrap=True)


def style_of(kind: str) -> str:
    """The colour of a result."""
    return STYLES.get(kind, "bold red")


def failure_text(result: Result) -> str:
    """A result with its clause and message, as rich markup."""
    head, text = result.result.upper(), text_of(result)
    return f"[{style_of(result.result)}]{head}[/]{escape(text.removeprefix(head))}\n"


def text_of(result: Result) -> str:
    """A result with its clause and message."""
    clause = spec.clauses()[result.clause]
    head = f"{result.result.upper()} {result.id} on {result.procs}"
    return f"{head}\n  {clause.id}: {clause.sentence}\n{result.message}"


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
    """The totals on one line, as rich markup. The time is that of the cases."""
    seconds = sum(result.seconds for result in run.results)
    parts = [f"[{style_of(kind)}]{n} {kind}[/]" for kind, n in run.totals.items() if n]
    whole = f" ({run.seconds:.1f} s with the start of processes)" if run.seconds else ""
    return f"{run.implementation}: {', '.join(parts) or 'nothing was run'} in {seconds:.1f} s{whole}"


def slowest_table(runs: Sequence[Run]) -> Table:
    """The results that took longest, of all implementations."""
    timed = [(result.seconds, run.implementation, result) for run in runs for result in run.results]
    timed.sort(key=lambda entry: -entry[0])
    table = Table(title=f"the {min(NUM_SLOWEST, len(timed))} slowest", title_justify="left")
    for heading in ("seconds", "implementation", "case", "on"):
        table.add_column(heading, overflow="fold", justify="right" if heading in ("seconds", "on") else "left")
    for seconds, implementation, result in timed[:NUM_SLOWEST]:
        table.add_row(f"{seconds:.2f}", implementation, result.id, str(result.procs))
    return table


def coverage_text(cases: Sequence[Case], *, version: str = spec.VERSION) -> str:
    """How many clauses the spec has, how many cases there are for them, and how they are spread."""
    clauses = spec.clauses(version)
    counts = Counter(case.clause for case in cases if case.clause in clauses)
    without = [identity for identity in clauses if not counts[identity]]
    spread = f"{min(counts.values())} to {max(counts.values())}" if counts else "none"
    mean = sum(counts.values()) / len(clauses)
    return (
        f"spec {version}: {len(clauses)} clauses, {counts.total()} cases; "
        f"{spread} for a clause, {mean:.2f} on average; "
        f"clauses without a case: {', '.join(without) or 'none'}"
    )
