"""Showing what came of the mutants: live, as a table, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hpcompat_conformance.case import Case
from hpcompat_conformance.mutants.plant import Mutant
from hpcompat_conformance.mutants.run import MutantPlan, Verdict, must_pass
from hpcompat_conformance.report import LiveBar

KILLED_AT_LEAST = 0.95
STYLES = {"killed": "green", "survived": "bold red", "unmet": "bold red", "error": "bold red"}


class MutantProgress(LiveBar):
    """A bar with the running mutant and case, under which each mutant that was not killed is printed as it
    comes."""

    def __init__(self, console: Console, *, total: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task("starting", total=total)

    def started(self, mutant: Mutant, case: Case, *, procs: int) -> None:
        """The bar shows both."""
        self._progress.update(self._task, description=f"{mutant.name}: {case.id} on {procs}")

    def finished(self, verdict: Verdict) -> None:
        """The bar advances."""
        self._progress.update(self._task, advance=1)
        if verdict.result != "killed":
            text = f"[{STYLES[verdict.result]}]{verdict.result.upper()}[/] {verdict.mutant.name}"
            self._progress.console.print(f"{text} {escape(verdict.message)}".rstrip(), highlight=False)


def listing(mutants: Sequence[Mutant]) -> Table:
    """Names and what they break."""
    table = Table(title=f"{len(mutants)} mutants", title_justify="left")
    for heading in ("mutant", "breaks", "likely found by"):
        table.add_column(heading, overflow="fold")
    for mutant in mutants:
        table.add_row(mutant.name, escape(mutant.breaks), "\n".join(mutant.likely))
    return table


def kill_table(verdicts: Sequence[Verdict], *, plan: MutantPlan) -> Table:
    """One row for each mutant, those that were not killed last."""
    num_cases = len(must_pass(plan.cases, version=plan.version))
    title = f"{plan.adapter.name}: the must-pass set of spec {plan.version} ({num_cases} cases) against mutants"
    table = Table(title=title, title_justify="left")
    for heading in ("mutant", "breaks", "killed by", "clause", "how"):
        table.add_column(heading, overflow="fold")
    for heading in ("runs", "seconds"):
        table.add_column(heading, justify="right")
    for verdict in sorted(verdicts, key=lambda verdict: verdict.result != "killed"):
        killer = f"{verdict.case} on {verdict.procs}" if verdict.case else "-"
        how = verdict.how or verdict.result
        row = (killer, verdict.clause or "-", f"[{STYLES[verdict.result]}]{how}[/]")
        numbers = (str(verdict.num_runs), f"{verdict.seconds:.1f}")
        table.add_row(verdict.mutant.name, escape(verdict.mutant.breaks), *row, *numbers)
    return table


def totals_text(verdicts: Sequence[Verdict]) -> str:
    """One line, then one for each mutant that was not killed, as rich markup."""
    num_killed = sum(verdict.result == "killed" for verdict in verdicts)
    seconds = sum(verdict.seconds for verdict in verdicts)
    style = "green" if is_enough(verdicts) else "bold red"
    rate = 100 * killed_rate(verdicts)
    lines = [f"[{style}]{num_killed} of {len(verdicts)} mutants killed ({rate:.1f} %)[/] in {seconds:.1f} s"]
    for verdict in verdicts:
        if verdict.result != "killed":
            lines.append(f"{verdict.result}: {verdict.mutant.name}: {escape(verdict.mutant.breaks)}")
    return "\n".join(lines)


def killed_rate(verdicts: Sequence[Verdict]) -> float:
    """Of all mutants."""
    return sum(verdict.result == "killed" for verdict in verdicts) / max(len(verdicts), 1)


def is_enough(verdicts: Sequence[Verdict]) -> bool:
    """Whether the suite finds what it should, and every mutant fits the implementation."""
    is_sound = not any(verdict.result in ("error", "unmet") for verdict in verdicts)
    return is_sound and killed_rate(verdicts) >= KILLED_AT_LEAST


def write_json(verdicts: Sequence[Verdict], *, plan: MutantPlan, path: Path) -> None:
    """``{"impl", "spec", "seed", "num_cases", "killed", "total", "rate", "mutants": [{"name", "breaks", "result",
    "how", "case", "clause", "procs", "runs", "seconds", "message"}]}``"""
    content = {
        "impl": plan.adapter.name,
        "spec": plan.version,
        "seed": plan.seed,
        "num_cases": len(must_pass(plan.cases, version=plan.version)),
        "killed": sum(verdict.result == "killed" for verdict in verdicts),
        "total": len(verdicts),
        "rate": killed_rate(verdicts),
        "mutants": [_entry(verdict) for verdict in verdicts],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _entry(verdict: Verdict) -> dict[str, Any]:
    return {
        "name": verdict.mutant.name,
        "breaks": verdict.mutant.breaks,
        "result": verdict.result,
        "how": verdict.how,
        "case": verdict.case,
        "clause": verdict.clause,
        "procs": verdict.procs,
        "runs": verdict.num_runs,
        "seconds": round(verdict.seconds, 3),
        "message": verdict.message,
    }
