"""Tables: as rich draws them in a terminal; one line a row, tabs between, in a file or a pipe."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text


def print_table(console: Console, table: Table) -> None:
    """Print ``table``. In a file it would be folded to 80 columns, words one below the other."""
    if console.is_terminal:
        console.print(table)
        return
    if table.title:
        print(_plain(table.title), file=console.file)
    rows = [[_plain(column.header) for column in table.columns]]
    rows += [[_plain(cell) for cell in row] for row in zip(*(column.cells for column in table.columns), strict=True)]
    for row in rows:
        print("\t".join(row), file=console.file)


def _plain(cell: RenderableType) -> str:
    return " ".join((Text.from_markup(cell).plain if isinstance(cell, str) else str(cell)).split())
