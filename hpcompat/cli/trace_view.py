"""Timelines of characters: three lines per unit, time across, and a table of what it adds up to."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcompat.cli.trace_file import RankTrace
from hpcompat.cli.trace_summary import Segment, Summary, own_segments, peak_unsharded_bytes, summaries
from hpcompat.core.spans import ALL_REDUCE, BLOCKED, COPY, GATHER, MEMORY, REDUCE

ROOT = "(root)"
MAX_LABEL = 22
MAX_TABLE_LABEL = 18  # so that its table fits into 100 columns
MIN_TICK_COLUMNS = 14
COLUMNS = ("gather", "reduce", "waiting", "exposed", "overlap", "unsharded", "forward", "backward")
# Shapes differ where colours do, so that the timeline can be read without them.
MARKS = {
    "forward": ("█", "green"),
    "backward": ("▓", "blue"),
    "blocked": ("░", "red"),
    GATHER: ("▄", "yellow"),
    REDUCE: ("▀", "magenta"),
    ALL_REDUCE: ("■", "cyan"),
    COPY: ("·", "white"),
    MEMORY: ("─", "bright_black"),
}
MEANINGS = {
    "forward": "forward",
    "backward": "backward",
    "blocked": "blocked",
    GATHER: "all-gather",
    REDUCE: "reduce-scatter",
    ALL_REDUCE: "all-reduce",
    COPY: "copy on one rank",
    MEMORY: "unsharded",
}


@dataclass(frozen=True)
class Piece:
    """Something to paint: what it is, and whether the calling thread stood still for it."""

    kind: str
    start_ns: int
    end_ns: int


def print_traces(traces: list[RankTrace], *, console: Console) -> None:
    """A timeline and a table for each rank, and a table of the ranks where there are several."""
    totals = {}
    for trace in traces:
        by_unit, total = summaries(trace)
        totals[trace.rank] = total
        console.print(_headline(trace, total))
        console.print(_timeline(trace, width=console.width))
        console.print()
        _print_table(console, "unit", {unit or ROOT: by_unit[unit] for unit in trace.units}, total=total)
        console.print()
    if len(traces) > 1:
        _print_table(console, "rank", {str(rank): total for rank, total in totals.items()})
        console.print()
    console.print(_notes(traces))


def _headline(trace: RankTrace, total: Summary) -> Text:
    text = Text(f"rank {trace.rank} of {trace.world_size}", style="bold")
    text.append(f"  {trace.backend}", style="not bold")
    duration = trace.end_ns - trace.start_ns
    text.append(f"  {milliseconds(duration)} ms", style="not bold")
    if total.overlap is not None:
        text.append(f", {milliseconds(total.communicating)} communicating:", style="not bold")
        text.append(f" {total.overlap:.0%} overlapped,", style="not bold green")
        text.append(f" {milliseconds(total.exposed)} ms exposed", style="not bold red")
    return text


# Timeline


def _timeline(trace: RankTrace, *, width: int) -> Text:
    label = min(MAX_LABEL, max(len(unit or ROOT) for unit in trace.units))
    columns = max(20, width - label - 10)
    text = _ruler(trace, columns=columns, indent=label + 9)
    own: dict[str, list[Segment]] = defaultdict(list)
    for segment in own_segments(trace):
        own[segment.unit].append(segment)
    for unit in trace.units:
        for title, pieces in _lines_of(trace, unit, own[unit]).items():
            text.append("\n")
            shown = _shorten(unit or ROOT, label) if title == "compute" else ""
            text.append(f"{shown:<{label}} ", style="bold")
            text.append(f"{title:<7} ", style="bright_black")
            text.append_text(_paint(pieces, trace, columns=columns))
    text.append("\n\n")
    text.append_text(_legend(trace))
    return text


def _lines_of(trace: RankTrace, unit: str, own: list[Segment]) -> dict[str, list[Piece]]:
    """What to paint on each line; a line with nothing on it is left out, but for the first."""
    spans = [span for span in trace.spans if span.unit == unit]
    comm = [
        Piece(COPY if span.name == COPY else span.lane, span.start_ns, span.end_ns)
        for span in spans
        if span.lane in (GATHER, REDUCE, ALL_REDUCE)
    ]
    comm += [Piece(BLOCKED, span.start_ns, span.end_ns) for span in spans if span.lane == BLOCKED]
    memory = [Piece(MEMORY, span.start_ns, span.end_ns) for span in spans if span.lane == MEMORY]
    compute = [Piece(segment.kind, segment.start_ns, segment.end_ns) for segment in own]
    return {"compute": compute, **({"comm": comm} if comm else {}), **({"memory": memory} if memory else {})}


def _paint(pieces: Iterable[Piece], trace: RankTrace, *, columns: int) -> Text:
    """Each column shows what filled most of it, if anything did; a collective keeps its shape where it blocks."""
    shares: list[dict[str, float]] = [defaultdict(float) for _ in range(columns)]
    scale = columns / (trace.end_ns - trace.start_ns)
    for piece in pieces:
        begin, end = (piece.start_ns - trace.start_ns) * scale, (piece.end_ns - trace.start_ns) * scale
        for column in range(int(begin), min(columns, math.ceil(end) or 1)):
            shares[column][piece.kind] += max(min(end, column + 1) - max(begin, column), 1e-9)
    text = Text()
    for share in shares:
        blocked = share.pop(BLOCKED, 0.0)
        if not share:
            text.append("░" if blocked else " ", style="red")
            continue
        kind = max(share, key=lambda kind: share[kind])
        mark, style = MARKS[kind]
        text.append(mark, style="red" if blocked > share[kind] / 2 else style)
    return text


def _ruler(trace: RankTrace, *, columns: int, indent: int) -> Text:
    duration = trace.end_ns - trace.start_ns
    step = nice_step(duration, max_ticks=max(1, columns // MIN_TICK_COLUMNS))
    line = [" "] * columns
    first = math.ceil(trace.start_ns / step) * step
    for time_ns in range(first, trace.end_ns, step):
        column = int((time_ns - trace.start_ns) * columns / duration)
        written = f"|{time_ns / 1e6:g} ms"
        if column + len(written) <= columns:
            line[column : column + len(written)] = written
    return Text(" " * indent + "".join(line), style="bright_black", end="")


def nice_step(duration_ns: int, *, max_ticks: int) -> int:
    """1, 2 or 5 times a power of ten, in nanoseconds, of which at most ``max_ticks`` fit into the duration."""
    wanted = max(duration_ns / max_ticks, 1.0)
    power = 10 ** math.floor(math.log10(wanted))
    return int(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted))


def _shorten(unit: str, width: int) -> str:
    return unit if len(unit) <= width else "…" + unit[len(unit) - width + 1 :]


def _legend(trace: RankTrace) -> Text:
    names = {COPY if span.name == COPY else span.lane for span in trace.spans}
    text = Text(" ")
    for kind, (mark, style) in MARKS.items():
        if kind in ("forward", "backward", "blocked") or kind in names:
            text.append(f" {mark * 2} ", style=style)
            text.append(f"{MEANINGS[kind]} ")
    return text


# Tables


def _print_table(console: Console, kind: str, rows: dict[str, Summary], *, total: Summary | None = None) -> None:
    table = _table(kind, rows, total=total, gap=2)
    if console.measure(table, options=console.options.update(max_width=1000)).maximum > console.width:
        table = _table(kind, rows, total=total, gap=1)
    console.print(table)


def _table(kind: str, rows: dict[str, Summary], *, total: Summary | None, gap: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, gap, 0, 0), show_footer=total is not None)
    table.add_column(kind, footer="all", no_wrap=True)
    footer = ["" for _ in COLUMNS] if total is None else _cells(total)
    for header, foot in zip(COLUMNS, footer, strict=True):
        table.add_column(header, footer=foot, justify="right", no_wrap=True)
    for name, summary in rows.items():
        table.add_row(_shorten(name, MAX_TABLE_LABEL), *_cells(summary))
    return table


def _cells(summary: Summary) -> list[str]:
    return [
        _times(summary.num_gathers, summary.gathering),
        _times(summary.num_reductions, summary.reducing),
        milliseconds(summary.waiting),
        milliseconds(summary.exposed),
        "" if summary.overlap is None else f"{summary.overlap:.0%}",
        milliseconds(summary.unsharded),
        milliseconds(summary.forward),
        milliseconds(summary.backward),
    ]


def _times(count: int, duration_ns: int) -> str:
    return f"{count} x {milliseconds(duration_ns)}" if count else ""


def milliseconds(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:.2f}"


def _notes(traces: list[RankTrace]) -> Text:
    peak = max(peak_unsharded_bytes(trace) for trace in traces)
    lines = [
        f"Times in ms. What overlaps counts once. At most {peak:,} bytes were unsharded at once.",
        "waiting: blocked until a gather is there. exposed: blocked by any communication; drawn in red.",
    ]
    if any(trace.has_streams for trace in traces):
        lines.append("The device has streams: these are times of the thread that enqueues, not of the device.")
    return Text("\n".join(lines), style="bright_black")
