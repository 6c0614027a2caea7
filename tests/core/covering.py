"""Fewer tests than a full product of settings, that still meet every pair or triple of choices.

    @pytest.mark.parametrize("combo", covering(product, settings_of, strength=3))

Most bugs need one or two settings to show, few need three. A design of strength three has, for every three settings and
every choice of each that go together, a case with those choices: a small part of the cases of the product.

[Note: three sizes] A case has the mark of the smallest run that needs it: none if it is in the design of one strength
less than asked for, ``thorough`` if it is in the design asked for, ``exhaustive`` if only the product has it. `tox.ini`
says which environment leaves out which marks, `pyproject.toml` what pytest leaves out by itself.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")
# What a case chooses of each setting, in the order of the settings.
Choices = tuple[Any, ...]


def covering(
    cases: Iterable[Case], choices_of: Callable[[Case], Choices], *, strength: int, id: Callable[[Case], str] = str
) -> list[Any]:
    """All cases as parameters of a test, each with its mark, see the note above."""
    product = list(cases)
    rows = [choices_of(case) for case in product]
    quick = set(design(rows, strength=strength - 1))
    default = set(design(rows, strength=strength, start=quick))

    def marks(index: int) -> list[pytest.MarkDecorator]:
        if index in quick:
            return []
        return [pytest.mark.thorough if index in default else pytest.mark.exhaustive]

    return [pytest.param(case, id=id(case), marks=marks(index)) for index, case in enumerate(product)]


def left_out(
    parameters: Iterable[Any], choices_of: Callable[[Case], Choices], *, strength: int, marks: Iterable[str]
) -> set[tuple[tuple[int, ...], Choices]]:
    """What all these parameters meet and those without any of the marks do not: positions of settings, and choices.

    For tests of a selection, so it shares nothing with how selections are made.
    """
    everything: set[tuple[tuple[int, ...], Choices]] = set()
    kept: set[tuple[tuple[int, ...], Choices]] = set()
    for parameter in parameters:
        row = choices_of(parameter.values[0])
        for columns in itertools.combinations(range(len(row)), strength):
            found = (columns, tuple(row[column] for column in columns))
            everything.add(found)
            if not any(mark.name in marks for mark in parameter.marks):
                kept.add(found)
    return everything - kept


def design(rows: Sequence[Choices], *, strength: int, start: Iterable[int] = ()) -> list[int]:
    """Positions of rows that meet, together, all that any row meets. Always the same for the same rows.

    Choices that exclude one another need no rule, for what no row meets is not asked for. ``start`` are in it anyway.
    """
    met = [set(meetings(row, strength=strength)) for row in rows]
    chosen = set(start)
    left = set[Any]().union(*met).difference(*(met[index] for index in chosen))
    # The next row is the first of those that add most. What a row adds only ever shrinks, so a row that still adds what
    # it once did, and is first in the queue, is it.
    queue = [(-len(meeting), index) for index, meeting in enumerate(met)]
    heapq.heapify(queue)
    while left:
        _, index = queue[0]
        added = (-len(met[index] & left), index)
        if heapq.heapreplace(queue, added) == added:
            chosen.add(index)
            left -= met[index]
    return sorted(chosen)


def meetings(row: Choices, *, strength: int) -> Iterator[tuple[tuple[int, Any], ...]]:
    """The pairs, or triples, of settings with what the row chooses of them."""
    return itertools.combinations(enumerate(row), min(strength, len(row)))
