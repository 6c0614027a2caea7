"""The event stream: complete, in order, and only for those who listen."""

from __future__ import annotations

import pytest

import hpcompat
from hpcompat.contract.states import TrainingState
from hpcompat.core import events
from hpcompat_conformance import numpy_reference as ref
from schedules import lines
from training import Stack, batch, train, wrap

pytestmark = pytest.mark.usefixtures("rank")

IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD = TrainingState


def test_an_event_is_the_step_the_unit_and_its_state() -> None:
    model = ref.Sequential([ref.Linear(4, 4)])
    wrap(model, "0")
    with hpcompat.record_events() as recorded:
        train(model, batch())
    assert recorded == [
        ("pre_forward", "", IDLE),
        ("pre_forward", "0", IDLE),
        ("unshard", "0", FORWARD),
        ("wait_for_unshard", "0", FORWARD),
        ("reshard", "0", FORWARD),
        ("post_forward", "0", IDLE),
        ("post_forward", "", IDLE),
        ("pre_backward", "0", IDLE),
        ("unshard", "0", PRE_BACKWARD),
        ("wait_for_unshard", "0", PRE_BACKWARD),
        ("pre_backward", "", IDLE),
        ("post_backward", "0", PRE_BACKWARD),
        ("reshard", "0", POST_BACKWARD),
        ("reduce", "0", POST_BACKWARD),
        ("final_callback", "", POST_BACKWARD),
    ]
    assert all(isinstance(event, hpcompat.Event) for event in recorded)


def test_units_go_by_the_qualified_names_of_their_modules() -> None:
    inner = Stack()
    hpcompat.fully_shard([inner.a, inner.b])
    hpcompat.fully_shard(inner.c)
    model = ref.Sequential([ref.Linear(4, 4), inner])
    wrap(model, "0")
    with hpcompat.record_events() as recorded:
        train(model, batch())
    assert {event.unit for event in recorded} == {"", "0", "1.a, 1.b", "1.c"}


def test_the_same_unit_has_no_name_before_the_first_forward() -> None:
    model = wrap(Stack())
    with hpcompat.record_events() as recorded:
        model.b.unshard()
        model.b.reshard()
    assert recorded == [("unshard", "", IDLE), ("wait_for_unshard", "", IDLE), ("reshard", "", IDLE)]


def test_recorders_do_not_see_what_happens_outside_them() -> None:
    model = wrap(Stack())
    with ref.no_grad():
        model(batch())
        with hpcompat.record_events() as outer:
            model.a.unshard()
            with hpcompat.record_events() as inner:
                model.b.unshard()
            model.c.unshard()
        model.reshard()
    assert lines(inner) == ["unshard b", "wait_for_unshard b"]
    assert lines(outer) == [f"{name} {unit}" for unit in "abc" for name in ("unshard", "wait_for_unshard")]


def test_recorders_that_hold_the_same_events_are_told_apart() -> None:
    with hpcompat.record_events() as outer:
        with hpcompat.record_events() as inner:
            pass
        events.emit("step", "unit", IDLE)
    assert outer == [("step", "unit", IDLE)]
    assert inner == []


def test_a_recorder_leaves_when_its_body_raises() -> None:
    before = list(events.listeners)
    with pytest.raises(ZeroDivisionError), hpcompat.record_events():
        raise ZeroDivisionError
    assert events.listeners == before


def test_every_listener_hears_every_event_in_the_order_of_arrival() -> None:
    heard: list[tuple[int, str]] = []
    mine = [lambda event, number=number: heard.append((number, event.name)) for number in range(2)]
    events.listeners.extend(mine)
    try:
        events.emit("first", "", IDLE)
        events.emit("second", "", IDLE)
    finally:
        del events.listeners[-2:]
    assert heard == [(0, "first"), (1, "first"), (0, "second"), (1, "second")]
