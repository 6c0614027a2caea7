"""The event stream: what the scheduler did, in order. Tracing and the conformance suite read it.

An event is ``(name, unit, state)``: the step, the qualified name of the unit (``""`` for the root) and the training
state in which it happened. The same model gives the same list on every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from hpcompat.core.states import TrainingState


class Event(NamedTuple):
    name: str
    unit: str
    state: TrainingState


Listener = Callable[[Event], None]

# Read on every step: an empty list costs one truth test.
listeners: list[Listener] = []


def emit(name: str, unit: str, state: TrainingState) -> None:
    event = Event(name, unit, state)
    for listener in listeners:
        listener(event)


@contextmanager
def record_events() -> Iterator[list[Event]]:
    """Collect the events of this process while the context is open."""
    events: list[Event] = []
    listeners.append(events.append)
    try:
        yield events
    finally:
        # By identity: two empty lists have equal bound methods.
        listeners[:] = [kept for kept in listeners if getattr(kept, "__self__", None) is not events]
