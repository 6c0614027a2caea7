"""What a recording says lasted from when to when."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

import hpcompat
from hpcompat.core.spans import ALL_REDUCE, BLOCKED, COMPUTE, GATHER, LANES, MEMORY, REDUCE
from hpcompat_conformance import numpy_reference as ref
from recording_streams import RecordingStreams
from schedules import lines
from tracing import counted, of_unit, traced
from training import Net, Stack, batch, train, wrap

pytestmark = pytest.mark.usefixtures("rank")


def test_the_spans_of_a_step() -> None:
    recording = traced(wrap(Net()))
    found = counted(recording)
    assert {span.note for span in recording.spans} == {""}
    for unit in ("", "a", "b", "c"):
        # Gathered for forward and again for backward, but for the root, which stays.
        num_gathers = 1 if unit == "" else 2
        assert found[(COMPUTE, "forward", unit)] == found[(COMPUTE, "backward", unit)] == 1
        assert found[(GATHER, "all-gather", unit)] == num_gathers
        assert found[(BLOCKED, "issue all-gather", unit)] == found[(BLOCKED, "wait all-gather", unit)] == num_gathers
        assert found[(MEMORY, "unsharded", unit)] == num_gathers
        assert found[(REDUCE, "reduce-scatter", unit)] == 1
        assert found[(BLOCKED, "issue reduce-scatter", unit)] == 1
        assert found[(BLOCKED, "finish reduce-scatter", unit)] == 1
    assert {lane for lane, _, _ in found} == set(LANES) - {ALL_REDUCE}


def test_spans_lie_where_the_events_are() -> None:
    recording = traced(wrap(Stack()))
    times = defaultdict(list)
    for timed in recording.timed_events:
        times[timed.event.name, timed.event.unit].append(timed.time_ns)
    for unit in "abc":
        (forward,) = of_unit(recording, unit, "forward")
        (backward,) = of_unit(recording, unit, "backward")
        assert [forward.start_ns] == times["pre_forward", unit]
        assert [forward.end_ns] == times["post_forward", unit]
        assert [backward.start_ns] == times["pre_backward", unit]
        assert [backward.end_ns] == times["post_backward", unit]
        unsharded = of_unit(recording, unit, "unsharded")
        assert [span.start_ns for span in unsharded] == times["wait_for_unshard", unit]
        assert [span.end_ns for span in unsharded] == times["reshard", unit]
        gathers, waits = of_unit(recording, unit, "all-gather"), of_unit(recording, unit, "wait all-gather")
        assert [span.start_ns for span in gathers] == times["unshard", unit]
        assert [span.start_ns for span in waits] == times["wait_for_unshard", unit]
        assert [span.end_ns for span in gathers] == [span.end_ns for span in waits]
        (reduction,), (finish,) = (of_unit(recording, unit, f"{name}reduce-scatter") for name in ("", "finish "))
        assert [reduction.start_ns] == times["reduce", unit]
        assert reduction.end_ns == finish.end_ns > finish.start_ns > reduction.start_ns
    (root,) = of_unit(recording, "", "backward")
    assert [root.end_ns] == times["final_callback", ""]


def test_a_prefetched_gather_is_in_flight_beside_the_backward_before() -> None:
    recording = traced(wrap(Stack()))
    gather, backward = of_unit(recording, "b", "all-gather")[1], of_unit(recording, "c", "backward")[0]
    assert backward.start_ns < gather.start_ns < backward.end_ns < gather.end_ns


def test_what_lasts_is_measured_in_bytes() -> None:
    recording = traced(wrap(Net(4)))
    sizes = {span.num_bytes for span in recording.spans if span.lane in (MEMORY, GATHER)}
    assert sizes == {(4 * 4 + 4) * 4}


def test_under_hsdp_an_all_reduce_follows_the_reduce_scatter() -> None:
    with ref.DryWorld(4).rank():
        model = wrap(Stack(), mesh=ref.init_device_mesh((2, 2), mesh_dim_names=("replicate", "shard")))
        recording = traced(model)
        (scatter,), (all_reduce,) = of_unit(recording, "a", "reduce-scatter"), of_unit(recording, "a", "all-reduce")
        assert (scatter.lane, all_reduce.lane) == (REDUCE, ALL_REDUCE)
        assert scatter.end_ns == all_reduce.start_ns == of_unit(recording, "a", "issue all-reduce")[0].end_ns
        model.set_requires_all_reduce(False)
        assert not of_unit(traced(model), "a", "all-reduce")


def test_replicated_units_gather_nothing() -> None:
    found = counted(traced(hpcompat.replicate(Stack())))
    assert found[(GATHER, "all-gather", "")] == 0
    assert found[(GATHER, "copy", "")] == found[(ALL_REDUCE, "all-reduce", "")] == 1


def test_alone_there_is_no_collective() -> None:
    with ref.DryWorld(1).rank():
        names = {span.name for span in traced(wrap(Stack())).spans}
    assert {"copy", "wait copy", "finish copy"} <= names
    assert not {name for name in names if "gather" in name or "scatter" in name}


def test_what_was_unsharded_before_is_so_from_the_start() -> None:
    model = wrap(Stack())
    train(model, batch())
    model.a.unshard()
    recording = traced(model)
    assert of_unit(recording, "a", "unsharded")[0].start_ns == recording.start_ns
    assert of_unit(recording, "b", "unsharded")[0].start_ns > recording.start_ns


def test_param_groups_have_spans_of_their_own() -> None:
    recording = traced(wrap(Stack(), comm_fusion=False))
    for name in ("all-gather", "reduce-scatter", "unsharded"):
        assert {span.group for span in of_unit(recording, "b", name)} == {0, 1}
    (backward,) = of_unit(recording, "b", "backward")
    last = max(timed.time_ns for timed in recording.timed_events if timed.event[:2] == ("post_backward", "b"))
    assert (backward.group, backward.end_ns) == (-1, last)


def test_a_module_list_is_one_forward() -> None:
    model = Stack()
    hpcompat.fully_shard([model.a, model.b])
    recording = traced(hpcompat.fully_shard(model))
    assert len(of_unit(recording, "a, b", "forward")) == 1
    assert lines(recording.events).count("pre_forward a+b") == 2


class Checkpointed(Stack):
    def forward(self, x: ref.Value) -> ref.Value:
        return self.c(ref.checkpoint(self.b, self.a(x)))


def test_recomputation_is_no_forward_of_its_own() -> None:
    recording = traced(wrap(Checkpointed()))
    assert lines(recording.events).count("pre_forward b") == 2
    assert len(of_unit(recording, "b", "forward")) == 1


def test_a_slice_after_forward_is_not_unsharded() -> None:
    with ref.DryWorld(4).rank():
        recording = traced(wrap(Stack(), reshard_after_forward=2))
    (forward,) = of_unit(recording, "b", "forward")
    first, second = of_unit(recording, "b", "unsharded")
    assert first.end_ns < forward.end_ns < second.start_ns
    assert first.note == second.note == ""


def test_accumulation_reduces_once() -> None:
    model = wrap(Stack())

    def body() -> None:
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            train(model, batch())

    recording = traced(model, body)
    assert len(of_unit(recording, "a", "backward")) == 2
    assert len(of_unit(recording, "a", "reduce-scatter")) == 1


def test_a_prefetch_that_guessed_wrong_is_marked() -> None:
    model = wrap(Stack())
    # Forward twice: the implicit prefetch before the first layer takes the last of the forward before.
    recording = traced(model, lambda: (model(batch()), train(model, batch())))
    assert [span.note for span in of_unit(recording, "c", "all-gather")].count("dropped") == 1


def test_with_streams_a_reduction_lasts_until_the_thread_lets_go_of_it() -> None:
    with ref.registered(ref.NumpyBackend(RecordingStreams())), ref.DryWorld(2).rank():
        model = wrap(Stack())
        train(model, batch())
        recording = traced(model)
    assert recording.has_streams
    assert {span.note for span in recording.spans} == {""}
    reductions = [of_unit(recording, unit, "reduce-scatter")[0] for unit in "cba"]
    # One keeps its input until the next needs the room.
    for before, after in itertools.pairwise(reductions):
        assert before.start_ns < before.end_ns < after.start_ns
