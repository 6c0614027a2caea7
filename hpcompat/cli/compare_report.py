"""What a comparison found, as tables in the terminal and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcompat.cli.compare_file import Comparison, Row
from hpcompat.record import PHASES

MAX_PROBLEMS_SHOWN = 20


def print_comparison(comparison: Comparison, *, console: Console) -> None:
    """The runs, a table per phase, what could not be compared, and the first divergence last."""
    for letter, run in zip("AB", comparison.runs, strict=True):
        console.print(Text(f"{letter}  {run.directory}: {run.label}"))
    for phase in PHASES:
        rows = [row for row in comparison.rows if row.phase == phase]
        if rows:
            console.print(_table(phase, rows))
    for note in option_notes(comparison):
        console.print(Text(note, style="yellow"))
    problems = comparison.problems
    for problem in problems[:MAX_PROBLEMS_SHOWN]:
        console.print(Text(problem, style="red"))
    if len(problems) > MAX_PROBLEMS_SHOWN:
        console.print(Text(f"and {len(problems) - MAX_PROBLEMS_SHOWN} more, all in the file that --json writes"))
    console.print(Text(verdict(comparison), style="bold"))


def verdict(comparison: Comparison) -> str:
    """The first divergence, or that there is none."""
    row = comparison.first
    if row is None:
        return f"no difference in {len(comparison.rows)} tensors"
    element = row.difference.first
    assert element is not None
    return (
        f"first divergence: step {row.step}, {row.phase}, {row.kind} {row.name}, index {list(element.index)}: "
        f"{element.values[0]} ({element.bits[0]}) and {element.values[1]} ({element.bits[1]}), {element.ulp} ULP apart"
    )


def option_notes(comparison: Comparison) -> list[str]:
    """Options of the optimizers that differ."""
    mine, theirs = (run.description["optimizer"] for run in comparison.runs)
    notes = []
    if mine["type"] != theirs["type"]:
        notes.append(f"optimizers: {mine['type']} and {theirs['type']}")
    for index, (one, other) in enumerate(zip(mine["groups"], theirs["groups"], strict=False)):
        for key in [key for key in one if key in other and one[key] != other[key]]:
            notes.append(f"group {index} of the optimizer: {key} is {one[key]} and {other[key]}")
    return notes


def as_json(comparison: Comparison) -> dict[str, Any]:
    """All of it."""
    first = comparison.first
    return {
        "runs": [{"directory": str(run.directory), **run.description} for run in comparison.runs],
        "equal": first is None and not comparison.problems,
        "problems": comparison.problems,
        "first_divergence": None if first is None else _described(first),
        "differing": [_described(row) for row in comparison.rows if row.difference.num_differing],
        "phases": {
            phase: {
                kind: totals(rows) for kind, rows in by_kind(r for r in comparison.rows if r.phase == phase).items()
            }
            for phase in PHASES
        },
    }


def by_kind(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each kind, in the order in which they come."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.kind, []).append(row)
    return found


def totals(rows: list[Row]) -> dict[str, Any]:
    """What the rows add up to."""
    differences = [row.difference for row in rows]
    return {
        "tensors": len(rows),
        "elements": sum(difference.num_elements for difference in differences),
        "differing": sum(difference.num_differing for difference in differences),
        "max_ulp": max((difference.max_ulp for difference in differences), default=0),
        "max_abs": _json_number(max((difference.max_abs for difference in differences), default=0.0)),
        "first_step": next((row.step for row in rows if row.difference.num_differing), None),
    }


def _described(row: Row) -> dict[str, Any]:
    difference, element = row.difference, row.difference.first
    assert element is not None
    return {
        "step": row.step,
        "phase": row.phase,
        "kind": row.kind,
        "name": row.name,
        "index": list(element.index),
        "values": list(element.values),
        "bits": list(element.bits),
        "ulp": element.ulp,
        "elements": difference.num_elements,
        "differing": difference.num_differing,
        "max_ulp": difference.max_ulp,
        "max_abs": _json_number(difference.max_abs),
    }


def _json_number(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _table(phase: str, rows: list[Row]) -> Table:
    table = Table(title=phase, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0))
    table.add_column("kind", no_wrap=True)
    for header in ("tensors", "elements", "differing", "largest ULP", "largest abs", "first at step"):
        table.add_column(header, justify="right", no_wrap=True)
    for kind, members in by_kind(rows).items():
        found = totals(members)
        largest = "inf" if found["max_abs"] is None else f"{found['max_abs']:.3g}"
        first = "" if found["first_step"] is None else str(found["first_step"])
        cells = [f"{found[key]:,}" for key in ("tensors", "elements", "differing", "max_ulp")]
        table.add_row(kind, *cells, largest, first, style="red" if found["differing"] else None)
    return table
