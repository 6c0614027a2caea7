"""How the processes of a pool are started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpcompat_conformance.process import ChildWorker, Worker


class Launcher(Protocol):
    """Compared and hashed by value: pools with equal launchers are the same pool."""

    def missing(self) -> list[str]:
        """What it needs and is not installed."""

    def launch(self, world_size: int, *, scratch: Path, path: Sequence[str]) -> Sequence[Worker]:
        """The processes of all ranks, in order, ready for their set-up. ``scratch`` is an empty directory, ``path``
        what they shall import from. Raises LaunchFailed, with nothing left running."""


@dataclass(frozen=True)
class Subprocesses:
    """Children of this process, which find each other by whatever their set-up does."""

    def missing(self) -> list[str]:
        return []

    def launch(self, world_size: int, *, scratch: Path, path: Sequence[str]) -> Sequence[Worker]:
        return [ChildWorker(rank, world_size=world_size, scratch=scratch, path=path) for rank in range(world_size)]


SUBPROCESSES = Subprocesses()
