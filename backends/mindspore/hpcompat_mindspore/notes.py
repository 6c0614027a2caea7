"""Notes that ranks leave for one another, as MPI messages beside the collectives. On Ascend there are none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcompat_mindspore.job import world
from hpcompat_mindspore.mpi import MPICommunicator

_TAG = 1717
# Nobody waits for an answer about an older step.
_NUM_KEPT = 64
Ranks = tuple[int, ...]
# By who shares them, key and sender: what has arrived.
_inbox: dict[tuple[Ranks, str, int], str] = {}


class MPINotes:
    """Implements :class:`hpcompat.contract.scheduler.Notes`."""

    def __init__(self, comm: Any, ranks: Ranks) -> None:
        self.num_contexts = self.num_unanswered = 0
        self.rank = int(comm.rank)
        self.others: Sequence[int] = [rank for rank in ranks if rank != self.rank]
        self._comm, self._ranks = comm, ranks
        self._sent: list[Any] = []

    def leave(self, key: str, note: str) -> None:
        self._sent = [request for request in self._sent if not request.Test()]
        self._sent += [self._comm.isend((self._ranks, key, note), dest=rank, tag=_TAG) for rank in self.others]
        num_old = len(_inbox) - _NUM_KEPT * int(self._comm.size)
        for old in tuple(_inbox)[: max(0, num_old)]:
            del _inbox[old]

    def find(self, key: str, rank: int) -> str | None:
        while self._comm.iprobe(tag=_TAG):
            self._receive()
        return _inbox.get((self._ranks, key, rank))

    def _receive(self) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        ranks, key, note = self._comm.recv(tag=_TAG, status=status)
        _inbox[ranks, key, status.Get_source()] = note


_notes: dict[Ranks, MPINotes] = {}


def notes_of(ranks: Ranks) -> MPINotes | None:
    everyone = world()
    if len(ranks) == 1 or not isinstance(everyone, MPICommunicator):
        return None
    if ranks not in _notes:
        _notes[ranks] = MPINotes(everyone.messages, ranks)
    return _notes[ranks]
