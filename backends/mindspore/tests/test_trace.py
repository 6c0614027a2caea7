"""Tracing a real model on two ranks: the same bits, the whole schedule, files that the command reads."""

from __future__ import annotations

from pathlib import Path

import pytest

import ms_traced
import traced_steps
from hpcompat_conformance.pytest_plugin import Ranks


@pytest.mark.parametrize(("shape", "reduced"), traced_steps.SHAPES)
def test_a_traced_step_is_the_same_step(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: tuple[int, ...], reduced: str
) -> None:
    results = ranks(2).run(ms_traced.run, shape=shape, out=tmp_path)
    traced_steps.check(results, layers=("layers.0", "layers.2"), shape=shape, reduced=reduced)
    files = [str(path) for path in sorted(tmp_path.glob("*.json"))]
    traced_steps.check_command(files, backend="mindspore", layer="layers.2", capsys=capsys)
