"""Notes that ranks leave for one another, in the store through which they found together."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from hpcompat_torch import private

# Older ones have been read by all who wait for them: nobody comes that far ahead of the others.
_NUM_KEPT = 64


class StoreNotes:
    """Implements :class:`hpcompat.contract.scheduler.Notes`."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.num_contexts = self.num_unanswered = 0
        self.rank = dist.get_rank()
        self.others = [rank for rank in ranks if rank != self.rank]
        self._prefix = f"hpcompat/{','.join(map(str, ranks))}"
        self._store = private.default_store()
        self._left: deque[str] = deque()

    def leave(self, key: str, note: str) -> None:
        path = self._path(key, self.rank)
        self._store.set(path, note)
        if path not in self._left:
            self._left.append(path)
        if len(self._left) > _NUM_KEPT:
            self._store.delete_key(self._left.popleft())

    def find(self, key: str, rank: int) -> str | None:
        path = self._path(key, rank)
        return self._store.get(path).decode() if self._store.check([path]) else None

    def _path(self, key: str, rank: int) -> str:
        return f"{self._prefix}/{key}/{rank}"


_notes: dict[tuple[Any, tuple[int, ...]], StoreNotes] = {}


def notes_of(ranks: tuple[int, ...]) -> StoreNotes | None:
    world = dist.group.WORLD
    if len(ranks) == 1 or dist.get_backend(world) == "fake":
        return None
    key = (world, ranks)
    if key not in _notes:
        _notes[key] = StoreNotes(ranks)
    return _notes[key]
