"""What a worker process knows about itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_current: WorkerContext | None = None


@dataclass(frozen=True)
class WorkerContext:
    """One rank of a pool. ``scratch`` is a directory that all ranks of this start of the pool share."""

    rank: int
    world_size: int
    scratch: Path


def current() -> WorkerContext:
    """The context of this worker process. RuntimeError in a process that no pool started."""
    if _current is None:
        raise RuntimeError("expected to run inside a worker of a WorkerPool, but this process is not one")
    return _current


def enter(context: WorkerContext) -> None:
    """Called once by the worker, before its set-up."""
    global _current
    _current = context
