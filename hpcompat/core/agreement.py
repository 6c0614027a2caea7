"""Ranks that reduce different gradients: found before anything of it is added up (RED-11).

[Note: departures]
Every rank has to reduce the same gradients of a unit. Ranks that do not would add up gradients of different parameters
where the lengths happen to agree, and end in an abort or a hang where they do not. No rank sees that alone, and asking
before every reduction would cost a collective each. But a rank knows when it departs from what it did before: when
other parameters of a param group are without a gradient than at its last reduction (at first: none). Such a rank leaves
a note for the others, outside of the collectives, and waits for theirs. They either depart too, or are in that
reduction already; whoever waits in a collective for ``PATIENCE_SECONDS`` leaves a note as well. Ranks whose notes agree
go on. Else those that depart first take part in what the others have begun, with zeros, so that nobody is left waiting;
then all of them raise. As long as nothing changes, nothing is sent. Every rank reads the notes of all others, so groups
of more than ``MAX_RANKS`` are left alone.

[Note: no answer]
A rank that is late, or has failed and does not catch up, leaves no note. So nobody waits for longer than
``ANSWER_SECONDS``: then the reduction begins as if the others had agreed, and the notes that have come meanwhile are
looked at when it ends. Where that has happened ``MAX_UNANSWERED`` times, the group is left alone from then on.

[Note: places]
Notes belong together if they are about one place in the order of collectives: so many collectives of one comm context
after its first, and so many steps since that one, as a backward without gradients reduces nothing: of the same param
group, or while debugging, when ranks may differ in the unit, of any. A rank that failed and repeats its step comes to a
place again, and is not counted twice there; ranks that failed in different moments still find each other.

[Note: debugging]
With ``HPCOMPAT_DEBUG=1`` in the environment every gather and every reduction counts as a departure, in groups of any
size. That also finds ranks that run different units, before they exchange anything, and costs a round of notes for each
collective.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from hpcompat.contract.backend import Backend
    from hpcompat.contract.scheduler import Notes
    from hpcompat.mesh import DataParallelMeshInfo

is_debugging = os.environ.get("HPCOMPAT_DEBUG") == "1"
MAX_RANKS = 32
PATIENCE_SECONDS = 2.0
# [Note: no answer] More than it takes a rank that waits to lose patience.
ANSWER_SECONDS = 10.0
MAX_UNANSWERED = 2
# While debugging. As long as a collective waits by default: the others may be that far behind.
DEADLINE_SECONDS = 1800.0
_SLEEP_SECONDS = (0.0005, 0.05)


# What this process has promised lately; the last ones may be pending.
_recent: deque[Pledge] = deque(maxlen=64)


class Step(NamedTuple):
    """What one rank does at one place in the order of collectives."""

    verb: str
    unit: str
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        lacks = f" without {', '.join(self.missing)}" if self.missing else ""
        return f"{self.verb} {self.unit or 'the root'!r}{lacks}"


class Place(NamedTuple):
    """[Note: places]"""

    context: int
    num_issued: int
    # Number since that collective, after the group whose step it is unless we are debugging.
    step: str

    def __str__(self) -> str:
        return f"{self.context}/{self.num_issued}/{self.step}"


class Pledge:
    """One step of this rank and the place where notes about it are found."""

    __slots__ = ("_is_left", "_is_settled", "_notes", "place", "step")

    def __init__(self, step: Step, notes: Notes, place: Place) -> None:
        self.step, self.place = step, place
        self._notes = notes
        self._is_left = self._is_settled = False
        _recent.append(self)

    def leave(self, *, is_issued: bool) -> None:
        """Say what this rank does. ``is_issued``: it has begun, and waits in the collective."""
        self._is_left = True
        self._notes.leave(str(self.place), json.dumps([*self.step, is_issued]))

    def leave_if_pending(self) -> None:
        """Say that this rank has begun, unless it is through or has said what it does."""
        if not self._is_left and not self._is_settled:
            self.leave(is_issued=True)

    def settle(self) -> None:
        """After the collective: raise if this rank had to leave a note, and another's is different."""
        self._is_settled = True
        if self._is_left:
            notes = {rank: self._notes.find(str(self.place), rank) for rank in self._notes.others}
            found = {rank: _read(note) for rank, note in notes.items() if note is not None}
            check(self.step, {**found, self._notes.rank: (self.step, True)})

    def forget(self, numbers: Mapping[Notes, int]) -> None:
        """If the step is one of the comm context with these ``numbers``: it is not under way any more."""
        if numbers.get(self._notes) == self.place.context:
            self._is_settled = True

    def answers(self) -> dict[int, tuple[Step, bool]]:
        """The steps of all ranks, and whether they have begun; without those that do not answer in time.

        Raises:
            RuntimeError: one does not, while debugging.
        """
        seconds = DEADLINE_SECONDS if is_debugging else ANSWER_SECONDS
        until = time.monotonic() + seconds
        answers = {rank: self._wait_for(rank, until) for rank in self._notes.others}
        missing = [rank for rank, answer in answers.items() if answer is None]
        if missing and is_debugging:
            raise RuntimeError(
                f"expected {_ranks(missing)} {self.step} as well, but got no answer for {seconds:g} s: it has ended, "
                "is in another collective, or is that far behind"
            )
        if missing:
            self._notes.num_unanswered += 1
            self.leave(is_issued=True)
        found = {rank: answer for rank, answer in answers.items() if answer is not None}
        return {**found, self._notes.rank: (self.step, False)}

    def _wait_for(self, rank: int, until: float) -> tuple[Step, bool] | None:
        pause, longest = _SLEEP_SECONDS
        while True:
            note = self._notes.find(str(self.place), rank)
            if note is not None:
                return _read(note)
            if time.monotonic() > until:
                return None
            time.sleep(pause)
            pause = min(2 * pause, longest)


