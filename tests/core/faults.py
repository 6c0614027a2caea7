"""Exceptions at chosen places: every event of the scheduler, and every call that it makes to the tensors of a group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from hpcompat.core import events
from hpcompat_conformance.numpy_reference.group import GroupTensors

# What the scheduler calls while it trains.
TENSOR_CALLS = (
    "all_gather",
    "copy_out",
    "to_unsharded",
    "to_sharded",
    "to_sharded_post_forward",
    "accumulate_gradients",
    "stash_gradients",
    "take_gradients",
    "start_reduce",
    "wait_for_offload",
)


class Fault(Exception):
    """Out of memory, or whatever else a step may die of."""


class Countdown(threading.local):
    """Counts the places that a thread passes, and raises at one. Each thread counts for itself: all fail alike."""

    left: int | None = None

    def __init__(self) -> None:
        self.places: list[str] = []

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        """Raise at the ``number``-th place that is passed inside."""
        self.left = number
        try:
            yield
        finally:
            self.left = None

    def passes(self, place: str) -> None:
        if self.left is None:
            return
        self.places.append(place)
        self.left -= 1
        if self.left == -1:
            raise Fault(place)


@contextmanager
def at_events() -> Iterator[Countdown]:
    """The places are the scheduler's events. What an event announces has not happened when it raises."""
    countdown = Countdown()

    def listen(event: events.Event) -> None:
        countdown.passes(f"{event.name} {event.unit}")

    events.listeners.append(listen)
    try:
        yield countdown
    finally:
        events.listeners.remove(listen)


@contextmanager
def at_calls(*, after: bool) -> Iterator[Countdown]:
    """The places are the calls to a group's tensors, before or after they have done their work."""
    countdown = Countdown()

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not after:
                countdown.passes(name)
            result = original(*args, **kwargs)
            if after:
                countdown.passes(name)
            return result

        return call

    with mock.patch.multiple(
        GroupTensors, **{name: watched(name, getattr(GroupTensors, name)) for name in TENSOR_CALLS}
    ):
        yield countdown
