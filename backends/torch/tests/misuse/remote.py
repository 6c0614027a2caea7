"""Runs a row on one rank of several."""

from __future__ import annotations

from misuse.row import Raised, attempt
from misuse.table import BY_ID


def provoke(*, row: str, api: str) -> Raised | None:
    """What the row's mistake raises with the API of that module name."""
    return attempt(BY_ID[row].provoke, api=api)
