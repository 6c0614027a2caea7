"""How a job on a pool can fail. Every one of them says what each rank did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RemoteError:
    """An exception on a rank, as text: the exception itself may not survive the way between processes."""

    kind: str
    message: str
    traceback: str
    bases: tuple[str, ...] = ()

    def is_a(self, name: str) -> bool:
        """Whether the exception's class, or one it derives from, is called ``name``."""
        return name in self.bases


class PoolError(Exception):
    """Any failure of a job that a pool ran."""


class LaunchFailed(PoolError, RuntimeError):
    """The processes could not be started."""


class JobFailed(PoolError):
    """At least one rank raised. ``errors`` maps its rank to the exception, in the order in which they came in."""

    def __init__(self, text: str, *, errors: Mapping[int, RemoteError]) -> None:
        super().__init__(text)
        self.errors = dict(errors)

    @property
    def first(self) -> RemoteError:
        """The exception that came in first; the others are often its consequence."""
        return next(iter(self.errors.values()))


class JobTimeout(PoolError, TimeoutError):
    """The deadline passed. ``stacks`` maps each rank that had not answered to its Python stacks at that time."""

    def __init__(self, text: str, *, stacks: Mapping[int, str]) -> None:
        super().__init__(text)
        self.stacks = dict(stacks)


class WorkerDied(PoolError, RuntimeError):
    """A worker process ended during a job. ``exit_codes`` maps its rank to the exit code (negative: a signal)."""

    def __init__(self, text: str, *, exit_codes: Mapping[int, int | None]) -> None:
        super().__init__(text)
        self.exit_codes = dict(exit_codes)


class RanksDiverged(PoolError, RuntimeError):
    """Every rank answered, but not from the same place: one issued a collective that another did not."""
