"""All ranks of a world in one process: a thread per rank, and collectives that are meetings of those threads.

A rank's n-th collective over a group meets the n-th of every other member. Issuing never blocks: it leaves a copy of
its input. Waiting blocks until every copy is there and then computes the result, in rank order, so that the bits do not
depend on timing. Two things that hardware forgives or hides are errors here: members that meet with different
collectives, and an input that changed while it was in flight.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hpcompat.comm import ReduceOp

Array = np.ndarray[Any, np.dtype[Any]]
Result = TypeVar("Result")

# Far more than any model here computes between two collectives; only schedules that differ between ranks wait so long.
DEADLOCK_SECONDS = 30.0


class Call(NamedTuple):
    """One collective as its caller sees it. ``num_sent`` is the number of elements of the input."""

    name: str
    num_ranks: int
    num_sent: int
    dtype: str
    op: str | None = None


class RankLost(RuntimeError):
    """Another rank raised, so this collective can never complete."""


class Meeting:
    """One collective of one group, and what each member brought to it."""

    def __init__(self, num_members: int) -> None:
        self.num_members = num_members
        self.brought: dict[int, tuple[Call, Array]] = {}
        self.is_over = threading.Event()

    @property
    def is_full(self) -> bool:
        return len(self.brought) == self.num_members

    def inputs(self) -> list[Array]:
        """Wait for every member; what they brought, in rank order."""
        self.is_over.wait(DEADLOCK_SECONDS)
        calls = {index: call for index, (call, _) in self.brought.items()}
        if not self.is_full and self.is_over.is_set():
            raise RankLost("another rank raised before it came to this collective")
        if not self.is_full or len(set(calls.values())) > 1:
            raise RuntimeError(f"expected {self.num_members} ranks to issue the same collective, but got {calls}")
        return [self.brought[index][1] for index in range(self.num_members)]


class World:
    """``size`` ranks that exchange data. ``reductions`` are those its groups have, as a device's library might."""

    def __init__(self, size: int, *, reductions: frozenset[ReduceOp] = frozenset(ReduceOp)) -> None:
        self.size = size
        self.reductions = reductions
        # What ranks leave for one another beside their collectives: by ranks, key and rank.
        self.notes: dict[tuple[tuple[int, ...], str, int], str] = {}
        self._meetings: dict[Any, Meeting] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    def run(self, body: Callable[[Rank], Result]) -> list[Result]:
        """``body`` on every rank at once, and what each returned. What a rank raised of its own is raised here."""
        results: dict[int, Result] = {}
        errors: list[BaseException] = []

        def run_rank(rank: Rank) -> None:
            try:
                with rank:
                    results[rank.number] = body(rank)
            except BaseException as error:
                errors.append(error)
                self._close()

        threads = [threading.Thread(target=run_rank, args=(Rank(self, number),)) for number in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((error for error in errors if not isinstance(error, RankLost)), errors[0])
        return [results[number] for number in range(self.size)]

    def meet(self, group: Group, call: Call, data: Array) -> Meeting:
        """Bring ``data`` to this rank's next meeting of ``group``."""
        group.rank.num_meetings[group] += 1
        key = (group, group.rank.num_meetings[group])
        with self._lock:
            meeting = self._meetings.setdefault(key, Meeting(group.size))
            meeting.brought[group.index] = (call, data)
            if meeting.is_full or self._is_closed:
                meeting.is_over.set()
                del self._meetings[key]
        return meeting

    def _close(self) -> None:
        """A rank raised: let nobody wait for it, now or later."""
        with self._lock:
            self._is_closed = True
            for meeting in self._meetings.values():
                meeting.is_over.set()


class DryWorld(World):
    """``size`` ranks seen by one of them: the schedule and the sizes are real, and nothing is exchanged.

    Collectives give what they would if every rank had brought what this one brings.
    """

    def rank(self, number: int = 0) -> Rank:
        """The rank to look from; ``with`` makes it the current one."""
        return Rank(self, number)

    def meet(self, group: Group, call: Call, data: Array) -> Meeting:
        meeting = Meeting(group.size)
        meeting.brought = dict.fromkeys(range(group.size), (call, data))
        meeting.is_over.set()
        return meeting


@dataclass(eq=False)
class Rank:
    """One member of a world, and every collective that it issued."""

    world: World
    number: int
    calls: list[Call] = field(default_factory=list)
    num_meetings: Counter[Group] = field(default_factory=Counter)
    notes: dict[tuple[int, ...], WorldNotes] = field(default_factory=dict)

    def __enter__(self) -> Rank:
        _thread.rank = self
        return self

    def __exit__(self, *error: object) -> None:
        _thread.rank = None


_thread = threading.local()


def current_rank() -> Rank:
    """The rank that this thread is."""
    rank: Rank | None = getattr(_thread, "rank", None)
    if rank is None:
        raise RuntimeError(
            "expected to run on a rank, but got none; use World(n).run(...) or `with DryWorld(n).rank():`"
        )
    return rank


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, seen from one of them. Over the same ranks they are equal, unless labelled apart."""

    ranks: tuple[int, ...]
    rank: Rank = field(compare=False, repr=False)
    label: str = ""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        """This rank's place in the group."""
        return self.ranks.index(self.rank.number)

    def issue(self, call: Call, data: Array, *, output: Array, combine: Callable[[list[Array]], Array]) -> Work:
        """Start a collective that will fill ``output`` with what ``combine`` makes of everybody's ``data``."""
        self.rank.calls.append(call)
        sent = data.copy()
        meeting = self.rank.world.meet(self, call, sent)

        def complete() -> None:
            inputs = meeting.inputs()
            if not np.array_equal(data, sent, equal_nan=True):
                raise RuntimeError(f"expected the input of {call} to stay as it was until the end, but it changed")
            output[...] = combine(inputs)

        return Work(complete)


class WorldNotes:
    """Implements :class:`hpcompat.contract.scheduler.Notes`."""

    def __init__(self, ranks: tuple[int, ...], rank: Rank) -> None:
        self.num_contexts = self.num_unanswered = 0
        self.rank = rank.number
        self.others = [number for number in ranks if number != rank.number]
        self._ranks, self._notes = ranks, rank.world.notes

    def leave(self, key: str, note: str) -> None:
        self._notes[self._ranks, key, self.rank] = note

    def find(self, key: str, rank: int) -> str | None:
        return self._notes.get((self._ranks, key, rank))


def notes_of(ranks: tuple[int, ...], rank: Rank) -> WorldNotes | None:
    """A rank's; there are none where the other ranks are not real."""
    if len(ranks) == 1 or isinstance(rank.world, DryWorld):
        return None
    return rank.notes.setdefault(ranks, WorldNotes(ranks, rank))


class Work:
    """A collective in flight."""

    def __init__(self, complete: Callable[[], None]) -> None:
        self._complete: Callable[[], None] | None = complete

    def wait(self) -> None:
        """Complete it; once is enough, again does nothing."""
        complete, self._complete = self._complete, None
        if complete is not None:
            complete()
