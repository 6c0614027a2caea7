"""Marks on objects of a framework that its copies do not take over.

Attributes travel: to every copy and clone, and into files. A weak table beside the objects will not do, since torch
refuses to swap tensors that have weak references (``to_empty`` of a DTensor). So a mark says whom it is on.
"""

from __future__ import annotations

from typing import Any


def mark(owner: Any, name: str, value: object) -> None:
    """Put ``value`` on ``owner``."""
    setattr(owner, name, (id(owner), value))


def mark_of(owner: Any, name: str) -> Any:
    """The value of the mark ``name``; ``None`` if there is none, or only one that was copied along."""
    found = getattr(owner, name, None)
    return found[1] if isinstance(found, tuple) and found[0] == id(owner) else None
