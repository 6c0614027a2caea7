"""The clauses: what an implementation of the FSDP2 API does, one sentence each, as data.

One JSON file for each group, in the folder of the spec's version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

VERSION = "2026.12"
LEVELS = ("must", "should", "extension")


@dataclass(frozen=True)
class Clause:
    """``id`` is ``<group's three letters>-<number>``; ids are never reused. ``source`` says where the behaviour is
    taken from."""

    id: str
    group: str
    level: str
    sentence: str
    source: str

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"expected a level of {LEVELS} in clause {self.id}, but got {self.level!r}")


@cache
def clauses() -> Mapping[str, Clause]:
    """All clauses of the current version by id, group by group."""
    found: dict[str, Clause] = {}
    folder = resources.files(__name__).joinpath(VERSION)
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        content = json.loads(file.read_text(encoding="utf-8"))
        for entry in content["clauses"]:
            clause = Clause(group=content["group"], **entry)
            if clause.id in found:
                raise ValueError(f"expected each clause id once, but got {clause.id} again in {file.name}")
            found[clause.id] = clause
    return found
