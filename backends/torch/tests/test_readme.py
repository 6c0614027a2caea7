"""The README's scripts run, and train, on torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from readme_scripts import losses_of

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("heading", ["## Use it", "## One script for both frameworks"])
def test_script_trains(heading: str, tmp_path: Path) -> None:
    losses = losses_of(heading, backend="torch", folder=tmp_path)
    assert len(losses) == 10
    assert sum(losses[-4:]) < sum(losses[:4])
