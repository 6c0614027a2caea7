"""Designs meet what they promise, with few cases, and every case is in the smallest run that needs it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from covering import covering, design

Choices = tuple[Any, ...]
SETTINGS = {"model": "abcdefghi", "mesh": "12", "reshard": "tfi", "policy": "x16", "microbatches": "14", "ranks": "124"}


def exclude(row: Choices) -> bool:
    """As with an integer to reshard to: not on one rank, nor on an axis of one."""
    _, mesh, reshard, _, _, ranks = row
    return reshard == "i" and (ranks == "1" or (mesh, ranks) == ("2", "2"))


PRODUCT = [row for row in itertools.product(*SETTINGS.values()) if not exclude(row)]


def left_out(some: list[Choices], *, strength: int) -> set[Choices]:
    """What the product meets and ``some`` do not, written without the code under test."""
    missing = set()
    for columns in itertools.combinations(range(len(SETTINGS)), strength):
        seen = {tuple(row[column] for column in columns) for row in some}
        missing |= {(columns, found) for row in PRODUCT if (found := tuple(row[c] for c in columns)) not in seen}
    return missing


@pytest.mark.parametrize(("strength", "most"), [(1, 9), (2, 30), (3, 110)])
def test_a_design_meets_all_that_the_product_meets(strength: int, most: int) -> None:
    rows = [PRODUCT[index] for index in design(PRODUCT, strength=strength)]
    assert not left_out(rows, strength=strength)
    assert len(rows) <= most


def test_no_row_of_a_design_is_for_nothing() -> None:
    """And so the check above can fail."""
    rows = [PRODUCT[index] for index in design(PRODUCT, strength=2)]
    needed = [row for row in rows if left_out([other for other in rows if other != row], strength=2)]
    assert len(needed) > 0.9 * len(rows)


def without(*names: str, parameters: list[Any]) -> list[Choices]:
    """The cases of a run that leaves out these marks."""
    return [one.values[0] for one in parameters if not any(mark.name in names for mark in one.marks)]


@pytest.mark.parametrize("strength", [2, 3])
def test_each_run_is_part_of_the_next_larger(strength: int) -> None:
    parameters = covering(PRODUCT, lambda row: row, strength=strength, id="-".join)
    quick = without("thorough", "exhaustive", parameters=parameters)
    default = without("exhaustive", parameters=parameters)
    assert not left_out(quick, strength=strength - 1)
    assert not left_out(default, strength=strength)
    assert set(quick) < set(default) < set(PRODUCT)
    assert without(parameters=parameters) == PRODUCT
    assert [one.id for one in parameters] == ["-".join(row) for row in PRODUCT]


def test_settings_of_one_choice_ask_for_nothing() -> None:
    """They are in every row anyway."""
    free = list(itertools.product("ab", "cd"))
    fixed = [("x", *row, "y") for row in free]
    assert design(fixed, strength=2) == design(free, strength=2) == [0, 1, 2, 3]
    assert len(design(fixed, strength=1)) == 2


def test_a_single_setting_is_its_own_product() -> None:
    assert design([("a",), ("b",), ("a",)], strength=3) == [0, 1]
    assert design([], strength=3) == []
