"""Recordings of a model: which events they hold, and that nothing else changes."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hpcompat
from hpcompat.core import events
from hpcompat.core.spans import MEMORY
from hpcompat.trace import Recording
from hpcompat_conformance import numpy_reference as ref
from schedules import BACKWARD, FORWARD, expected, lines
from tracing import of_unit, traced
from training import Net, Stack, assert_equal, batch, gradients, initialize, train, units, wrap

pytestmark = pytest.mark.usefixtures("rank")


def test_the_events_are_those_of_record_events_with_times() -> None:
    model = wrap(Stack())
    with hpcompat.record_events() as all_events:
        recording = traced(model)
    assert lines(recording.events) == expected(FORWARD + BACKWARD)
    assert recording.events == all_events
    assert [timed.event for timed in recording.timed_events] == all_events
    times = [recording.start_ns, *(timed.time_ns for timed in recording.timed_events), recording.end_ns]
    assert times == sorted(times)
    assert len({timed.thread for timed in recording.timed_events}) == 1
    assert (recording.backend, recording.rank, recording.world_size) == ("numpy", 0, 2)


def test_only_units_of_the_model_are_heard() -> None:
    first, second = wrap(Stack()), wrap(Stack())
    with hpcompat.trace(first) as of_first, hpcompat.trace(second) as of_second:
        train(first, batch())
        train(second, batch())
        train(first, batch())
    train(first, batch())
    assert lines(of_first.events) == expected(FORWARD + BACKWARD) * 2
    assert lines(of_second.events) == expected(FORWARD + BACKWARD)
    assert {(span.name, span.unit) for span in of_first.spans} == {(s.name, s.unit) for s in of_second.spans}


def test_a_part_of_a_model_is_a_model_too() -> None:
    model = wrap(Stack())
    recording = traced(model.b, lambda: train(model, batch()))
    assert lines(recording.events) == [line for line in expected(FORWARD + BACKWARD) if line.endswith(" b")]
    assert recording.units == ["b"]


def test_a_recording_can_be_read_while_it_runs() -> None:
    model = wrap(Stack())
    with hpcompat.trace(model) as recording:
        model.unshard()
        model.a.unshard()
        assert lines(recording.events) == ["unshard root", "wait_for_unshard root"]
        assert [(span.name, span.note) for span in recording.spans if span.lane == MEMORY] == [
            ("unsharded", "unfinished")
        ]
        model(batch())
        assert {span.unit for span in recording.spans if span.name == "forward"} == {"", "a", "b", "c"}


def test_names_that_the_first_forward_gives_are_known_from_the_start() -> None:
    model = wrap(Stack())

    def body() -> None:
        model.b.unshard()
        train(model, batch())

    recording = traced(model, body)
    assert recording.events[0] == ("unshard", "", events.TrainingState.IDLE)
    first = min(recording.spans, key=lambda span: span.start_ns)
    assert (first.name, first.unit) == ("issue all-gather", "b")


def test_the_numbers_do_not_change() -> None:
    def run(record: bool) -> list[Any]:
        def body(rank: ref.Rank) -> Any:
            model = wrap(initialize(Net()))
            inputs = batch(rank.number)
            traced(model, lambda: train(model, inputs)) if record else train(model, inputs)
            return gradients(model)

        return ref.World(2).run(body)

    for with_trace, without in zip(run(True), run(False), strict=True):
        assert_equal(with_trace, without)


def test_ranks_that_are_threads_record_themselves_only() -> None:
    def body(rank: ref.Rank) -> Recording:
        model = wrap(initialize(Net()))
        return traced(model, lambda: train(model, batch(rank.number), batch(rank.number)))

    recordings = ref.World(4).run(body)
    assert [recording.rank for recording in recordings] == [0, 1, 2, 3]
    assert all(recording.events == recordings[0].events for recording in recordings)
    assert not events.observers
    assert not events.listeners


def test_who_does_not_trace_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def spend(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"expected nobody to be told, but got {args}")

    model = wrap(Net())
    traced(model)
    monkeypatch.setattr(events, "emit", spend)
    monkeypatch.setattr(events, "observe", spend)
    train(model, batch())
    model.reset_iter_state()
    with pytest.raises(AssertionError, match="pre_forward"):
        traced(model)


def test_nothing_is_left_behind() -> None:
    before = list(events.listeners), list(events.observers)
    model = wrap(Stack())
    recording = traced(model)
    assert (events.listeners, events.observers) == before
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert recording.units == ["", "a", "b", "c"]


@pytest.mark.parametrize("model", [ref.Linear(4, 4), None, [ref.Linear(4, 4)]], ids=["module", "None", "list"])
def test_an_unwrapped_model_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a wrapped module to trace, but got \w+; call fully_shard"):
        traced(model)
    assert not events.observers


# Exceptions


def failing(model: Any) -> Callable[[], None]:
    def body() -> None:
        def explode(x: Any) -> Any:
            raise ZeroDivisionError

        model.b.forward, kept = explode, model.b.forward
        try:
            train(model, batch())
        finally:
            model.b.forward = kept

    return body


def test_after_an_exception_the_recording_holds_what_happened_until_then(tmp_path: Path) -> None:
    model = wrap(Stack())
    before = list(events.observers)
    with pytest.raises(ZeroDivisionError), hpcompat.trace(model) as recording:
        failing(model)()
    assert events.observers == before
    assert lines(recording.events)[-1] == "wait_for_unshard b"
    notes = {(span.unit, span.name): span.note for span in recording.spans}
    assert notes["a", "forward"] == ""
    assert notes["b", "forward"] == notes["", "forward"] == notes["b", "unsharded"] == "unfinished"
    recording.to_chrome(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


class FailsOnce:
    """An all-gather that raises the first time."""

    def __init__(self) -> None:
        self.working = ref.NumpyBackend().comm_for("process_group", None)[0]
        self.allocate = self.working.allocate
        self.has_failed = False

    def __call__(self, **arguments: Any) -> Any:
        if not self.has_failed:
            self.has_failed = True
            raise ZeroDivisionError
        return self.working(**arguments)


def test_what_an_exception_cut_short_and_is_tried_again_is_there_twice() -> None:
    model = wrap(Stack())
    model.a.set_custom_all_gather(FailsOnce())

    def body() -> None:
        with pytest.raises(ZeroDivisionError):
            model.a.unshard()
        train(model, batch())

    recording = traced(model, body)
    assert [span.note for span in of_unit(recording, "a", "all-gather")] == ["unfinished", "", ""]


def test_what_a_reset_ends_is_marked() -> None:
    model = wrap(Stack())

    def body() -> None:
        with pytest.raises(ZeroDivisionError):
            failing(model)()
        model.reset_iter_state()
        train(model, batch())

    recording = traced(model, body)
    assert [span.note for span in of_unit(recording, "b", "forward")] == ["reset", ""]
    assert [span.note for span in of_unit(recording, "b", "unsharded")] == ["reset", "", ""]
    assert not [span for span in recording.spans if span.note == "unfinished"]


def test_a_reduction_that_a_reset_gives_up_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap(Stack())
    train(model, batch())
    group = next(unit.groups[0] for unit in units(model) if unit.fqn == "b")

    def explode() -> None:
        raise ZeroDivisionError

    def body() -> None:
        monkeypatch.setattr(group.tensors, "accumulate_gradients", explode)
        with pytest.raises(ZeroDivisionError):
            train(model, batch())
        model.reset_iter_state()

    recording = traced(model, body)
    assert [span.note for span in of_unit(recording, "c", "reduce-scatter")] == ["reset"]
