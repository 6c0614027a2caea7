"""What the user sees: a progress bar, the tables at the end, the curve of the loss and the exact losses in a file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from comparison import Counts

matplotlib.use("Agg")
from matplotlib import pyplot

NUM_ROWS = 12
"""About how many steps a table of losses shows."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One training, as the tables show it."""

    losses: list[float]
    step_seconds: list[float]
    tokens_per_step: int
    sharded_bytes: int
    peak_unsharded_bytes: int

    @property
    def tokens_per_second(self) -> float:
        """From the median step; the first one pays for lazy initialization and is left out when there are others."""
        return self.tokens_per_step / statistics.median(self.step_seconds[1:] or self.step_seconds)


@contextmanager
def progress(title: str, *, num_steps: int, visible: bool) -> Iterator[Callable[[float], None]]:
    """Gives the function to call after each step with its loss."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]}"), disable=not visible) as bar:
        task = bar.add_task(title, total=num_steps, loss="-")
        yield lambda loss: bar.update(task, advance=1, loss=f"{loss:.4f}")


def print_results(results: dict[str, Result], *, title: str, console: Console) -> None:
    rows: dict[str, Callable[[Result], str]] = {
        "loss, first step": lambda result: f"{result.losses[0]:.6f}",
        "loss, last step": lambda result: f"{result.losses[-1]:.6f}",
        "tokens/s, all ranks": lambda result: f"{result.tokens_per_second:,.0f}",
        "sharded parameters, bytes per rank": lambda result: f"{result.sharded_bytes:,}",
        "peak unsharded parameters, bytes": lambda result: f"{result.peak_unsharded_bytes:,}",
    }
    table = _table("", *results, title=title)
    for name, show in rows.items():
        table.add_row(name, *(show(result) for result in results.values()))
    console.print(table)


def print_differences(differences: dict[str, Counts], *, console: Console) -> None:
    table = _table("", "differ", "compared", title="Ours against native, in bits")
    for kind, counts in differences.items():
        style = "bold red" if counts.differing else "green"
        table.add_row(kind, f"[{style}]{counts.differing:,}", f"{counts.compared:,}")
    console.print(table)


def print_curves(curves: dict[str, list[float]], *, differences: list[float], console: Console) -> None:
    """The loss of each at about `NUM_ROWS` steps, and how far they are apart there."""
    table = _table("step", *curves, "relative difference", title="Loss")
    num_steps = len(differences)
    stride = max(1, round(num_steps / NUM_ROWS))
    for step in sorted({1, *range(stride, num_steps + 1, stride), num_steps}):
        losses = (f"{losses[step - 1]:.6f}" for losses in curves.values())
        table.add_row(str(step), *losses, f"{differences[step - 1]:.2e}")
    console.print(table)


def _table(*columns: str, title: str) -> Table:
    table = Table(*columns, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def write_losses(
    path: Path, results: dict[str, Result], *, differences: dict[str, Counts], run: dict[str, Any]
) -> None:
    """Python writes a float so that reading it gives the same bits. `run` says what gave these losses."""
    content = {
        "run": run,
        **{name: {"losses": r.losses, "tokens_per_second": r.tokens_per_second} for name, r in results.items()},
        "differences": {kind: counts._asdict() for kind, counts in differences.items()},
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def plot_losses(path: Path, curves: dict[str, list[float]]) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    # Dashed lines of growing thinness, so that equal curves stay visible on top of each other.
    for (name, losses), (style, width) in zip(curves.items(), [("-", 4.0), ("--", 1.5)], strict=False):
        axes.plot(range(1, len(losses) + 1), losses, style, linewidth=width, label=name)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Next-byte loss on the standard library's sources")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
