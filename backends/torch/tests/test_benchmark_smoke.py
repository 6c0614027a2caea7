"""The benchmarks run from the command line and write what they promise; their numbers are nobody's business here."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcompat_torch.tensors import split_storage

pytestmark = pytest.mark.thorough

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SCRIPT = BENCHMARKS / "step_time.py"
OPTIMIZER_SCRIPT = BENCHMARKS / "optimizer_step.py"
NUM_UNITS = 25
GATHERS_PER_STEP = 2 * NUM_UNITS - 1  # forward and backward, but the root stays gathered in between
ARGUMENTS = ("--cases", "tiny24,tiny24-host", "--profile", "stages")

Run = tuple[dict[str, Any], str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The JSON and the printed tables of a run with the least of everything."""
    return run_script(*ARGUMENTS, folder=tmp_path_factory.mktemp("benchmark"))


def run_script(*arguments: str, folder: Path) -> Run:
    path = folder / "times.json"
    command = [sys.executable, str(SCRIPT), "--rounds", "1", "--steps", "1", *arguments, "--json", str(path)]
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


WatchMaker = Callable[[list[torch.Tensor]], Any]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> WatchMaker:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("paired.memory").StorageWatch  # type: ignore[no-any-return]


def test_peaks_are_bytes_of_both_sides(run: Run) -> None:
    peaks = run[0]["peak_unsharded_bytes"]

    assert set(peaks) == {"ours", "native"}
    assert all(isinstance(peak, int) and peak > 0 for peak in peaks.values()), peaks


NUM_SHARD_ELEMENTS = 1000
UNIT_BYTES = NUM_SHARD_ELEMENTS * 4


def flat_shard() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A unit's flat shard, which is gathered as it is, and the parameters' windows on it."""
    flat = torch.zeros(NUM_SHARD_ELEMENTS)
    return flat, split_storage(flat, [NUM_SHARD_ELEMENTS // 4, NUM_SHARD_ELEMENTS * 3 // 4])


def test_the_flat_shard_is_not_counted_beside_the_parameters_on_it(watch: WatchMaker) -> None:
    flat, windows = flat_shard()
    out = torch.empty(2)
    with watch([*windows, out]) as seen:
        out[0].copy_(flat[0])
        windows[1].add_(1)
        flat.view(2, -1).mul_(2)

    assert seen.peak_bytes == 0


def test_memory_is_counted_once_however_many_windows_it_has(watch: WatchMaker) -> None:
    flat, windows = flat_shard()
    with watch([]) as seen:
        for tensor in (*windows, flat, *windows):
            tensor.mul_(2)

    assert seen.peak_bytes == UNIT_BYTES


def test_one_more_buffer_of_a_unit_is_seen(watch: WatchMaker) -> None:
    flat, windows = flat_shard()
    with watch(windows) as seen:
        copy = flat.clone()
        split_storage(copy, [NUM_SHARD_ELEMENTS])[0].mul_(2)
        copy.untyped_storage().resize_(0)
        flat.mul_(2)

    assert seen.peak_bytes == UNIT_BYTES


def test_memory_that_was_freed_counts_no_more(watch: WatchMaker) -> None:
    flat, windows = flat_shard()
    copies, others = [], []
    with watch(windows) as seen:
        for _ in range(3):
            copies.append(flat.clone())
            copies[-1].untyped_storage().resize_(0)
            # So that the next copy lies elsewhere.
            others.append(bytearray(UNIT_BYTES))

    assert seen.peak_bytes == UNIT_BYTES


def test_replaced_collectives_are_those_of_both_sides(run: Run) -> None:
    calls = {"gathers": GATHERS_PER_STEP, "reductions": NUM_UNITS}

    assert run[0]["cases"]["tiny24-host"]["noop_calls_per_step"] == {"ours": calls, "native": calls}


def test_native_may_stand_in_for_ours(tmp_path: Path) -> None:
    """To see whether the measurement is fair."""
    result, _ = run_script("--ours", "native", "--cases", "tiny24-host", "--no-memory", folder=tmp_path)
    row = result["cases"]["tiny24-host"]

    assert result["settings"]["ours"] == "native"
    assert row["losses_equal"] is True
    assert row["noop_calls_per_step"]["ours"] == row["noop_calls_per_step"]["native"]


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


# optimizer_step.py

NUM_PARAMETERS = 20  # of the 22 of a decoder of two blocks
NUM_REPEATS, NUM_ROUNDS, NUM_STEPS = 2, 1, 2
NUM_WARMUP_ROUNDS = 2
STATES = {"parameter", "step", "exp_avg", "exp_avg_sq"}


@pytest.fixture(scope="module", params=[(1, "fp32"), (2, "bf16")], ids=lambda found: f"{found[0]}-{found[1]}")
def optimizer_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    num_ranks, dtype = request.param
    path = tmp_path_factory.mktemp("benchmark") / "step.json"
    sizes = {"ranks": num_ranks, "dtype": dtype, "parameters": NUM_PARAMETERS}
    sizes |= {"repeats": NUM_REPEATS, "rounds": NUM_ROUNDS, "steps": NUM_STEPS}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    command = [sys.executable, str(OPTIMIZER_SCRIPT), *options, "--json", str(path)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return json.loads(path.read_text()), finished.stdout


def test_optimizer_result_has_the_promised_shape(optimizer_run: Run) -> None:
    result, printed = optimizer_run

    for key in ("plain_ms", "native_ms", "ours_ms", "ours_over_plain", "ours_over_native", "native_over_plain"):
        assert isinstance(result[key], float), (key, result[key])
        assert result[key] > 0, (key, result[key])
    assert result["ours_over_plain"] == pytest.approx(result["ours_ms"] / result["plain_ms"])
    assert f"ours / plain {result['ours_over_plain']:.3f}" in printed
    assert result["num_timed_steps"] == NUM_REPEATS * NUM_ROUNDS * NUM_STEPS
    assert {"versions", "machine", "settings"} <= set(result)


def test_optimizer_sides_step_the_same_to_the_same_bits(optimizer_run: Run) -> None:
    result, _ = optimizer_run

    assert result["num_parameters"] == NUM_PARAMETERS
    steps = NUM_WARMUP_ROUNDS + NUM_ROUNDS * (1 + NUM_STEPS)
    assert result["num_steps"] == dict.fromkeys(("plain", "native", "ours"), steps)
    assert result["num_elements_moved"] > result["num_elements"] // 2 > 0
    none = dict.fromkeys(STATES, 0)
    assert result["differing_elements"] == {"native": none, "ours": none}
    assert result["bits_equal"] is True


def test_one_bit_of_difference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    optimizers = importlib.import_module("paired.optimizers")
    for dtype in (torch.float32, torch.bfloat16):
        zeros = torch.zeros(2, 3, dtype=dtype)
        other = zeros.clone()
        other[1, 2] = -0.0

        assert optimizers.num_differing([zeros, zeros], [zeros, zeros]) == 0
        assert optimizers.num_differing([zeros, zeros], [zeros, other]) == 1