def _read(note: str) -> tuple[Step, bool]:
    verb, unit, missing, is_issued = json.loads(note)
    return Step(verb, unit, tuple(missing)), is_issued


def check(step: Step, found: dict[int, tuple[Step, bool]]) -> None:
    """
    Raises:
        RuntimeError: another rank does something else.
    """
    if all(other == step for other, _ in found.values()):
        return
    steps: dict[Step, list[int]] = {}
    for rank, (other, _) in sorted(found.items()):
        steps.setdefault(other, []).append(rank)
    told = "; ".join(f"{_ranks(ranks)} {other}" for other, ranks in steps.items())
    raise RuntimeError(
        f"expected all ranks to do the same, but got: {told}. For parameters that only some ranks use, call "
        "set_reduce_scatter_unused_params(True) on the wrapped module: they count as zero then. Ranks that run "
        "different modules have to run them all, for example by adding 0 * output.sum() to the loss"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}:"


class CollectiveOrder(Protocol):
    """The order of collectives, kept by a comm context."""

    # Its number among those of a group of ranks, and the pledges since the last collective, by what they count for.
    numbers: dict[Notes, int]
    num_pledges: Counter[str]

    @property
    def num_issued(self) -> int: ...
    @property
    def takes_part(self) -> bool: ...
    def finish(self) -> None: ...


class AgreeingGroup(Protocol):
    """A param group, as far as its agreement asks it."""

    fqn: str
    index: int
    all_reduce_grads: bool

    @property
    def mesh_info(self) -> DataParallelMeshInfo: ...
    @property
    def comm_ctx(self) -> CollectiveOrder: ...
    def reduce_zeros(self, missing: tuple[str, ...]) -> None: ...


