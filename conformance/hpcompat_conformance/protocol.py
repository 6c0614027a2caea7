"""What goes through the pipe between a pool and its workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcompat_conformance.failures import RemoteError
from hpcompat_conformance.reference import Reference


@dataclass(frozen=True)
class Job:
    """``kwargs`` is a pickle of its own, read after ``target`` has been imported. ``path`` is the caller's sys.path."""

    target: Reference
    kwargs: bytes
    deadline: float
    path: tuple[str, ...]


@dataclass
class Reply:
    """``value`` is a pickle, or ``error`` is set. ``positions`` says, by the name of a group, how many collectives this
    rank has issued on it."""

    value: bytes | None = None
    error: RemoteError | None = None
    positions: dict[str, int] = field(default_factory=dict)
