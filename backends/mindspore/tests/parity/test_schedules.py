"""The same model, weights and data give the same events and the same collectives on both frameworks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("schedules.py")


def run(backend: str, *, num_ranks: int, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "hpcompat.cli", "launch", "-n", str(num_ranks), "--backend", backend]
    result = subprocess.run(
        [*command, str(SCRIPT), str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(out.read_text())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_both_frameworks_do_the_same(tmp_path: Path, num_ranks: int) -> None:
    torch, mindspore = (run(name, num_ranks=num_ranks, out=tmp_path / name) for name in ("torch", "mindspore"))
    assert torch.keys() == mindspore.keys()
    for way, expected in torch.items():
        actual = mindspore[way]
        assert actual["events"] == expected["events"], way
        assert actual["collectives"] == expected["collectives"], way
        np.testing.assert_allclose(actual["losses"], expected["losses"], rtol=1e-6, err_msg=way)
        assert actual["gradients"].keys() == expected["gradients"].keys()
        for name, values in expected["gradients"].items():
            scale = np.abs(values).max()
            np.testing.assert_allclose(
                actual["gradients"][name], values, rtol=0, atol=1e-6 * scale, err_msg=f"{way} {name}"
            )
