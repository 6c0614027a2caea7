"""A picture of timelines: a band per unit with what it computed and communicated, and the unsharded bytes below."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

from hpcompat.cli.trace_file import RankTrace
from hpcompat.cli.trace_summary import Segment, own_segments, summaries, unsharded_steps
from hpcompat.core.spans import ALL_REDUCE, BLOCKED, COPY, GATHER, MEMORY, REDUCE, Span

# Told apart by people who do not see all colours, too.
COLORS = {
    "forward": "#009E73",
    "backward": "#0072B2",
    GATHER: "#E69F00",
    REDUCE: "#CC79A7",
    ALL_REDUCE: "#56B4E9",
    COPY: "#999999",
    "blocked": "#E15759",
    MEMORY: "#DCE3EA",
}
LABELS = {
    "forward": "forward",
    "backward": "backward",
    GATHER: "all-gather",
    REDUCE: "reduce-scatter",
    ALL_REDUCE: "all-reduce",
    COPY: "copy on one rank",
    "blocked": "thread blocked by communication",
    MEMORY: "unsharded",
}
WIDTH_INCHES = 12.0
UNIT_INCHES = 0.46
MEMORY_INCHES = 0.7
GAP_INCHES = 0.55


def draw(traces: list[RankTrace], *, out: Path) -> None:
    """Write the picture of ``traces`` to ``out``, an .svg or .png file."""
    # Text stays text, and the same trace gives the same file.
    with matplotlib.rc_context({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "hpcompat"}):
        figure = _figure(traces)
        is_svg = out.suffix.lower() == ".svg"
        figure.savefig(out, dpi=150, metadata={"Date": None} if is_svg else None)


def _figure(traces: list[RankTrace]) -> Figure:
    heights = [inches for trace in traces for inches in (UNIT_INCHES * len(trace.units), MEMORY_INCHES)]
    top, bottom = 0.75, 0.55
    total = top + bottom + sum(heights) + GAP_INCHES * (len(traces) - 1)
    figure = Figure(figsize=(WIDTH_INCHES, total))
    left = 0.6 + 0.075 * max(len(_shorten(unit)) for trace in traces for unit in trace.units)
    width = WIDTH_INCHES - left - 0.95
    y = total - top
    first: Axes | None = None
    for index, trace in enumerate(traces):
        panels = []
        for height in heights[2 * index : 2 * index + 2]:
            y -= height
            place = (left / WIDTH_INCHES, y / total, width / WIDTH_INCHES, height / total)
            panels.append(figure.add_axes(place, sharex=first))
            first = first or panels[0]
        y -= GAP_INCHES
        _draw_units(panels[0], trace)
        _draw_memory(panels[1], trace)
        panels[0].tick_params(labelbottom=False, length=0)
    panels[1].set_xlabel("ms")
    figure.legend(
        handles=_legend(traces),
        loc="upper right",
        ncols=8,
        columnspacing=1.4,
        frameon=False,
        bbox_to_anchor=(0.995, 0.999),
    )
    return figure


def _draw_units(axes: Axes, trace: RankTrace) -> None:
    by_unit, total = summaries(trace)
    own: dict[str, list[Segment]] = defaultdict(list)
    for segment in own_segments(trace):
        own[segment.unit].append(segment)
    for row, unit in enumerate(trace.units):
        _draw_unit(axes, row, [span for span in trace.spans if span.unit == unit], own[unit])
        overlap = by_unit[unit].overlap
        if overlap is not None:
            axes.text(1.008, row + 0.5, f"{overlap:.0%}", transform=axes.get_yaxis_transform(), va="center")
    axes.text(1.008, -0.12, "overlap", transform=axes.get_yaxis_transform(), va="bottom", color="#555555")
    axes.set_ylim(len(trace.units), 0)
    axes.set_yticks([row + 0.5 for row in range(len(trace.units))], [_shorten(unit) for unit in trace.units])
    axes.set_xlim(trace.start_ns / 1e6, trace.end_ns / 1e6)
    axes.hlines(range(1, len(trace.units)), *axes.get_xlim(), color="#E6E6E6", linewidth=0.6, zorder=0)
    axes.xaxis.grid(True, color="#EEEEEE", linewidth=0.6)
    axes.set_axisbelow(True)
    _frame(axes)
    axes.set_title(_title(trace, exposed=total.exposed, overlap=total.overlap), loc="left", fontsize=10, pad=6)


def _draw_unit(axes: Axes, row: int, spans: list[Span], own: list[Segment]) -> None:
    """From top to bottom: computing, in flight, blocked; behind them the time in which the unit was unsharded."""
    memory = [(span.start_ns, span.end_ns) for span in spans if span.lane == MEMORY]
    _bars(axes, memory, row + 0.08, 0.84, COLORS[MEMORY], z=1)
    for kind in ("forward", "backward", "blocked"):
        _bars(axes, [(s.start_ns, s.end_ns) for s in own if s.kind == kind], row + 0.14, 0.34, COLORS[kind], z=3)
    for lane in (GATHER, REDUCE, ALL_REDUCE):
        flights = [span for span in spans if span.lane == lane]
        for is_copy, color in ((False, COLORS[lane]), (True, COLORS[COPY])):
            chosen = [(span.start_ns, span.end_ns) for span in flights if (span.name == COPY) == is_copy]
            _bars(axes, chosen, row + 0.56, 0.2, color, z=3)
    blocked = [(span.start_ns, span.end_ns) for span in spans if span.lane == BLOCKED]
    _bars(axes, blocked, row + 0.78, 0.08, COLORS["blocked"], z=3)


def _bars(axes: Axes, intervals: Iterable[tuple[int, int]], y: float, height: float, color: str, *, z: int) -> None:
    ranges = [(start / 1e6, (end - start) / 1e6) for start, end in intervals]
    # A hairline of the same colour keeps the shortest visible.
    axes.broken_barh(ranges, (y, height), facecolors=color, edgecolors=color, linewidth=0.3, zorder=z)


def _draw_memory(axes: Axes, trace: RankTrace) -> None:
    steps = [(trace.start_ns, 0), *unsharded_steps(trace), (trace.end_ns, 0)]
    times, sizes = [time / 1e6 for time, _ in steps], [size for _, size in steps]
    axes.fill_between(times, sizes, step="post", color=COLORS[MEMORY], linewidth=0)
    axes.step(times, sizes, where="post", color="#5B7083", linewidth=0.9)
    axes.set_ylim(0, max([*sizes, 1]) * 1.25)
    axes.yaxis.set_major_formatter(EngFormatter(unit="B", sep=" "))
    axes.yaxis.set_major_locator(MaxNLocator(2))
    axes.xaxis.grid(True, color="#EEEEEE", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.text(1.008, 0.5, "unsharded", transform=axes.transAxes, va="center", color="#555555")
    _frame(axes)


def _frame(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#BBBBBB")
    axes.tick_params(axis="y", length=0)


def _title(trace: RankTrace, *, exposed: int, overlap: float | None) -> str:
    duration = trace.end_ns - trace.start_ns
    text = f"rank {trace.rank} of {trace.world_size}, {trace.backend}: {duration / 1e6:.1f} ms"
    if overlap is not None:
        text += f", {overlap:.0%} of communication overlapped, {exposed / 1e6:.1f} ms exposed"
    return text


def _legend(traces: list[RankTrace]) -> list[Patch]:
    spans = [span for trace in traces for span in trace.spans]
    present = {COPY if span.name == COPY else span.lane for span in spans} | {span.name for span in spans}
    return [Patch(color=color, label=LABELS[kind]) for kind, color in COLORS.items() if kind in present]


def _shorten(unit: str) -> str:
    label = unit or "(root)"
    return label if len(label) <= 22 else "…" + label[-21:]
