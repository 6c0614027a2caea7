"""Short runs of ``benchmarks/soak.py`` on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"
HANG_SECONDS = 600
STEPS = ["--steps=200", "--warm-up=100"]
RESIDENT = "resident memory, KiB"
# What may be planted, and what must have grown then.
LEAKS = {"bytes": RESIDENT, "object": "objects of hpcompat", "handle": "file handles"}


def run(*arguments: str, backend: str, folder: Path) -> tuple[int, dict[str, dict[str, Any]], str]:
    """The exit code, a row per quantity, and all that was printed."""
    written = folder / "soak.json"
    launch = [sys.executable, "-m", "hpcompat.cli", "launch", "-n", "2", "--backend", backend]
    done = subprocess.run(
        [*launch, str(SCRIPT), *STEPS, *arguments, "--json", str(written)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert written.exists(), printed
    rows = {row["quantity"]: row for row in json.loads(written.read_text())["rows"]}
    return done.returncode, rows, printed


def check_same_numbers(rows: dict[str, dict[str, Any]]) -> None:
    """All numbers are those after the warm-up, on both ranks; memory has its allowance."""
    for name, row in rows.items():
        if name == RESIDENT and row["allowed"] is not None:
            growth = [last - warm for warm, last in zip(row["warm"], row["last"], strict=True)]
            assert max(growth) <= row["allowed"], row
        elif row["allowed"] is not None:
            assert row["last"] == row["warm"], row
