"""examples/train_decoder.py, run as a user runs it, and the pieces that decide what it reports."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forked_ranks

EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPT = EXAMPLES / "train_decoder.py"
SMALL = ["--layers=2", "--width=32", "--seq-len=32", "--batch=4", "--steps=6", "--lr=1e-2"]
HANG_SECONDS = 300
OPTIONS = runpy.run_path(str(EXAMPLES / "options.py"))

# The example with one weight of the root one unit in the last place higher, in our training only.
ONE_ULP_OFF = f"""
import runpy, sys
import torch
import hpcompat

original = hpcompat.fully_shard

def fully_shard(module, **options):
    if hasattr(module, "norm"):
        weight = module.norm.weight.data
        weight[0] = torch.nextafter(weight[0], torch.tensor(2.0))
    return original(module, **options)

hpcompat.fully_shard = fully_shard
sys.path.insert(0, {str(EXAMPLES)!r})
runpy.run_module("train_decoder", run_name="__main__")
"""


def train(*arguments: str, out: Path, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """As a user starts it."""
    command = [sys.executable, *launcher, str(SCRIPT), *SMALL, *arguments, "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HPCOMPAT_BACKEND"):
        environment.pop(variable, None)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)


def train_forked(
    *arguments: str, out: Path, num_ranks: int = 1, script: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """The same at a fraction of the cost."""
    options = [*SMALL, *arguments, "--out", str(out)]
    return forked_ranks.run(script or SCRIPT, *options, num_ranks=num_ranks, folder=out)


def check_equal_to_native(done: subprocess.CompletedProcess[str], *, out: Path) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    for row in ("loss, first step", "loss, last step", "tokens/s", "sharded parameters", "peak unsharded", "differ"):
        assert row in done.stdout
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    content: dict[str, Any] = json.loads((out / "losses.json").read_text())
    assert content["ours"]["losses"] == content["native"]["losses"]
    assert len(content["ours"]["losses"]) == 6
    assert content["ours"]["losses"][-1] < content["ours"]["losses"][0] - 0.5
    differences = content["differences"]
    assert set(differences) == {"parameters", "gradients", "AdamW states", "losses"}
    assert {kind: counts["differing"] for kind, counts in differences.items()} == dict.fromkeys(differences, 0)
    # Every element has a gradient and two moments; a tensor's step counter exists on each rank.
    num_parameters = differences["parameters"]["compared"]
    assert differences["gradients"]["compared"] == num_parameters > 10_000
    assert 2 * num_parameters < differences["AdamW states"]["compared"] < 2 * num_parameters + 100
    return content


@pytest.mark.thorough
def test_two_ranks_equal_native(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = train("--accumulate", "2", "--compare", "native", out=tmp_path, launcher=launcher)
    check_equal_to_native(done, out=tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "arguments",
    [
        "--mesh hsdp --dtype bf16 --tied --reshard false",
        "--dtype bf16 --tied --accumulate 3 --reshard true",
        "--dtype fp16 --reshard 2",
    ],
)
def test_two_ranks_equal_native_with_options(arguments: str, tmp_path: Path) -> None:
    done = train_forked(*arguments.split(), "--compare", "native", out=tmp_path, num_ranks=2)
    check_equal_to_native(done, out=tmp_path)


@pytest.mark.thorough
def test_without_a_launcher(tmp_path: Path) -> None:
    done = train("--compare", "native", out=tmp_path)
    check_equal_to_native(done, out=tmp_path)


@pytest.mark.thorough
def test_one_ulp_in_one_weight_is_found(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ONE_ULP_OFF)
    done = train_forked("--compare", "native", out=tmp_path, script=script)
    assert done.returncode == 1, done.stdout + done.stderr
    differences = json.loads((tmp_path / "losses.json").read_text())["differences"]
    assert all(differences[kind]["differing"] > 0 for kind in ("parameters", "gradients", "AdamW states"))


@pytest.mark.thorough
def test_hsdp_needs_an_even_number_of_ranks(tmp_path: Path) -> None:
    done = train_forked("--mesh", "hsdp", out=tmp_path)
    assert done.returncode == 1
    assert "expected an even number of ranks for --mesh hsdp, but got 1; use --mesh fsdp" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--width 30 --heads 4", "expected --width to be a multiple of --heads 4, but got 30"),
        ("--width 36 --heads 4", "expected an even head size for rotary embeddings, but got 9"),
        ("--heads 4 --kv-heads 3", "expected --heads to be a multiple of --kv-heads 3, but got 4"),
        ("--reshard maybe", "expected true, false, auto or a number of ranks, but got 'maybe'"),
        ("--steps 0", "expected a positive number, but got '0'"),
        ("--backend jax", "argument --backend: invalid choice: 'jax'"),
        ("--backend ms --compare native", "expected --backend torch with --compare native, but got mindspore"),
    ],
)
def test_options_are_checked(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("HPCOMPAT_BACKEND", raising=False)
    with pytest.raises(SystemExit):
        OPTIONS["parse_options"](arguments.split())
    assert message in capsys.readouterr().err


def test_the_launcher_decides_the_backend(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HPCOMPAT_BACKEND", "ms")
    assert OPTIONS["parse_options"]([]).backend == "mindspore"
    with pytest.raises(SystemExit):
        OPTIONS["parse_options"](["--backend", "torch"])
    message = "expected --backend mindspore, which the ranks were launched for, but got torch"
    assert message in " ".join(capsys.readouterr().err.split())


class TestWeights:
    """That the names and shapes are those of the decoders, the decoders check when they load them."""

    @pytest.fixture(autouse=True)
    def _load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(EXAMPLES)
        self.weights = runpy.run_path(str(EXAMPLES / "weights.py"))

    def initial(self, **options: Any) -> dict[str, Any]:
        return self.weights["initial_weights"](OPTIONS["Options"](**options))  # type: ignore[no-any-return]

    def test_the_seed_alone_decides_the_values(self) -> None:
        first, again, other = self.initial(), self.initial(), self.initial(seed=1)
        assert all(array.dtype == np.float32 for array in first.values())
        assert all(array.tobytes() == again[name].tobytes() for name, array in first.items())
        matrices = [name for name, array in first.items() if array.ndim == 2]
        assert all((first[name] != other[name]).any() for name in matrices)
        assert all(0.019 < first[name].std() < 0.021 for name in matrices)
        assert all((first[name] == 1).all() for name in first.keys() - matrices)

    def test_a_tied_head_is_the_embedding(self) -> None:
        tied = self.initial(tied=True)
        assert tied["head.weight"] is tied["embedding.weight"]
        assert tied.keys() == self.initial().keys()

    def test_rotary_tables(self) -> None:
        cos, sin = self.weights["rotary_tables"](OPTIONS["Options"](width=24, heads=4, seq_len=5))
        assert cos.shape == sin.shape == (5, 3)
        np.testing.assert_allclose(cos[4], [np.cos(4 / 10_000 ** (i / 6)) for i in (0, 2, 4)], rtol=1e-7)
        np.testing.assert_allclose(cos**2 + sin**2, 1, rtol=1e-6)


class TestCorpus:
    corpus = runpy.run_path(str(EXAMPLES / "corpus.py"))

    def numbered(self, *, num_windows: int, seed: int = 0) -> Any:
        """A corpus whose window i holds the byte i only."""
        text = b"".join(bytes([number]) * 5 for number in range(num_windows))
        return self.corpus["Corpus"](text, seq_len=4, seed=seed)

    def test_an_epoch_shows_every_window_once_over_all_ranks(self) -> None:
        corpus = self.numbered(num_windows=24)
        batches = [
            corpus.batch(index, batch_size=2, rank=rank, world_size=3) for index in range(4) for rank in range(3)
        ]
        assert all(batch.shape == (2, 5) and batch.dtype == np.int64 for batch in batches)
        assert sorted(np.concatenate(batches)[:, 0].tolist()) == list(range(24))

    def test_a_batch_depends_on_its_index_and_the_seed_alone(self) -> None:
        def where(corpus: Any, index: int) -> list[int]:
            return corpus.batch(index, batch_size=12, rank=0, world_size=1)[:, 0].tolist()  # type: ignore[no-any-return]

        first = where(self.numbered(num_windows=24), 0)
        assert where(self.numbered(num_windows=24), 0) == first
        assert where(self.numbered(num_windows=24), 2) != first  # the next epoch has another order
        assert where(self.numbered(num_windows=24, seed=1), 0) != first

    def test_too_little_text(self) -> None:
        with pytest.raises(ValueError, match=r"longer than seq_len=4 bytes, but got 3"):
            self.corpus["Corpus"](b"abc", seq_len=4, seed=0)
        with pytest.raises(ValueError, match=r"expected at most 3 windows in a batch over all ranks, but got 4"):
            self.numbered(num_windows=3).batch(0, batch_size=2, rank=0, world_size=2)

    def test_the_standard_library_is_text_of_python(self) -> None:
        text = self.corpus["standard_library_text"]()
        assert len(text) > 1_000_000
        assert b"\ndef " in text


class TestComparison:
    comparison = runpy.run_path(str(EXAMPLES / "comparison.py"))

    def count(self, ours: dict[str, Any], native: dict[str, Any]) -> tuple[int, int]:
        return self.comparison["count_differences"]({"parameters": ours}, {"parameters": native})["parameters"]  # type: ignore[no-any-return]

    def test_bits_are_compared_not_values(self) -> None:
        a = np.array([0.0, 1.0, np.nan], dtype=np.float32)
        assert self.count({"w": a}, {"w": a.copy()}) == (0, 3)
        assert self.count({"w": a}, {"w": np.array([-0.0, 1.0, np.nan], dtype=np.float32)}) == (1, 3)
        above_one = np.nextafter(np.float32(1), np.float32(2))
        assert self.count({"w": a}, {"w": np.array([0.0, above_one, np.nan], np.float32)}) == (1, 3)

    def test_what_cannot_be_compared_differs(self) -> None:
        a = np.zeros(4, dtype=np.float32)
        assert self.count({"w": a, "b": a}, {"w": a}) == (4, 8)
        assert self.count({}, {"w": a}) == (4, 4)
        assert self.count({"w": a}, {"w": a.reshape(2, 2)}) == (4, 4)
        assert self.count({"w": a}, {"w": a.view(np.int32)}) == (4, 4)
        assert self.count({"w": np.float32(1).reshape(())}, {"w": np.float32(2).reshape(())}) == (1, 1)

    def test_losses_are_compared_as_strings(self) -> None:
        count = self.comparison["count_loss_differences"]
        assert count([1.0, 2.0], [1.0, 2.0]) == (0, 2)
        assert count([1.0, 2.0], [1.0, 2.0000000000000004]) == (1, 2)
        assert count([1.0, 2.0], [1.0]) == (1, 2)

    def test_relative_differences(self) -> None:
        relative = self.comparison["relative_differences"]
        assert relative([2.0, 3.0, -4.0], [2.0, 4.0, -3.0]) == [0.0, 0.25, 0.25]
        assert relative([np.nan, 1.0, np.inf], [np.nan, np.inf, np.inf]) == [np.inf] * 3


class TestCompareBackends:
    def write(self, path: Path, *, losses: list[float], **run: Any) -> str:
        described = {"backend": "torch", "steps": 3, "num_ranks": 2, "out": str(path.parent), **run}
        path.write_text(json.dumps({"run": described, "ours": {"losses": losses}}))
        return str(path)

    def compare(self, *arguments: str, out: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(EXAMPLES / "compare_backends.py"), *arguments, "--out", str(out)]
        return subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)

    def test_the_largest_difference_is_shown_and_limited(self, tmp_path: Path) -> None:
        first = self.write(tmp_path / "a.json", losses=[8.0, 4.0, 2.0])
        second = self.write(tmp_path / "b.json", losses=[8.0, 4.0004, 2.0], backend="mindspore", mesh="hsdp")
        done = self.compare(first, second, out=tmp_path / "both")
        assert done.returncode == 0, done.stderr
        assert "largest relative difference in 3 steps: 1.00e-04, at step 2\n" in done.stdout
        assert all(text in done.stdout for text in ("torch", "mindspore", "4.000400", "1.00e-04"))
        assert (tmp_path / "both" / "loss.png").read_bytes().startswith(b"\x89PNG")
        assert self.compare(first, second, "--max-relative-difference", "1.1e-4", out=tmp_path).returncode == 0
        done = self.compare(first, second, "--max-relative-difference", "0.9e-4", out=tmp_path)
        assert done.returncode == 1
        assert "expected at most 9e-05 in 3 steps" in done.stdout
        done = self.compare(first, second, "--max-relative-difference", "0.9e-4", "--checked-steps", "1", out=tmp_path)
        assert done.returncode == 0
        assert "largest relative difference in 1 steps: 0.00e+00, at step 1\n" in done.stdout

    def test_other_trainings_are_refused(self, tmp_path: Path) -> None:
        first = self.write(tmp_path / "a.json", losses=[8.0, 4.0, 2.0])
        second = self.write(tmp_path / "b.json", losses=[8.0, 4.0, 2.0], num_ranks=1)
        done = self.compare(first, second, out=tmp_path)
        assert done.returncode == 2
        assert "expected two runs of the same training, but got {'num_ranks': (2, 1)}" in done.stderr
