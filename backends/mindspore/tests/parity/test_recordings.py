"""``hpcompat compare`` between recordings of the two frameworks, on different numbers of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hpcompat.cli import main

SCRIPT = Path(__file__).with_name("recorded.py")
NUM_PHASES = 3


def run(backend: str, *, num_ranks: int, out: Path) -> str:
    command = [sys.executable, "-m", "hpcompat.cli", "launch", "-n", str(num_ranks), "--backend", backend]
    result = subprocess.run(
        [*command, str(SCRIPT), str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return str(out)


def test_recordings_of_both_frameworks_are_equal(tmp_path: Path) -> None:
    runs = [
        run("torch", num_ranks=1, out=tmp_path / "torch"),
        run("mindspore", num_ranks=2, out=tmp_path / "mindspore"),
    ]
    assert main(["compare", *runs, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(run["framework"], run["world_size"]) for run in found["runs"]] == [("torch", 1), ("mindspore", 2)]
    rows = [row for kinds in found["phases"].values() for row in kinds.values()]
    # A parameter and its gradient at each phase, and three states from the first step on.
    assert sum(row["tensors"] for row in rows) == 5 * (2 * NUM_PHASES + 3 * NUM_PHASES) - 3 * (NUM_PHASES - 1)
