"""``hpcompat launch`` with the real mpirun behind it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcompat.cli import launch

SCRIPT = """
import os, sys
from pathlib import Path
from hpcompat_mindspore.job import world

group = world()
line = f"{group.size()} {os.environ['HPCOMPAT_BACKEND']} {os.environ['OMP_NUM_THREADS']} {sys.argv[2:]}"
Path(sys.argv[1], f"rank{group.rank()}").write_text(line)
group.barrier()
if sys.argv[2] == "raise" and group.rank() == 1:
    raise ValueError("rank 1 has had enough")
group.barrier()
"""


@pytest.mark.parametrize("what", ["end", "raise"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_find_each_other_and_a_failure_ends_all(tmp_path: Path, num_ranks: int, what: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "hpcompat.cli", "launch", "-n", str(num_ranks), "--backend", "ms"]
    result = subprocess.run(
        [*command, str(script), str(tmp_path), what],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    written = {path.name: path.read_text() for path in tmp_path.glob("rank*")}
    expected = f"{num_ranks} mindspore 1 ['{what}']"
    assert written == {f"rank{rank}": expected for rank in range(num_ranks)}, result.stderr
    assert (result.returncode == 0) is (what == "end"), result.stderr
    assert ("rank 1 has had enough" in result.stderr) is (what == "raise")


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    return parser.parse_args(words)


def test_oversubscribes_only_where_ranks_outnumber_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_num_cores", lambda: 2)
    assert "--oversubscribe" not in launch.mpirun_command(arguments("-n", "2", "train.py"))
    assert "--oversubscribe" in launch.mpirun_command(arguments("-n", "3", "train.py"))


def test_options_of_torchrun_are_refused() -> None:
    with pytest.raises(launch.CommandError, match="expected no options of torchrun, but got --nnodes"):
        launch.mpirun_command(arguments("--nnodes", "2", "train.py"))


def test_missing_mpi_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_mpirun", lambda: None)
    with pytest.raises(launch.CommandError, match=r"pip install 'hpcompat\[mindspore-cpu\]'"):
        launch.mpirun_command(arguments("train.py"))


def test_ascend_is_started_by_msrun() -> None:
    command = launch.msrun_command(arguments("-n", "8", "train.py", "--steps", "3"))
    assert command[1:] == [
        "-m",
        "mindspore.parallel.cluster.run",
        "--worker_num=8",
        "--local_worker_num=8",
        "--join=True",
        "train.py",
        "--steps",
        "3",
    ]
