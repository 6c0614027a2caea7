"""From moments to spans: what lasted from when to when, in the lanes of a trace.

lane         spans, each of one unit
compute      ``forward`` and ``backward``, from the pre to the post event; they contain those of the units below
gather       ``all-gather``: from its issue until the parameters are copied out of it
reduce       ``reduce-scatter``: from its issue until its gradients are on the shards
all-reduce   ``all-reduce``: likewise; under HSDP from the end of the reduce-scatter's issue
memory       ``unsharded``: from ``wait_for_unshard`` to the reshard
blocked      ``issue``, ``wait``, ``finish`` of those collectives: the calling thread does that and nothing else

Where there is only one rank to gather from or to reduce over, the spans are called ``copy``. Times are those of the
calling thread. On a device with streams it enqueues work and goes on, so a collective may be over before its span is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from hpcompat.contract.states import TrainingState
from hpcompat.core.events import Event

COMPUTE, GATHER, REDUCE, ALL_REDUCE, MEMORY, BLOCKED = LANES = (
    "compute",
    "gather",
    "reduce",
    "all-reduce",
    "memory",
    "blocked",
)
COLLECTIVES = {GATHER: "all-gather", REDUCE: "reduce-scatter", ALL_REDUCE: "all-reduce"}
COPY = "copy"


@dataclass(eq=False)
class Source:
    """A param group, or with ``group`` -1 a unit. ``owner`` is the unit of a group."""

    unit: str
    owner: Source | None = None
    group: int = -1
    num_groups: int = 0
    unsharded_bytes: int = 0
    gathers: bool = False  # over more than one rank


class Moment(NamedTuple):
    """``lanes`` are those that a reduction crosses, ``reduction`` tells it from the group's others."""

    time_ns: int
    name: str
    source: Source
    event: Event | None = None
    lanes: tuple[str, ...] = ()
    reduction: int = 0


class Span(NamedTuple):
    """``note`` is empty, or how it ended otherwise: ``dropped``, ``reset`` or ``unfinished``."""

    lane: str
    name: str
    unit: str
    group: int
    start_ns: int
    end_ns: int
    num_bytes: int = 0
    note: str = ""


class _Begun(NamedTuple):
    lane: str
    name: str
    start_ns: int
    num_bytes: int = 0


@dataclass
class _InFlight:
    source: Source
    lanes: tuple[str, ...]
    start_ns: int
    issued_ns: int
    waiting_since_ns: int | None = None


@dataclass
class _Open:
    """What has begun in one source and not ended, by what will end it."""

    begun: dict[str, _Begun] = field(default_factory=dict)
    # Groups of a unit whose post-backward has not come yet.
    num_groups_left: int = 0


