"""The README's neutral script runs, and trains, on MindSpore."""

from __future__ import annotations

from pathlib import Path

from readme_scripts import losses_of


def test_script_trains(tmp_path: Path) -> None:
    losses = losses_of("## One script for both frameworks", backend="mindspore", folder=tmp_path)
    assert len(losses) == 10
    assert sum(losses[-4:]) < sum(losses[:4])
