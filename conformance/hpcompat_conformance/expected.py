"""Gaps that are known and expected, as data: one JSON file for each implementation.

    {"implementation": NAME, "gaps": [{"case": ID, "procs": [2, 4], "versions": {"torch": "<2.14"}, "saying": TEXT,
                                       "reason": TEXT, "link": URL}]}

``reason`` and ``link`` are required. ``case`` may be a list of cases that fail alike. ``procs`` limits the gap to these
numbers of processes, ``versions`` to these versions of packages (specifiers of PEP 440): those on which it was seen, so
that a later one is looked at anew. ``saying`` is part of the failure's text, so that another failure of the case is not
taken for this one. ``"*"`` for a case means all that the entries before it do not name: for an implementation that does
not get as far as a case.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

FOLDER = Path(__file__).parent / "xfails"
ANY_CASE = "*"


@dataclass(frozen=True)
class Gap:
    """See the module."""

    case: str
    reason: str
    link: str
    procs: tuple[int, ...] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    saying: str = ""

    def applies(self, case: str, *, procs: int, versions: Mapping[str, str]) -> bool:
        """Whether this case on that many processes and these versions is expected to fail."""
        if self.case not in (case, ANY_CASE) or (self.procs is not None and procs not in self.procs):
            return False
        return within(self.versions, versions=versions)


def within(bounds: Mapping[str, str], *, versions: Mapping[str, str]) -> bool:
    """Whether all packages named are there, in versions that their bounds allow."""
    return all(
        name in versions and SpecifierSet(bound).contains(Version(versions[name]), prereleases=True)
        for name, bound in bounds.items()
    )


def load_gaps(path: Path, *, known_cases: Iterable[str]) -> list[Gap]:
    """The gaps in a file, one for each case of each entry. ValueError for a case that does not exist (such an entry is
    stale) and for a bound that is none."""
    known = {*known_cases, ANY_CASE}
    gaps = []
    for entry in json.loads(path.read_text(encoding="utf-8"))["gaps"]:
        procs: Sequence[int] | None = entry.get("procs")
        cases = [entry["case"]] if isinstance(entry["case"], str) else entry["case"]
        _check_bounds(entry.get("versions", {}), path=path)
        for case in cases:
            if case not in known:
                raise ValueError(f"expected {path.name} to name cases of the suite, but got {case!r}: remove the entry")
            gaps.append(Gap(**{**entry, "case": case, "procs": None if procs is None else tuple(procs)}))
    return gaps


def _check_bounds(bounds: Mapping[str, str], *, path: Path) -> None:
    for name, bound in bounds.items():
        try:
            SpecifierSet(bound)
        except InvalidSpecifier:
            raise ValueError(
                f"expected {path.name} to bound {name} by version specifiers such as '>=2.9,<2.15', but got {bound!r}"
            ) from None


def implementation_of(path: Path) -> str:
    """The implementation that a file is about."""
    return str(json.loads(path.read_text(encoding="utf-8"))["implementation"])


def default_path(implementation: str) -> Path | None:
    """The file that comes with the suite for this implementation, if there is one."""
    path = FOLDER / f"{implementation}.json"
    return path if path.exists() else None
