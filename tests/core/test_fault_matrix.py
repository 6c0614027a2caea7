"""The fault matrix: what of it runs by default, and how it is printed: side by side, from one run or from files."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from covering import left_out
from fault_matrix import report, settings, suite
from fault_matrix.cell import WHO, Cell

OURS, NATIVE = "fault_kits:Torch", "fault_kits:Native"
SETTING = settings.SETTINGS[0]
WELL, WRONG = Cell("in forward", "first", "all"), Cell("in forward", "middle", "all")
REASON = "step 0: other gradients"


def found(kit: str, *, wrong: str) -> report.Results:
    return {(kit, SETTING.id, WELL): ["", ""], (kit, SETTING.id, WRONG): ["", wrong]}


def test_files_of_several_runs_are_shown_side_by_side(tmp_path: Path) -> None:
    both = {**found(OURS, wrong=""), **found(NATIVE, wrong=REASON)}
    paths = [tmp_path / "ours.json", tmp_path / "native.json"]
    report.save(paths[0], found(OURS, wrong=""))
    report.save(paths[1], found(NATIVE, wrong=REASON))
    assert report.load(paths) == both
    console = Console(width=120, file=io.StringIO(), record=True)
    report.show(console, report.load(paths), kits=[OURS, NATIVE], settings=[SETTING], who=WHO)
    text = console.export_text()
    (row,) = (line for line in text.splitlines() if "in forward " in line)
    assert [column.strip() for column in row.split("│")[2:4]] == ["✓✓·", "✓✗·"]
    assert "torch: 2 of 2 cells leave no trace" in text
    assert "native: 1 of 2 cells leave no trace" in text
    assert f"1  {REASON}" in text


def test_there_are_cells_between_microbatches_in_every_way_to_wrap() -> None:
    """With and without sync."""
    for style in (settings.NO_SYNC, settings.SYNC):
        found = [setting for setting in settings.SETTINGS if setting.style == style and not setting.is_mixed]
        ways = {(setting.wrapper, setting.mesh, setting.reshard) for setting in found}
        assert ways >= {(setting.wrapper, setting.mesh, setting.reshard) for setting in settings.WRAPPERS}


def test_every_kind_of_place_is_met_in_every_setting_by_default() -> None:
    assert not left_out(suite.places(), suite.choices, strength=2, marks=["exhaustive"])


def test_all_events_are_met_by_default() -> None:
    default = [one.values for one in suite.EVENTS if not any(mark.name == "exhaustive" for mark in one.marks)]
    assert {(setting, half) for setting, _, half in default} == {
        (setting.id, half) for setting in settings.EVENT_BY_EVENT for half in (0, 1)
    }
