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

[Note: catching up]
Ranks meet in collectives in the order in which they issue them. A rank that failed in the middle of a step has issued
the first of them and owes the others the rest. So it runs the step once more, on anything that passes the same
collectives: those it has taken part in already give zeros without communication, the rest are real. What comes out is
worth nothing and is dropped by all ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from hpcompat.contract.states import TrainingState
from hpcompat.core import agreement, events

if TYPE_CHECKING:
    from hpcompat.contract.scheduler import Gather, Notes, Reduction, Stream, Streams


class ReducingGroup(Protocol):
    """A param group, as far as the context looks into it."""

    @property
    def reduction_name(self) -> str:
        """Of the collective that ends a reduction; empty where nothing travels."""
        ...


Group = TypeVar("Group", bound=ReducingGroup)


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


class CommContext(Generic[Group]):
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
        self.post_forward_order: list[Group] = []
        # [Note: catching up] How many collectives were issued, and the most that this rank has taken part in.
        self._num_issued = 0
        self._num_taken_part = 0
        # For hpcompat.core.agreement: its number among those of a group of ranks, and the pledges since the last
        # collective, by what they are counted for.
        self.numbers: dict[Notes, int] = {}
        self.num_pledges: Counter[str] = Counter()
        # For [Note: last words].
        self.last_begun: tuple[str, Group] | None = None
        self._is_initialized = False
        self._held_gather: tuple[Gather, Any] | None = None
        self._reductions: deque[tuple[Group, Reduction]] = deque()
        self._post_reduce_events: dict[Any, Any] = {}
        # [Note: kept outputs]
        self._kept: dict[Group, Reduction] = {}

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

    # Order of collectives

    @property
    def num_issued(self) -> int:
        """Gathers and reductions so far. The same on all ranks whenever they have come equally far."""
        return self._num_issued

    @property
    def takes_part(self) -> bool:
        """Whether the next collective is a real one. [Note: catching up]"""
        return self._num_issued == self._num_taken_part

    def count_issued(self, group: Group, collective: str) -> None:
        if collective:
            self.last_begun = (collective, group)
        if self._num_issued == self._num_taken_part:
            self._num_taken_part += 1
        self._num_issued += 1
        self.num_pledges.clear()

    @contextmanager
    def catching_up(self, start: int) -> Iterator[None]:
        """Repeat what was issued after the first ``start`` collectives. [Note: catching up]"""
        if not 0 <= start <= self._num_taken_part:
            raise ValueError(
                f"expected where a step of this model began, between 0 and {self._num_taken_part}, but got {start!r}; "
                "pass what begin_step returned"
            )
        self._num_issued = start
        self.num_pledges.clear()
        try:
            yield
            if self._num_issued < self._num_taken_part:
                raise RuntimeError(
                    f"expected to issue the {self._num_taken_part - start} collectives again that this rank had "
                    f"issued before it failed, but got {self._num_issued - start}; run the whole step, with as many "
                    "microbatches, in the same way"
                )
        finally:
            self._num_issued = self._num_taken_part

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

    def submit(self, group: Group, reduction: Reduction) -> None:
        """Queue a reduction of ``group`` whose collective has been issued."""
        if events.observers:
            events.observe("reduce_issued", group, reduction=reduction)
        self._reductions.append((group, reduction))
        if self.has_streams:
            reduction.complete()
            self._post_reduce_events[reduction.post_stream] = reduction.post_event
            if reduction.post_stream is not self.reduce_stream:
                self._keep(group, reduction)

    def make_room(self) -> None:
        """Retire the oldest reductions until one more may keep its input."""
        while len(self._reductions) >= self.max_input_buffers:
            self._retire(*self._reductions.popleft())

    def finish(self) -> None:
        """End of backward: every gradient is on its shard when the current stream (or the caller) goes on."""
        while self._reductions:
            self._retire(*self._reductions.popleft())
        self._wait_for_post_reduce_events()

    def pending(self) -> list[tuple[str, Group]]:
        """The reductions in flight."""
        return [(group.reduction_name, group) for group, _ in self._reductions if group.reduction_name]

    def end_backward(self, *, is_last: bool) -> None:
        # Without streams the hand-over is work of this thread: left undone, .grad would be missing.
        if is_last or not self.has_streams:
            self.finish()
        if is_last:
            self.post_forward_order.clear()

    def reset(self) -> None:
        """After an exception: wait for what is in flight and forget it."""
        self.post_forward_order.clear()
        self.release_held_gather()
        while self._reductions:
            group, reduction = self._reductions.popleft()
            reduction.abandon()
            if events.observers:
                events.observe("reduce_abandoned", group, reduction=reduction)
        agreement.forget(self)
        self._wait_for_post_reduce_events()
        if self.has_streams:
            # What was launched just before the exception may be on no list yet.
            current = self.streams.current()
            for stream in (self.copy_in_stream, self.gather_stream, self.reduce_stream, self.all_reduce_stream):
                current.wait_stream(stream)

    def _keep(self, group: Group, reduction: Reduction) -> None:
        """[Note: kept outputs]"""
        previous = self._kept.get(group)
        if previous is not None:
            self.streams.current().wait_event(previous.post_event)
        self._kept[group] = reduction

    def _retire(self, group: Group, reduction: Reduction) -> None:
        if events.observers:
            events.observe("reduce_wait", group, reduction=reduction)
        reduction.complete()
        reduction.release_input()
        if events.observers:
            events.observe("reduced", group, reduction=reduction)

    def _wait_for_post_reduce_events(self) -> None:
        if self._post_reduce_events:
            current = self.streams.current()
            for event in self._post_reduce_events.values():
                current.wait_event(event)
            self._post_reduce_events.clear()
        self._kept.clear()
