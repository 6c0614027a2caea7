"""A short soak, `benchmarks/soak.py`: nothing grows from step to step, and what would grow is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

import soaking


def test_nothing_grows(tmp_path: Path) -> None:
    status, rows, printed = soaking.run(backend="torch", folder=tmp_path)
    assert status == 0, printed
    soaking.check_same_numbers(rows)


@pytest.mark.parametrize("leak", soaking.LEAKS)
def test_a_leak_is_seen(leak: str, tmp_path: Path) -> None:
    status, rows, printed = soaking.run("--leak", leak, backend="torch", folder=tmp_path)
    assert status != 0, printed
    assert [name for name, row in rows.items() if row["grew"]] == [soaking.LEAKS[leak]], printed
