"""The benchmark runs from the command line and writes what it promises; its numbers are nobody's business here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "mindspore_step_time.py"
NUM_UNITS = {"tiny24": 25, "large4": 5}
ARGUMENTS = ("--cases", ",".join(NUM_UNITS), "--rounds", "1", "--steps", "1", "--profile")

Run = tuple[dict[str, Any], str]


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMI"))}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=environ, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The JSON and the printed tables of a run with the least of everything."""
    path = tmp_path_factory.mktemp("benchmark") / "times.json"
    finished = start(*ARGUMENTS, "--json", str(path))
    assert finished.returncode == 0, finished.stderr
    return json.loads(path.read_text()), finished.stdout


@pytest.fixture(params=NUM_UNITS)
def row(run: Run, request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = run[0]["cases"][request.param]
    return found


def test_result_has_the_promised_shape(run: Run) -> None:
    result, printed = run
    assert set(result) == {"versions", "machine", "settings", "cases"}
    assert result["settings"]["num_ranks"] == 2
    assert result["versions"]["mindspore"] != "not installed"
    assert {name: row["num_units"] for name, row in result["cases"].items()} == NUM_UNITS
    assert all(name in printed for name in NUM_UNITS)


def test_times_are_positive_and_shares_are_shares(row: dict[str, Any]) -> None:
    times = {key: row[key] for key in ("sharded_ms", "bare_ms", "host_ms", "raw_ms", "mpi_ms", "additions_ms")}
    assert all(time > 0 for time in times.values()), times
    assert 0 < row["mpi_share"] < 1
    assert row["mpi_ms"] + row["additions_ms"] < row["sharded_ms"]
    for name in ("overhead", "host_overhead"):
        low, high = row[f"{name}_interval"]
        assert low <= row[f"{name}_ms_per_unit"] <= high
    assert row["num_timed_steps"] == 1


def test_all_sides_compute_the_same_loss(row: dict[str, Any]) -> None:
    assert row["losses_equal"] is True


def test_the_replay_makes_the_calls_of_the_step(row: dict[str, Any]) -> None:
    calls, num_units = row["calls_per_step"], row["num_units"]
    assert row["replayed_calls_per_step"] == calls
    # Gathered in forward and in backward, but the root stays gathered in between.
    assert calls["Iallgather"] == 2 * num_units - 1
    assert calls["Ialltoall"] == num_units
    assert calls["Wait"] == calls["Iallgather"] + calls["Ialltoall"]


def test_bytes_received_are_those_of_the_parameters(row: dict[str, Any]) -> None:
    received, parameters = row["bytes_received_per_step"], row["parameter_bytes"]
    # All sizes are even, so that two ranks pad nothing.
    assert received["Ialltoall"] == parameters
    root = 2 * parameters - received["Iallgather"]
    assert 0 < root < row["largest_unit_bytes"] or root == row["largest_unit_bytes"]


def test_whole_parameters_are_few_and_gone_after_the_step(row: dict[str, Any]) -> None:
    assert row["largest_unit_bytes"] <= row["peak_whole_bytes"] < row["parameter_bytes"]
    assert row["whole_bytes_after_step"] == 0


def test_the_profile_finds_its_functions(row: dict[str, Any]) -> None:
    profile = row["profile"]
    assert profile["missing"] == []
    calls = {kind: spent["calls"] for kind, spent in profile["kinds"].items()}
    assert all(num > 0 for num in calls.values()), calls
    assert calls["pre-forward"] == calls["post-backward"] == calls["additions"] == pytest.approx(1)
    assert calls["instead of MPI"] == pytest.approx(3 - 1 / profile["num_units"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cases", "tiny24,huge"), "expected cases among tiny24, decoder6, large4, but got huge"),
        (("--ranks", "1"), "expected at least 2 ranks to communicate, but got --ranks 1"),
        (("--steps", "0"), "expected a positive number, but got 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[str, ...], message: str) -> None:
    finished = start(*arguments)
    assert finished.returncode == 2
    assert message in finished.stderr
