"""Rank side: bugs planted on purpose, to prove that the comparisons can fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

Spoil = Callable[[int, nn.Module], None]


@contextmanager
def planted(name: str | None) -> Iterator[Spoil | None]:
    """Activate the bug of that name; yields the function to run between backward and optimizer, if it is such a bug."""
    if name is not None:
        raise ValueError(f"expected the name of a planted bug, but got {name!r}")
    yield None
