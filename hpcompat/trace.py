"""What the scheduler did and when: recorded in training, written to a file that Perfetto and ``hpcompat trace`` open.

The file is in the trace-event format of Chrome, with a process per rank and in it

- a row per lane and unit with its spans (see :mod:`hpcompat.core.spans`),
- the row ``events`` with an instant for every event of the scheduler, in order,
- counters of the bytes and the param groups that are unsharded,
- in ``otherData.hpcompat``, a description of each rank: which ``pid`` it has; ``start_unix_ns``, the wall-clock time
  of ``ts`` 0; and ``start_us``, the ``ts`` at which its recording began.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from hpcompat.core import events
from hpcompat.core.events import Event
from hpcompat.core.spans import ALL_REDUCE, BLOCKED, LANES, MEMORY, REDUCE, Moment, Source, Span, SpanBuilder
from hpcompat.core.unit import Unit
from hpcompat.mesh import replicate_world_size
from hpcompat.module import HSDPModule

__all__ = ["FORMAT", "Recording", "TimedEvent", "trace"]

FORMAT = 1
_ROOT = "(root)"


class TimedEvent(NamedTuple):
    """``time_ns`` is of ``time.perf_counter_ns``, ``thread`` of ``threading.get_ident``."""

    time_ns: int
    event: Event
    thread: int


@contextmanager
def trace(model: Any) -> Iterator[Recording]:
    """Record what the scheduler does with the units at or below ``model``, and when.

        with hpcompat.trace(model) as recording:
            hpcompat.backward(loss_of(model, batch))
        recording.to_chrome(f"trace-rank{recording.rank}.json")

    The numbers that are computed do not change. Contexts may be nested, over one model or several. After an exception
    the recording holds what happened until then.

    Raises:
        TypeError: ``model`` is not wrapped.
    """
    if not isinstance(model, HSDPModule):
        raise TypeError(
            f"expected a wrapped module to trace, but got {type(model).__name__}; call fully_shard or replicate on it"
        )
    recording = Recording(list(model._units(recurse=True)))
    with events.observing(recording._hear):
        try:
            yield recording
        finally:
            recording._end()


class Recording:
    """What one ``trace`` has heard on this rank.

    Attributes:
        events: as :func:`hpcompat.record_events` gives them, of the traced units only.
        timed_events: the same with times and threads.
        rank, world_size: of this process in the job.
        backend: the name of the framework.
        units: qualified names in module pre-order, ``""`` for the root.
    """

    def __init__(self, units: list[Unit]) -> None:
        backend = units[0].backend
        self.events: list[Event] = []
        self.timed_events: list[TimedEvent] = []
        self.backend = backend.name
        self.rank = backend.distributed.get_rank(None)
        self.world_size = backend.distributed.get_world_size(None)
        self.has_streams = False
        self.start_unix_ns = time.time_ns()
        self.start_ns = time.perf_counter_ns()
        self.end_ns: int | None = None
        self._moments: list[Moment] = []
        # Gone when the recording ends: it shall not keep the model alive.
        self._sources: dict[object, Source] = {}
        self._units = units
        self._unit_sources = [self._adopt(unit) for unit in units]

    @property
    def units(self) -> list[str]:
        self._take_names()
        return [source.unit for source in self._unit_sources]

    @property
    def spans(self) -> list[Span]:
        """What lasted from when to when; what has not ended yet ends with the recording, or now."""
        self._take_names()
        builder = SpanBuilder()
        builder.add_all(self._moments)
        return builder.close(self._last_ns)

    def to_chrome(self, path: str | os.PathLike[str]) -> None:
        """Write the file that Perfetto (https://ui.perfetto.dev), chrome://tracing and ``hpcompat trace`` open."""
        content = {
            "displayTimeUnit": "ms",
            "otherData": {"hpcompat": {"format": FORMAT, "ranks": [self._description()]}},
            "traceEvents": self._chrome_events(),
        }
        with open(path, "w", encoding="utf-8") as file:
            json.dump(content, file)

    def _description(self) -> dict[str, object]:
        return {
            "rank": self.rank,
            "pid": self._pid,
            "world_size": self.world_size,
            "backend": self.backend,
            "units": self.units,
            "start_unix_ns": self.start_unix_ns,
            "start_us": 0.0,
            "duration_us": (self._last_ns - self.start_ns) / 1000,
            "has_streams": self.has_streams,
        }

    def _chrome_events(self) -> list[dict[str, Any]]:
        spans = self.spans
        places, rows = _rows_of(spans, self.units)
        listed: list[dict[str, Any]] = [
            _metadata("process_name", name=f"rank {self.rank} of {self.world_size} ({self.backend})"),
            _metadata("process_sort_index", sort_index=self.rank),
        ]
        for row, title in enumerate(rows, start=1):
            listed += [
                _metadata("thread_name", row, name=title),
                _metadata("thread_sort_index", row, sort_index=row),
            ]
        entries = [self._chrome_event(index, timed) for index, timed in enumerate(self.timed_events)]
        entries += [self._chrome_span(span, row=place) for span, place in zip(spans, places, strict=True)]
        entries += self._chrome_counters(spans)
        # A span before those inside it.
        entries.sort(key=lambda entry: (entry["ts"], -entry.get("dur", 0)))
        return [{"pid": self._pid, **entry} for entry in listed + entries]

    @property
    def _pid(self) -> int:
        # Viewers know process 0 and thread 0 as those of an idle processor.
        return self.rank + 1

    def _chrome_event(self, index: int, timed: TimedEvent) -> dict[str, Any]:
        name, unit, state = timed.event
        args = {"index": index, "event": name, "unit": unit, "state": state.name, "thread": timed.thread}
        place = {"ts": self._ts(timed.time_ns), "tid": 1}
        return {"ph": "i", "s": "t", "cat": "event", "name": f"{name} {unit or _ROOT}", **place, "args": args}

    def _chrome_span(self, span: Span, *, row: int) -> dict[str, Any]:
        args: dict[str, Any] = {"unit": span.unit}
        if span.group >= 0:
            args["group"] = span.group
        if span.num_bytes:
            args["bytes"] = span.num_bytes
        if span.note:
            args["note"] = span.note
        duration = (span.end_ns - span.start_ns) / 1000
        place = {"ts": self._ts(span.start_ns), "dur": duration, "tid": row}
        return {"ph": "X", "cat": span.lane, "name": span.name, **place, "args": args}

    def _chrome_counters(self, spans: list[Span]) -> Iterator[dict[str, Any]]:
        changes = sorted(
            change
            for span in spans
            if span.lane == MEMORY
            for change in ((span.start_ns, 1, span.num_bytes), (span.end_ns, -1, -span.num_bytes))
        )
        num_groups = num_bytes = 0
        for time_ns, groups, size in changes:
            num_groups += groups
            num_bytes += size
            counted = {"ph": "C", "ts": self._ts(time_ns), "tid": 1}
            yield {**counted, "name": "unsharded bytes", "args": {"bytes": num_bytes}}
            yield {**counted, "name": "unsharded param groups", "args": {"groups": num_groups}}

    def _ts(self, time_ns: int) -> float:
        return (time_ns - self.start_ns) / 1000

    # Recording

    def _adopt(self, unit: Unit) -> Source:
        source = self._sources[unit] = Source(unit.fqn, num_groups=len(unit.groups))
        for group in unit.groups:
            self._sources[group] = of_group = Source(
                unit.fqn,
                owner=source,
                group=group.index,
                unsharded_bytes=group.tensors.unsharded_bytes,
                gathers=group.shard_world_size > 1,
            )
            if group.is_unsharded:
                self._moments.append(Moment(self.start_ns, "was_unsharded", of_group))
        return source

    def _hear(self, name: str, origin: object, event: Event | None, reduction: object) -> None:
        now = time.perf_counter_ns()
        source = self._sources.get(origin)
        if source is None:
            return
        lanes = _lanes_of(origin) if name == "reduce" else ()
        self._moments.append(Moment(now, name, source, event, lanes, id(reduction)))
        if event is not None:
            self.events.append(event)
            self.timed_events.append(TimedEvent(now, event, threading.get_ident()))

    def _take_names(self) -> None:
        # The first forward gives them, which may be part of the recording.
        for unit in self._units:
            for owner in (unit, *unit.groups):
                self._sources[owner].unit = unit.fqn

    def _end(self) -> None:
        self.end_ns = time.perf_counter_ns()
        self._take_names()
        self.has_streams = any(unit.comm_ctx.has_streams for unit in self._units)
        self._units = []
        self._sources.clear()

    @property
    def _last_ns(self) -> int:
        return time.perf_counter_ns() if self.end_ns is None else self.end_ns


def _metadata(kind: str, row: int = 1, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "tid": row, "args": args}


def _rows_of(spans: list[Span], units: list[str]) -> tuple[list[int], list[str]]:
    """The row of each span, and the titles from row 1 on: by lane, then by unit. Spans of one row do not overlap."""
    ends: dict[tuple[str, str], list[int]] = {}
    keys: list[tuple[str, str, int]] = [("", "", 0)] * len(spans)
    for index in sorted(range(len(spans)), key=lambda index: spans[index].start_ns):
        span = spans[index]
        kind = (span.lane, "" if span.lane == BLOCKED else span.unit)
        taken = ends.setdefault(kind, [])
        free = next((row for row, end in enumerate(taken) if end <= span.start_ns), len(taken))
        taken[free : free + 1] = [span.end_ns]
        keys[index] = (*kind, free)
    order = {unit: place for place, unit in enumerate(units)}
    used = sorted(set(keys), key=lambda key: (LANES.index(key[0]), order.get(key[1], -1), key[2]))
    titles = [lane if lane == BLOCKED else f"{lane} {unit or _ROOT}" for lane, unit, _ in used]
    rows = {key: row for row, key in enumerate(used, start=2)}
    return [rows[key] for key in keys], ["events", *titles]


def _lanes_of(group: Any) -> tuple[str, ...]:
    """Where the reduction goes that ``group`` begins now."""
    lanes = []
    if group.shard_world_size > 1:
        lanes.append(REDUCE)
    if replicate_world_size(group.mesh_info) > 1 and group.all_reduce_grads:
        lanes.append(ALL_REDUCE)
    return tuple(lanes)
