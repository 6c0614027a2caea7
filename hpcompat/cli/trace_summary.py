"""Numbers from spans: how long each unit communicated, and how much of that the calling thread had to stand still."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpcompat.cli.trace_file import RankTrace
from hpcompat.core.spans import ALL_REDUCE, BLOCKED, COMPUTE, COPY, GATHER, MEMORY, REDUCE, Span

Interval = tuple[int, int]


@dataclass(frozen=True)
class Summary:
    """Nanoseconds in which at least one span of the kind ran; of one unit, or with an empty name of all."""

    num_gathers: int
    gathering: int
    num_reductions: int
    reducing: int
    waiting: int
    communicating: int
    exposed: int
    unsharded: int
    forward: int
    backward: int

    @property
    def overlap(self) -> float | None:
        """The share of communication beside which the calling thread did something else."""
        return None if self.communicating == 0 else 1 - self.exposed / self.communicating


@dataclass(frozen=True)
class Segment:
    """A piece of a unit's own time: ``kind`` is ``forward``, ``backward`` or ``blocked``."""

    unit: str
    kind: str
    start_ns: int
    end_ns: int


def summaries(trace: RankTrace) -> tuple[dict[str, Summary], Summary]:
    """Of each unit, and of all together."""
    own = own_segments(trace)
    return {unit: _summarize(trace, own, unit=unit) for unit in trace.units}, _summarize(trace, own)


def _summarize(trace: RankTrace, own: list[Segment], *, unit: str | None = None) -> Summary:
    spans = [span for span in trace.spans if unit is None or span.unit == unit]
    gathers = [span for span in spans if span.lane == GATHER and span.name != COPY]
    reductions = [span for span in spans if span.lane in (REDUCE, ALL_REDUCE) and span.name != COPY]
    blocked = [span for span in spans if span.lane == BLOCKED and not span.name.endswith(COPY)]
    in_flight = union(gathers + reductions)
    own = [segment for segment in own if unit is None or segment.unit == unit]
    return Summary(
        num_gathers=len(gathers),
        gathering=length(union(gathers)),
        num_reductions=len(reductions),
        reducing=length(union(reductions)),
        waiting=length(union(span for span in blocked if span.name.startswith("wait"))),
        communicating=length(in_flight),
        exposed=length(intersection(in_flight, union(blocked))),
        unsharded=length(union(span for span in spans if span.lane == MEMORY)),
        forward=sum(each.end_ns - each.start_ns for each in own if each.kind == "forward"),
        backward=sum(each.end_ns - each.start_ns for each in own if each.kind == "backward"),
    )


def peak_unsharded_bytes(trace: RankTrace) -> int:
    """The most that was unsharded at once."""
    steps = unsharded_steps(trace)
    return max((size for _, size in steps), default=0)


def unsharded_steps(trace: RankTrace) -> list[tuple[int, int]]:
    """From which time on how many bytes were unsharded."""
    spans = [span for span in trace.spans if span.lane == MEMORY]
    changes = sorted(
        change for span in spans for change in ((span.start_ns, span.num_bytes), (span.end_ns, -span.num_bytes))
    )
    steps: list[tuple[int, int]] = []
    size = 0
    for time_ns, change in changes:
        size += change
        if steps and steps[-1][0] == time_ns:
            steps.pop()
        steps.append((time_ns, size))
    return steps


def own_segments(trace: RankTrace) -> list[Segment]:
    """Which unit the calling thread was in at each time, the innermost where units are nested, and whether blocked."""
    computing = [span for span in trace.spans if span.lane == COMPUTE]
    blocked = union(span for span in trace.spans if span.lane == BLOCKED)
    times = sorted({time for span in computing for time in (span.start_ns, span.end_ns)})
    edges = sorted({*times, *(time for interval in blocked for time in interval)})
    waiting = sorted(computing, key=lambda span: span.start_ns, reverse=True)
    active: list[Span] = []
    found: list[Segment] = []
    next_blocked = 0
    for start, end in itertools.pairwise(edges):
        while waiting and waiting[-1].start_ns <= start:
            active.append(waiting.pop())
        active = [span for span in active if span.end_ns > start]
        while next_blocked < len(blocked) and blocked[next_blocked][1] <= start:
            next_blocked += 1
        if not active:
            continue
        inner = max(active, key=lambda span: (_depth(span.unit), span.start_ns))
        is_blocked = next_blocked < len(blocked) and blocked[next_blocked][0] <= start
        found.append(Segment(inner.unit, "blocked" if is_blocked else inner.name, start, end))
    return found


def union(spans: Iterable[Span]) -> list[Interval]:
    """Disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted((span.start_ns, span.end_ns) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersection(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Of two lists as ``union`` gives them."""
    found: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            found.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def _depth(unit: str) -> int:
    return unit.partition(",")[0].count(".") + 1 if unit else 0
