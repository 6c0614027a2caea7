"""Designs meet what they promise, with few cases, and every case is in the smallest run that needs it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from covering import covering, design, left_out

Choices = tuple[Any, ...]
SETTINGS = {"model": "abcdefghi", "mesh": "12", "reshard": "tfi", "policy": "x16", "microbatches": "14", "ranks": "124"}
QUICK, DEFAULT = ("thorough", "exhaustive"), ("exhaustive",)


def excludes_itself(row: Choices) -> bool:
    """As an integer to reshard to does on one rank, or on an axis of one."""
    _, mesh, reshard, _, _, ranks = row
    return reshard == "i" and (ranks == "1" or (mesh, ranks) == ("2", "2"))


PRODUCT = [row for row in itertools.product(*SETTINGS.values()) if not excludes_itself(row)]


def itself(row: Choices) -> Choices:
    return row


def cases(parameters: list[Any], *, without: tuple[str, ...]) -> list[Choices]:
    return [one.values[0] for one in parameters if not any(mark.name in without for mark in one.marks)]


@pytest.mark.parametrize(("strength", "most"), [(1, 9), (2, 30), (3, 110)])
def test_a_design_is_small(strength: int, most: int) -> None:
    assert len(PRODUCT) == 810
    assert len(design(PRODUCT, strength=strength)) <= most


@pytest.mark.parametrize("strength", [2, 3])
def test_each_run_meets_what_it_promises_and_is_part_of_the_next_larger(strength: int) -> None:
    parameters = covering(PRODUCT, itself, strength=strength, id="-".join)
    assert [one.id for one in parameters] == ["-".join(row) for row in PRODUCT]
    assert not left_out(parameters, itself, strength=strength - 1, marks=QUICK)
    assert not left_out(parameters, itself, strength=strength, marks=DEFAULT)
    assert left_out(parameters, itself, strength=strength, marks=QUICK)
    assert left_out(parameters, itself, strength=strength + 1, marks=DEFAULT)
    quick, default = (cases(parameters, without=marks) for marks in (QUICK, DEFAULT))
    assert set(quick) < set(default) < set(PRODUCT)


def test_one_case_less_is_noticed() -> None:
    """Few cases of a design are there for nothing."""
    chosen = [PRODUCT[index] for index in design(PRODUCT, strength=2)]
    noticed = 0
    for row in chosen:
        parameters = [
            pytest.param(other, marks=[] if other in chosen and other != row else pytest.mark.exhaustive)
            for other in PRODUCT
        ]
        noticed += bool(left_out(parameters, itself, strength=2, marks=DEFAULT))
    assert noticed > 0.9 * len(chosen)


def test_settings_of_one_choice_ask_for_nothing() -> None:
    """They are in every row anyway."""
    free = list(itertools.product("ab", "cd"))
    fixed = [("x", *row, "y") for row in free]
    assert design(fixed, strength=2) == design(free, strength=2) == [0, 1, 2, 3]
    assert len(design(fixed, strength=1)) == 2


def test_a_single_setting_is_its_own_product() -> None:
    assert design([("a",), ("b",), ("a",)], strength=3) == [0, 1]
    assert design([], strength=3) == []
