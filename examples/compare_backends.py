"""Show the losses of two runs of `train_decoder.py` in one table and one picture.

    python examples/compare_backends.py torch/losses.json mindspore/losses.json --out both

The runs must have the same weights and data, so they may differ in the backend, in how they shard, and in nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from comparison import relative_differences
from options import positive
from report import plot_losses, print_curves

MAY_DIFFER = {"backend", "device", "mesh", "reshard", "compare", "out"}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 1 if the losses are farther apart than allowed."""
    parser = _parser()
    args = parser.parse_args(argv)
    runs = [json.loads(path.read_text()) for path in (args.first, args.second)]
    if problem := _problem_with(*(run["run"] for run in runs)):
        parser.error(problem)
    curves = _curves(args, runs)
    differences = relative_differences(*curves.values())
    checked = differences[: args.checked_steps]
    is_above = args.max_relative_difference is not None and max(checked) > args.max_relative_difference
    picture = args.out / "loss.png"
    args.out.mkdir(parents=True, exist_ok=True)
    plot_losses(picture, curves)
    console = Console()
    print_curves(curves, differences=differences, console=console)
    for num_steps in sorted({len(checked), len(differences)}):
        largest = max(differences[:num_steps])
        where = f"in {num_steps} steps: {largest:.2e}, at step {differences.index(largest) + 1}"
        console.print(f"largest relative difference {where}", highlight=False)
    if is_above:
        console.print(f"[bold red]expected at most {args.max_relative_difference:g} in {len(checked)} steps")
    console.print(f"wrote {picture}", highlight=False, soft_wrap=True)
    return int(is_above)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Show the losses of two runs of train_decoder.py side by side.")
    parser.add_argument("first", type=Path, metavar="LOSSES", help="losses.json of one run")
    parser.add_argument("second", type=Path, metavar="LOSSES", help="losses.json of the other")
    parser.add_argument("--out", type=Path, default=Path("compare_backends_out"), metavar="DIR", help="for loss.png")
    parser.add_argument(
        "--max-relative-difference", type=float, metavar="X", help="exit 1 if a checked step's is larger"
    )
    parser.add_argument(
        "--checked-steps",
        type=positive,
        metavar="N",
        help="check the first N steps only (default: all); differences of rounding grow from step to step",
    )
    return parser


def _problem_with(first: dict[str, Any], second: dict[str, Any]) -> str | None:
    names = sorted((first.keys() | second.keys()) - MAY_DIFFER)
    unequal = {name: (first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)}
    if not unequal:
        return None
    return f"expected two runs of the same training, but got {unequal}; run both with the same options and ranks"


def _curves(args: argparse.Namespace, runs: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Name -> losses: by the backend, and by the folder too where that is the same."""
    names = [run["run"]["backend"] for run in runs]
    if names[0] == names[1]:
        names = [f"{name}, {path.parent}" for name, path in zip(names, (args.first, args.second), strict=True)]
    return {name: run["ours"]["losses"] for name, run in zip(names, runs, strict=True)}


if __name__ == "__main__":
    sys.exit(main())
