"""A short soak, `benchmarks/soak.py`: nothing grows from step to step, and what would grow is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

import soaking

pytestmark = pytest.mark.thorough


def test_nothing_grows(tmp_path: Path) -> None:
    status, rows, printed = soaking.run(backend="torch", folder=tmp_path)
    assert status == 0, printed
    soaking.check_same_numbers(rows)


def test_leaks_are_seen(tmp_path: Path) -> None:
    """Each by the quantity that it is about, and by no other."""
    leaks = soaking.LEAKS
    status, rows, printed = soaking.run("--leak", *leaks, backend="torch", folder=tmp_path)
    assert status != 0, printed
    assert {name for name, row in rows.items() if row["grew"]} == {soaking.LEAKS[leak] for leak in leaks}, printed
