"""What the tests of every framework run. ``Ranks`` gives a pool of so many ranks; a kit is named ``"module:class"``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from covering import covering
from fault_matrix.cell import NOT_REACHED, WHO, Cell, cells_of
from fault_matrix.plants import PLANTS
from fault_matrix.settings import BY_ID, EVENT_BY_EVENT, SETTINGS

Ranks = Callable[[int], Any]

# For a job; only a rank that waits for one that does not come takes so long.
DEADLINE = 300.0

MIN_EVENTS = 30


class Place(NamedTuple):
    """A cell in its setting, by the setting's id."""

    setting: str
    cell: Cell


_PLACES = [Place(one.id, cell) for one in SETTINGS for who in WHO for cell in cells_of(one, who=who)]


def places(*, setting: str | None = None, strength: int = 2) -> list[Any]:
    """Parameters of a test: all of the matrix, or of one setting; by default each kind of place in each setting."""
    chosen = [place for place in _PLACES if setting in (None, place.setting)]
    return covering(chosen, choices, strength=strength, id=lambda place: "-".join(choices(place)))


def choices(place: Place) -> tuple[str, ...]:
    return place.setting, *place.cell


def check_place(ranks: Ranks, place: Place, *, kit: str, optimizer: str = "adamw") -> None:
    assert not wrong(run(ranks, kit=kit, setting=place.setting, cells=[place.cell], optimizer=optimizer))


def halves(setting: str) -> list[Any]:
    """Parameters ``setting``, ``who`` and ``half`` of a test. By default one half with each, together all events."""
    return [
        pytest.param(setting, who, half, marks=pytest.mark.thorough if who == default else pytest.mark.exhaustive)
        for half, default in enumerate(("all", "one"))
        for who in ("all", "one")
    ]


EVENTS = [parameters for setting in EVENT_BY_EVENT for parameters in halves(setting.id)]


def check_events(ranks: Ranks, *, kit: str, setting: str, who: str, half: int) -> None:
    found = ranks(BY_ID[setting].num_ranks).run(
        "fault_matrix.cell:run_events", kit=kit, setting=setting, who=who, optimizer="sgd", half=half, deadline=DEADLINE
    )
    assert len({num_events for num_events, _ in found}) == 1
    assert all(num_events >= MIN_EVENTS and not wrong_at for num_events, wrong_at in found), found


def check_plant(ranks: Ranks, *, kit: str, plant: str) -> None:
    """What is forgotten shows in the cell that the plant names; the cell is well without it."""
    setting, point, unit = PLANTS[plant].setting, PLANTS[plant].point, PLANTS[plant].unit
    cells = [Cell(point, unit, "all")]
    assert not wrong(run(ranks, kit=kit, setting=setting, cells=cells))
    planted = run(ranks, kit=kit, setting=setting, cells=cells, plant=plant)
    assert all(verdict and verdict != NOT_REACHED for verdict in planted[cells[0]]), planted


def run(
    ranks: Ranks, *, kit: str, setting: str, cells: list[Cell], optimizer: str = "adamw", plant: str | None = None
) -> dict[Cell, list[str]]:
    """What each rank found wrong, by cell."""
    by_rank = ranks(BY_ID[setting].num_ranks).run(
        "fault_matrix.cell:run_cells",
        kit=kit,
        setting=setting,
        cells=cells,
        optimizer=optimizer,
        plant=plant,
        deadline=DEADLINE,
    )
    return {cell: verdicts for cell, *verdicts in zip(cells, *by_rank, strict=True)}


def wrong(found: dict[Cell, list[str]]) -> dict[str, list[str]]:
    """The cells in which a rank found something."""
    return {f"{cell.point}, {cell.unit}": verdicts for cell, verdicts in found.items() if any(verdicts)}
