"""``hpcompat compare`` on recordings written here: what it finds, and what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import TensorSpec, serialize_file

from hpcompat.cli import main
from hpcompat.cli.compare_bits import Difference, Tensor, compare, number
from hpcompat.record import FORMAT, PHASES

NUM_STEPS = 4
SHAPE = (3, 5)
BITS = {"bfloat16": np.uint16, "float32": np.uint32}


class Recorded:
    """Two bf16 parameters over four steps. ``bits[step, phase, kind, name]`` may be changed before it is written."""

    def __init__(self, directory: Path, *, framework: str = "torch", world_size: int = 2) -> None:
        self.directory, self.framework, self.world_size = directory, framework, world_size
        self.losses = {step: [1.0 / step] for step in range(1, NUM_STEPS + 1)}
        self.dtypes: dict[tuple[str, str], str] = {}
        numbers = np.random.default_rng(0)
        kinds = ("parameter", "gradient", "state/exp_avg")
        self.bits: dict[tuple[int, str, str, str], np.ndarray[Any, Any]] = {
            # Of exponents around that of 1: no value is special.
            (step, phase, kind, name): numbers.integers(0x3E80, 0x3FFF, SHAPE).astype(np.uint16)
            for step in range(1, NUM_STEPS + 1)
            for phase in PHASES
            for kind in kinds
            for name in ("up.weight", "down.weight")
        }

    def write(self) -> str:
        about: dict[str, Any] = {"format": FORMAT, "framework": self.framework, "world_size": self.world_size}
        about |= {"versions": {self.framework: "1.0"}, "optimizer": {"type": "AdamW", "groups": [{"lr": "0.1"}]}}
        self._json(self.directory / "index.json", about)
        for step, phase in dict.fromkeys(key[:2] for key in self.bits):
            folder = self.directory / f"step-{step:06d}" / phase
            entries = [self._entry(folder, key) for key in self.bits if key[:2] == (step, phase)]
            given = self.losses[step] if phase == PHASES[0] else []
            losses = [{"value": loss.hex(), "dtype": "float32"} for loss in given]
            self._json(folder / "index.json", {"losses": losses, "tensors": entries})
        return str(self.directory)

    def _entry(self, folder: Path, key: tuple[int, str, str, str]) -> dict[str, str]:
        _, _, kind, name = key
        dtype = self.dtypes.get((kind, name), "bfloat16")
        bits = np.ascontiguousarray(self.bits[key].astype(BITS[dtype]))
        file = f"{kind}/{name}.safetensors"
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        spec = TensorSpec(dtype=dtype, shape=bits.shape, data_ptr=bits.ctypes.data, data_len=bits.nbytes)
        serialize_file({name: spec}, folder / file)
        return {"kind": kind, "name": name, "file": file}

    @staticmethod
    def _json(path: Path, content: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Recorded, Recorded]:
    return Recorded(tmp_path / "a"), Recorded(tmp_path / "b", framework="mindspore", world_size=1)


def compared(pair: tuple[Recorded, Recorded], *options: str, status: int) -> dict[str, Any]:
    """What the command writes as JSON."""
    out = pair[0].directory.parent / "found.json"
    arguments = ["compare", *(recorded.write() for recorded in pair), "--json", str(out), "--width", "120", *options]
    assert main(arguments) == status
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_equal_recordings(pair: tuple[Recorded, Recorded], capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(pair, status=0)
    assert found["equal"]
    assert found["first_divergence"] is None
    assert found["problems"] == found["differing"] == []
    rows = [row for kinds in found["phases"].values() for row in kinds.values()]
    assert sum(row["tensors"] for row in rows) == len(pair[0].bits) + NUM_STEPS, "each tensor and each loss"
    assert all(row["differing"] == row["max_ulp"] == row["max_abs"] == 0 for row in rows)
    printed = capsys.readouterr().out
    assert "torch 1.0, 2 ranks" in printed
    assert "mindspore 1.0, 1 rank\n" in printed
    assert all(phase in printed for phase in PHASES)
    assert "no difference in 100 tensors" in printed


def test_one_bit_of_one_element_is_found(
    pair: tuple[Recorded, Recorded], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for place, (step, by) in enumerate(((3, 1), (4, 40))):
        key = (step, "after_optim", "parameter", "down.weight")
        pair[0].bits[key][1, 2 + place] = 0x3F80
        pair[1].bits[key][1, 2 + place] = 0x3F80 + by
    found = compared(pair, "--html", str(tmp_path / "found.html"), status=1)
    assert found["first_divergence"] == {
        "step": 3,
        "phase": "after_optim",
        "kind": "parameter",
        "name": "down.weight",
        "index": [1, 2],
        "values": ["1.0", "1.0078125"],
        "bits": ["0x3f80", "0x3f81"],
        "ulp": 1,
        "elements": 15,
        "differing": 1,
        "max_ulp": 1,
        "max_abs": 0.0078125,
    }
    assert [(row["step"], row["differing"], row["max_ulp"]) for row in found["differing"]] == [(3, 1, 1), (4, 1, 40)]
    assert found["phases"]["after_optim"]["parameter"]["first_step"] == 3
    assert found["phases"]["before_optim"]["parameter"]["differing"] == 0
    verdict = (
        "first divergence: step 3, after_optim, parameter down.weight, index [1, 2]: 1.0 (0x3f80) and 1.0078125 "
        "(0x3f81), 1 ULP apart"
    )
    assert verdict in " ".join(capsys.readouterr().out.split())
    page = (tmp_path / "found.html").read_text()
    assert verdict in page
    assert "<svg" in page
    assert "largest difference in ULP" in page
    assert 'src="' not in page, "self-contained"


def test_within_the_limit_is_equal(pair: tuple[Recorded, Recorded]) -> None:
    pair[1].bits[2, "after_clip", "gradient", "up.weight"][0, 0] += 2
    assert compared(pair, "--limit-ulp", "2", status=0)["phases"]["after_clip"]["gradient"]["max_ulp"] == 2
    assert compared(pair, "--limit-ulp", "1", status=1)["first_divergence"]["ulp"] == 2


def test_what_comes_first_in_a_step(pair: tuple[Recorded, Recorded]) -> None:
    """Gradients are of the loss, the loss of the parameters; whichever name comes first."""
    pair[1].bits[2, "after_backward", "gradient", "up.weight"][0, 0] += 1
    pair[1].losses[2] = [0.25]
    first = compared(pair, status=1)["first_divergence"]
    assert (first["kind"], first["index"], first["values"]) == ("loss", [], ["0.5", "0.25"])
    assert first["ulp"] == 1 << 23, "of float32, as the loss was"
    pair[1].bits[2, "after_backward", "parameter", "down.weight"][2, 4] += 1
    first = compared(pair, status=1)["first_divergence"]
    assert (first["kind"], first["name"], first["index"]) == ("parameter", "down.weight", [2, 4])


def test_a_missing_tensor_is_named(pair: tuple[Recorded, Recorded], capsys: pytest.CaptureFixture[str]) -> None:
    del pair[1].bits[2, "after_clip", "state/exp_avg", "up.weight"]
    (problem,) = compared(pair, status=2)["problems"]
    assert problem == f"only in {pair[0].directory}, step 2 after_clip: state/exp_avg up.weight"
    assert "state/exp_avg up.weight" in capsys.readouterr().out


def test_missing_phases_are_named(pair: tuple[Recorded, Recorded]) -> None:
    pair[0].bits = {key: bits for key, bits in pair[0].bits.items() if key[0] < 4 or key[1] == "after_backward"}
    (problem,) = compared(pair, status=2)["problems"]
    assert problem == (f"only in {pair[1].directory}: step 4 after_clip, step 4 before_optim, step 4 after_optim")


def test_a_phase_without_its_index_is_incomplete(pair: tuple[Recorded, Recorded]) -> None:
    for recorded in pair:
        recorded.write()
    (pair[0].directory / "step-000002" / "after_clip" / "index.json").unlink()
    assert main(["compare", *(str(recorded.directory) for recorded in pair)]) == 2


def test_another_shape_is_named_and_the_rest_compared(pair: tuple[Recorded, Recorded]) -> None:
    key = (1, "after_backward", "gradient", "up.weight")
    pair[1].bits[key] = pair[1].bits[key].T
    pair[1].bits[1, "after_clip", "gradient", "up.weight"][0, 1] += 1
    found = compared(pair, status=2)
    assert found["problems"] == [
        "step 1 after_backward: gradient up.weight is BF16 of shape (3, 5) and BF16 of shape (5, 3)"
    ]
    assert found["first_divergence"]["phase"] == "after_clip"


def test_another_dtype_is_named(pair: tuple[Recorded, Recorded]) -> None:
    pair[1].dtypes["state/exp_avg", "down.weight"] = "float32"
    problems = compared(pair, status=2)["problems"]
    assert len(problems) == NUM_STEPS * len(PHASES)
    assert problems[0] == (
        "step 1 after_backward: state/exp_avg down.weight is BF16 of shape (3, 5) and F32 of shape (3, 5)"
    )


def test_parts_of_names_can_be_renamed(pair: tuple[Recorded, Recorded]) -> None:
    renamed = {"up.weight": "up.gamma"}
    pair[1].bits = {(*key[:3], renamed.get(key[3], key[3])): bits for key, bits in pair[1].bits.items()}
    compared(pair, status=2)
    assert compared(pair, "--rename", "gamma=weight", status=0)["equal"]


def test_no_recording_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert "expected a file that hpcompat.record wrote, but got" in capsys.readouterr().err


def test_a_broken_file_is_an_error(pair: tuple[Recorded, Recorded], capsys: pytest.CaptureFixture[str]) -> None:
    for recorded in pair:
        recorded.write()
    path = pair[1].directory / "step-000001" / "after_clip" / "gradient" / "up.weight.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["compare", *(str(recorded.directory) for recorded in pair)]) == 2
    assert str(path) in capsys.readouterr().err


# Bits


def bfloat16(*patterns: int) -> Tensor:
    return Tensor("BF16", np.array(patterns, np.uint16))


def difference(one: Tensor, other: Tensor) -> Difference:
    forth, back = compare(one, other, limit_ulp=0), compare(other, one, limit_ulp=0)
    assert (forth.num_differing, forth.max_ulp, forth.max_abs) == (back.num_differing, back.max_ulp, back.max_abs)
    return forth


def test_zeros_of_both_signs_are_neighbours() -> None:
    found = difference(bfloat16(0x0000, 0x0001), bfloat16(0x8000, 0x8001))
    assert (found.num_differing, found.max_ulp) == (2, 3)
    assert found.first is not None
    assert (found.first.values, found.first.ulp) == (("0.0", "-0.0"), 1)


def test_a_nan_equals_itself_only() -> None:
    nan, other_nan, infinity = 0x7FC0, 0x7FC1, 0x7F80
    assert difference(bfloat16(nan), bfloat16(nan)).num_differing == 0
    found = difference(bfloat16(nan), bfloat16(other_nan))
    assert (found.num_differing, found.max_ulp, found.max_abs) == (1, 1, 0.0)
    found = difference(bfloat16(infinity), bfloat16(nan))
    assert (found.max_ulp, found.max_abs) == (nan - infinity, np.inf)
    assert difference(bfloat16(infinity), bfloat16(infinity)).max_abs == 0.0


@pytest.mark.parametrize(("dtype", "unsigned"), [(np.float16, "<u2"), (np.float32, "<u4"), (np.float64, "<u8")])
def test_a_distance_counts_the_values_between(dtype: Any, unsigned: str) -> None:
    kind = f"F{8 * np.dtype(dtype).itemsize}"
    values = [np.array([start], dtype) for start in (-1.0, -0.0, 1.0, 0.1)]
    steps = [np.nextafter(np.nextafter(value, np.array(9, dtype)), np.array(9, dtype)) for value in values]
    one, other = (Tensor(kind, np.concatenate(side).view(unsigned)) for side in (values, steps))
    # The first value beyond -0.0 is 0.0 in bits, and the smallest positive one to nextafter.
    found = compare(one, other, limit_ulp=2)
    assert (found.num_differing, found.max_ulp) == (1, 3)
    assert found.first is not None
    assert found.first.index == (1,)


def test_the_farthest_numbers_of_64_bits() -> None:
    assert difference(number(-np.inf), number(np.inf)).max_ulp == 2 * 0x7FF0_0000_0000_0000 + 1


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 0x3FC0), ("float16", 0x3E00), ("float32", 0x3FC00000)])
def test_a_number_in_its_dtype(dtype: str, bits: int) -> None:
    assert int(number(1.5, dtype).bits) == bits
    assert compare(number(1.5, dtype), number(1.5, dtype), limit_ulp=0).num_elements == 1


def test_integers_and_truth_values() -> None:
    one = Tensor("I64", np.array([-3, 2], "<i8").view("<u8"))
    other = Tensor("I64", np.array([4, 2], "<i8").view("<u8"))
    assert (difference(one, other).max_ulp, difference(one, other).max_abs) == (7, 7.0)
    assert difference(Tensor("BOOL", np.array([1], "<u1")), Tensor("BOOL", np.array([0], "<u1"))).max_ulp == 1


def test_tensors_without_elements_are_equal() -> None:
    assert difference(bfloat16(), bfloat16()).num_differing == 0


def test_the_command_needs_no_framework(pair: tuple[Recorded, Recorded]) -> None:
    directories = [recorded.write() for recorded in pair]
    blocked = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'mindspore'])); "
        f"from hpcompat.cli import main; sys.exit(main(['compare', *{directories!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
