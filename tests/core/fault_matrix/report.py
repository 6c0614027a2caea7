"""The matrix as tables for the terminal: places by ways to train, a mark per unit, native beside ours."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fault_matrix.cell import Cell, cells_of
from fault_matrix.kit import UNITS
from fault_matrix.points import POINTS, SCRIPT
from fault_matrix.settings import Setting

# By kit, setting and cell: what each rank found wrong.
Results = dict[tuple[str, str, Cell], list[str]]

_TITLES = {
    "all": "An exception on all ranks",
    "one": "An exception on one rank, which catches up; then all drop the step",
    "one between phases": "An exception on one rank between two phases of the step, before which the ranks agree",
}
_HEADS = {"fault_kits:Torch": "torch", "fault_kits:Native": "native", "ms_fault_kit:MindSpore": "mindspore"}
_COLUMN_WIDTH = 19  # of the longest name of a setting, and the frame
_WELL, _WRONG, _NONE = ("✓", "green"), ("✗", "red"), ("·", "dim")


def cells_for(kit: str, setting: Setting, *, who: str) -> list[Cell]:
    """Those that the implementation has means for; in others the ranks that did not fail would wait for ever."""
    if is_native(kit) and (setting.replicates_biases or setting.debugs):
        return []
    return [cell for cell in cells_of(setting, who=who) if cell.who != "one" or not is_native(kit)]


def save(path: Path, results: Results) -> None:
    """A list of cells, each with what every rank found wrong (``""``: nothing)."""
    found = [
        {"kit": kit, "setting": setting, **cell._asdict(), "wrong": verdicts}
        for (kit, setting, cell), verdicts in results.items()
    ]
    path.write_text(json.dumps(found, indent=1))


def load(paths: Sequence[Path]) -> Results:
    """What :func:`save` wrote, of several runs."""
    found = [cell for path in paths for cell in json.loads(path.read_text())]
    return {(one["kit"], one["setting"], Cell(one["point"], one["unit"], one["who"])): one["wrong"] for one in found}


def is_native(kit: str) -> bool:
    return kit.endswith(":Native")


def num_wrong(results: Results, *, kit: str) -> int:
    return sum(any(verdicts) for (name, _, _), verdicts in results.items() if name == kit)


def show(
    console: Console, results: Results, *, kits: Sequence[str], settings: Sequence[Setting], who: Sequence[str]
) -> None:
    for one_who in who:
        columns = [
            (kit, setting)
            for setting in settings
            for kit in kits
            if any((kit, setting.id, cell) in results for cell in cells_of(setting, who=one_who))
        ]
        size = _num_columns(console, multiple=len(kits))
        for start in range(0, len(columns), size):
            console.print(_table(results, columns=columns[start : start + size], who=one_who))
    legend = f"{_WELL[0]} no trace, {_WRONG[0]} a trace, {_NONE[0]} no such cell"
    console.print(f"A mark per unit ({', '.join(UNITS)}): {legend}")
    for kit in kits:
        num_cells = sum(name == kit for name, _, _ in results)
        console.print(f"{_HEADS[kit]}: {num_cells - num_wrong(results, kit=kit)} of {num_cells} cells leave no trace")
        for verdict, count in _reasons(results, kit=kit):
            console.print(f"  {count:4}  {verdict}")


def _num_columns(console: Console, *, multiple: int) -> int:
    """How many ways to train fit beside the places."""
    num_columns = (console.width - max(len(point.id) for point in POINTS) - 4) // _COLUMN_WIDTH
    return max(1, num_columns // multiple) * multiple


def _table(results: Results, *, columns: Sequence[tuple[str, Setting]], who: str) -> Table:
    table = Table(title=_TITLES[who], header_style="bold", title_justify="left")
    table.add_column("the exception comes", no_wrap=True)
    for kit, setting in columns:
        name = setting.id.replace(" reshard=", "\nreshard ").replace(", ", "\n")
        table.add_column(f"{name}\n{_HEADS[kit]}", justify="center")
    for point in POINTS:
        cells = [Cell(point.id, unit, who) for unit in (("root",) if point.id in SCRIPT else UNITS)]
        rows = [[results.get((kit, setting.id, cell)) for cell in cells] for kit, setting in columns]
        if any(verdicts is not None for row in rows for verdicts in row):
            table.add_row(point.id, *map(_marks, rows))
    return table


def _marks(row: Sequence[list[str] | None]) -> Text:
    text = Text()
    for verdicts in row:
        text.append(*(_NONE if verdicts is None else _WRONG if any(verdicts) else _WELL))
    return text


def _reasons(results: Results, *, kit: str) -> list[tuple[str, int]]:
    found = (verdicts for (name, _, _), verdicts in results.items() if name == kit)
    return Counter(next(filter(None, verdicts)) for verdicts in found if any(verdicts)).most_common()