class Agreement:
    """What one param group knows about its steps so far. [Note: departures]"""

    def __init__(self, group: AgreeingGroup, backend: Backend) -> None:
        self._group, self._backend = group, backend
        # By whether the replicas take part: without them each may have gradients of its own.
        self._missing_before: dict[bool, tuple[str, ...]] = {False: (), True: ()}
        self._notes: dict[bool, Notes | None] = {}

    def before_gather(self) -> None:
        """[Note: debugging]"""
        pledge = self._pledge(Step("gather", self._group.fqn), with_replicas=False)
        if pledge is not None:
            pledge.leave(is_issued=False)
            check(pledge.step, pledge.answers())

    def before_reduction(self, missing: tuple[str, ...]) -> Pledge | None:
        """``missing`` are the trainable parameters that the reduction leaves out; it may have nothing left.

        Raises:
            RuntimeError: another rank reduces other gradients.
        """
        group = self._group
        with_replicas = group.all_reduce_grads
        pledge = self._pledge(Step("reduce", group.fqn, missing), with_replicas=with_replicas)
        if pledge is not None and (is_debugging or missing != self._missing_before[with_replicas]):
            # Others may wait in an earlier reduction for this rank to finish its part of it.
            group.comm_ctx.finish()
            pledge.leave(is_issued=False)
            found = pledge.answers()
            try:
                check(pledge.step, found)
            except RuntimeError:
                self._join(found)
                raise
            self._missing_before[with_replicas] = missing
        return pledge

    def _pledge(self, step: Step, *, with_replicas: bool) -> Pledge | None:
        ctx = self._group.comm_ctx
        if not ctx.takes_part:
            return None
        if with_replicas not in self._notes:
            self._notes[with_replicas] = self._backend.notes(self._group.mesh_info, with_replicas=with_replicas)
        notes = self._notes[with_replicas]
        if notes is None:
            return None
        if not is_debugging and (len(notes.others) >= MAX_RANKS or notes.num_unanswered >= MAX_UNANSWERED):
            return None
        return Pledge(step, notes, self._place(ctx, notes))

    def _place(self, ctx: CollectiveOrder, notes: Notes) -> Place:
        """[Note: places]"""
        if notes not in ctx.numbers:
            ctx.numbers[notes] = notes.num_contexts
            notes.num_contexts += 1
        counted = "" if is_debugging else f"{self._group.fqn}.{self._group.index}."
        ctx.num_pledges[counted] += 1
        return Place(ctx.numbers[notes], ctx.num_issued, f"{counted}{ctx.num_pledges[counted]}")

    def _join(self, found: dict[int, tuple[Step, bool]]) -> None:
        """Take part with zeros in the reduction that other ranks have begun, if it is one of this group's."""
        begun = {step for step, is_issued in found.values() if is_issued}
        if len(begun) == 1:
            (step,) = begun
            if (step.verb, step.unit) == ("reduce", self._group.fqn):
                self._group.reduce_zeros(step.missing)


# Waiting in a collective

_waiting: dict[int, float] = {}
_watchman: list[threading.Thread] = []


def wait(work: Any) -> None:
    """``work.wait()``, which no thread can interrupt; meanwhile another one leaves the notes."""
    if not _watchman:
        _watchman.append(threading.Thread(target=_watch, name="hpcompat-agreement", daemon=True))
        _watchman[0].start()
    thread = threading.get_ident()
    _waiting[thread] = time.monotonic()
    try:
        work.wait()
    finally:
        del _waiting[thread]


def lose_patience() -> None:
    """Leave notes for all that this process has begun: whoever it waits for may itself wait for another rank, in a
    later step.
    """
    for pledge in tuple(_recent):
        pledge.leave_if_pending()


def forget(ctx: CollectiveOrder) -> None:
    """After a reset: leave no more notes about what this rank had begun, and count its steps anew."""
    if not is_debugging:
        ctx.num_pledges.clear()
    for pledge in tuple(_recent):
        pledge.forget(ctx.numbers)


def _watch() -> None:
    while True:
        time.sleep(PATIENCE_SECONDS / 2)
        now = time.monotonic()
        if any(now - since > PATIENCE_SECONDS for since in tuple(_waiting.values())):
            lose_patience()
