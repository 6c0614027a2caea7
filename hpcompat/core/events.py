"""The event stream: what the scheduler did, in order. Tracing and the conformance suite read it.

An event is ``(name, unit, state)``: the step, the qualified name of the unit (``""`` for the root) and the training
state in which it happened. The same model gives the same list on every backend.

Observers are the second kind of listener, for whoever has to know more. They also learn which unit or param group an
event comes from, and hear the moments that end what an event began. Moments are no events: when a reduction is done
depends on the device, and the list of events does not.

moment            source        what has just happened
gather_issued     param group   the gather that ``unshard`` began is in flight
unsharded         param group   the parameters that ``wait_for_unshard`` waited for are registered
gather_dropped    param group   a gather that nobody used is over
reduce_issued     param group   the reduction that ``reduce`` began is in flight
reduce_wait       param group   the caller turns to finishing a reduction
reduced           param group   that reduction is finished: its gradients are on the shards
reduce_abandoned  param group   a reduction was given up after an exception
reset             unit, group   ``reset_iter_state`` has made it idle and sharded

The four about reductions name the reduction: a group may have several in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from hpcompat.contract.states import TrainingState


class Event(NamedTuple):
    name: str
    unit: str
    state: TrainingState


Listener = Callable[[Event], None]
# Name, source, the event unless it is a moment, and the reduction where a moment is about one.
Observer = Callable[[str, object, "Event | None", object], None]

# Read on every step: an empty list costs one truth test.
listeners: list[Listener] = []
observers: list[Observer] = []
# Ranks may be threads of one process, each with recordings of its own that come and go.
_lock = threading.Lock()


def emit(name: str, unit: str, state: TrainingState, *, source: object = None) -> None:
    event = Event(name, unit, state)
    for listener in tuple(listeners):
        listener(event)
    for observer in tuple(observers):
        observer(name, source, event, None)


def observe(moment: str, source: object, *, reduction: object = None) -> None:
    for observer in tuple(observers):
        observer(moment, source, None, reduction)


@contextmanager
def record_events() -> Iterator[list[Event]]:
    """Collect the events of this process while the context is open."""
    events: list[Event] = []
    with _lock:
        listeners.append(events.append)
    try:
        yield events
    finally:
        # By identity: two empty lists have equal bound methods.
        with _lock:
            listeners[:] = [kept for kept in listeners if getattr(kept, "__self__", None) is not events]


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let ``observer`` hear the events and moments of this process while the context is open."""
    with _lock:
        observers.append(observer)
        # The steps that emit events ask for listeners only.
        listeners.append(_say_that_somebody_listens)
    try:
        yield
    finally:
        with _lock:
            observers[:] = [kept for kept in observers if kept is not observer]
            listeners.remove(_say_that_somebody_listens)


def _say_that_somebody_listens(event: Event) -> None: ...
