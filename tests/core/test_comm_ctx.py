"""What units share while they communicate: streams, the gather that is held, reductions in flight."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from hpcompat.contract.states import TrainingState
from hpcompat.core.comm_ctx import NULL_STREAM, CommContext, NullStreams
from recording_streams import RecordingStreams

# The context by itself


class FakeReduction:
    """Writes down what becomes of it."""

    def __init__(self, name: str, log: list[str], *, stream: Any = NULL_STREAM) -> None:
        self.name, self.log = name, log
        self.post_stream, self.post_event = stream, None

    def complete(self) -> None:
        if self.post_event is None:
            self.log.append(f"complete {self.name}")
            self.post_event = f"end of {self.name}"

    def release_input(self) -> None:
        self.log.append(f"release {self.name}")

    def abandon(self) -> None:
        self.log.append(f"abandon {self.name}")


def submit(ctx: CommContext, reduction: FakeReduction, *, group: Any = None) -> None:
    """For ``group``; by default every reduction is of a group of its own."""
    ctx.submit(object() if group is None else group, reduction)


class FakeGather:
    event = None
    is_async = False

    def wait(self) -> None: ...


@pytest.fixture
def streams() -> RecordingStreams:
    return RecordingStreams()


@pytest.fixture
def ctx(streams: RecordingStreams) -> CommContext:
    made = CommContext()
    made.lazy_init(streams)
    return made


@pytest.fixture
def ctx_without_streams() -> CommContext:
    made = CommContext()
    made.lazy_init(NullStreams())
    return made


def test_everything_that_computation_waits_for_has_high_priority(streams: RecordingStreams, ctx: CommContext) -> None:
    assert streams.priorities == {"copy-in": True, "gather": True, "reduce": True, "all-reduce": False}


def test_streams_are_made_once(streams: RecordingStreams, ctx: CommContext) -> None:
    gather_stream = ctx.gather_stream
    ctx.lazy_init(RecordingStreams())
    assert ctx.gather_stream is gather_stream
    assert ctx.streams is streams


IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD = TrainingState


@pytest.mark.parametrize(
    ("async_op", "state", "names"),
    [
        (False, FORWARD, ["copy-in", "gather"]),
        (False, PRE_BACKWARD, ["copy-in", "gather"]),
        (False, IDLE, ["current", "current"]),
        (False, POST_BACKWARD, ["current", "current"]),
        (True, FORWARD, ["current", "current"]),
        (True, PRE_BACKWARD, ["current", "current"]),
        (True, IDLE, ["current", "current"]),
    ],
)
def test_implicit_gathers_run_beside_and_others_on_the_current_stream(
    ctx: CommContext, async_op: bool, state: TrainingState, names: list[str]
) -> None:
    assert [str(stream) for stream in ctx.gather_streams(async_op=async_op, state=state)] == names


def test_a_held_gather_is_released_once_the_gathers_wait_for_its_copy(
    streams: RecordingStreams, ctx: CommContext
) -> None:
    ctx.hold_gather(FakeGather(), "copy")
    assert streams.log == []
    ctx.release_held_gather()
    assert streams.take_log() == ["copy-in waits for copy", "gather waits for copy"]
    ctx.release_held_gather()
    assert streams.log == []


def test_with_streams_a_reduction_is_enqueued_whole(streams: RecordingStreams, ctx: CommContext) -> None:
    log: list[str] = []
    submit(ctx, FakeReduction("c", log))
    assert log == ["complete c"]


def test_without_streams_a_reduction_is_completed_when_its_turn_comes(ctx_without_streams: CommContext) -> None:
    log: list[str] = []
    submit(ctx_without_streams, FakeReduction("c", log))
    assert log == []
    ctx_without_streams.make_room()
    assert log == ["complete c", "release c"]


@pytest.mark.parametrize("cap", [1, 2, 4])
def test_at_most_cap_reductions_keep_their_input(ctx_without_streams: CommContext, cap: int) -> None:
    log: list[str] = []
    ctx = ctx_without_streams
    ctx.max_input_buffers = cap
    for number in range(6):
        ctx.make_room()
        submit(ctx, FakeReduction(str(number), log))
        num_kept = number + 1 - sum(entry.startswith("release") for entry in log)
        assert num_kept == min(number + 1, cap)
    ctx.finish()
    assert log == [f"{what} {number}" for number in range(6) for what in ("complete", "release")], (
        "the oldest goes first"
    )


def test_only_the_last_backward_waits_for_the_gradients(streams: RecordingStreams, ctx: CommContext) -> None:
    log: list[str] = []
    submit(ctx, FakeReduction("a", log, stream="reduce"))
    submit(ctx, FakeReduction("b", log, stream="all-reduce"))
    submit(ctx, FakeReduction("c", log, stream="reduce"))
    ctx.end_backward(is_last=False)
    assert streams.log == []
    assert "release a" not in log
    ctx.end_backward(is_last=True)
    # One stream's events are in order: its last stands for all.
    assert streams.take_log() == ["current waits for end of c", "current waits for end of b"]
    assert log[-3:] == ["release a", "release b", "release c"]
    ctx.end_backward(is_last=True)
    assert streams.log == []


def test_outputs_that_another_stream_uses_are_kept_until_the_gradients_are_waited_for(ctx: CommContext) -> None:
    used_by = {"reduce": ctx.reduce_stream, "all-reduce": ctx.all_reduce_stream}
    alive: dict[str, weakref.ref[FakeReduction]] = {}
    for name, stream in used_by.items():
        reduction = FakeReduction(name, [], stream=stream)
        submit(ctx, reduction)
        alive[name] = weakref.ref(reduction)
    del reduction
    ctx.make_room()
    assert alive["reduce"]() is None
    assert alive["all-reduce"]() is not None
    ctx.finish()
    assert alive["all-reduce"]() is None


def test_the_next_reduction_of_a_group_waits_for_what_is_kept_and_lets_it_go(
    streams: RecordingStreams, ctx: CommContext
) -> None:
    log: list[str] = []
    group: Any = object()
    first = FakeReduction("first", log, stream=ctx.all_reduce_stream)
    submit(ctx, first, group=group)
    submit(ctx, FakeReduction("other", log, stream=ctx.all_reduce_stream))
    submit(ctx, FakeReduction("on its own", log, stream=ctx.reduce_stream), group=group)
    ctx.make_room()
    assert streams.log == [], "neither another group's nor one whose output is used on the reduce stream alone"
    alive = weakref.ref(first)
    del first
    assert alive() is not None
    submit(ctx, FakeReduction("second", log, stream=ctx.all_reduce_stream), group=group)
    assert streams.take_log() == ["current waits for end of first"]
    assert alive() is None
    submit(ctx, FakeReduction("third", log, stream=ctx.all_reduce_stream), group=group)
    assert streams.take_log() == ["current waits for end of second"]


def test_once_the_gradients_are_waited_for_a_reduction_waits_for_none(
    streams: RecordingStreams, ctx: CommContext
) -> None:
    group: Any = object()
    submit(ctx, FakeReduction("first", [], stream=ctx.all_reduce_stream), group=group)
    ctx.finish()
    streams.take_log()
    submit(ctx, FakeReduction("second", [], stream=ctx.all_reduce_stream), group=group)
    assert streams.log == []


@pytest.mark.parametrize("is_last", [True, False])
def test_without_streams_every_backward_hands_its_gradients_over(
    ctx_without_streams: CommContext, is_last: bool
) -> None:
    log: list[str] = []
    submit(ctx_without_streams, FakeReduction("a", log))
    ctx_without_streams.end_backward(is_last=is_last)
    assert log == ["complete a", "release a"]


def test_the_order_of_forwards_outlives_all_but_the_last_backward(ctx: CommContext) -> None:
    group: Any = object()
    ctx.post_forward_order.append(group)
    ctx.end_backward(is_last=False)
    assert ctx.post_forward_order == [group]
    ctx.end_backward(is_last=True)
    assert ctx.post_forward_order == []


def test_reset_abandons_what_is_in_flight(streams: RecordingStreams, ctx: CommContext) -> None:
    log: list[str] = []
    ctx.hold_gather(FakeGather(), "copy")
    submit(ctx, FakeReduction("a", log, stream="reduce"))
    ctx.post_forward_order.append(object())
    ctx.reset()
    assert log == ["complete a", "abandon a"]
    everything = [f"current waits for {stream}" for stream in ("copy-in", "gather", "reduce", "all-reduce")]
    assert streams.take_log() == [
        "copy-in waits for copy",
        "gather waits for copy",
        "current waits for end of a",
        *everything,
    ]
    assert ctx.post_forward_order == []
    ctx.end_backward(is_last=True)
    assert log == ["complete a", "abandon a"]
    assert streams.log == []
