"""Recording a training on one rank and on two, and what ``hpcompat compare`` finds between recordings."""

from __future__ import annotations

from pathlib import Path

from safetensors import deserialize

import ms_recorded
from comparing import compared
from hpcompat_conformance.pytest_plugin import Ranks


def test_recordings_on_one_rank_and_on_two_are_equal(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(ms_recorded.recording_changes_nothing, directory=tmp_path / "two")
    ranks(1).run(ms_recorded.train, directory=tmp_path / "one")
    found = compared(tmp_path / "two", tmp_path / "one", status=0)
    assert [(run["framework"], run["world_size"]) for run in found["runs"]] == [("mindspore", 2), ("mindspore", 1)]
    rows = found["phases"]["after_optim"]
    assert rows.keys() == {"parameter", "gradient", "state/exp_avg", "state/exp_avg_sq", "state/step"}
    num_tensors = len(found["runs"][0]["parameters"]) * ms_recorded.NUM_STEPS
    assert all(row["tensors"] == num_tensors for row in rows.values())
    assert found["phases"]["after_backward"]["loss"]["tensors"] == ms_recorded.NUM_STEPS


def test_another_option_is_found_where_it_steps(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(ms_recorded.train, directory=tmp_path / "plain")
    ranks(2).run(ms_recorded.train, directory=tmp_path / "other", eps=1e-4)
    first = compared(tmp_path / "plain", tmp_path / "other", status=1)["first_divergence"]
    assert (first["step"], first["phase"], first["kind"]) == (1, "after_optim", "parameter")


def test_files_have_the_bits_of_every_dtype(ranks: Ranks, tmp_path: Path) -> None:
    (meant,) = ranks(1).run(ms_recorded.write, directory=tmp_path)
    kinds = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}
    assert meant.keys() == kinds.keys()
    for dtype, kind in kinds.items():
        found = dict(deserialize((tmp_path / dtype).read_bytes()))
        assert (found["one"]["dtype"], found["one"]["shape"]) == (kind, [1, 3])
        assert bytes(found["one"]["data"]) == meant[dtype]
        assert (found["number"]["dtype"], found["number"]["shape"]) == ("F32", [])


def test_states_of_mindspores_own_optimizers(ranks: Ranks) -> None:
    ranks(1).run(ms_recorded.states_of_mindspores_own)
