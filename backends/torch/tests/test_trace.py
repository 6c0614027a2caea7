"""Tracing a real model on two ranks: the same bits, the whole schedule, files that the command reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import traced_decoder
import traced_steps
from hpcompat.cli import main
from hpcompat.cli.trace_file import load
from hpcompat_conformance.pool import PoolSet

EXAMPLE = Path(__file__).parents[3] / "examples" / "trace_decoder.py"
HANG_SECONDS = 300
SMALL = ["--layers=2", "--width=32", "--seq-len=32", "--batch=4", "--steps=2"]


@pytest.mark.parametrize(("shape", "reduced"), traced_steps.SHAPES)
def test_a_traced_step_is_the_same_step(
    pool: PoolSet, tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: tuple[int, ...], reduced: str
) -> None:
    results = pool(2).run(traced_decoder.run, shape=shape, out=tmp_path)
    traced_steps.check(results, layers=("layers.0", "layers.1"), shape=shape, reduced=reduced)
    files = [str(path) for path in sorted(tmp_path.glob("*.json"))]
    traced_steps.check_command(files, backend="torch", layer="layers.1", capsys=capsys)
    assert main(["trace", "plot", *files, "--out", str(tmp_path / "trace.svg")]) == 0
    assert ">layers.1</text>" in (tmp_path / "trace.svg").read_text()


def test_the_example_writes_a_file_per_rank(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "hpcompat.cli", "launch", "-n", "2", "--backend", "torch"]
    done = subprocess.run(
        [*launch, str(EXAMPLE), *SMALL, "--out", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    traces = load([tmp_path / f"trace-rank{rank}.json" for rank in range(2)])
    assert [trace.rank for trace in traces] == [0, 1]
    for trace in traces:
        assert trace.units == ("", "blocks.0", "blocks.1")
        # Of the last step only.
        assert sum(span.name == "forward" for span in trace.spans) == 3
