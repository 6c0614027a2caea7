"""What the user sees: a progress bar, the tables at the end, the curve of the loss and the exact losses in a file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from comparison import Counts

matplotlib.use("Agg")
from matplotlib import pyplot


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


def print_results(results: dict[str, Result], *, console: Console) -> None:
    rows: dict[str, Callable[[Result], str]] = {
        "loss, first step": lambda result: f"{result.losses[0]:.6f}",
        "loss, last step": lambda result: f"{result.losses[-1]:.6f}",
        "tokens/s, all ranks": lambda result: f"{result.tokens_per_second:,.0f}",
        "sharded parameters, bytes per rank": lambda result: f"{result.sharded_bytes:,}",
        "peak unsharded parameters, bytes": lambda result: f"{result.peak_unsharded_bytes:,}",
    }
    table = Table("", *results, title="Training")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, show in rows.items():
        table.add_row(name, *(show(result) for result in results.values()))
    console.print(table)


def print_differences(differences: dict[str, Counts], *, console: Console) -> None:
    table = Table("", "differ", "compared", title="Ours against native, in bits")
    for column in table.columns[1:]:
        column.justify = "right"
    for kind, counts in differences.items():
        style = "bold red" if counts.differing else "green"
        table.add_row(kind, f"[{style}]{counts.differing:,}", f"{counts.compared:,}")
    console.print(table)


def write_losses(folder: Path, results: dict[str, Result], *, differences: dict[str, Counts]) -> Path:
    """`losses.json`; Python writes a float so that reading it gives the same bits."""
    content = {
        name: {"losses": result.losses, "tokens_per_second": result.tokens_per_second}
        for name, result in results.items()
    }
    path = folder / "losses.json"
    path.write_text(
        json.dumps(
            {**content, "differences": {kind: counts._asdict() for kind, counts in differences.items()}}, indent=1
        )
        + "\n"
    )
    return path


def plot_losses(folder: Path, results: dict[str, Result]) -> Path:
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    # Dashed lines of growing thinness, so that equal curves stay visible on top of each other.
    for (name, result), (style, width) in zip(results.items(), [("-", 4.0), ("--", 1.5)], strict=False):
        axes.plot(range(1, len(result.losses) + 1), result.losses, style, linewidth=width, label=name)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Next-byte loss on the standard library's sources")
    axes.legend()
    axes.grid(alpha=0.3)
    path = folder / "loss.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
