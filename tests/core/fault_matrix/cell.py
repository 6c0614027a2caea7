"""One cell: a failed step, what a script does then, and the steps after it against those of a run without it."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

from fault_matrix import plants, points, settings
from fault_matrix.kit import UNITS, Kit, Site, Trap
from fault_matrix.settings import Setting
from fault_matrix.training import NotReached, Script, Step
from hpcompat.core import agreement

# How many steps follow each failure. The first failure comes before anything else has run.
STEPS_AFTER = (1, 2)
_FAILED = 500
NOT_REACHED = "the step came to its end"


# Who fails: all ranks; the last one, which then catches up; the last one, between phases before which ranks agree.
WHO = ("all", "one", "one between phases")


class Cell(NamedTuple):
    """``who`` is one of `WHO`."""

    point: str
    unit: str
    who: str


def cells_of(setting: Setting, *, who: str) -> list[Cell]:
    return [
        Cell(point.id, unit, who)
        for point in points.POINTS
        for unit in UNITS
        if setting.has_point(point, unit)
        and (who == "all" or point.on_one_rank)
        and (who != "one between phases" or point.id in points.SCRIPT)
    ]


def run_cells(*, kit: str, setting: str, cells: list[Cell], optimizer: str, plant: str | None = None) -> list[str]:
    """A job for a pool, on every rank: for each cell what is wrong, or nothing."""
    found, chosen = kit_of(kit), settings.BY_ID[setting]
    with plants.planted(plant), mock.patch.object(agreement, "is_debugging", chosen.debugs):
        return [_verdict(found, chosen, cell, optimizer=optimizer) for cell in cells]


def run_events(*, kit: str, setting: str, who: str, optimizer: str, half: int) -> tuple[int, dict[str, str]]:
    """A job likewise: the trap at the scheduler's events in turn. Their number, and what is wrong at which.

    Half of them at a time: in no simple rhythm, for events repeat themselves unit by unit.
    """
    found, chosen = kit_of(kit), settings.BY_ID[setting]
    wrong: dict[str, str] = {}
    for number in (number for number in itertools.count() if number.bit_count() % 2 == half):
        cell = Cell(points.event_id(number), "root", who)
        verdict = _verdict(found, chosen, cell, optimizer=optimizer, steps_after=(1, 1))
        if verdict == NOT_REACHED:
            return number, wrong
        if verdict:
            wrong[cell.point] = verdict
    raise AssertionError("a step has an end")


def kit_of(name: str) -> Kit:
    module, _, attribute = name.partition(":")
    kit: Kit = getattr(importlib.import_module(module), attribute)()
    return kit


def _verdict(
    kit: Kit, setting: Setting, cell: Cell, *, optimizer: str, steps_after: Sequence[int] = STEPS_AFTER
) -> str:
    clean = _clean_steps(kit, setting, optimizer)
    try:
        steps = _steps(kit, setting, cell, optimizer=optimizer, steps_after=steps_after)
    except NotReached:
        return NOT_REACHED
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for number, (step, wanted) in enumerate(zip(steps, clean, strict=False)):
        differing = [field for field in Step._fields if getattr(step, field) != getattr(wanted, field)]
        if differing:
            return f"step {number}: other {', '.join(differing)}"
    return ""


def _steps(kit: Kit, setting: Setting, cell: Cell, *, optimizer: str, steps_after: Sequence[int]) -> list[Step]:
    point = points.point_of(cell.point)
    trap = Trap(skip=point.skip)
    model = kit.net()
    site = Site(kit, model, cell.unit, trap)
    with ExitStack() as stack:
        if point.early:
            stack.enter_context(point.in_place(site))
        setting.wrap(kit, model)
        if not point.early:
            stack.enter_context(point.in_place(site))
        script = Script(kit, setting, model, optimizer=optimizer, point=point, trap=trap)
        steps: list[Step] = []
        for num_steps in steps_after:
            fails = (script.fail_together, script.fail_alone, script.fail_between_phases)
            fails[WHO.index(cell.who)](_FAILED + len(steps))
            steps += [script.step(len(steps) + index) for index in range(num_steps)]
    return steps


_clean: dict[Any, list[Step]] = {}


def _clean_steps(kit: Kit, setting: Setting, optimizer: str) -> list[Step]:
    """Of a model in which no trap has ever been laid; trained once per process."""
    key = (kit.name, setting.id, optimizer)
    if key not in _clean:
        model = setting.wrap(kit, kit.net())
        script = Script(kit, setting, model, optimizer=optimizer, trap=Trap())
        _clean[key] = [script.step(number) for number in range(sum(STEPS_AFTER))]
    return _clean[key]
