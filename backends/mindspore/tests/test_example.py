"""examples/train_decoder.py in MindSpore, run as a user runs it.

Every way of sharding is the same training: two ranks with four sequences each see the eight that one process sees.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL = ["--layers=2", "--width=32", "--seq-len=32", "--steps=6", "--lr=1e-2"]
HANG_SECONDS = 300

relative_differences = runpy.run_path(str(EXAMPLES / "comparison.py"))["relative_differences"]


def train(
    *arguments: str, out: Path, num_ranks: int | None, environ: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """Started by `hpcompat launch`, or without a launcher when `num_ranks` is None."""
    script = [str(EXAMPLES / "train_decoder.py"), *SMALL, "--out", str(out), *arguments]
    launch = ["-m", "hpcompat.cli", "launch", "-n", str(num_ranks), "--backend", "mindspore"]
    return subprocess.run(
        [sys.executable, *(launch if num_ranks else []), *script, *([] if num_ranks else ["--backend", "mindspore"])],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "", **environ},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def losses_of(done: subprocess.CompletedProcess[str], out: Path) -> list[float]:
    assert done.returncode == 0, done.stdout + done.stderr
    losses: list[float] = json.loads((out / "losses.json").read_text())["ours"]["losses"]
    return losses


@cache
def unsharded_losses(*arguments: str) -> list[float]:
    """Of one process with the batches of both ranks."""
    with TemporaryDirectory() as folder:
        done = train(*arguments, "--batch", "8", out=Path(folder), num_ranks=None)
        return losses_of(done, Path(folder))


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        ("--batch 4", 1e-6),
        ("--batch 2 --accumulate 2 --mesh hsdp --reshard false", 1e-6),
        ("--batch 4 --tied --reshard true", 1e-6),
        ("--batch 4 --dtype fp16 --mesh hsdp", 1e-3),
        ("--batch 2 --accumulate 2 --dtype bf16", 2e-3),
    ],
)
def test_two_ranks_train_as_one_process(arguments: str, limit: float, tmp_path: Path) -> None:
    done = train(*arguments.split(), out=tmp_path, num_ranks=2)
    losses = losses_of(done, tmp_path)
    expected = unsharded_losses(*(["--tied"] if "--tied" in arguments else []))
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.5
    largest = max(relative_differences(losses, expected))
    assert largest <= limit, f"largest relative difference {largest:.2e} of {losses} to {expected}"


def test_what_the_user_sees(tmp_path: Path) -> None:
    done = train("--batch", "4", "--steps", "2", out=tmp_path, num_ranks=1)
    losses_of(done, tmp_path)
    rows = ("loss, first step", "loss, last step", "tokens/s", "sharded parameters", "peak unsharded")
    assert all(row in done.stdout for row in rows), done.stdout
    assert "\x1b" not in done.stdout, "terminal control in an output that is no terminal"
    assert "Warning" not in done.stderr
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_hsdp_needs_an_even_number_of_ranks(tmp_path: Path) -> None:
    done = train("--mesh", "hsdp", out=tmp_path, num_ranks=None)
    assert done.returncode == 1
    assert "expected an even number of ranks for --mesh hsdp, but got 1; use --mesh fsdp" in done.stderr


def test_torchrun_is_refused(tmp_path: Path) -> None:
    """Its ranks would each train alone."""
    done = train(out=tmp_path, num_ranks=None, environ={"RANK": "0", "WORLD_SIZE": "2"})
    assert done.returncode == 1
    assert "start the script with hpcompat launch, which uses MPI" in done.stderr
