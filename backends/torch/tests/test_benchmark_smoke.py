"""The benchmark runs from the command line and writes what it promises; its numbers are nobody's business here."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "step_time.py"
NUM_UNITS = 25
GATHERS_PER_STEP = 2 * NUM_UNITS - 1  # forward and backward, but the root stays gathered in between
ARGUMENTS = ("--cases", "tiny24,tiny24-host", "--rounds", "1", "--steps", "1", "--profile", "stages")

Run = tuple[dict[str, Any], str]


@pytest.fixture(scope="module", params=["hpcompat", "native"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The JSON and the printed tables of a run with the least of everything."""
    path = tmp_path_factory.mktemp("benchmark") / "times.json"
    command = [sys.executable, str(SCRIPT), *ARGUMENTS, "--ours", request.param, "--json", str(path)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return json.loads(path.read_text()), finished.stdout


def test_result_has_the_promised_shape(run: Run) -> None:
    result, printed = run

    assert set(result) == {"versions", "machine", "settings", "cases", "peak_unsharded_bytes", "memory", "profile"}
    assert list(result["cases"]) == ["tiny24", "tiny24-host"]
    for name, row in result["cases"].items():
        assert name in printed
        for key in ("ours_ms", "native_ms", "bare_ms", "ratio_step"):
            assert isinstance(row[key], float), (name, key, row[key])
            assert row[key] > 0, (name, key, row[key])
        assert "ratio" in row
        assert "ratio_cpu" in row
    assert result["cases"]["tiny24"]["ratio"] == result["cases"]["tiny24"]["ratio_step"]
    assert result["cases"]["tiny24-host"]["ratio_of"] == "overhead"


def test_all_sides_compute_the_same_loss(run: Run) -> None:
    assert {name: row["losses_equal"] for name, row in run[0]["cases"].items()} == {"tiny24": True, "tiny24-host": True}


def test_peaks_are_bytes_of_both_sides(run: Run) -> None:
    peaks = run[0]["peak_unsharded_bytes"]

    assert set(peaks) == {"ours", "native"}
    assert all(isinstance(peak, int) and peak > 0 for peak in peaks.values()), peaks


def test_replaced_collectives_are_those_of_both_sides(run: Run) -> None:
    calls = {"gathers": GATHERS_PER_STEP, "reductions": NUM_UNITS}

    assert run[0]["cases"]["tiny24-host"]["noop_calls_per_step"] == {"ours": calls, "native": calls}


def test_profile_finds_every_function_it_names(run: Run) -> None:
    for side in ("ours", "native"):
        profile = run[0]["profile"]["tiny24-host"][side]
        assert profile["missing"] == []
        for kind in ("pre-forward", "post-forward", "pre-backward", "post-backward", "reshard"):
            assert profile["calls_per_step"][kind] >= NUM_UNITS, (side, kind)
            assert math.isfinite(profile["kinds"][kind]["us"]), (side, kind)


def test_unknown_case_is_refused_with_the_known_ones() -> None:
    command = [sys.executable, str(SCRIPT), "--cases", "tiny25"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)

    assert finished.returncode == 2
    assert "expected cases among tiny24, tiny24-host, decoder6, tiny96, but got tiny25" in finished.stderr
