"""The table that all reports show: clause x implementation, and item of the API x implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from hpcompat_conformance import spec
from hpcompat_conformance.document import Document
from hpcompat_conformance.results import BY_SEVERITY, NOT_RUN, Result, Run, worst
from hpcompat_conformance.spec import Clause

MISSING = "missing"


@dataclass(frozen=True)
class Cell:
    """What an implementation does with a clause, or with an item of the API. ``state`` is a kind of result, the worst
    over cases and numbers of processes, or `NOT_RUN`, or for an item `MISSING`."""

    implementation: str
    state: str
    results: Sequence[Result]

    @property
    def num_passed(self) -> int:
        return sum(result.result == "pass" for result in self.results)

    @property
    def share(self) -> str:
        """How much of it passes, unless that is all or nothing is known: ``"2/6"``."""
        count = len(self.results)
        return f"{self.num_passed}/{count}" if self.num_passed < count else ""

    @property
    def is_partial(self) -> bool:
        """Whether the share says more than the state."""
        return bool(self.share) and self.state not in ("pass", MISSING)

    @property
    def worst_first(self) -> list[Result]:
        """The results as a reader wants them."""
        return sorted(self.results, key=lambda result: -BY_SEVERITY.index(result.result))

    @property
    def to_explain(self) -> list[Result]:
        """The results that are not simply good."""
        return [result for result in self.results if result.result != "pass"]

    @property
    def notes(self) -> list[str]:
        """Why, in a few words, each reason once."""
        return list(dict.fromkeys(result.reason or result.headline or result.message for result in self.to_explain))


@dataclass(frozen=True)
class Row:
    """A clause."""

    clause: Clause
    cells: Sequence[Cell]


@dataclass(frozen=True)
class Item:
    """A name of the API, with the clauses that are about it."""

    name: str
    clauses: Sequence[str]
    cells: Sequence[Cell]


@dataclass(frozen=True)
class Score:
    """How many clauses of a level pass, out of those that were run."""

    level: str
    passed: int
    total: int


def rows(document: Document) -> list[Row]:
    """All clauses of the spec, whether or not they were run."""
    return [
        Row(clause, [_cell(run, clauses=[identity]) for run in document.runs])
        for identity, clause in spec.clauses(document.spec).items()
    ]


def groups(document: Document) -> list[tuple[str, list[Row]]]:
    """`rows`, group by group."""
    return [(name, list(members)) for name, members in groupby(rows(document), key=lambda row: row.clause.group)]


def items(document: Document) -> list[Item]:
    """All items that clauses name, in alphabetical order."""
    clauses_of: dict[str, list[str]] = {}
    for clause in spec.clauses(document.spec).values():
        for name in clause.api:
            clauses_of.setdefault(name, []).append(clause.id)
    return [
        Item(name, clauses, [_item_cell(run, clauses=clauses) for run in document.runs])
        for name, clauses in sorted(clauses_of.items(), key=lambda entry: entry[0].lower())
    ]


def scores(document: Document, implementation: str) -> list[Score]:
    """For each level of which anything was run."""
    found = []
    for level in spec.LEVELS:
        states = [
            cell.state
            for row in rows(document)
            for cell in row.cells
            if row.clause.level == level and cell.implementation == implementation and cell.state != NOT_RUN
        ]
        if states:
            found.append(Score(level, states.count("pass"), len(states)))
    return found


def _cell(run: Run, *, clauses: Sequence[str]) -> Cell:
    results = [result for result in run.results if result.clause in clauses]
    return Cell(run.implementation, worst(results), results)


def _item_cell(run: Run, *, clauses: Sequence[str]) -> Cell:
    cell = _cell(run, clauses=clauses)
    # A case of the item may need something else, too: the item is missing only if nothing about it could be run.
    tried = [result for result in cell.results if result.result != "skip"]
    if cell.results and not tried:
        return Cell(run.implementation, MISSING, cell.results)
    return Cell(run.implementation, worst(tried), cell.results)
