"""Failures that somebody has decided to live with for a while, as data: a JSON file that the user brings.

    {"waivers": [{"case": ID, "reason": TEXT, "until": "2027-03-31"},
                 {"clause": ID, "reason": TEXT, "versions": {"torch": "<2.15"}, "implementations": ["torch-fsdp2"]}]}

``case`` or ``clause``, ``reason``, and ``until`` (the last day) or ``versions`` are required. Unlike an expected gap, a
waiver covers any failure, and it ends. One that is not needed is stale, and a stale waiver fails the run: it names
nothing, it has ended, or all that it covers passes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from hpcompat_conformance import spec
from hpcompat_conformance.case import Case
from hpcompat_conformance.expected import within
from hpcompat_conformance.results import Result, Run

WAIVABLE = frozenset({"fail", "error", "timeout"})


@dataclass(frozen=True)
class Waiver:
    """See the module."""

    reason: str
    case: str = ""
    clause: str = ""
    until: date | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    implementations: tuple[str, ...] = ()
    link: str = ""

    @property
    def name(self) -> str:
        """What it waives."""
        return f"case {self.case}" if self.case else f"clause {self.clause}"

    def covers(self, *, case: str, clause: str) -> bool:
        """Whether it is about that case."""
        return case == self.case or clause == self.clause

    def is_about(self, implementation: str, *, versions: Mapping[str, str]) -> bool:
        """Whether it concerns this implementation."""
        named = not self.implementations or implementation in self.implementations
        return named and all(name in versions for name in self.versions)

    def has_ended(self, *, today: date, versions: Mapping[str, str]) -> bool:
        """Whether its last day is over, or these versions are beyond it."""
        return (self.until is not None and today > self.until) or not within(self.versions, versions=versions)

    def applies(self, result: Result, *, implementation: str, versions: Mapping[str, str], today: date) -> bool:
        """Whether this bad result is waived."""
        covered = result.result in WAIVABLE and self.covers(case=result.id, clause=result.clause)
        about = self.is_about(implementation, versions=versions)
        return covered and about and not self.has_ended(today=today, versions=versions)


def load_waivers(path: Path) -> list[Waiver]:
    """The waivers in a file. ValueError for one that lacks something or has something unknown."""
    waivers = []
    for entry in json.loads(path.read_text(encoding="utf-8"))["waivers"]:
        unknown = set(entry) - set(Waiver.__dataclass_fields__)
        if unknown or not entry.get("reason") or ("case" in entry) == ("clause" in entry):
            raise ValueError(f"expected a reason and either a case or a clause in {path.name}, but got {entry!r}")
        if not (entry.get("until") or entry.get("versions")):
            raise ValueError(f"expected an end, by 'until' or 'versions', in {path.name}, but got {entry!r}")
        until = date.fromisoformat(entry["until"]) if entry.get("until") else None
        implementations = tuple(entry.get("implementations", ()))
        waivers.append(Waiver(**{**entry, "until": until, "implementations": implementations}))
    return waivers


def stale_waivers(
    waivers: Iterable[Waiver],
    *,
    runs: Sequence[Run],
    known: Sequence[Case],
    implementations: Sequence[str],
    today: date,
) -> list[str]:
    """One sentence for each waiver that these runs show to be stale. ``known`` are all cases of the suite and
    ``implementations`` all that can be named, whether or not they were run."""
    found = []
    for waiver in waivers:
        why = _why_stale(waiver, runs=runs, known=known, implementations=implementations, today=today)
        if why:
            found.append(f"expected waivers that are needed, but that of {waiver.name} {why}: remove it")
    return found


def _why_stale(
    waiver: Waiver, *, runs: Sequence[Run], known: Sequence[Case], implementations: Sequence[str], today: date
) -> str:
    covered = {(case.id, n) for case in known if waiver.covers(case=case.id, clause=case.clause) for n in case.procs}
    if not covered and waiver.clause not in spec.clauses():
        return "names nothing"
    strangers = [name for name in waiver.implementations if name not in implementations]
    if strangers:
        return f"names no implementation with {strangers[0]!r}"
    if waiver.until is not None and today > waiver.until:
        return f"has ended on {waiver.until}"
    concerned = [run for run in runs if waiver.is_about(run.implementation, versions=run.versions)]
    ended = [run for run in concerned if waiver.has_ended(today=today, versions=run.versions)]
    if ended:
        return f"has ended with the versions of {ended[0].implementation}"
    seen = [result for run in concerned for result in run.results if (result.id, result.procs) in covered]
    # On a part of the numbers of processes, or with a part of the cases, nothing is known about the rest.
    complete = bool(concerned) and covered <= {(result.id, result.procs) for result in seen}
    if complete and not any(result.result == "waived" for result in seen):
        return "covers nothing that fails"
    return ""
