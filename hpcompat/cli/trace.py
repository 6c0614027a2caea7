"""``hpcompat trace``: look at what ``hpcompat.trace`` recorded, in the terminal or as a picture."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from hpcompat.cli.errors import CommandError
from hpcompat.cli.trace_file import RankTrace, clip, load, merge

MAX_RANKS_SHOWN = 4
# What `plot` needs besides the extra `cli`.
PLOT_EXTRA_MODULES = frozenset({"matplotlib", "numpy"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``hpcompat trace``."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    view = actions.add_parser("view", help="print timelines and tables in the terminal")
    plot = actions.add_parser("plot", help="draw timelines to a picture")
    merge = actions.add_parser("merge", help="write one file for Perfetto from those of several ranks")
    for action in (view, plot, merge):
        action.add_argument("files", nargs="+", type=Path, metavar="FILE", help="written by recording.to_chrome")
    for action in (view, plot):
        action.add_argument("--rank", type=int, action="append", metavar="N", help="show this rank; may be repeated")
        action.add_argument("--from", dest="start", type=_milliseconds, metavar="MS", help="leave out what is before")
        action.add_argument("--to", dest="end", type=_milliseconds, metavar="MS", help="leave out what is after")
    view.add_argument("--width", type=int, metavar="COLUMNS", help="by default that of the terminal")
    plot.add_argument("--out", type=Path, default=Path("trace.svg"), metavar="PATH", help=".svg or .png (trace.svg)")
    merge.add_argument("--out", type=Path, default=Path("trace.json"), metavar="PATH", help="the file (trace.json)")


def run(args: argparse.Namespace) -> int:
    """Show or write what the files hold."""
    if args.action == "merge":
        merge(args.files, out=args.out)
        print(f"wrote {args.out}; open it at https://ui.perfetto.dev")
        return 0
    shown, num_left_out = _chosen(load(args.files), args)
    if num_left_out:
        print(f"showing {len(shown)} of {len(shown) + num_left_out} ranks; choose others with --rank")
    if args.action == "plot":
        _plot(shown, out=args.out)
        print(f"wrote {args.out}")
        return 0
    from rich.console import Console

    from hpcompat.cli.trace_view import print_traces

    print_traces(shown, console=Console(width=args.width, highlight=False))
    return 0


def _chosen(traces: list[RankTrace], args: argparse.Namespace) -> tuple[list[RankTrace], int]:
    num_left_out = 0
    if args.rank is not None:
        present = [trace.rank for trace in traces]
        missing = [rank for rank in args.rank if rank not in present]
        if missing:
            raise CommandError(f"expected --rank to be one of {present}, but got {missing[0]}; add that rank's file")
        traces = [trace for trace in traces if trace.rank in args.rank]
    elif len(traces) > MAX_RANKS_SHOWN:
        num_left_out = len(traces) - MAX_RANKS_SHOWN
        traces = traces[:MAX_RANKS_SHOWN]
    begin, stop = min(trace.start_ns for trace in traces), max(trace.end_ns for trace in traces)
    start = begin if args.start is None else args.start
    end = stop if args.end is None else args.end
    if start >= end or end <= begin or start >= stop:
        raise CommandError(
            f"expected --from before --to and some of {begin / 1e6:.3f} to {stop / 1e6:.3f} ms between them, but got "
            f"{start / 1e6:.3f} to {end / 1e6:.3f} ms"
        )
    return [clip(trace, start_ns=start, end_ns=end) for trace in traces], num_left_out


def _plot(traces: list[RankTrace], *, out: Path) -> None:
    if out.suffix.lower() not in (".svg", ".png"):
        raise CommandError(f"expected --out to end in .svg or .png, but got {str(out)!r}")
    try:
        from hpcompat.cli.trace_plot import draw
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in PLOT_EXTRA_MODULES:
            raise
        raise CommandError(
            f"drawing needs the package {package!r}, which is not installed; install it with: "
            "pip install 'hpcompat[trace]'"
        ) from error
    try:
        draw(traces, out=out)
    except OSError as error:
        raise CommandError(f"expected to write {str(out)!r}, but got: {error.strerror}") from error


def _milliseconds(text: str) -> int:
    """Nanoseconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a time in ms, but got {text!r}")
    return round(value * 1e6)
