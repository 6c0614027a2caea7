"""One row of the table, and how it is provoked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Provoke = Callable[[Any], object]


@dataclass(frozen=True)
class Misuse:
    """A mistake and its error.

    ``provoke`` makes the mistake with the names of an API: hpcompat, or ``torch.distributed.fsdp`` where ``native`` is
    set. The error must be an instance of each of ``types``. ``message`` is a regular expression for what the error
    names (the parameter, axis or argument) and what came; ``advice`` one for what to do about it. ``clause`` is the
    clause of FSDP2's behaviour, or the public report, that asks for the error. ``native`` is the class that native
    FSDP2 raises for the same calls; it must be one of ``types``, so that code which catches native's error catches
    ours. ``gap`` says what happens instead as long as the error is not as it should be.
    """

    id: str
    provoke: Provoke
    types: tuple[type[Exception], ...]
    message: str
    advice: str
    clause: str
    native: type[Exception] | None = None
    world_size: int = 1
    gap: str = ""


@dataclass(frozen=True)
class Raised:
    """An error as it left the API; survives the way between processes."""

    bases: tuple[str, ...]
    message: str

    def is_a(self, kind: type[Exception]) -> bool:
        return qualified(kind) in self.bases


def qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def attempt(provoke: Provoke, api: Any) -> Raised | None:
    """What ``provoke`` raises; ``None`` if nothing."""
    try:
        provoke(api)
    except Exception as error:
        return Raised(tuple(qualified(base) for base in type(error).__mro__), str(error))
    return None