class SpanBuilder:
    """Feed it the moments of one rank in order; :meth:`close` gives the spans, in order of their ends."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._open: dict[Source, _Open] = {}
        self._reducing: dict[Source, Moment] = {}
        self._in_flight: dict[int, _InFlight] = {}

    def add_all(self, moments: Iterable[Moment]) -> None:
        for moment in moments:
            handle = getattr(self, f"_on_{moment.name}", None)
            if handle is not None:
                handle(moment)

    def close(self, end_ns: int) -> list[Span]:
        """End what is still open, too."""
        for source in list(self._open):
            self._end_all(source, end_ns, note="unfinished")
        for reduction in list(self._in_flight):
            self._land(reduction, end_ns, note="unfinished")
        return self._spans

    # Units

    def _on_pre_forward(self, moment: Moment) -> None:
        assert moment.event is not None
        # A later member of a module list belongs to the forward that is open. Where activation checkpointing runs
        # forward inside backward, no post_forward follows.
        if moment.event.state not in (TrainingState.FORWARD, TrainingState.PRE_BACKWARD):
            self._begin(moment.source, "forward", COMPUTE, "forward", moment.time_ns)

    def _on_post_forward(self, moment: Moment) -> None:
        self._end(moment.source, "forward", moment.time_ns)

    def _on_pre_backward(self, moment: Moment) -> None:
        unit = moment.source
        if "backward" not in self._opened(unit).begun:
            self._begin(unit, "backward", COMPUTE, "backward", moment.time_ns)
            self._opened(unit).num_groups_left = unit.num_groups

    def _on_post_backward(self, moment: Moment) -> None:
        unit = moment.source.owner
        assert unit is not None
        opened = self._opened(unit)
        opened.num_groups_left -= 1
        if opened.num_groups_left <= 0:
            self._end(unit, "backward", moment.time_ns)

    def _on_final_callback(self, moment: Moment) -> None:
        for source in list(self._open):
            if source.num_groups == 0:
                self._end(source, "backward", moment.time_ns)

    # Gathers

    def _on_unshard(self, moment: Moment) -> None:
        source = moment.source
        name = COLLECTIVES[GATHER] if source.gathers else COPY
        self._begin(source, "gather", GATHER, name, moment.time_ns, num_bytes=source.unsharded_bytes)
        self._begin(source, "issue", BLOCKED, f"issue {name}", moment.time_ns)

    def _on_gather_issued(self, moment: Moment) -> None:
        self._end(moment.source, "issue", moment.time_ns)

    def _on_wait_for_unshard(self, moment: Moment) -> None:
        source = moment.source
        name = COLLECTIVES[GATHER] if source.gathers else COPY
        self._begin(source, "wait", BLOCKED, f"wait {name}", moment.time_ns)
        self._on_was_unsharded(moment)

    def _on_was_unsharded(self, moment: Moment) -> None:
        source = moment.source
        self._begin(source, "unsharded", MEMORY, "unsharded", moment.time_ns, num_bytes=source.unsharded_bytes)

    def _on_unsharded(self, moment: Moment) -> None:
        self._end(moment.source, "wait", moment.time_ns)
        self._end(moment.source, "gather", moment.time_ns)

    def _on_gather_dropped(self, moment: Moment) -> None:
        self._end(moment.source, "gather", moment.time_ns, note="dropped")

    def _on_reshard(self, moment: Moment) -> None:
        self._end(moment.source, "unsharded", moment.time_ns)

    _on_reshard_post_forward = _on_reshard

    # Reductions

    def _on_reduce(self, moment: Moment) -> None:
        self._reducing[moment.source] = moment
        self._begin(moment.source, "issue", BLOCKED, f"issue {_name(moment.lanes)}", moment.time_ns)

    def _on_reduce_issued(self, moment: Moment) -> None:
        begun = self._reducing.pop(moment.source, None)
        if begun is not None:
            self._end(moment.source, "issue", moment.time_ns)
            self._in_flight[moment.reduction] = _InFlight(
                moment.source, begun.lanes, start_ns=begun.time_ns, issued_ns=moment.time_ns
            )

    def _on_reduce_wait(self, moment: Moment) -> None:
        if moment.reduction in self._in_flight:
            self._in_flight[moment.reduction].waiting_since_ns = moment.time_ns

    def _on_reduced(self, moment: Moment) -> None:
        self._land(moment.reduction, moment.time_ns)

    def _on_reduce_abandoned(self, moment: Moment) -> None:
        self._land(moment.reduction, moment.time_ns, note="reset")

    def _land(self, reduction: int, time_ns: int, *, note: str = "") -> None:
        flight = self._in_flight.pop(reduction, None)
        if flight is None:  # begun before the recording
            return
        source, lanes, start = flight.source, flight.lanes, flight.start_ns
        if len(lanes) == 2:
            # The all-reduce needs the scattered sums, so its issue has waited for them.
            self._append(source, _Begun(REDUCE, COLLECTIVES[REDUCE], start), flight.issued_ns)
            lanes, start = (ALL_REDUCE,), flight.issued_ns
        self._append(source, _Begun(lanes[0] if lanes else REDUCE, _name(lanes), start), time_ns, note=note)
        if flight.waiting_since_ns is not None:
            self._append(source, _Begun(BLOCKED, f"finish {_name(lanes)}", flight.waiting_since_ns), time_ns, note=note)

    # What the two share

    def _on_reset(self, moment: Moment) -> None:
        self._reducing.pop(moment.source, None)
        self._end_all(moment.source, moment.time_ns, note="reset")

    def _opened(self, source: Source) -> _Open:
        return self._open.setdefault(source, _Open())

    def _begin(self, source: Source, key: str, lane: str, name: str, time_ns: int, *, num_bytes: int = 0) -> None:
        # What is open still was cut short by an exception.
        self._end(source, key, time_ns, note="unfinished")
        self._opened(source).begun[key] = _Begun(lane, name, time_ns, num_bytes)

    def _end(self, source: Source, key: str, time_ns: int, *, note: str = "") -> None:
        begun = self._opened(source).begun.pop(key, None)
        if begun is not None:
            self._append(source, begun, time_ns, note=note)

    def _end_all(self, source: Source, time_ns: int, *, note: str) -> None:
        for key in list(self._opened(source).begun):
            self._end(source, key, time_ns, note=note)

    def _append(self, source: Source, begun: _Begun, end_ns: int, *, note: str = "") -> None:
        self._spans.append(
            Span(begun.lane, begun.name, source.unit, source.group, begun.start_ns, end_ns, begun.num_bytes, note)
        )


def _name(lanes: tuple[str, ...]) -> str:
    return COLLECTIVES[lanes[-1]] if lanes else COPY
