"""examples/train_decoder.py in PyTorch and in MindSpore, from the same weights: the same losses."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpcompat

EXAMPLES = Path(__file__).parents[4] / "examples"
SMALL = ["--steps=20", "--layers=2", "--width=64", "--seq-len=64", "--batch=4"]
LIMIT = "1e-4"
HANG_SECONDS = 300


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def train(backend: str, *arguments: str, out: Path) -> Path:
    launch = ["-m", "hpcompat.cli", "launch", "-n", "2", "--backend", backend]
    done = run(*launch, str(EXAMPLES / "train_decoder.py"), *SMALL, *arguments, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "losses.json"


@pytest.mark.parametrize(
    "arguments", [pytest.param("", marks=pytest.mark.exhaustive), "--tied --batch 2 --accumulate 2 --mesh hsdp"]
)
def test_loss_curves_agree(arguments: str, tmp_path: Path) -> None:
    files = [str(train(backend, *arguments.split(), out=tmp_path / backend)) for backend in ("torch", "mindspore")]
    compare = [str(EXAMPLES / "compare_backends.py"), *files, "--max-relative-difference", LIMIT]
    done = run(*compare, "--out", str(tmp_path))
    measured = re.search(r"largest relative difference in 20 steps: (\S+),", done.stdout)
    assert measured, done.stdout + done.stderr
    assert done.returncode == 0, f"measured {measured[1]}, allowed {LIMIT}:\n{done.stdout}"
    assert all(name in done.stdout for name in ("torch", "mindspore")), done.stdout
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("tied", [False, True])
def test_both_start_from_the_same_bits(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    options = importlib.import_module("options").Options(layers=2, width=32, tied=tied)
    initial = importlib.import_module("weights").initial_weights(options)
    names = initial.keys() - ({"head.weight"} if tied else set())
    for backend in ("torch", "mindspore"):
        model = importlib.import_module(f"decoder_{backend}").build_model(options)
        arrays = {name: hpcompat.to_numpy(parameter) for name, parameter in hpcompat.named_parameters(model)}
        assert arrays.keys() == names, backend
        for name, array in arrays.items():
            assert (array.dtype, array.shape) == (initial[name].dtype, initial[name].shape), (backend, name)
            assert array.tobytes() == initial[name].tobytes(), (backend, name)
