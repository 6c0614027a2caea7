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
    taken from; ``api`` names the items of the API that the clause is about, for the table of those."""

    id: str
    group: str
    level: str
    sentence: str
    source: str
    api: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"expected a level of {LEVELS} in clause {self.id}, but got {self.level!r}")


def versions() -> list[str]:
    """The versions that come with the suite, oldest first."""
    return sorted(folder.name for folder in resources.files(__name__).iterdir() if folder.name[:1].isdigit())


@cache
def clauses(version: str = VERSION) -> Mapping[str, Clause]:
    """All clauses of a version by id, group by group. ValueError for a version that is not there."""
    if version not in versions():
        raise ValueError(f"expected a spec out of {', '.join(versions())}, but got {version!r}")
    found: dict[str, Clause] = {}
    folder = resources.files(__name__).joinpath(version)
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        content = json.loads(file.read_text(encoding="utf-8"))
        for entry in content["clauses"]:
            clause = Clause(group=content["group"], **{**entry, "api": tuple(entry.get("api", ()))})
            if clause.id in found:
                raise ValueError(f"expected each clause id once, but got {clause.id} again in {file.name}")
            found[clause.id] = clause
    return found
