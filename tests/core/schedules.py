"""Schedules as text: what the scheduler did, and what a step of three wrapped layers is expected to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import hpcompat
from hpcompat.core.events import Event
from training import batch, train

FORWARD = """
    pre_forward root
    pre_forward a, unshard a, wait_for_unshard a, reshard a, post_forward a
    pre_forward b, unshard b, wait_for_unshard b, reshard b, post_forward b
    pre_forward c, unshard c, wait_for_unshard c, reshard c, post_forward c
    post_forward root
"""
BACKWARD = """
    pre_backward c, unshard c, wait_for_unshard c, prefetch b, unshard b
    pre_backward root
    post_backward c, reshard c, reduce c
    pre_backward b, wait_for_unshard b, prefetch a, unshard a
    post_backward b, reshard b, reduce b
    pre_backward a, wait_for_unshard a
    post_backward a, reshard a, reduce a
    final_callback root
"""
# After earlier forwards that no backward has undone: the layer before the first is then the last of the forward before.
BACKWARD_INTO_ANOTHER_FORWARD = BACKWARD.replace("wait_for_unshard a", "wait_for_unshard a, prefetch c, unshard c")
FORWARD_KEEPING = """
    pre_forward root
    pre_forward a, unshard a, wait_for_unshard a, post_forward a
    pre_forward b, unshard b, wait_for_unshard b, post_forward b
    pre_forward c, unshard c, wait_for_unshard c, post_forward c
    post_forward root
"""
# A prefetch of what is unsharded already gathers nothing.
BACKWARD_KEEPING = """
    pre_backward c, prefetch b
    pre_backward root
    post_backward c, reshard c, reduce c
    pre_backward b, prefetch a
    post_backward b, reshard b, reduce b
    pre_backward a
    post_backward a, reshard a, reduce a
    final_callback root
"""


def lines(events: Iterable[Event]) -> list[str]:
    """``["unshard a", ...]``; the root unit is called ``root``, one over modules a and b ``a+b``."""
    return [f"{event.name} {event.unit.replace(', ', '+') or 'root'}" for event in events]


def expected(text: str) -> list[str]:
    """The same from a text: one event after another, separated by commas or line ends."""
    return [entry.strip() for line in text.splitlines() for entry in line.split(",") if entry.strip()]


def events_of(body: Callable[[], object]) -> list[str]:
    with hpcompat.record_events() as events:
        body()
    return lines(events)


def step(model: Any, *, requires_grad: bool = True) -> list[str]:
    return events_of(lambda: train(model, batch(requires_grad=requires_grad)))


def without(text: str, *names: str) -> list[str]:
    """The events of ``text`` but those called ``names``."""
    return [event for event in expected(text) if event.split()[0] not in names]
