"""Streams of a made-up accelerator: nothing is queued, but every command is written down."""

from __future__ import annotations

from typing import Any, NamedTuple


class Event(NamedTuple):
    number: int

    def __str__(self) -> str:
        return f"event {self.number}"


class RecordingStream:
    def __init__(self, streams: RecordingStreams, name: str) -> None:
        self._streams, self.name = streams, name

    def __repr__(self) -> str:
        return self.name

    def wait_stream(self, stream: Any) -> None:
        self._streams.log.append(f"{self} waits for {stream}")

    def wait_event(self, event: Any) -> None:
        self._streams.log.append(f"{self} waits for {event}")

    def record_event(self) -> Event:
        self._streams.num_events += 1
        event = Event(self._streams.num_events)
        self._streams.log.append(f"{self} records {event}")
        return event


class RecordingStreams:
    """Implements ``hpcompat.contract.scheduler.Streams``; names the side streams in the order of their making."""

    available = True

    def __init__(self) -> None:
        self.log: list[str] = []
        self.num_events = 0
        self.priorities: dict[str, bool] = {}
        self._current = RecordingStream(self, "current")

    def current(self) -> RecordingStream:
        return self._current

    def create(self, *, high_priority: bool) -> RecordingStream:
        name = ("copy-in", "gather", "reduce", "all-reduce")[len(self.priorities)]
        self.priorities[name] = high_priority
        return RecordingStream(self, name)

    def take_log(self) -> list[str]:
        """What was written since the last time."""
        log, self.log = self.log, []
        return log
