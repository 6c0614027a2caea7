"""Recording a training on one rank and on two, and what ``hpcompat compare`` finds between recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import recorded_model
from comparing import compared
from hpcompat.record import PHASES
from hpcompat_conformance.pool import PoolSet


def test_recordings_on_one_rank_and_on_two_are_equal(pool: PoolSet, tmp_path: Path) -> None:
    pool(2).run(recorded_model.recording_changes_nothing, directory=tmp_path / "two")
    pool(1).run(recorded_model.train, directory=tmp_path / "one")
    found = compared(tmp_path / "two", tmp_path / "one", status=0)
    assert [run["world_size"] for run in found["runs"]] == [2, 1]
    assert found["runs"][0]["parameters"] == dict.fromkeys(["0.weight", "0.bias", "2.weight", "2.bias"], "bfloat16")
    for phase in PHASES:
        rows = found["phases"][phase]
        assert rows["parameter"]["tensors"] == 4 * recorded_model.NUM_STEPS
        assert rows["parameter"]["elements"] == (33 * 64 + 33 + 5 * 33 + 5) * recorded_model.NUM_STEPS
        num_steps = recorded_model.NUM_STEPS - (phase != "after_optim")
        for state in ("exp_avg", "exp_avg_sq", "step"):
            assert rows[f"state/{state}"]["tensors"] == 4 * num_steps, "states come with the first step"
    assert found["phases"]["after_backward"]["loss"]["tensors"] == recorded_model.NUM_STEPS


def test_a_fused_step_is_found_where_it_steps(pool: PoolSet, tmp_path: Path) -> None:
    pool(2).run(recorded_model.train, directory=tmp_path / "plain")
    pool(2).run(recorded_model.train, directory=tmp_path / "fused", fused=True)
    found = compared(tmp_path / "plain", tmp_path / "fused", "--html", str(tmp_path / "found.html"), status=1)
    first = found["first_divergence"]
    assert (first["step"], first["phase"]) == (1, "after_optim")
    name, index = first["name"], tuple(first["index"])
    values = [
        load_file(tmp_path / run / "step-000001" / "after_optim" / first["kind"] / f"{name}.safetensors")[name][index]
        for run in ("plain", "fused")
    ]
    assert [repr(float(value)) for value in values] == first["values"]
    assert values[0] != values[1]
    assert "<svg" in (tmp_path / "found.html").read_text()


@pytest.mark.parametrize(
    "job",
    [
        recorded_model.one_whole_tensor_at_a_time,
        recorded_model.a_directory_that_cannot_be_used,
        recorded_model.a_phase_that_cannot_be_written,
    ],
    ids=lambda job: job.__name__,
)
def test_on_two_ranks(pool: PoolSet, tmp_path: Path, job: Any) -> None:
    pool(2).run(job, directory=tmp_path)
