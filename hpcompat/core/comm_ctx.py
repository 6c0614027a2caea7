"""Communication state that the units of a tree share: streams, reductions in flight, order of forwards.

[Note: two ways to overlap]
A device with streams runs collectives and their division, cast and hand-over on side streams: a reduction is completed
(that is, enqueued whole) as soon as it is submitted, and the current stream waits for its last event at the end of
backward. A device without streams (CPU) has only work objects. There a collective is issued without waiting, and the
rest of the reduction runs when its turn comes: at the latest ``max_input_buffers`` reductions later or at the end of
backward. Either way the collectives are issued in the same order, and gradients are added to a parameter in the same
order.

[Note: held gather]
In forward with streams, the buffer of the last gather is held until the next gather has been copied out, so that this
copy overlaps the next collective without both using one block of memory.

[Note: kept outputs]
A reduction's output is allocated on the reduce stream. Where an all-reduce or a hook then uses it on another stream,
dropping it would let the next reduction write into it too early, so it is kept until the end of the last backward or
the group's next reduction, and is waited for there.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from hpcompat.core.states import TrainingState

if TYPE_CHECKING:
    from hpcompat.backend import Gather, Reduction, Stream, Streams
    from hpcompat.core.param_group import ParamGroup


class NullStream:
    """A stream of a device that has none: everything has already happened."""

    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def record_event(self) -> None: ...


NULL_STREAM = NullStream()


class NullStreams:
    """The streams of a device that has none."""

    available = False

    def current(self) -> NullStream:
        return NULL_STREAM

    def create(self, *, high_priority: bool) -> NullStream:
        return NULL_STREAM


class CommContext:
    """Shared by the units of one root, and by several roots after ``share_comm_ctx``."""

    def __init__(self) -> None:
        self.streams: Streams = NullStreams()
        self.copy_in_stream: Stream = NULL_STREAM
        self.gather_stream: Stream = NULL_STREAM
        self.reduce_stream: Stream = NULL_STREAM
        self.all_reduce_stream: Stream = NULL_STREAM
        self.has_streams = False
        self.max_input_buffers = 1
        # One entry per forward of a group, in order; backward prefetch walks it from the end.
        self.post_forward_order: list[ParamGroup] = []
        self._is_initialized = False
        self._held_gather: tuple[Gather, Any] | None = None
        self._reductions: deque[Reduction] = deque()
        self._post_reduce_events: dict[Any, Any] = {}
        # [Note: kept outputs]
        self._kept: dict[ParamGroup, Reduction] = {}

    def lazy_init(self, streams: Streams) -> None:
        if self._is_initialized:
            return
        self._is_initialized = True
        self.streams = streams
        self.has_streams = streams.available
        # Copies and collectives start as soon as they can: they are what computation waits for.
        self.copy_in_stream = streams.create(high_priority=True)
        self.gather_stream = streams.create(high_priority=True)
        self.reduce_stream = streams.create(high_priority=True)
        self.all_reduce_stream = streams.create(high_priority=False)

    # Gathers

    def gather_streams(self, *, async_op: bool, state: TrainingState) -> tuple[Stream, Stream]:
        """Streams for copy-in and collective: the side streams for implicit gathers, else the current one."""
        if not async_op and state in (TrainingState.FORWARD, TrainingState.PRE_BACKWARD):
            return self.copy_in_stream, self.gather_stream
        current = self.streams.current()
        return current, current

    def make_gathers_wait(self, event: Any) -> None:
        self.copy_in_stream.wait_event(event)
        self.gather_stream.wait_event(event)

    def make_gathers_follow_current_stream(self) -> None:
        current = self.streams.current()
        self.copy_in_stream.wait_stream(current)
        self.gather_stream.wait_stream(current)

    def hold_gather(self, gather: Gather, event: Any) -> None:
        self._held_gather = (gather, event)

    def release_held_gather(self) -> None:
        if self._held_gather is not None:
            self.make_gathers_wait(self._held_gather[1])
            self._held_gather = None

    # Reductions

    def submit(self, group: ParamGroup, reduction: Reduction) -> None:
        """Queue a reduction of ``group`` whose collective has been issued."""
        self._reductions.append(reduction)
        if self.has_streams:
            reduction.complete()
            self._post_reduce_events[reduction.post_stream] = reduction.post_event
            if reduction.post_stream is not self.reduce_stream:
                self._keep(group, reduction)

    def make_room(self) -> None:
        """Retire the oldest reductions until one more may keep its input."""
        while len(self._reductions) >= self.max_input_buffers:
            self._retire(self._reductions.popleft())

    def finish(self) -> None:
        """End of backward: every gradient is on its shard when the current stream (or the caller) goes on."""
        while self._reductions:
            self._retire(self._reductions.popleft())
        self._wait_for_post_reduce_events()

    def end_backward(self, *, is_last: bool) -> None:
        # Without streams the hand-over is work of this thread: left undone, .grad would be missing.
        if is_last or not self.has_streams:
            self.finish()
        if is_last:
            self.post_forward_order.clear()

    def reset(self) -> None:
        """After an exception: wait for what is in flight and forget it."""
        self.release_held_gather()
        while self._reductions:
            self._reductions.popleft().abandon()
        self._wait_for_post_reduce_events()
        self.post_forward_order.clear()

    def _keep(self, group: ParamGroup, reduction: Reduction) -> None:
        """[Note: kept outputs]"""
        previous = self._kept.get(group)
        if previous is not None:
            self.streams.current().wait_event(previous.post_event)
        self._kept[group] = reduction

    def _retire(self, reduction: Reduction) -> None:
        reduction.complete()
        reduction.release_input()

    def _wait_for_post_reduce_events(self) -> None:
        if self._post_reduce_events:
            current = self.streams.current()
            for event in self._post_reduce_events.values():
                current.wait_event(event)
            self._post_reduce_events.clear()
        self._kept.clear()
